"""All COCO evaluators give the same scores, and crowds count neither as missed nor as false."""

import builtins
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatout.errors import ConfigError, DataError, ResourceError
from flatout.yolo.metrics import coco
from flatout.yolo.metrics.coco import COCO_CATEGORY_IDS, EVALUATORS, CocoExport, coco_scores, image_id_of
from flatout.yolo.nms import Detections

INSTALLED = [each for each in EVALUATORS if importlib.util.find_spec(each[1].split(".")[0])]
needs_evaluator = pytest.mark.skipif(not INSTALLED, reason="no COCO evaluator is installed (extra `eval`)")
EVALUATOR = [pytest.param(each, id=each[0]) for each in INSTALLED] or [pytest.param(None, marks=needs_evaluator)]


def annotation(number: int, image: int, category: int, box: list[float], *, crowd: bool = False) -> dict[str, Any]:
    return {
        "id": number,
        "image_id": image,
        "category_id": category,
        "bbox": box,
        "area": box[2] * box[3],
        "iscrowd": int(crowd),
    }


TRUTH = {
    "images": [{"id": number, "width": 100, "height": 100, "file_name": f"{number:012}.jpg"} for number in (7, 9)],
    "categories": [{"id": 1, "name": "person"}, {"id": 13, "name": "stop sign"}],
    "annotations": [
        annotation(1, 7, 1, [10, 10, 20, 20]),
        annotation(2, 7, 1, [50, 50, 40, 40], crowd=True),
        annotation(3, 9, 13, [0, 0, 30, 30]),
    ],
}


def export(*, in_crowd: bool = True, far_off: bool = False) -> CocoExport:
    """Both objects found exactly; optionally a box in the crowd, and a false one with the highest score."""
    rows = [[10.0, 10, 30, 30, 0.9, 0]]
    rows += [[60.0, 60, 70, 70, 0.95, 0]] * in_crowd + [[80.0, 5, 95, 20, 0.99, 0]] * far_off
    row_D6 = torch.tensor([*rows, [0.0, 0, 30, 30, 0.8, 11]])
    image_D = torch.tensor([0] * len(rows) + [1])
    collected = CocoExport(COCO_CATEGORY_IDS)
    collected.add(Detections(row_D6, image_D, 2), ["val/000000000007.jpg", "val/000000000009.jpg"])
    return collected


def use_only(evaluator: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coco, "EVALUATORS", (evaluator,))


