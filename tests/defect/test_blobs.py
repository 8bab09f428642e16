"""Scores of inspection have the values that arithmetic gives: AU-PRO, blobs, F1, average precision of blobs."""

import numpy as np
import pytest

from flatout.defect.data.pairs import Boxes
from flatout.defect.evaluate.blobs import blob_average_precision, blob_scores, inspect_blobs
from flatout.defect.evaluate.scores import PixelCounts, rank_scores
from tests.reference.plain_inspection import au_pro_plain, blobs_plain

_HALF_WIDTHS = {-3: 0, -2: 2, -1: 3, 0: 3, 1: 3, 2: 2, 3: 0}
DISC = {(dy, dx) for dy, reach in _HALF_WIDTHS.items() for dx in range(-reach, reach + 1)}
"""Distances at which a blob still hits a defect: a disc of MATCH_RADIUS pixels."""


def counted(*images):
    counts = PixelCounts()
    for mask, heat in images:
        counts.add(mask, heat)
    return counts.ranking()


def image(*defects, shape=(40, 40)):
    """An empty heat map and a mask with defects, each (y, x, side)."""
    mask = np.zeros(shape, np.bool_)
    for y, x, side in defects:
        mask[y : y + side, x : x + side] = True
    return np.zeros(shape, np.float32), mask


def test_au_pro_counts_every_defect_equally_however_large():
    heat, mask = image((2, 2, 10), (30, 30, 1))
    heat[mask] = 0.5
    heat[30, 30] = 0
    # Half of the defects are covered without any false pixel; the rest is linear, up to all at a rate of 1.
    assert counted((mask, heat)).au_pro(0.3) == pytest.approx(0.5 + 0.5 * 0.3 / 2)
    assert counted((mask, mask.astype(np.float32))).au_pro() == pytest.approx(1)
    assert counted((mask, 1 - mask.astype(np.float32))).au_pro() == 0
    assert counted((mask & False, heat)).au_pro() is None, "no defects"
    assert rank_scores(mask, heat).au_pro() is None, "scores without positions have no regions"


@pytest.mark.parametrize("max_fpr", [0.05, 0.3, 1.0])
def test_au_pro_equals_its_plain_reference(max_fpr):
    rng = np.random.default_rng(2)
    images = []
    for defects in ([(3, 3, 4), (20, 8, 2), (9, 17, 1)], [], [(0, 20, 3)]):
        heat, mask = image(*defects, shape=(24, 24))
        # Heat that is exact in a bin: the reference knows no bins.
        heat = np.clip(rng.integers(0, 100, mask.shape) / 128 + mask * rng.integers(0, 28, mask.shape) / 128, 0, 1)
        images.append((mask, heat.astype(np.float32)))
    expected = au_pro_plain([mask for mask, _ in images], [heat for _, heat in images], max_fpr)
    assert counted(*images).au_pro(max_fpr) == pytest.approx(expected, abs=1e-12)


def test_blobs_have_boxes_areas_and_their_highest_heat():
    heat, _ = image()
    heat[3:5, 10:14] = 0.6
    heat[5, 14] = 0.9  # a diagonal neighbour belongs to it
    heat[30, 30] = 0.7
    heat[35, 0] = 0.4
    found = inspect_blobs(heat, 0.5)
    assert [blob[:5] for blob in found.blobs] == [(10, 3, 15, 6, 9), (30, 30, 31, 31, 1)]
    assert [blob.score for blob in found.blobs] == pytest.approx([0.9, 0.7])
    assert found.verdict == "fail" and found.false_blobs == [], "nothing is known to be false without a label"
    assert inspect_blobs(heat, 0.95).verdict == "pass"


def test_blobs_and_their_hits_equal_the_plain_reference():
    rng = np.random.default_rng(5)
    for _ in range(20):
        heat, mask = image((2, 2, 3), (2, 24, 2), (20, 20, 5), (33, 4, 1))
        for y, x in rng.integers(0, 37, (8, 2)):
            heat[y : y + 3, x : x + rng.integers(1, 4)] = rng.integers(1, 100) / 100
        found = inspect_blobs(heat, 0.3, mask)
        expected = blobs_plain(heat, 0.3, mask, DISC)
        assert sorted((blob.score, blob.area_px, len(blob.hits)) for blob in found.blobs) == sorted(expected)


