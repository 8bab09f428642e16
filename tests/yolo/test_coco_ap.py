"""COCO AP follows from the annotation file, whatever the data YAML is called; a file that does not fit is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from flatout.yolo.data.coco import annotation_file
from flatout.yolo.data.data_yaml import DataSet, open_data_yaml
from flatout.yolo.data.image_set import ImageSet, Labels
from flatout.yolo.metrics.coco import (
    COCO_CATEGORY_IDS,
    CocoTruth,
    CocoUnavailable,
    export_for,
    find_truth,
    is_requested,
    score,
)
from flatout.yolo.nms import Detections

NAMES = ("person", "stop sign", "toothbrush")
CATEGORY_IDS = (90, 1, 13)
"""Neither contiguous nor in the order of the classes."""
IMAGE_IDS = {"a.jpg": 7, "img_2.png": 4, "000000000012.jpg": 99}
"""Ids that differ from the numbers in the names."""
SIZE_WH = (200, 100)


def content() -> dict[str, Any]:
    """Annotations of every class in every image, at different positions, and a crowd."""
    annotations = [
        {"image_id": image, "category_id": category, "bbox": [10.0 + 50 * n, 20.0, 30.0, 40.0 + n], "area": 1200.0}
        for image in IMAGE_IDS.values()
        for n, category in enumerate(CATEGORY_IDS)
    ]
    crowd = {"image_id": 7, "category_id": 1, "bbox": [0, 0, 200, 100], "area": 20000.0, "iscrowd": 1}
    return {
        "images": [
            {"id": number, "file_name": name, "width": SIZE_WH[0], "height": SIZE_WH[1]}
            for name, number in IMAGE_IDS.items()
        ],
        "categories": [{"id": number, "name": name} for number, name in zip(CATEGORY_IDS, NAMES, strict=True)],
        "annotations": [
            {"id": number, "iscrowd": 0} | each for number, each in enumerate([*annotations, crowd], start=1)
        ],
    }


def data_set(folder: Path, yaml_name: str = "bolts.yaml", truth: dict[str, Any] | None = None, **keys: Any) -> DataSet:
    """A data YAML with images in images/val, and annotations beside that folder."""
    (folder / "images/val").mkdir(parents=True, exist_ok=True)
    (folder / "annotations").mkdir(exist_ok=True)
    if truth is not None:
        (folder / "annotations/instances_val.json").write_text(json.dumps(truth))
    values = {"val": str(folder / "images/val"), "names": list(NAMES)} | keys
    (folder / yaml_name).write_text(yaml.safe_dump(values))
    return open_data_yaml(folder / yaml_name)


def images_of(folder: Path, size_wh: tuple[int, int] = SIZE_WH) -> ImageSet:
    paths = tuple(str(folder / "images/val" / name) for name in IMAGE_IDS)
    none = Labels(
        np.zeros((0, 5), np.float32), np.zeros(4, np.int64), np.zeros((0, 2), np.float32), np.zeros(1, np.int64)
    )
    return ImageSet(paths, np.array([size_wh] * len(paths), np.int32), none, NAMES)


def perfect_scores(data: DataSet, folder: Path, *, size_wh: tuple[int, int] = SIZE_WH) -> tuple[Any, Any]:
    """Scores and records of detections that are exactly the annotated boxes, in pixels of images of that size."""
    truth = find_truth(data, "val", data.names, images_of(folder, size_wh))
    export = export_for(truth, data.names)
    classes = {
        number: data.names.index(name) for number, name in zip(CATEGORY_IDS, NAMES, strict=True) if name in data.names
    }
    scale = np.tile(np.array(size_wh) / SIZE_WH, 2)
    for name, number in IMAGE_IDS.items():
        rows = []
        for each in content()["annotations"]:
            if each["image_id"] == number and not each["iscrowd"] and each["category_id"] in classes:
                x, y, w, h = np.array(each["bbox"]) * scale
                rows.append([x, y, x + w, y + h, 0.9, classes[each["category_id"]]])
        found = Detections(torch.tensor(rows), torch.zeros(len(rows), dtype=torch.int64), 1)
        export.add(found, [str(folder / "images/val" / name)])
    return score(export, truth), export.records()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


# --- names and ids


@pytest.mark.parametrize("name", ["coco.yaml", "coco320.yaml", "bolts.yaml"])
def test_perfect_boxes_score_one_whatever_the_yaml_is_called(tmp_path, name):
    pytest.importorskip("hotcoco", reason="no COCO evaluator is installed")
    scores, records = perfect_scores(data_set(tmp_path, name, content()), tmp_path)
    assert scores.ap == pytest.approx(1)
    assert {record["category_id"] for record in records} == set(CATEGORY_IDS)
    assert {record["image_id"] for record in records} == set(IMAGE_IDS.values())


def test_classes_in_any_order_and_case_find_their_categories(tmp_path):
    pytest.importorskip("hotcoco", reason="no COCO evaluator is installed")
    data = data_set(tmp_path, truth=content(), names=["toothbrush", "person", "stop sign"])
    assert perfect_scores(data, tmp_path)[0].ap == pytest.approx(1)
    truth = find_truth(data, "val", ["Toothbrush ", "PERSON"], images_of(tmp_path))
    assert isinstance(truth, CocoTruth)
    assert truth.category_ids == (13, 90)


def test_copies_at_another_size_are_scored_in_the_pixels_of_the_annotations(tmp_path):
    pytest.importorskip("hotcoco", reason="no COCO evaluator is installed")
    data = data_set(tmp_path, "coco320.yaml", content())
    scores, records = perfect_scores(data, tmp_path, size_wh=(81, 40))  # 80 x 40 would be exact
    assert scores.ap == pytest.approx(1)
    expected = [each["bbox"] for each in content()["annotations"] if not each["iscrowd"]]
    np.testing.assert_allclose(sorted(record["bbox"] for record in records), sorted(expected), atol=1e-3)


def test_categories_that_are_not_classes_are_left_out_with_a_remark(tmp_path):
    pytest.importorskip("hotcoco", reason="no COCO evaluator is installed")
    data = data_set(tmp_path, truth=content(), names=["person", "toothbrush"])
    assert perfect_scores(data, tmp_path)[0].ap == pytest.approx(1)
    truth = find_truth(data, "val", data.names, images_of(tmp_path))
    assert isinstance(truth, CocoTruth)
    assert truth.remarks[-1] == "Categories that are not classes of the data set are left out: stop sign."


# --- annotations that do not fit


def without_names(truth: dict[str, Any]) -> None:
    for category in truth["categories"]:
        category["name"] = str(category["id"])


def other_images(truth: dict[str, Any]) -> None:
    truth["images"] = truth["images"][:1]


def rotated(truth: dict[str, Any]) -> None:
    for image in truth["images"]:
        image["width"], image["height"] = image["height"], image["width"]


def text_ids(truth: dict[str, Any]) -> None:
    truth["images"][0]["id"] = "a"


def same_name_twice(truth: dict[str, Any]) -> None:
    truth["categories"][1]["name"] = "Person"


def no_objects(truth: dict[str, Any]) -> None:
    truth["annotations"] = [each for each in truth["annotations"] if each["iscrowd"]]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (without_names, "it has no category for 3 of 3 classes, such as 'person'; its categories are 1, 13, 90."),
        (other_images, "it does not contain 2 of 3 images by file name, such as "),
        (
            rotated,
            "a.jpg is 200 x 100 px, but 100 x 200 in the file. It is a different image, or it was cropped or rotated: "
            "use the original.",
        ),
        (text_ids, "the id of a.jpg is 'a'; evaluators need whole numbers. Renumber the images."),
        (
            same_name_twice,
            "two categories are named 'person', so classes cannot be identified by name. Rename one of them.",
        ),
        (no_objects, "it has no object of these classes in any of 3 images. Use the annotation file of this split."),
    ],
)
def test_annotations_that_do_not_fit_give_a_reason_and_no_ap(tmp_path, spoil, reason):
    truth = content()
    spoil(truth)
    scores, records = perfect_scores(data_set(tmp_path, "coco.yaml", truth), tmp_path)
    assert isinstance(scores, CocoUnavailable)
    assert scores.text.startswith("COCO AP was not computed: ")
    assert reason in scores.text
    assert str(tmp_path / "annotations/instances_val.json") in scores.text
    assert {record["category_id"] for record in records} == {0, 1, 2}, "classes keep their own numbers"


def test_class_names_that_are_not_unique_are_refused(tmp_path):
    data = data_set(tmp_path, truth=content(), names=["person", "Person"])
    refused = find_truth(data, "val", data.names, images_of(tmp_path))
    assert "Two classes of the data set have the same name, 'person'" in refused.text


def test_a_damaged_file_is_refused_with_the_reason(tmp_path):
    data = data_set(tmp_path)
    (tmp_path / "annotations/instances_val.json").write_text("{")
    assert "not valid JSON" in find_truth(data, "val", data.names, images_of(tmp_path)).text


def test_images_of_the_same_name_are_identified_by_their_folders(tmp_path):
    truth = content()
    truth["images"] = [image | {"file_name": f"val/{image['file_name']}"} for image in truth["images"]]
    others = [
        image | {"id": 500 + image["id"], "file_name": image["file_name"].replace("val/", "old/")}
        for image in truth["images"]
    ]
    truth["images"] += others
    found = find_truth(data_set(tmp_path, truth=truth), "val", NAMES, images_of(tmp_path))
    assert isinstance(found, CocoTruth)
    assert [image.image_id for image in found.images.values()] == list(IMAGE_IDS.values())


def test_without_annotations_coco_class_names_still_get_coco_category_ids(tmp_path):
    names = open_data_yaml(Path(__file__).parents[2] / "data/coco.yaml").names
    for classes, numbers in ((names, COCO_CATEGORY_IDS), (names[::-1], range(80))):
        export = export_for(CocoUnavailable("no annotation file"), classes)
        export.add(Detections(torch.tensor([[0.0, 0, 9, 9, 0.5, 79]]), torch.tensor([0]), 1), ["7.jpg"])
        assert export.records()[0]["category_id"] == numbers[79]


# --- which file


def test_the_key_in_the_yaml_names_the_file_for_val_or_for_each_split(tmp_path):
    (tmp_path / "mine.json").write_text("{}")
    for keys in ({"annotations": "mine.json"}, {"annotations": {"val": "mine.json", "test": "other.json"}}):
        data = data_set(tmp_path, truth=content(), **keys)
        assert annotation_file(data, "val") == tmp_path / "mine.json"
        assert is_requested(data)
    assert annotation_file(data, "test") is None
    assert not is_requested(data_set(tmp_path))
    assert is_requested(data_set(tmp_path, "my-coco.yaml"))


def test_a_split_that_is_one_coco_file_requests_ap_and_a_createml_file_does_not(tmp_path):
    data_set(tmp_path, truth=content())
    (tmp_path / "createml.json").write_text('[{"image": "a.jpg", "annotations": []}]')
    own, other = str(tmp_path / "annotations/instances_val.json"), str(tmp_path / "createml.json")
    assert is_requested(data_set(tmp_path, val=own)) and annotation_file(data_set(tmp_path, val=own), "val") == Path(
        own
    )
    assert not is_requested(data_set(tmp_path, val=other))
    assert not is_requested(data_set(tmp_path, val=[own, own])), "AP is that of one file"
    assert not is_requested(data_set(tmp_path, val=own), "test")


@pytest.mark.parametrize(
    ("val", "file"),
    [
        ("images/val2017", "annotations/instances_val2017.json"),
        ("images/val2017", "annotations/instances_val.json"),
        ("images/val2017", "images/annotations/instances_val2017.json"),
        ("val2017", "annotations/instances_val2017.json"),
        ("val2017.txt", "annotations/instances_val2017.json"),
        ("some/where.json", "some/where.json"),
        ("elsewhere/pictures", "here/coco/annotations/instances_val2017.json"),
    ],
)
def test_without_the_key_the_file_is_searched_in_the_usual_folders(tmp_path, val, file):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("{}")
    data = data_set(tmp_path, val=str(tmp_path / val))
    assert annotation_file(data, "val").resolve() == tmp_path / file


def test_a_missing_file_is_reported_with_the_searched_paths_and_the_key(tmp_path):
    data = data_set(tmp_path)
    refused = find_truth(data, "val", data.names, images_of(tmp_path))
    assert "there is no annotation file" in refused.text
    assert str(tmp_path / "annotations/instances_val.json") in refused.text
    assert f"Name yours in {tmp_path}/bolts.yaml: annotations: FILE.json" in refused.text
