"""Boxes, AP, confusion, fitness and whole evaluations give the golden numbers."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatout.yolo.boxes import Letterbox, cxcywh_to_xyxy, pairwise_iou, to_native, xyxy_to_cxcywh
from flatout.yolo.metrics import ConfusionMatrix, Evaluator, Labels, average_precision, fitness, score_classes
from flatout.yolo.metrics.coco import COCO_CATEGORY_IDS, CocoExport
from flatout.yolo.nms import Detections, NmsConfig, non_max_suppression
from tests.golden_cases import golden_cases
from tests.reference.boxes_of_yolov7 import norm_to_input

Arrays = Mapping[str, np.ndarray]


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    if not path.exists():
        pytest.skip(f"{path.name} is not in the golden folder")
    with np.load(path) as arrays:
        return {key: arrays[key] for key in arrays.files}


def need(arrays: Arrays, *names: str) -> list[Any]:
    """Arrays as tensors of the same type; skips the test if one is missing."""
    for name in names:
        if name not in arrays:
            pytest.skip(f"{name} is not in the golden arrays")
    return [torch.from_numpy(arrays[name]) for name in names]


def records_of(path: Path) -> Iterable[tuple[str, tuple[Path, dict[str, Any]]]]:
    return [(record["name"], (path, record)) for record in json.loads(path.read_text())]


# --- boxes.npz: one case per result


def box_results(path: Path) -> Iterable[tuple[str, tuple[Path, str]]]:
    inputs = re.compile(r"xywh|xywhn|box_iou_[ab]|scale_\w+_(in|shapes|ratiopad)")
    return [(name, (path, name)) for name in arrays_of(path) if not inputs.fullmatch(name)]


@pytest.mark.parametrize("case", golden_cases("yolov7-metrics/boxes.npz", box_results))
def test_boxes_convert_to_the_golden_ones(case):
    path, name = case
    arrays = arrays_of(path)
    np.testing.assert_allclose(_converted(name, arrays).numpy(), arrays[name], rtol=0, atol=1e-4)


def _converted(name: str, arrays: Arrays) -> torch.Tensor:
    if name == "xywh2xyxy":
        return cxcywh_to_xyxy(*need(arrays, "xywh"))
    if name == "xyxy2xywh":
        return xyxy_to_cxcywh(*need(arrays, "xywh2xyxy"))
    if name == "box_iou":
        return pairwise_iou(*need(arrays, "box_iou_a", "box_iou_b"))
    if numbers := re.fullmatch(r"xywhn2xyxy_w(\d+)_h(\d+)_pad(\d+)_(\d+)", name):
        width, height, pad_x, pad_y = map(int, numbers.groups())
        return norm_to_input(*need(arrays, "xywhn"), size_wh=(width, height), pad_xy=(pad_x, pad_y))
    if scale := re.fullmatch(r"(scale_\w+)_out", name):
        box, shapes = need(arrays, f"{scale[1]}_in", f"{scale[1]}_shapes")
        return to_native(box, torch.zeros(len(box)).long(), _letterbox(shapes, arrays.get(f"{scale[1]}_ratiopad")))
    raise AssertionError(f"{name} is unknown")


def _letterbox(shapes: torch.Tensor, ratio_pad: np.ndarray | None) -> Letterbox:
    height, width, native_height, native_width = shapes.tolist()
    if ratio_pad is None:
        return Letterbox.centred((height, width), [(native_height, native_width)])
    ratio_h, ratio_w, pad_x, pad_y = ratio_pad.tolist()
    return Letterbox.from_shapes([((native_height, native_width), ((ratio_h, ratio_w), (pad_x, pad_y)))])


# --- ap_per_class


@pytest.mark.parametrize(
    "case", golden_cases("yolov7-metrics/ap_per_class.json", records_of, also=("yolov7-metrics/ap_per_class.npz",))
)
def test_scores_of_classes_match_the_golden(case):
    path, record = case
    assert set(record) <= {"name", "note", "n_pred", "n_labels", *_means("", record), *_means("_v5", record)}
    arrays, name = arrays_of(path.with_suffix(".npz")), record["name"]
    tp, conf, pred_cls, target_cls = (
        each.numpy() for each in need(arrays, *(f"{name}/{part}" for part in ("tp", "conf", "pred_cls", "target_cls")))
    )
    for suffix in ("", "_v5"):
        scores = score_classes(tp, conf, pred_cls, target_cls, v5_metric=bool(suffix))
        found = {
            "p": scores.precision_C,
            "r": scores.recall_C,
            "ap": scores.ap_CK,
            "f1": scores.f1_C,
            "classes": scores.classes_C,
        }
        for part, value in found.items():
            if f"{name}/{part}{suffix}" in arrays:
                np.testing.assert_allclose(value, arrays[f"{name}/{part}{suffix}"], rtol=0, atol=1e-9)
        means = {"mp": scores.precision_C, "mr": scores.recall_C, "map50": scores.ap_CK[:, 0], "map": scores.ap_CK}
        for part, expected in _means(suffix, record).items():
            assert means[part.removesuffix(suffix)].mean() == pytest.approx(expected, abs=1e-9)


def _means(suffix: str, record: Mapping[str, Any]) -> dict[str, float]:
    names = [f"{part}{suffix}" for part in ("map50", "map", *(() if suffix else ("mp", "mr")))]
    return {name: record[name] for name in names if name in record}


def curves_of(path: Path) -> Iterable[tuple[str, tuple[Path, str]]]:
    names = {key.split("/")[0] for key in arrays_of(path) if re.match(r"curve\d+/", key)}
    return [(name, (path, name)) for name in sorted(names)]


@pytest.mark.parametrize("case", golden_cases("yolov7-metrics/ap_per_class.npz", curves_of))
def test_the_area_under_a_curve_matches_the_golden(case):
    path, name = case
    arrays = arrays_of(path)
    recall, precision = (each.numpy() for each in need(arrays, f"{name}/recall", f"{name}/precision"))
    for suffix in ("", "_v5"):
        if f"{name}/ap{suffix}" in arrays:
            area = average_precision(recall, precision, v5_metric=bool(suffix))
            assert area == pytest.approx(float(arrays[f"{name}/ap{suffix}"]), abs=1e-9)


def fitness_rows(path: Path) -> Iterable[tuple[str, tuple[np.ndarray, float]]]:
    arrays = arrays_of(path)
    if "fitness/in" not in arrays or "fitness/out" not in arrays:
        return []
    rows = zip(arrays["fitness/in"], arrays["fitness/out"], strict=True)
    return [(f"fitness{number}", (row, float(value))) for number, (row, value) in enumerate(rows)]


@pytest.mark.parametrize("case", golden_cases("yolov7-metrics/ap_per_class.npz", fitness_rows))
def test_fitness_matches_the_golden(case):
    row, expected = case
    assert fitness(map50=row[2], map50_95=row[3]) == pytest.approx(expected, abs=1e-9)


# --- confusion.npz: one case, image by image


def one_case(path: Path) -> Iterable[tuple[str, Path]]:
    return [("all", path)]


@pytest.mark.parametrize("case", golden_cases("yolov7-metrics/confusion.npz", one_case))
def test_the_confusion_matrix_grows_as_the_golden_one(case):
    arrays = arrays_of(case)
    assert all(re.fullmatch(r"(det|lab|matrix_after)_\d+", key) for key in arrays)
    sides = {len(arrays[key]) for key in arrays if key.startswith("matrix")}
    if not sides:
        pytest.skip("the case stores no matrix")
    matrix = ConfusionMatrix(sides.pop() - 1)
    for image in range(sum(key.startswith("det_") for key in arrays)):
        det_n6, lab_m5 = need(arrays, f"det_{image}", f"lab_{image}")
        found = Detections(det_n6, torch.zeros(len(det_n6)).long(), 1)
        matrix.update(found, Labels(lab_m5[:, 1:], lab_m5[:, 0].long(), torch.zeros(len(lab_m5)).long()))
        if f"matrix_after_{image}" in arrays:
            np.testing.assert_array_equal(matrix.counts().numpy(), arrays[f"matrix_after_{image}"])


# --- evaluate


EVALUATE_KEYS = {
    *("name", "nc", "batches", "B", "input_hw", "N", "conf_thres", "iou_thres", "v5_metric", "is_coco", "note"),
    *("shapes", "paths", "results", "n_predictions", "n_labels", "confidence_ties", "n_json", "json_head"),
}


@pytest.mark.parametrize(
    "case", golden_cases("yolov7-metrics/evaluate.json", records_of, also=("yolov7-metrics/evaluate.npz",))
)
def test_a_whole_evaluation_matches_the_golden(case):
    path, record = case
    assert set(record) <= EVALUATE_KEYS
    arrays, name = arrays_of(path.with_suffix(".npz")), record["name"]
    evaluator = Evaluator(record["nc"], v5_metric=record.get("v5_metric", False))
    export = CocoExport(COCO_CATEGORY_IDS if record.get("is_coco") else None)
    config = NmsConfig(conf_thres=record["conf_thres"], iou_thres=record["iou_thres"], multi_label=True)
    for batch, shapes in enumerate(record["shapes"]):
        prediction, target = need(arrays, f"{name}/out_{batch}", f"{name}/targets_{batch}")
        height, width = record["input_hw"]
        found = non_max_suppression(prediction, config)
        native = evaluator.update(found, target, Letterbox.from_shapes(shapes), (height, width))
        export.add(native, record["paths"][batch] if "paths" in record else [str(i) for i in range(len(shapes))])
    _compare_matches(evaluator, record, arrays)
    _compare_result(evaluator, record, arrays)
    records = export.records()
    assert len(records) == record.get("n_json", len(records))
    head = record.get("json_head", [])
    assert records[: len(head)] == [as_rounded(each) for each in head]


def as_rounded(expected: Mapping[str, Any]) -> dict[str, Any]:
    """A golden record that allows one unit of difference in the third decimal of the box, because processors may round
    an intermediate product differently."""
    return {**expected, "bbox": pytest.approx(expected["bbox"], rel=0, abs=0.001 + 1e-9)}


def test_a_unit_of_the_last_decimal_of_a_box_is_allowed_and_nothing_else():
    golden = {"image_id": "a", "category_id": 1, "bbox": [1.234, 2.0, 3.0, 4.0], "score": 0.77399}
    for bbox in ([1.235, 2.0, 3.0, 4.0], [1.233, 2.001, 2.999, 4.0]):
        assert golden | {"bbox": bbox} == as_rounded(golden)
    changes: list[dict[str, Any]] = [{"bbox": [1.236, 2.0, 3.0, 4.0]}, {"score": 0.774}, {"category_id": 2}, {"new": 1}]
    for change in changes:
        assert golden | change != as_rounded(golden)


def _compare_matches(evaluator: Evaluator, record: Mapping[str, Any], arrays: Arrays) -> None:
    matches = evaluator.matches()
    assert len(matches.score_D) == record.get("n_predictions", len(matches.score_D))
    assert len(matches.label_class_L) == record.get("n_labels", len(matches.label_class_L))
    stored = dict(zip(("tp", "conf", "pred_cls", "target_cls"), matches, strict=True))
    for part, value in stored.items():
        if f"{record['name']}/stats_{part}" in arrays:
            np.testing.assert_allclose(value.numpy(), arrays[f"{record['name']}/stats_{part}"], rtol=1e-6)


def _compare_result(evaluator: Evaluator, record: Mapping[str, Any], arrays: Arrays) -> None:
    result = evaluator.result()
    found = {"P": result.precision, "R": result.recall, "map50": result.map50, "map": result.map50_95}
    for part, expected in record.get("results", {}).items():
        # Validation losses are those of the trainer; there is no loss here, so they are 0.
        assert found.get(part, [0.0] * 3) == pytest.approx(expected, abs=1e-6)
    scores = result.classes
    parts = {"ap": scores.ap_CK, "p": scores.precision_C, "r": scores.recall_C, "classes": scores.classes_C}
    for part, value in (parts | {"maps": result.maps}).items():
        if f"{record['name']}/{part}" in arrays:
            np.testing.assert_allclose(value, arrays[f"{record['name']}/{part}"], rtol=0, atol=1e-6)
