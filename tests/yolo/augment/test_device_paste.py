"""Polygons are filled as by OpenCV, and objects to paste are planned as on the CPU."""

import cv2
import numpy as np
import pytest
import torch

from flatout.yolo.augment.draw import AugmentConfig, draw_training
from flatout.yolo.augment.gpu.paste_torch import inside_polygon
from flatout.yolo.augment.gpu.source import OBJECT_COLUMNS, PastePlanner
from flatout.yolo.augment.layout import resized_wh
from tests.yolo.augment.scenes import busy_set

SIZE = 128


@pytest.mark.parametrize("num_points", [1, 2, 3, 7, 40])
def test_a_polygon_is_filled_as_opencv_fills_it(num_points):
    rng = np.random.default_rng(num_points)
    line = torch.arange(60, dtype=torch.int32)
    for _ in range(20):
        angles = np.sort(rng.uniform(0, 2 * np.pi, num_points))
        points = (30 + rng.uniform(8, 28, (num_points, 1)) * np.stack((np.cos(angles), np.sin(angles)), 1)).astype(
            np.int32
        )
        mask = np.zeros((60, 60), np.uint8)
        cv2.drawContours(mask, [points], -1, 1, cv2.FILLED)
        found = inside_polygon(torch.from_numpy(points), line, line).numpy()
        assert (found != mask.astype(bool)).mean() <= 0.01


def planned(polygons: str, share: float = 1.0):
    images, labels = busy_set(12, seed=3, polygons=polygons, largest=160)
    wh_N2 = resized_wh(np.array([image.shape[1::-1] for image in images]), SIZE)
    index = np.arange(20)
    draws = draw_training(
        AugmentConfig(paste_in=share), num_images=12, size=SIZE, seed=0, epoch=0,
        positions_M=index, indices_M=index % 12,
    )  # fmt: skip
    nothing = [np.zeros((0, 5), np.float32)] * len(index)
    return PastePlanner(labels=labels, wh_N2=wh_N2, size=SIZE).plan(draws, nothing, (SIZE, SIZE)), draws, wh_N2


@pytest.mark.parametrize("polygons", ["some", "all"])
def test_objects_lie_in_the_image_and_have_a_label_and_a_polygon_each(polygons):
    pasted, draws, wh_N2 = planned(polygons, share=0.6)
    assert pasted.object_KC.shape == (pasted.num_objects_M.sum(), OBJECT_COLUMNS) and len(pasted.object_KC) > 10
    assert [len(labels) for labels in pasted.label_T5] == pasted.num_objects_M.tolist()
    assert (pasted.num_objects_M[~draws["paste"]] == 0).all()
    x, y, w, h, image, tile_x, tile_y, cut_x, cut_y, cut_w, cut_h, num_points = pasted.object_KC.T
    assert (x >= 0).all() and (y >= 0).all() and (x + w <= SIZE).all() and (y + h <= SIZE).all()
    boxes = np.concatenate([labels[:, 1:] for labels in pasted.label_T5])
    np.testing.assert_array_equal(boxes, np.stack((x, y, x + w, y + h), 1))
    # An object is cut out of the tile of its image, give or take a pixel of rounding.
    assert (cut_x >= tile_x - 1).all() and (cut_x + cut_w <= tile_x + wh_N2[image, 0] + 1).all()
    assert (cut_y >= tile_y - 1).all() and (cut_y + cut_h <= tile_y + wh_N2[image, 1] + 1).all()
    assert num_points.sum() == len(pasted.point_P2) == pasted.num_points_M.sum()


def test_without_polygons_nothing_is_pasted():
    pasted, _, _ = planned("none")
    assert len(pasted.object_KC) == len(pasted.point_P2) == 0
    assert all(len(labels) == 0 for labels in pasted.label_T5)
