"""Invisible tiles are not read, and that changes no pixel."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from flatout.yolo.augment import layout
from flatout.yolo.augment import source as sources
from flatout.yolo.augment.draw import AugmentConfig
from flatout.yolo.augment.gpu.source import ParameterSource
from flatout.yolo.augment.layout import lay_out, resized_wh
from flatout.yolo.augment.paint_compiled import fastest_painter
from tests.yolo.augment.scenes import busy_set, image_set_of, parameters_of, renderer_of

SIZE, SAMPLES = 64, 60
WARPS = {
    "moved": {"scale": 0.5, "translate": 0.1},
    "far": {"scale": 0.9, "translate": 0.6},
    "turned": {"scale": 0.5, "translate": 0.2, "degrees": 40.0, "shear": 10.0},
    "stretched": {"scale": 0.5, "translate": 0.2, "aspect": 1.0},
    "single images": {"mosaic": 0.0, "scale": 0.9, "translate": 0.9},
}


class Counted:
    """Images, and how often any of them was read."""

    def __init__(self, images: Sequence[np.ndarray]) -> None:
        self.images, self.count = images, 0

    def __getitem__(self, index: int) -> np.ndarray:
        self.count += 1
        return self.images[index]


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("painter", ["classic", "fast"])
def test_leaving_them_out_changes_no_pixel(warp, painter, monkeypatch):
    images, labels = busy_set(8, seed=2)
    config = AugmentConfig(mixup=0.3, paste_in=0.0, **WARPS[warp])
    paints = fastest_painter() if painter == "fast" else None
    renderer = renderer_of(images, labels, config, size=SIZE, painter=paints)
    positions = np.arange(SAMPLES)
    source = ParameterSource(image_set_of(images, labels), config, size=SIZE)
    draws = source.draw(3, 0, positions, positions % len(images))
    found, counts = [], []
    for leave_out in (layout.without_invisible, lambda canvases, *_: canvases):
        monkeypatch.setattr(sources, "without_invisible", leave_out)
        counted, out = Counted(renderer.images), np.empty((SAMPLES, 3, SIZE, SIZE), np.uint8)
        replace(renderer, images=counted).render(draws, out)
        found.append(out)
        counts.append(counted.count)
    np.testing.assert_array_equal(*found)
    if warp == "single images":
        assert counts[0] == counts[1]
    else:
        assert counts[0] < 0.9 * counts[1], "about one in four is invisible"


def test_the_device_gets_only_visible_tiles():
    images, labels = busy_set(8, seed=2)
    config = AugmentConfig(mixup=0.0, paste_in=0.0, scale=0.5, translate=0.1)
    image_set = image_set_of(images, labels)
    source = ParameterSource(image_set, config, size=SIZE)
    written = parameters_of(source, np.arange(SAMPLES))
    draws = source.draw(1, 0, np.arange(SAMPLES), np.arange(SAMPLES) % len(images))
    canvases = lay_out(draws, resized_wh(image_set.size_wh_N2, SIZE), size=SIZE, out_wh=(SIZE, SIZE))
    visible_Q9 = layout.visible_tiles(canvases, (SIZE, SIZE)) & (canvases.image_Q9 >= 0)
    np.testing.assert_array_equal(written["tiles"].reshape(SAMPLES, 2, 9, 4)[:, 0, :, 2] > 0, visible_Q9)
    np.testing.assert_array_equal(written["num_tiles"][:, 0], canvases.kind_Q)
    assert 0.6 < visible_Q9.sum() / (canvases.image_Q9 >= 0).sum() < 0.9