def test_eighty_classes_map_to_category_ids_up_to_ninety():
    assert len(COCO_CATEGORY_IDS) == len(set(COCO_CATEGORY_IDS)) == 80
    absent = set(range(1, 91)) - set(COCO_CATEGORY_IDS)
    assert absent == {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
    assert list(COCO_CATEGORY_IDS) == sorted(COCO_CATEGORY_IDS)


@pytest.mark.parametrize(
    ("path", "image_id"),
    # Characters that have a numeric value, but are no digits: the number one in Chinese, a square.
    [("a/000000000139.jpg", 139), ("b/img_1.png", "img_1"), ("7", 7), ("\u4e00.jpg", "\u4e00"), ("\u00b2", "\u00b2")],
)
def test_the_id_of_an_image_is_the_number_in_its_name(path, image_id):
    assert image_id_of(path) == image_id


def test_detections_that_cannot_be_written_leave_no_cut_file(tmp_path: Path):
    collected = CocoExport()
    place = tmp_path / "predictions.json"
    place.mkdir()
    with pytest.raises(ResourceError, match=r"predictions\.json"):
        collected.write(place)
    assert list(tmp_path.iterdir()) == [place]


def test_records_are_rounded_and_written_as_json(tmp_path):
    collected = CocoExport()
    collected.add(
        Detections(torch.tensor([[1.23456, 2, 11.5, 4.25, 0.1234567, 3]]), torch.tensor([1]), 2), ["1", "b.jpg"]
    )
    collected.add(Detections(torch.tensor([[0.0, 0, 1, 1, 0.5, 2]]), torch.tensor([0]), 1), ["9.jpg"])
    collected.write(tmp_path / "best_predictions.json")
    assert json.loads((tmp_path / "best_predictions.json").read_text()) == [
        {"image_id": "b", "category_id": 3, "bbox": [1.235, 2.0, 10.265, 2.25], "score": 0.12346},
        {"image_id": 9, "category_id": 2, "bbox": [0.0, 0.0, 1.0, 1.0], "score": 0.5},
    ]
    assert collected.image_ids == [1, "b", 9]
    with pytest.raises(DataError, match=r'name of image "b" is not a number.* Use an annotation file'):
        collected.table()


@pytest.mark.parametrize("evaluator", EVALUATOR)
def test_objects_found_exactly_score_one_and_crowds_do_not_count(evaluator, monkeypatch, capsys):
    use_only(evaluator, monkeypatch)
    for in_crowd in (False, True):
        scores = coco_scores(TRUTH, export(in_crowd=in_crowd).table())
        assert (scores.ap, scores.ap50) == pytest.approx((1, 1))
    assert coco_scores(TRUTH, export(far_off=True).table()).ap50 == pytest.approx(0.75)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("evaluator", EVALUATOR)
def test_only_the_requested_images_count(evaluator, monkeypatch, tmp_path):
    use_only(evaluator, monkeypatch)
    (tmp_path / "instances.json").write_text(json.dumps(TRUTH))
    table = export().table()
    missed = table[table[:, 0] == 7]
    assert coco_scores(tmp_path / "instances.json", missed).ap == pytest.approx(0.5)
    assert coco_scores(tmp_path / "instances.json", missed, [7]).ap == pytest.approx(1)


@pytest.mark.parametrize("evaluator", EVALUATOR)
def test_no_detections_score_zero(evaluator, monkeypatch):
    use_only(evaluator, monkeypatch)
    assert coco_scores(TRUTH, CocoExport().table()).ap == 0


@pytest.mark.parametrize("evaluator", EVALUATOR)
@pytest.mark.parametrize("side", [20, 50, 200])
def test_no_detections_score_minus_one_for_sizes_without_labels_like_wrong_detections(evaluator, side, monkeypatch):
    use_only(evaluator, monkeypatch)
    truth = {
        "images": [{"id": 1, "file_name": "1.jpg", "width": 640, "height": 640}],
        "categories": [{"id": 1, "name": "thing"}],
        "annotations": [
            {"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, side, side], "area": side**2, "iscrowd": 0},
            {"id": 2, "image_id": 1, "category_id": 1, "bbox": [0, 0, 300, 9], "area": 2700, "iscrowd": 1},
        ],
    }
    far_away = np.array([[1, 500, 500, 10, 10, 0.9, 1]], float)
    without = coco_scores(truth, CocoExport().table())
    assert without == coco_scores(truth, far_away)
    assert sorted(without[3:6]) == [-1, -1, 0]


@pytest.mark.parametrize("evaluator", EVALUATOR)
def test_an_object_of_id_zero_is_never_found_by_any_evaluator_with_a_warning(evaluator, monkeypatch, caplog):
    use_only(evaluator, monkeypatch)
    boxes = ([10, 10, 20, 20], [12, 10, 20, 20], [60, 60, 20, 20])
    table = np.array([[7, *boxes[0], 0.9, 1], [7, *boxes[2], 0.8, 1]])
    counted = {}
    for first in (0, 1):
        caplog.clear()
        annotations = [annotation(first + index, 7, 1, box) for index, box in enumerate(boxes)]
        counted[first] = coco_scores(TRUTH | {"annotations": annotations}, table)
        assert ("An annotation has the id 0" in caplog.text) == (first == 0)
    # Two of three objects are found. If the first has the id 0, the detection with the higher score counts as false: it
    # is not matched with the second object instead.
    assert counted[1].ap == pytest.approx(67 / 101)
    assert counted[0].ap == counted[0].ap50 == counted[0].ap75 == pytest.approx(34 / 101 / 2)
    assert (counted[0].ar1, counted[0].ar100, counted[0].ap_small) == pytest.approx((0, 1 / 3, 34 / 101 / 2))
    assert counted[0].ap_large == -1


@needs_evaluator
def test_evaluators_agree(monkeypatch):
    rng = np.random.default_rng(0)
    corner = rng.random((60, 2)) * 60
    box = np.concatenate((corner, 5 + rng.random((60, 2)) * 30), 1)
    image, category = rng.choice([7, 9], 60), rng.choice([1, 13], 60)
    truth = TRUTH | {
        "annotations": [
            annotation(n, int(image[n]), int(category[n]), box[n].tolist(), crowd=n % 7 == 0) for n in range(30)
        ]
    }
    near = box[rng.integers(0, 60, 200)] + rng.normal(0, 1, (200, 4))
    table = np.column_stack((rng.choice([7, 9], 200), near, rng.random(200), rng.choice([1, 13], 200)))
    results = []
    for evaluator in INSTALLED:
        use_only(evaluator, monkeypatch)
        results.append(coco_scores(truth, table))
    for each in results:
        assert each == pytest.approx(results[0], abs=1e-9)


@needs_evaluator
def test_images_of_another_data_set_are_refused(tmp_path):
    with pytest.raises(DataError, match="1 of 2 images are not in the annotation file, such as 8"):
        coco_scores(TRUTH, export().table(), [7, 8])
    with pytest.raises(DataError, match="no such annotation file"):
        coco_scores(tmp_path / "absent.json", export().table())


def test_a_missing_evaluator_gives_an_error_with_the_install_command(monkeypatch):
    real = builtins.__import__

    def absent(name, *rest):
        if name.split(".")[0] in ("hotcoco", "faster_coco_eval", "pycocotools"):
            raise ModuleNotFoundError(name)
        return real(name, *rest)

    monkeypatch.setattr(coco.importlib, "import_module", absent)
    with pytest.raises(ConfigError, match=r"COCO AP needs an evaluator.*pip install hotcoco"):
        coco_scores(TRUTH, export().table())
