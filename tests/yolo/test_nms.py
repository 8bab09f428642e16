"""NMS of a batch equals NMS image by image, for all options, kernels and numbers of boxes."""

import importlib.util
import logging

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.errors import ConfigError
from flatout.yolo.nms import NmsConfig, greedy, non_max_suppression, suppress
from tests.reference import plain_nms as twin
from tests.reference.plain_nms import plain_nms
from tests.yolo.nms_predictions import OPTIONS, VALIDATION, draw


def assert_same(rows: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert [len(each) for each in rows] == [len(each) for each in expected]
    for one, other in zip(rows, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("num_classes", [1, 2, 80])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_batch_gives_the_same_boxes_as_its_images_one_by_one(options, num_classes):
    config = NmsConfig(**options)
    prediction = draw(4, 60, num_classes, seed=num_classes)
    prediction[1, :, 4] = 0
    assert_same(non_max_suppression(prediction, config).per_image(), plain_nms(prediction, config))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_and_corners_are_computed_in_the_precision_of_the_prediction(dtype):
    prediction = draw(3, 200, 5, seed=1).to(dtype)
    config = NmsConfig(**VALIDATION)
    assert_same(non_max_suppression(prediction, config).per_image(), plain_nms(prediction, config))


def test_boxes_of_different_classes_overlap_if_they_are_wider_than_the_class_shift():
    prediction = draw(2, 80, 6, seed=2, size_px=6000)
    prediction[..., 2:4] *= 80
    config = NmsConfig(conf_thres=0.01, iou_thres=0.3, multi_label=True)
    assert_same(non_max_suppression(prediction, config).per_image(), plain_nms(prediction, config))


@pytest.mark.parametrize("block", [1, 3, 1000])
@pytest.mark.parametrize("pairs", [5, 1 << 20])
def test_sizes_of_blocks_do_not_change_the_boxes(block, pairs, monkeypatch):
    prediction, config = draw(3, 50, 3, seed=3), NmsConfig(**VALIDATION)
    expected = plain_nms(prediction, config)
    monkeypatch.setattr(greedy, "BLOCK", block)
    monkeypatch.setattr(greedy, "PAIRS", pairs)
    assert_same(non_max_suppression(prediction, config).per_image(), expected)


@pytest.mark.parametrize("images_at_a_time", [0, 1, 2.5, 4])
def test_images_processed_together_do_not_change_each_other(images_at_a_time, monkeypatch):
    """Some have no box with enough objectness, the limit of candidates falls between equal scores, labels are added."""
    prediction = draw(9, 50, 3, seed=3)
    prediction[..., 4:] = (prediction[..., 4:] * 4).ceil() / 4
    prediction[[0, 4, 5, 8], :, 4] = 0
    config = NmsConfig(**VALIDATION, max_nms=60)
    labels = [torch.full((image % 3, 5), 50.0 + image).index_fill_(1, torch.tensor([0]), 1) for image in range(9)]
    monkeypatch.setattr(suppress, "MAX_SCORES", images_at_a_time * prediction[1, :, 5:].numel())
    for extra in (None, labels):
        found = non_max_suppression(prediction, config, labels=extra)
        assert found.num_images == 9
        assert_same(found.per_image(), plain_nms(prediction, config, extra))


class CountsOperations(TorchDispatchMode):
    """Counts torch's operations: on a GPU each is at least one launch."""

    total = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.total += 1
        return operation(*args, **(kwargs or {}))


def test_more_images_in_a_batch_take_no_more_operations():
    """As long as no image has more candidates than the limit; with 36,000 scores each, they are counted."""
    totals = []
    for num_images in (2, 12):
        prediction = draw(num_images, 450, 80, seed=11)
        with CountsOperations() as counted:
            found = non_max_suppression(prediction, NmsConfig(**VALIDATION))
        assert len(found.row_D6) == 300 * num_images
        totals.append(counted.total)
    assert totals[0] == totals[1]


def test_chains_copies_and_boxes_without_area_are_suppressed_greedily():
    # Each box overlaps the next by more than 0.45, so every second one is removed; then copies; then points and lines.
    chain = torch.tensor([[30.0 + 10 * step, 30, 40, 20] for step in range(40)])
    copies = torch.tensor([[300.0, 300, 50, 50]]).repeat(20, 1)
    flat = torch.tensor([[500.0, 500, 0, 0]] * 3 + [[500.0, 500, 30, 0]] * 3 + [[500.0, 500, 30, 30]])
    box = torch.cat((chain, copies, flat))
    score = torch.linspace(0.9, 0.5, len(box))[:, None]
    prediction = torch.cat((box, score, torch.ones(len(box), 1)), 1)[None]
    rows = non_max_suppression(prediction).per_image()
    assert_same(rows, plain_nms(prediction, NmsConfig()))
    assert len(rows[0]) == 20 + 1 + 7


def test_a_box_that_is_not_finite_does_not_affect_others():
    prediction = draw(2, 60, 3, seed=4)
    prediction[0, 5, 0] = float("nan")
    prediction[0, 6, 3] = float("inf")
    config = NmsConfig(**VALIDATION)
    rows, expected = non_max_suppression(prediction, config).per_image(), plain_nms(prediction, config)
    for one, other in zip(rows, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_too_many_candidates_are_limited_to_the_best_and_of_equal_scores_to_the_first():
    prediction = draw(2, 400, 80, seed=5)
    # Few distinct scores, so that the limit falls between equal ones.
    prediction[..., 4:] = (prediction[..., 4:] * 4).ceil() / 4
    config = NmsConfig(**VALIDATION, max_nms=1000)
    assert_same(non_max_suppression(prediction, config).per_image(), plain_nms(prediction, config))


@pytest.mark.parametrize("options", [{}, {"classes": (1, 2, 77)}, {"conf_thres": 0.0}], ids=str)
@pytest.mark.parametrize("levels", [4, 1_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_limit_of_a_gpu_leaves_the_same_candidates_as_that_of_the_host(options, levels, dtype, monkeypatch):
    """Many scores are equal, or few; one image has no box, one is below the limit, one has the score 1 everywhere."""
    prediction = draw(5, 400, 80, seed=5)
    prediction[..., 4:] = (prediction[..., 4:] * levels).ceil() / levels
    prediction[1, :, 4], prediction[2, 5:, 4], prediction[3, :, 4:] = 0, 0, 1
    config = NmsConfig(**VALIDATION | {"max_nms": 1000, **options})
    expected = non_max_suppression(prediction.to(dtype), config)
    monkeypatch.setattr(suppress, "_unmark_on_host", suppress._unmark_on_device)
    found = non_max_suppression(prediction.to(dtype), config)
    assert torch.equal(found.row_D6, expected.row_D6) and torch.equal(found.image_D, expected.image_D)


def test_the_limit_of_a_gpu_leaves_few_candidates_too_many():
    score_RK = torch.rand(2000, 80, generator=torch.Generator().manual_seed(0)) ** 4
    wanted_RK, rows = score_RK > 0.001, suppress.Rows(score_RK, torch.arange(2000) // 1000, [1000, 1000])
    assert suppress._unmark_on_device(wanted_RK, score_RK, rows, 5000)
    for first in (0, 1000):
        assert 5000 <= int(wanted_RK[first : first + 1000].sum()) < 1.05 * 5000
    assert score_RK[wanted_RK].min() > score_RK[~wanted_RK].max() * 0.98


def test_thirty_thousand_candidates_per_image_are_handled():
    prediction = draw(2, 3000, 80, seed=6)
    config = NmsConfig(**VALIDATION)
    rows = non_max_suppression(prediction, config).per_image()
    assert [len(each) for each in rows] == [300, 300]
    assert_same(rows, plain_nms(prediction, config))


def test_ten_thousand_copies_of_one_box_leave_one():
    prediction = torch.tensor([100.0, 100, 50, 50, 0.9, 1]).repeat(1, 10_000, 1)
    assert len(non_max_suppression(prediction).row_D6) == 1


def test_labels_are_added_with_score_1_after_the_predictions_of_their_image():
    prediction = draw(3, 40, 4, seed=7)
    labels = [torch.tensor([[2.0, 50, 60, 20, 30], [0, 500, 500, 90, 90]]), torch.zeros(0, 5), torch.ones(1, 5) * 3]
    config = NmsConfig(conf_thres=0.2, multi_label=True)
    rows = non_max_suppression(prediction, config, labels=labels).per_image()
    assert_same(rows, plain_nms(prediction, config, labels))
    assert rows[0][:2, 4].tolist() == [1, 1]
    assert rows[0][:2, 5].tolist() == [2, 0]


@pytest.mark.parametrize(
    ("prediction", "got"),
    [
        (torch.zeros(50, 85), r"\[50, 85\]"),
        (torch.zeros(1, 50, 5), r"\[1, 50, 5\]"),
        ((torch.zeros(1, 2, 85),), "a tuple"),
    ],
)
def test_what_is_no_prediction_is_refused_with_the_shape_of_one(prediction, got):
    with pytest.raises(ConfigError, match=rf"got {got} instead of a tensor \[images, boxes, 5 \+ classes\]"):
        non_max_suppression(prediction)


def test_no_images_no_boxes_and_no_detections_give_empty_results():
    for shape in ((0, 10, 7), (2, 0, 7), (2, 10, 7)):
        found = non_max_suppression(torch.zeros(shape))
        assert found.num_images == shape[0]
        assert [tuple(rows.shape) for rows in found.per_image()] == [(0, 6)] * shape[0]


def test_merging_averages_overlapping_candidates_and_drops_isolated_boxes():
    box = torch.tensor([[100.0, 100, 40, 40], [102, 100, 40, 40], [300, 300, 40, 40]])
    prediction = torch.cat((box, torch.tensor([[0.9], [0.3], [0.8]]), torch.ones(3, 1)), 1)[None]
    (plain,) = non_max_suppression(prediction).per_image()
    (merged,) = non_max_suppression(prediction, NmsConfig(merge=True)).per_image()
    assert len(plain) == 2
    mean_cx = (100 * 0.9 + 102 * 0.3) / 1.2
    torch.testing.assert_close(merged, torch.tensor([[mean_cx - 20, 80, mean_cx + 20, 120, 0.9, 0]]))


def test_merging_leaves_images_with_one_candidate_alone():
    prediction = torch.tensor([[[100.0, 100, 40, 40, 0.9, 1]]])
    assert len(non_max_suppression(prediction, NmsConfig(merge=True)).row_D6) == 1


def torchvision_kernel(box_M4, count_B, threshold, max_det):
    """torchvision.ops.nms for each image."""
    from torchvision.ops import nms

    kept, begin = [torch.zeros(0, dtype=torch.int64, device=box_M4.device)], 0
    for count in count_B.tolist():
        # The boxes are sorted already; descending numbers in place of the scores keep their order.
        descending = torch.arange(count, 0, -1, dtype=torch.float32, device=box_M4.device)
        kept.append(nms(box_M4[begin : begin + count], descending, threshold)[:max_det] + begin)
        begin += count
    return torch.cat(kept)


@pytest.mark.skipif(not importlib.util.find_spec("torchvision"), reason="torchvision is not installed")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_torchvisions_kernel_gives_the_same_boxes(options, monkeypatch):
    prediction = draw(3, 80, 5, seed=8)
    ours = non_max_suppression(prediction, NmsConfig(**options, kernel="sweep"))
    monkeypatch.setattr(suppress, "kernel_named", lambda name, device: torchvision_kernel)
    assert torch.equal(ours.row_D6, non_max_suppression(prediction, NmsConfig(**options)).row_D6)


def test_a_threshold_that_float32_cannot_represent_acts_like_the_exact_one():
    # The IoU is float32(0.6), which is above 0.6; rounding the threshold to nearest would make them equal.
    box = torch.tensor([[0.0, 0, 10, 10], [0, 0, 6, 10]])
    assert twin.greedy(box, torch.tensor([0.9, 0.8]), 0.6, 10).tolist() == [0]
    assert greedy.sweep_kernel(box, torch.tensor([2]), suppress.float32_at_most(0.6), 10).tolist() == [0]
    assert greedy.sweep_kernel(box, torch.tensor([2]), float(torch.tensor(0.6)), 10).tolist() == [0, 1]


def test_slow_nms_warns_and_drops_nothing(monkeypatch, caplog):
    monkeypatch.setattr(suppress, "SLOW_S", 0)
    prediction = draw(2, 50, 3, seed=9)
    with caplog.at_level(logging.WARNING):
        rows = non_max_suppression(prediction).per_image()
    assert_same(rows, plain_nms(prediction, NmsConfig()))
    assert "NMS of 2 images took" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"conf_thres": 1.5}, r"nms\.conf_thres=1\.5 is outside 0\.\.1"),
        ({"iou_thres": -0.1}, r"nms\.iou_thres=-0\.1 is outside 0\.\.1"),
        ({"max_det": 0}, r"nms\.max_det=0 is outside 1"),
        ({"kernel": "fast"}, r'nms\.kernel="fast" is unknown\. Use auto, sweep or triton'),
        ({"classes": ("cat",)}, "by their numbers, from 0, not by names"),
    ],
)
def test_an_invalid_option_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        NmsConfig(**options)


def test_a_kernel_that_cannot_run_here_says_why():
    with pytest.raises(ConfigError, match="needs CUDA, but the predictions are on cpu"):
        non_max_suppression(draw(1, 5, 2, seed=10), NmsConfig(kernel="triton"))
