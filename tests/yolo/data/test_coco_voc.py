"""COCO files and Pascal VOC folders give the same data set as YOLO labels with the same boxes."""

import json
from pathlib import Path

import numpy as np
import pytest

from flatout.errors import ConfigError, DataError
from flatout.yolo.data.check.run import CheckConfig, check_data_set
from flatout.yolo.data.data_yaml import read_data_yaml
from flatout.yolo.data.formats.coco import read_coco
from flatout.yolo.data.formats.voc import parse_voc
from flatout.yolo.data.open_data import open_data_set
from flatout.yolo.data.open_set import SplitConfig, open_split
from flatout.yolo.data.scan import ScanConfig
from tests.yolo.data.drawn_set import SmallDataSet, jpeg

CONFIG = SplitConfig(scan=ScanConfig(workers=0, progress=False))
NAMES = ["bolt", "nut"]
BOXES_PX = {"0": [(0, 10, 6, 32, 24)], "1": [(1, 0, 0, 64, 48), (0, 4, 4, 8, 12)], "2": []}
"""Image of 64 x 48 px -> boxes: class, left, top, width, height in pixels."""


def yolo_line(number: int, left: float, top: float, width: float, height: float) -> str:
    return f"{number} {(left + width / 2) / 64} {(top + height / 2) / 48} {width / 64} {height / 48}"


@pytest.fixture
def as_yolo(tmp_path: Path) -> SmallDataSet:
    made = SmallDataSet(tmp_path / "yolo", num_train=0, num_val=1)
    for seed, (stem, boxes) in enumerate(BOXES_PX.items()):
        made.put("train", stem, jpeg(seed=seed), "\n".join(yolo_line(*box) for box in boxes))
    return made


def write_coco(folder: Path) -> Path:
    """annotations/instances_train.json beside images/train; category ids with gaps, as in COCO."""
    annotations: list[dict[str, object]] = []
    images = []
    for number, (stem, boxes) in enumerate(BOXES_PX.items()):
        images.append({"id": 7 + number, "file_name": f"{stem}.jpg", "width": 64, "height": 48})
        for kind, left, top, width, height in boxes:
            corners = [left, top, left + width, top, left + width, top + height, left, top + height]
            annotations.append(
                {
                    "id": len(annotations), "image_id": 7 + number, "category_id": (90, 3)[1 - kind], "iscrowd": 0,
                    "bbox": [left, top, width, height], "segmentation": [corners],
                }
            )  # fmt: skip
    annotations.append({"id": 99, "image_id": 7, "category_id": 3, "iscrowd": 1, "bbox": [0, 0, 9, 9]})
    content = {"images": images, "annotations": annotations}
    content["categories"] = [{"id": 90, "name": "nut"}, {"id": 3, "name": "bolt"}]
    path = folder / "annotations" / "instances_train.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content))
    return path


def voc_xml(boxes, *, extra: str = "") -> str:
    objects = [
        f"<object><name>{NAMES[kind]}</name><difficult>0</difficult><bndbox><xmin>{left + 1}</xmin>"
        f"<ymin>{top + 1}</ymin><xmax>{left + width}</xmax><ymax>{top + height}</ymax></bndbox></object>"
        for kind, left, top, width, height in boxes
    ]
    return f"<annotation><size><width>0</width></size>{''.join(objects)}{extra}</annotation>"


def assert_same(found, expected):
    assert [Path(path).name for path in found.paths] == [Path(path).name for path in expected.paths]
    np.testing.assert_array_equal(found.size_wh_N2, expected.size_wh_N2)
    np.testing.assert_array_equal(found.labels.first_N, expected.labels.first_N)
    np.testing.assert_allclose(found.labels.class_box_T5, expected.labels.class_box_T5, atol=1e-6)


def test_a_coco_file_is_the_same_set_as_yolo_labels(as_yolo):
    expected = open_split(read_data_yaml(as_yolo.yaml()), "train", CONFIG).images
    path = write_coco(as_yolo.folder)
    as_yolo.values["train"] = str(path)
    found = open_split(read_data_yaml(as_yolo.yaml()), "train", CONFIG).images
    assert_same(found, expected)
    assert [len(points) for points in found.labels.polygons_of(1)] == [4, 4], "polygons in one piece are kept"
    alone = open_split(open_data_set(path), "train", CONFIG).images
    assert read_coco(str(path)).names == tuple(NAMES), "numbered by their ids"
    assert_same(alone, expected)


