"""Batches are matched like single images, results do not depend on the batches, and wrong input is refused."""

import json
import re
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from flatout.charts.evaluation import as_shown, column_shares
from flatout.errors import DataError
from flatout.yolo.boxes import Letterbox, best_first
from flatout.yolo.evaluate.run import plot_evaluation
from flatout.yolo.metrics import (
    IOU_THRESHOLDS,
    ConfusionMatrix,
    Evaluator,
    Labels,
    average_precision,
    headings,
    match_to_labels,
    score_classes,
    scores_by_class,
)
from flatout.yolo.metrics.evaluation import mean_scores
from flatout.yolo.nms import Detections
from tests.reference.plain_evaluation import (
    confused_by_loops,
    matched_by_loops,
    matched_per_image,
    scores_by_loops,
)

DOCS = Path(__file__).parents[2] / "docs/metrics.md"
WHOLE = (100, 100)


def draw(num_images: int, seed: int, num_classes: int = 3) -> tuple[Detections, Labels]:
    """Random labels that overlap each other, and detections near them; some images have no labels or no detections."""
    rng = np.random.default_rng(seed)
    found, labels, images, label_images = [], [], [], []
    for image in range(num_images):
        num_labels, num_found = (int(rng.integers(0, limit)) * int(rng.random() < 0.85) for limit in (7, 30))
        corner = rng.random((num_labels, 2)) * 60
        label = np.concatenate(
            (rng.integers(0, num_classes, (num_labels, 1)), corner, corner + 15 + 20 * rng.random((num_labels, 2))), 1
        )
        near = label[rng.integers(0, num_labels, num_found)] if num_labels else rng.random((num_found, 5)) * 50
        box = near[:, 1:] + rng.normal(0, 2.5, (num_found, 4))
        class_id = np.where(rng.random(num_found) < 0.8, near[:, 0], rng.integers(0, num_classes, num_found)) // 1
        found.append(np.column_stack((box, -np.sort(-rng.random(num_found)), np.minimum(class_id, num_classes - 1))))
        labels.append(label)
        images.append(np.full(num_found, image))
        label_images.append(np.full(num_labels, image))
    row_D6, label_L5 = (torch.from_numpy(np.concatenate(part)).float() for part in (found, labels))
    image_D, image_L = (torch.from_numpy(np.concatenate(part)) for part in (images, label_images))
    return Detections(row_D6, image_D, num_images), Labels(label_L5[:, 1:], label_L5[:, 0].long(), image_L)


def per_image(found: Detections, labels: Labels) -> list[tuple[torch.Tensor, torch.Tensor]]:
    label_L5 = torch.cat((labels.class_L[:, None].float(), labels.box_L4), 1)
    return [(rows, label_L5[labels.image_L == image]) for image, rows in enumerate(found.per_image())]


@pytest.mark.parametrize("seed", range(8))
def test_a_batch_is_matched_like_its_images_one_by_one(seed):
    found, labels = draw(12, seed)
    correct_DK = match_to_labels(found, labels)
    pairs = per_image(found, labels)
    assert correct_DK.any()
    np.testing.assert_array_equal(
        correct_DK.numpy(), np.concatenate([matched_by_loops(*pair, IOU_THRESHOLDS) for pair in pairs])
    )
    thresholds = torch.tensor(IOU_THRESHOLDS)
    assert torch.equal(correct_DK, torch.cat([matched_per_image(*pair, thresholds) for pair in pairs]))


def test_labels_need_not_be_sorted_by_image():
    found, labels = draw(6, seed=3)
    order = torch.randperm(len(labels.image_L), generator=torch.Generator().manual_seed(0))
    shuffled = Labels(*(column[order] for column in labels))
    assert torch.equal(match_to_labels(found, labels), match_to_labels(found, shuffled))


@pytest.mark.parametrize("seed", range(8))
def test_the_confusion_of_a_batch_is_the_sum_over_its_images(seed):
    found, labels = draw(12, seed)
    matrix = ConfusionMatrix(3)
    matrix.update(found, labels)
    expected = sum(confused_by_loops(*pair, 3) for pair in per_image(found, labels))
    np.testing.assert_array_equal(matrix.counts().numpy(), expected)


