"""Scores have the specified values, exactly or in bins."""

from functools import partial

import numpy as np
import pytest
import torch

from flatout.defect.evaluate.maps import HeatMapper
from flatout.defect.evaluate.scores import (
    DetectConfig,
    ImageDetections,
    PixelCounts,
    detect,
    rank_scores,
    recall_at,
    recall_at_false_positives,
    truth_in_name,
    zero_dead_pixels,
)
from flatout.defect.patches import Grid
from tests.defect.golden_files import arrays_of, entries, records
from tests.feed.test_device import needs_gpu
from tests.golden_cases import golden_cases
from tests.reference.plain_stitch import stitch_owner


@pytest.mark.parametrize("case", golden_cases("defect/auroc.json", records("cases")))
def test_auroc_counts_ties_half(case):
    record, _ = case
    found = rank_scores(np.array(record["labels"]), np.array(record["scores"])).auroc
    assert found == (None if record["auroc"] is None else pytest.approx(record["auroc"], abs=1e-12))


def detect_cases(path):
    """One case per file: recall is over all of its images."""
    return [("all", (dict(value for _, value in entries(path)), arrays_of(path.with_suffix(".npz"))))]


@pytest.mark.parametrize("case", golden_cases("defect/detect.json", detect_cases, also=("defect/detect.npz",)))
def test_detections_and_recall_are_the_golden_ones(case):
    record, heat_maps = case
    params = dict(record["params"])
    match_radius = params.pop("match_radius")
    config = DetectConfig(**params)
    image_detections = []
    for image in record["images"]:
        found = detect(heat_maps[image["name"]], config)
        assert [(each.y, each.x) for each in found] == [(y, x) for y, x, _ in image["detections"]]
        assert [each.score for each in found] == pytest.approx([score for *_, score in image["detections"]], abs=1e-6)
        image_detections.append(ImageDetections(found, image["gt_xy"] and tuple(image["gt_xy"])))
    nums = [int(num) for num in record["recall"]]
    assert recall_at(image_detections, nums, match_radius=match_radius) == pytest.approx(
        {int(num): value for num, value in record["recall"].items()}
    )
    if "total_recall" in record:
        assert recall_at(image_detections, [10**6], match_radius=match_radius)[10**6] == pytest.approx(
            record["total_recall"]
        )


def test_precision_and_f1_by_hand():
    ranking = rank_scores(np.array([1, 0, 1, 0]), np.array([0.9, 0.8, 0.7, 0.1]))
    assert ranking.average_precision == pytest.approx((1 + 2 / 3) / 2)
    assert ranking.best_f1() == (pytest.approx(0.8), pytest.approx(0.7))
    assert ranking.iou_at(0.7) == pytest.approx(2 / 3)
    empty = rank_scores(np.zeros(3), np.arange(3))
    assert empty.auroc is None and empty.average_precision is None and empty.best_f1() is None


def test_binned_pixels_rank_as_exact_ones_do():
    rng = np.random.default_rng(0)
    labels = rng.random((200, 300)) < 0.01
    scores = np.clip(rng.beta(0.3, 3, labels.shape) + 0.4 * labels * rng.random(labels.shape), 0, 1).astype(np.float32)
    exact, counts = rank_scores(labels, scores), PixelCounts()
    counts.add(labels[:90], scores[:90])
    counts.add(labels[90:], scores[90:])
    binned = counts.ranking()
    assert binned.auroc == pytest.approx(exact.auroc, abs=1e-4)
    assert binned.average_precision == pytest.approx(exact.average_precision, abs=2e-3)


@needs_gpu
def test_a_gpu_counts_the_pixels_of_the_cpu():
    rng = np.random.default_rng(0)
    heat = rng.random((200, 300), np.float32)
    rankings = []
    for device in ("cpu", "cuda"):
        counts = PixelCounts(torch.device(device))
        counts.add(heat > 0.9, heat)
        counts.add(np.zeros((200, 300), bool), heat)
        rankings.append(counts.ranking())
    one, other = rankings
    assert one.positive_V.tolist() == other.positive_V.tolist() and one.negative_V.tolist() == other.negative_V.tolist()
    assert one.au_pro() == pytest.approx(other.au_pro(), rel=1e-9)


def test_certain_and_impossible_pixels_have_bins():
    counts = PixelCounts()
    counts.add(np.array([[True, False]]), np.array([[1.0, 0.0]]))
    assert counts.ranking().auroc == 1.0
    assert counts.ranking().iou_at(1.0) == 1.0


def test_defect_positions_are_read_from_file_names():
    assert truth_in_name("strip_17#88,412") == (88, 412)
    assert truth_in_name("strip_17") is None
    assert truth_in_name("a#b,c") is None


def test_a_box_of_ten_around_dead_pixels_is_set_to_zero():
    heat = np.ones((30, 30), np.float32)
    zero_dead_pixels(heat, np.array([[2, 15]]))
    assert heat[:, 12:].all()
    assert (heat == 0).sum() == 7 * 10
    assert heat[10:20, 0:7].sum() == 0


def test_recall_stops_at_the_allowed_false_positives():
    hits = [(0.9, 0), (0.8, None), (0.7, 1), (0.6, None), (0.5, 2)]
    assert recall_at_false_positives(hits, num_defects=4, num_images=1, per_image=1.0) == 0.5
    assert recall_at_false_positives(hits, num_defects=4, num_images=2, per_image=1.0) == 0.75
    assert recall_at_false_positives([], num_defects=0, num_images=2, per_image=1.0) is None


class Brightness(torch.nn.Module):
    """A network whose probability at a pixel is a known function of that pixel alone."""

    def forward(self, x):
        return torch.stack((torch.zeros_like(x[:, 0]), x[:, 0]), 1)


@pytest.mark.parametrize("untiled", [False, True])
def test_a_heat_map_has_every_pixel_at_its_position(untiled):
    planes = np.random.default_rng(0).uniform(0, 255, (3, 75, 61)).astype(np.float32)
    grid = Grid.over((75, 61), 32)
    found = HeatMapper(Brightness(), lambda shape_hw: grid, torch.device("cpu"), untiled=untiled)(planes)
    expected = 1 / (1 + np.exp(-planes[0] / 255))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    tiles = np.stack([expected[y : y + 32, x : x + 32] for y in grid.ys for x in grid.xs])
    np.testing.assert_allclose(found, stitch_owner(tiles, grid), atol=1e-6)


@pytest.mark.parametrize("untiled", [False, True])
def test_images_of_different_sizes_each_have_a_heat_map_of_their_own_size(untiled):
    mapper = HeatMapper(Brightness(), partial(Grid.over, patch=32), torch.device("cpu"), untiled=untiled)
    for shape_hw in [(75, 61), (75, 90), (64, 40), (75, 61)]:
        planes = np.random.default_rng(0).uniform(0, 255, (3, *shape_hw)).astype(np.float32)
        np.testing.assert_allclose(mapper(planes), 1 / (1 + np.exp(-planes[0] / 255)), atol=1e-6)