def test_a_voc_folder_is_the_same_set_as_yolo_labels(as_yolo, tmp_path):
    expected = open_split(read_data_yaml(as_yolo.yaml()), "train", CONFIG).images
    difficult = "<object><name>nut</name><difficult>1</difficult><bndbox></bndbox></object>"
    for stem, boxes in BOXES_PX.items():
        for folder, name, content in (
            ("JPEGImages", f"{stem}.jpg", (as_yolo.folder / f"images/train/{stem}.jpg").read_bytes()),
            ("Annotations", f"{stem}.xml", voc_xml(boxes, extra=difficult).encode()),
            ("ImageSets/Main", "train.txt", b"0\n1\n2\n"),
        ):
            path = tmp_path / "voc" / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    for train in ("voc", "voc/ImageSets/Main/train.txt"):
        as_yolo.values["train"] = str(tmp_path / train)
        assert_same(open_split(read_data_yaml(as_yolo.yaml()), "train", CONFIG).images, expected)
    assert_same(open_split(open_data_set(tmp_path / "voc"), "train", CONFIG).images, expected)


@pytest.mark.parametrize(
    ("text", "check"),
    [
        ("<annotation><object>", "label-encoding"),
        ('<!DOCTYPE a [<!ENTITY b "c">]><annotation>&b;</annotation>', "label-encoding"),
        (voc_xml([(0, 10, 10, 4, 3)]).replace("bolt", "washer"), "class-beyond-names"),
        ("<a><object><name>nut</name></object></a>", "label-columns"),
        (voc_xml([(0, 10, 10, -4, 3)]), "label-zero-area"),
        (voc_xml([(0, 10, 10, float("nan"), 3)]), "label-columns"),
    ],
)
def test_a_bad_voc_object_is_named_and_dropped(text, check):
    labels = parse_voc(text.encode(), tuple(NAMES), (64, 48))
    assert [problem.check for problem in labels.problems] == [check]
    assert len(labels.class_box_n5) == 0


def test_the_error_for_a_folder_that_is_not_a_data_set_says_what_to_give_instead(tmp_path):
    with pytest.raises(ConfigError, match=r"not a Pascal VOC folder \(with JPEGImages and Annotations\)\. Give a YAML"):
        open_data_set(tmp_path)
    (tmp_path / "bolts.yaml").write_text("names: [bolt]")
    with pytest.raises(ConfigError, match=r" is a folder\. Give the YAML in it: .*/bolts\.yaml\.$"):
        open_data_set(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b"[" * 100_000, b'{"images": 1, "annotations": [], "categories": []}',
     b'{"images": [], "annotations": [], "categories": [{"id": "x"}]}', b"\xff\xfe\0"],
)  # fmt: skip
def test_a_file_that_is_not_a_coco_file_is_refused_with_a_reason(content, tmp_path):
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.json(:1)?: .*(COCO|JSON|image)"):
        read_coco(str(tmp_path / "bad.json"))


def test_the_check_reads_coco_files_too_and_names_bad_annotations(as_yolo):
    path = write_coco(as_yolo.folder)
    content = json.loads(path.read_text())
    content["annotations"] += [
        {"id": 50, "image_id": 7, "category_id": 5, "bbox": [1, 1, 5, 5]},
        {"id": 51, "image_id": 7, "category_id": 3, "bbox": [1, 1, 0, 5]},
        {"id": 52, "image_id": 7, "category_id": 3, "bbox": "none"},
    ]
    content["images"].append({"id": 70, "file_name": "gone.jpg", "width": 5, "height": 5})
    path.write_text(json.dumps(content))
    report = check_data_set(path, CheckConfig(workers=0, progress=False, quick=True))
    found = {finding.topic: finding.value for finding in report.findings}
    assert "annotation 50" in found["class-beyond-names"]
    assert "annotation 51" in found["label-zero-area"]
    assert "annotation 52" in found["label-columns"]
    assert "path-missing" in found
    assert "stem-shared" not in found