def evaluate(batch_size: int, num_images: int = 12) -> Evaluator:
    """Evaluate the same images in batches of any size; images fill the input, so that coordinates do not change."""
    found, labels = draw(num_images, seed=5)
    rows = found.per_image()
    evaluator = Evaluator(3, confusion=True)
    for first in range(0, num_images, batch_size):
        some = rows[first : first + batch_size]
        counts = torch.tensor([len(each) for each in some])
        own = (labels.image_L >= first) & (labels.image_L < first + batch_size)
        low, high = labels.box_L4[own].split(2, 1)
        target = torch.cat(
            (
                (labels.image_L[own] - first)[:, None],
                labels.class_L[own][:, None],
                (low + high) / 200,
                (high - low) / 100,
            ),
            1,
        )
        batch = Detections(torch.cat(some), torch.repeat_interleave(counts), len(some))
        evaluator.update(batch, target, Letterbox.centred(WHOLE, [WHOLE] * len(some)), WHOLE)
    return evaluator


@pytest.mark.parametrize("batch_size", [1, 5, 12])
def test_the_size_of_batches_does_not_change_the_result(batch_size):
    one, other = evaluate(batch_size).result(), evaluate(7).result()
    assert one.num_images == 12
    assert one.map50_95 == other.map50_95 > 0
    np.testing.assert_array_equal(one.classes.curves.f1_CX, other.classes.curves.f1_CX)
    np.testing.assert_array_equal(one.confusion, other.confusion)


def test_the_first_example_of_the_documentation_runs(capsys):
    code = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL).group(1)
    prediction = torch.zeros(1, 3, 85)
    prediction[0, 0, :6] = torch.tensor([50.0, 50, 20, 20, 1, 1])
    shapes = [(WHOLE, ((1.0, 1.0), (0.0, 0.0)))]
    batch = (torch.zeros(1, 3, *WHOLE), torch.tensor([[0.0, 0, 0.5, 0.5, 0.2, 0.2]]), shapes)
    exec(code, {"batches": [batch], "model": lambda images: prediction})
    assert [float(number) for number in capsys.readouterr().out.split()] == pytest.approx([1] * 6)


def test_padding_rows_of_targets_do_not_count():
    target = torch.tensor([[0.0, 1, 0.5, 0.5, 0.2, 0.2]])
    padded = torch.cat((target, torch.tensor([[-1.0, 0, 0, 0, 0, 0]] * 3)))
    found = Detections(torch.tensor([[40.0, 40, 60, 60, 0.9, 1]]), torch.zeros(1).long(), 1)
    results = []
    for rows in (target, padded):
        evaluator = Evaluator(2)
        evaluator.update(found, rows, Letterbox.centred(WHOLE, [WHOLE]), WHOLE)
        results.append(evaluator.result())
    assert results[0].num_labels == results[1].num_labels == 1
    assert results[0].map50_95 == results[1].map50_95 > 0.9


def test_without_a_correct_detection_all_scores_are_zero():
    assert Evaluator(3).result().fitness == 0
    evaluator = Evaluator(3)
    found = Detections(torch.tensor([[0.0, 0, 5, 5, 0.9, 1]]), torch.zeros(1).long(), 1)
    evaluator.update(found, torch.tensor([[0.0, 1, 0.5, 0.5, 0.2, 0.2]]), Letterbox.centred(WHOLE, [WHOLE]), WHOLE)
    result = evaluator.result()
    assert (result.precision, result.recall, result.map50, result.map50_95) == (0, 0, 0, 0)
    assert set(result.scores.values()) == {0.0}
    assert result.num_labels == 1
    assert result.maps.tolist() == [0, 0, 0]


def means_of(
    correct_DK: list[list[int]], score_D: list[float], class_D: list[int], labels_L: list[int]
) -> dict[str, float]:
    arrays = (np.array(correct_DK, bool), np.array(score_D, np.float32), np.array(class_D), np.array(labels_L))
    return mean_scores(score_classes(*arrays))