def test_scores_at_the_threshold_are_those_counted_by_hand():
    heat, mask = image((2, 2, 4), (20, 20, 2))
    heat[2:6, 2:4] = 0.9  # half of the first defect
    heat[30:32, 2:4] = 0.8  # false
    one = inspect_blobs(heat, 0.5, mask)
    assert [(each[:4], each.area_px) for each in one.missed] == [((20, 20, 22, 22), 4)]
    good = inspect_blobs(np.zeros_like(heat), 0.5, np.zeros_like(mask))
    unlabelled = inspect_blobs(heat, 0.5)
    scores = blob_scores([one, good, unlabelled])
    assert scores == {
        "pixel_F1": pytest.approx(2 * 8 / (2 * 8 + 4 + 12)),
        "image_F1": 1.0,
        "blob_AP": pytest.approx(0.5),
        "blob_recall": 0.5,
        "false_blobs_per_image": 0.5,
    }
    assert blob_scores([unlabelled]) == dict.fromkeys(scores)
    alarm = inspect_blobs(np.ones_like(heat), 0.5, np.zeros_like(mask))
    assert blob_scores([one, alarm])["image_F1"] == pytest.approx(2 / 3)
    assert blob_scores([alarm])["image_F1"] is None and blob_scores([alarm])["false_blobs_per_image"] == 1


def test_a_defect_in_two_parts_is_no_false_alarm_and_a_blob_may_hit_two():
    heat, mask = image((10, 10, 6), (30, 30, 1), (30, 34, 1))
    heat[10, 10:16] = 0.9
    heat[15, 10:16] = 0.8  # a second part of the same defect
    heat[20, 0] = 0.7  # false
    heat[30, 30:35] = 0.6  # one blob over two defects
    found = inspect_blobs(heat, 0.5, mask)
    assert [len(blob.hits) for blob in found.blobs] == [1, 1, 0, 2]
    # One defect at a precision of 1; two more by the second true blob of three.
    assert blob_average_precision([found]) == pytest.approx((1 + 2 * 2 / 3) / 3)


def test_blobs_of_one_score_are_ranked_together():
    heat, mask = image((10, 10, 2))
    heat[10:12, 10:12] = heat[30, 30] = heat[0, 0] = 1
    assert blob_average_precision([inspect_blobs(heat, 0.5, mask)]) == pytest.approx(1 / 3)


def test_boxes_that_people_drew_go_before_the_mask_and_give_recall_by_class():
    heat, mask = image((10, 10, 2), (30, 30, 2))
    heat[10:12, 10:12] = 0.9
    heat[20, 39] = 0.8
    boxes = Boxes(np.array([(8.0, 8, 14, 14), (28, 28, 36, 37), (0, 0, 3, 3.5)]), np.array([2, 2, 5]))
    found = inspect_blobs(heat, 0.5, mask, boxes)
    assert [blob.hits for blob in found.blobs] == [(0,), ()] and found.num_defects == 3
    assert [tuple(region) for region in found.missed] == [(28, 28, 36, 37, 72), (0, 0, 3, 4, 10)]
    scores = blob_scores([found])
    assert scores["blob_recall[class 2]"] == 0.5 and scores["blob_recall[class 5]"] == 0
    assert scores["false_blobs_per_image"] == 1 and scores["pixel_F1"] == pytest.approx(2 * 4 / (2 * 4 + 1 + 4))
    alone = blob_scores([inspect_blobs(heat, 0.5, None, boxes)])
    assert alone == scores | {"pixel_F1": None}, "boxes alone say nothing about pixels"
    good = inspect_blobs(heat, 0.5, None, Boxes(np.zeros((0, 4)), np.zeros(0, np.int64)))
    assert len(good.false_blobs) == 2, "an empty file of boxes says that the image is good"


def test_a_box_at_the_edge_of_the_image_is_cut_there():
    heat, _ = image(shape=(20, 30))
    found = inspect_blobs(heat, 0.5, None, Boxes(np.array([(25.0, -3, 40, 4), (50, 50, 60, 60)]), np.array([-1, -1])))
    assert [region[:4] for region in found.missed] == [(25, 0, 30, 4), (29, 19, 30, 20)]
    assert found.class_hits == [], "a box without a class"
