"""Tiles that a warp does not show are not read, and that changes no pixel."""

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
    "single pictures": {"mosaic": 0.0, "scale": 0.9, "translate": 0.9},
}


class Counted:
    """Pictures, and how often any of them was asked for."""

    def __init__(self, pictures: Sequence[np.ndarray]) -> None:
        self.pictures, self.count = pictures, 0

    def __getitem__(self, index: int) -> np.ndarray:
        self.count += 1
        return self.pictures[index]


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
    for leave_out in (layout.without_unseen, lambda sheets, *_: sheets):
        monkeypatch.setattr(sources, "without_unseen", leave_out)
        pictures, out = Counted(renderer.pictures), np.empty((SAMPLES, 3, SIZE, SIZE), np.uint8)
        replace(renderer, pictures=pictures).render(draws, out)
        found.append(out)
        counts.append(pictures.count)
    np.testing.assert_array_equal(*found)
    if warp == "single pictures":
        assert counts[0] == counts[1]
    else:
        assert counts[0] < 0.9 * counts[1], "about one in four is not seen"


def test_the_device_is_told_of_seen_tiles_only():
    images, labels = busy_set(8, seed=2)
    config = AugmentConfig(mixup=0.0, paste_in=0.0, scale=0.5, translate=0.1)
    image_set = image_set_of(images, labels)
    source = ParameterSource(image_set, config, size=SIZE)
    told = parameters_of(source, np.arange(SAMPLES))
    draws = source.draw(1, 0, np.arange(SAMPLES), np.arange(SAMPLES) % len(images))
    sheets = lay_out(draws, resized_wh(image_set.size_wh_N2, SIZE), size=SIZE, out_wh=(SIZE, SIZE))
    seen_Q9 = layout.are_seen(sheets, (SIZE, SIZE)) & (sheets.picture_Q9 >= 0)
    np.testing.assert_array_equal(told["tiles"].reshape(SAMPLES, 2, 9, 4)[:, 0, :, 2] > 0, seen_Q9)
    np.testing.assert_array_equal(told["num_tiles"][:, 0], sheets.kind_Q)
    assert 0.6 < seen_Q9.sum() / (sheets.picture_Q9 >= 0).sum() < 0.9