def test_f1_is_the_mean_over_classes_at_the_best_confidence_for_all():
    """Class 0: two of three labels found, nothing wrong: 2 * 1 * (2/3) / (1 + 2/3) = 0.8. Class 1: all found: 1."""
    scores = means_of([[1], [1], [1]], [0.9, 0.6, 0.9], [0, 0, 1], [0, 0, 0, 1])
    assert (scores["precision"], scores["recall"]) == pytest.approx((1, 5 / 6))
    assert scores["F1"] == pytest.approx(0.9), "not 10/11, the F1 of mean precision and mean recall"


def test_average_recall_counts_detections_of_any_score():
    """Two overlaps. Class 0 finds 3 and 2 of 4 labels, the last at a score of 0.002; class 1 finds 1 and 0 of 2; class
    2 has a label and no detection, class 3 detections and no label."""
    correct_DK = [[1, 1], [1, 0], [0, 0], [1, 1], [1, 0], [0, 0]]
    scores = means_of(correct_DK, [0.9, 0.8, 0.7, 0.002, 0.9, 0.9], [0, 0, 0, 0, 1, 3], [0, 0, 0, 0, 1, 1, 2])
    assert scores["AR_0.5:0.95"] == pytest.approx((3 / 4 + 2 / 4 + 1 / 2 + 0 + 0 + 0) / 6)


def test_mean_scores_are_the_means_of_the_scores_of_classes():
    result = evaluate(4).result()
    by_class = scores_by_class(result.classes)
    assert by_class.keys() == result.scores.keys() and len(headings()) == len(by_class)
    for name, mean in result.scores.items():
        assert 0 < mean == pytest.approx(by_class[name].mean()), name
    assert (result.classes.full_recall_CK[:, 0] >= result.classes.curves.recall_CX.max(1) - 1e-12).all()


@pytest.mark.parametrize(
    ("targets", "num_images", "message"),
    [
        (np.zeros((1, 6)), 1, r"\[T, 6\] of image"),
        (torch.zeros(1, 5), 1, r"\[T, 6\]"),
        (torch.zeros(1, 6), 2, "of 2 images"),
    ],
)
def test_targets_and_letterboxes_of_another_form_are_refused(targets, num_images, message):
    found = Detections(torch.zeros(0, 6), torch.zeros(0, dtype=torch.long), 1)
    with pytest.raises(DataError, match=message):
        Evaluator(num_classes=1).update(found, targets, Letterbox.centred((8, 8), [(8, 8)] * num_images), (8, 8))


def test_a_label_of_an_unknown_class_is_refused():
    evaluator = Evaluator(2, confusion=True)
    found = Detections(torch.tensor([[40.0, 40, 60, 60, 0.9, 1]]), torch.zeros(1).long(), 1)
    evaluator.update(found, torch.tensor([[0.0, 7, 0.5, 0.5, 0.2, 0.2]]), Letterbox.centred(WHOLE, [WHOLE]), WHOLE)
    with pytest.raises(DataError, match=r"Labels have classes \[7\], but the network has 2 \(0\.\.1\)"):
        evaluator.result()


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5])
def test_the_scores_of_a_class_come_from_its_own_detections_in_the_order_of_their_scores(share):
    """Class 0 has no detection, class 3 no correct one, class 4 no label, class 6 and its labels come last."""
    rng = np.random.default_rng(2)
    class_D = rng.integers(1, 6, 900)
    score_D = (rng.random(900) * 40).round().astype(np.float32) / 40  # many are equal
    correct_DK = (rng.random((900, 4)) < share) & (class_D != 3)[:, None]
    label_class_L = rng.choice([0, 1, 2, 3, 5, 6], 300)
    found = score_classes(correct_DK, score_D, class_D, label_class_L)
    assert found.classes_C.tolist() == [0, 1, 2, 3, 5, 6]
    for row, number in enumerate(found.classes_C):
        own = class_D == number
        if not own.any():
            assert not found.ap_CK[row].any() and not found.curves.recall_CX[row].any()
            continue
        plain = scores_by_loops(correct_DK[own], score_D[own], int((label_class_L == number).sum()))
        np.testing.assert_allclose(found.ap_CK[row], plain.ap_K, rtol=0, atol=1e-12)
        np.testing.assert_array_equal(found.full_recall_CK[row], plain.full_recall_K)
        np.testing.assert_allclose(found.curves.precision_CX[row], plain.precision_X, rtol=0, atol=1e-12)
        np.testing.assert_allclose(found.curves.recall_CX[row], plain.recall_X, rtol=0, atol=1e-12)


