"""Rare classes are drawn more often, anchors fit the boxes, and rectangular batches contain every image once."""

import numpy as np
import pytest

from flatout.yolo.data.anchors import fit_of, search_anchors
from flatout.yolo.data.image_set import Labels, class_counts, class_weights, image_weights
from flatout.yolo.data.letterbox import rect_batches


def labels_of(classes_per_image: list[list[int]]) -> Labels:
    numbers = [number for classes in classes_per_image for number in classes]
    boxes = np.zeros((len(numbers), 5), np.float32)
    boxes[:, 0] = numbers
    first = np.cumsum([0, *map(len, classes_per_image)])
    return Labels(boxes, first, np.zeros((0, 2), np.float32), np.zeros(len(numbers) + 1, np.int64))


def test_every_class_has_the_same_total_weight():
    labels = labels_of([[0] * 9, [0], [1], []])
    weights = class_weights(class_counts(labels, 2))
    of_images = image_weights(labels, weights)
    assert of_images[:2].sum() == pytest.approx(of_images[2])
    assert of_images[3] == 0


def test_searched_anchors_fit_boxes_that_the_usual_ones_do_not_fit():
    rng = np.random.default_rng(0)
    boxes = rng.lognormal((1.5, 4.0), 0.3, (400, 2))
    usual = np.array([(12, 16), (76, 55), (142, 110)], float)
    found = search_anchors(boxes, 3, rng, generations=50)
    assert fit_of(found, boxes).best_recall > 0.99 > fit_of(usual, boxes).best_recall
    with pytest.raises(ValueError, match="2 boxes of at least 2 px are too few for 3 anchors"):
        search_anchors(boxes[:2], 3, rng)


@pytest.mark.parametrize("batch_size", [1, 4, 7, 50])
def test_every_image_fits_into_the_shape_of_its_batch(batch_size):
    rng = np.random.default_rng(batch_size)
    size_wh = rng.integers(20, 2000, (37, 2))
    found = rect_batches(size_wh, batch_size=batch_size, img_size=640, pad=0.5)
    assert sorted(found.order_N) == list(range(37))
    assert (np.bincount(found.batch_N) <= batch_size).all()
    scaled_hw = 640 * size_wh[found.order_N][:, ::-1] / size_wh[found.order_N].max(1, keepdims=True)
    assert (scaled_hw <= found.shape_hw_S2[found.batch_N] + 1e-9).all()