def test_leaving_out_points_between_corners_does_not_change_the_area():
    rng = np.random.default_rng(1)
    for _ in range(30):
        correct_n = rng.random(60) < rng.random()
        scores = score_classes(
            correct_n[:, None], np.linspace(0.9, 0.1, 60, dtype=np.float32), np.zeros(60), np.zeros(40)
        )
        true_n = correct_n.cumsum()
        whole = average_precision(true_n / (40 + 1e-16), true_n / np.arange(1, 61))
        assert scores.ap_CK[0, 0] == pytest.approx(whole, abs=1e-12)


def test_the_best_come_first_in_every_group_and_equals_stay_in_order():
    generator = torch.Generator().manual_seed(0)
    group = torch.randint(0, 5, (400,), generator=generator)
    score = (torch.randn(400, generator=generator) * 3).round() / 3
    expected = sorted(range(400), key=lambda row: (int(group[row]), -float(score[row]), row))
    assert best_first(group, score, 5).tolist() == expected
    # Too many groups for one key: two stable sorts instead.
    assert best_first(group, score, 1 << 40).tolist() == expected


def test_ap_per_class_is_written_with_names():
    record = json.loads(json.dumps(evaluate(4).result().per_class_ap(["cat", "dog", "cow"])))
    assert set(record) == {"map50", "map", "per_class"}
    assert record["per_class"]["1"]["name"] == "dog"
    assert record["map"] == pytest.approx(np.mean([each["ap"] for each in record["per_class"].values()]))


def test_columns_of_the_plotted_matrix_sum_to_one_without_their_small_fractions():
    shares = column_shares(np.array([[3, 0, 0], [1, 999, 0], [0, 1, 0]]))
    np.testing.assert_allclose(shares[:, 0], [0.75, 0.25, np.nan], atol=1e-6)
    assert np.isnan(shares[2, 1])


def test_the_plotted_matrix_has_one_rule_for_all_cells():
    found = Detections(torch.tensor([[10.0, 10, 30, 30, 0.9, 1], [60, 60, 80, 80, 0.9, 2]]), torch.zeros(2).long(), 1)
    boxes = torch.tensor([[10.0, 10, 30, 30], [40, 40, 50, 50]])
    labels = Labels(boxes, torch.tensor([0, 0]), torch.zeros(2).long())
    matrix = ConfusionMatrix(3)
    matrix.update(found, labels)
    shown = as_shown(matrix.counts().numpy())
    predicted_true = {(1, 0), (3, 0), (2, 3)}  # class 0 detected as 1, class 0 missed, a false detection of class 2
    assert {tuple(cell) for cell in np.argwhere(shown).tolist()} == predicted_true


def test_curves_and_matrix_are_plotted_without_optional_packages(tmp_path):
    plotted = plot_evaluation(evaluate(4).result(), ["cat", "dog", "c\u00f6w"], tmp_path)
    names = ["PR_curve.png", "F1_curve.png", "P_curve.png", "R_curve.png", "confusion_matrix.png"]
    assert [path.name for path in plotted] == names
    assert all(cv2.imread(str(path)).std() > 5 for path in plotted)


def test_without_a_correct_detection_there_are_no_curves(tmp_path):
    (only,) = plot_evaluation(Evaluator(2, confusion=True).result(), ["cat", "dog"], tmp_path)
    assert only.name == "confusion_matrix.png"
