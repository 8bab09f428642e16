"""Labels in any format: files of the real programs are read alike, and every finding names its file and line."""

import importlib.util
import json
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from flatout.__main__ import main
from flatout.errors import ConfigError, DataError
from flatout.yolo.data.check.run import CheckConfig, check_data_set
from flatout.yolo.data.formats.annotated import (
    AnnotatedImage,
    ClassNumbers,
    Objects,
    ellipse_half,
    rotated_corners,
    to_labels,
)
from flatout.yolo.data.formats.coco import read_coco
from flatout.yolo.data.formats.createml import read_createml
from flatout.yolo.data.formats.csv_tables import read_open_images, read_tensorflow
from flatout.yolo.data.formats.cvat import read_cvat
from flatout.yolo.data.formats.huggingface import cache_folder, class_names
from flatout.yolo.data.formats.labelme import parse_labelme
from flatout.yolo.data.formats.registry import annotation_files, recognise
from flatout.yolo.data.formats.voc import parse_voc
from flatout.yolo.data.open_data import images_of, open_data_set
from flatout.yolo.data.open_set import SplitConfig, open_split
from flatout.yolo.data.scan import ScanConfig
from flatout.yolo.find_file import find_data
from tests.yolo.data.drawn_set import jpeg
from tests.yolo.data.format_files.write import BOXES, FOLDER, NAMES, SIZES, WRITERS, write_images

CONFIG = SplitConfig(scan=ScanConfig(workers=0, progress=False))
CHECK = CheckConfig(workers=0, progress=False, quick=True)


@pytest.fixture(autouse=True)
def _caches_here(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def data_yaml(folder: Path, train: str, **values) -> Path:
    path = folder / "bolts.yaml"
    path.write_text(yaml.safe_dump({"train": train, "val": train, "names": list(NAMES), **values}))
    return path


def expected_labels(stems=tuple(BOXES)) -> list[np.ndarray]:
    """Class, centre and size of each label, relative to the image, computed from the pixels in `BOXES`."""
    labels = []
    for stem in stems:
        width, height = SIZES[stem]
        rows = [
            (kind, (x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height)
            for kind, x1, y1, x2, y2 in BOXES[stem]
        ]
        labels.append(np.array(rows).reshape(-1, 5))
    return labels


def assert_the_same(data, stems=tuple(BOXES), split="train", config=CONFIG) -> None:
    images = open_split(data, split, config).images
    assert [Path(path).stem.rpartition("_")[2] for path in images.paths] == list(stems)
    for row, labels in enumerate(expected_labels(stems)):
        np.testing.assert_allclose(images.labels.of(row), labels, atol=1e-6)


# Files of the real programs

PLACED = {
    "labelme": ("labelme", "train", "train"),
    "supervision/labelme": ("supervision/labelme", "train", "train"),
    "supervision/coco": ("supervision/coco", "train", "train/annotations.json"),
    "supervision/createml": ("supervision/createml", "train", "train/annotations.json"),
    "supervision/voc": ("supervision/voc", "train", "train"),
    "supervision/voc apart": ("supervision/voc", "annotations", "images"),
    "supervision/yolo": ("supervision/yolo", "train", "train"),
    "datumaro/cvat": ("datumaro/cvat", "train", "train/train.xml"),
    "datumaro/open_images": ("datumaro/open_images/annotations", "train", "train"),
}
"""What is read -> folder of the files, where they are put, and the entry of the YAML."""


@pytest.mark.parametrize("kind", PLACED)
def test_files_of_the_real_programs_are_the_same_set(kind, tmp_path):
    source, place, entry = PLACED[kind]
    shutil.copytree(FOLDER / source, tmp_path / place, ignore=shutil.ignore_patterns("shapes.json"))
    write_images(tmp_path / ("images" if entry == "images" else place))
    assert_the_same(open_data_set(data_yaml(tmp_path, str(tmp_path / entry))))
    if kind != "supervision/yolo":  # the only one without class names
        alone = open_data_set(tmp_path / entry)
        assert alone.names == NAMES
        assert_the_same(alone)


@pytest.mark.parametrize("program", WRITERS)
def test_the_installed_program_still_writes_such_files(program, tmp_path):
    if importlib.util.find_spec(program) is None:
        pytest.skip(f"{program} is not installed")
    WRITERS[program](tmp_path / program)
    for kind, (source, place, entry) in PLACED.items():
        if source.split("/")[0] == program:
            folder = tmp_path / kind.replace("/", "-")
            shutil.copytree(tmp_path / source, folder / place, ignore=shutil.ignore_patterns("shapes.json"))
            write_images(folder / ("images" if entry == "images" else place))
            assert_the_same(open_data_set(data_yaml(folder, str(folder / entry))))


def test_every_shape_of_labelme_becomes_a_box_or_is_reported():
    labels = parse_labelme((FOLDER / "labelme/shapes.json").read_bytes(), NAMES, (64, 48))
    boxes_px = labels.class_box_n5[:, 1:] * [64, 48, 64, 48]
    np.testing.assert_allclose(boxes_px, [[26, 18, 32, 24], [20, 20, 10, 10], [17, 17, 26, 26]], atol=1e-4)
    assert labels.class_box_n5[:, 0].tolist() == [0, 1, 0]
    assert [len(points) for points in labels.polygons] == [3, 0, 4], "a polygon stays one"
    assert [problem.check for problem in labels.problems] == ["label-rotated", "label-shape", "label-shape"]
    assert labels.num_dropped == 2, "the line and the point"


CVAT_SHAPES = """<annotations><version>1.1</version>
<image id="0" name="a.jpg" width="64" height="48">
<box label="bolt" xtl="20" ytl="20" xbr="40" ybr="30" rotation="90"/>
<polygon label="nut" points="1,2;11,2;6,12"/>
<ellipse label="nut" cx="30" cy="20" rx="10" ry="5"/>
<mask label="bolt" rle="1, 2" left="3" top="4" width="5" height="6"/>
<points label="bolt" points="1,2"/>
<skeleton label="bolt"><points label="head" points="1,2"/></skeleton>
<tag label="bolt"/>
<box label="bolt" xtl="20" ytl="x" xbr="40" ybr="30"/>
</image></annotations>"""


def test_every_shape_of_cvat_becomes_a_box_or_is_reported_with_its_line(tmp_path):
    (tmp_path / "annotations.xml").write_text(CVAT_SHAPES)
    (image,) = read_cvat(str(tmp_path / "annotations.xml")).images
    labels = to_labels(image, ClassNumbers(NAMES), (64, 48))
    boxes_px = labels.class_box_n5[:, 1:] * [64, 48, 64, 48]
    np.testing.assert_allclose(
        boxes_px, [[30, 25, 10, 20], [6, 7, 10, 10], [30, 20, 20, 10], [5.5, 7, 5, 6]], atol=1e-4
    )
    assert [(problem.check, problem.line) for problem in labels.problems] == [
        ("label-rotated", 3),
        ("label-shape", 7),
        ("label-shape", 8),
        ("label-columns", 10),
    ]


def test_the_box_around_a_rotated_shape_contains_it():
    for degrees in (0, 30, 45, 90, 200):
        angle = np.linspace(0, 2 * np.pi, 721)
        turn = np.radians(degrees)
        x, y = 9 * np.cos(angle), 4 * np.sin(angle)
        around = (
            np.abs(x * np.cos(turn) - y * np.sin(turn)).max(),
            np.abs(x * np.sin(turn) + y * np.cos(turn)).max(),
        )
        np.testing.assert_allclose(ellipse_half((9, 4), degrees), around, rtol=1e-3)
    np.testing.assert_allclose(rotated_corners((5, 5), (2, 1), 90), [(6, 3), (6, 7), (4, 7), (4, 3)], atol=1e-12)


# Exports of Roboflow


def coco_of(stems) -> dict:
    """As Roboflow exports it: category 0 is the parent of all others, and has no annotation."""
    annotations = [
        {"id": 10 * number + row, "image_id": number, "category_id": kind + 1, "bbox": [x1, y1, x2 - x1, y2 - y1],
         "area": (x2 - x1) * (y2 - y1), "segmentation": [], "iscrowd": 0}
        for number, stem in enumerate(stems) for row, (kind, x1, y1, x2, y2) in enumerate(BOXES[stem], 1)
    ]  # fmt: skip
    return {
        "info": {}, "licenses": [], "annotations": annotations,
        "categories": [{"id": 0, "name": "parts", "supercategory": "none"}]
        + [{"id": number, "name": name, "supercategory": "parts"} for number, name in enumerate(NAMES, 1)],
        "images": [{"id": number, "license": 1, "file_name": f"{stem}.jpg", "width": SIZES[stem][0],
                    "height": SIZES[stem][1]} for number, stem in enumerate(stems)],
    }  # fmt: skip


def write_roboflow(folder: Path, kind: str) -> None:
    folder.mkdir(parents=True)
    rows = [(stem, *box) for stem, boxes in BOXES.items() for box in boxes]
    if kind == "coco":
        (folder / "_annotations.coco.json").write_text(json.dumps(coco_of(BOXES)))
    elif kind == "createml":
        shutil.copyfile(FOLDER / "supervision/createml/annotations.json", folder / "_annotations.createml.json")
    elif kind == "voc":
        shutil.copytree(FOLDER / "supervision/voc", folder, dirs_exist_ok=True)
    elif kind == "tensorflow":
        lines = ["filename,width,height,class,xmin,ymin,xmax,ymax"]
        lines += [
            f"{stem}.jpg,{SIZES[stem][0]},{SIZES[stem][1]},{NAMES[number]},{x1:g},{y1:g},{x2:g},{y2:g}"
            for stem, number, x1, y1, x2, y2 in rows
        ]
        (folder / "_annotations.csv").write_text("\r\n".join(lines))
    else:
        lines = [f"{stem}.jpg,{x1:g},{y1:g},{x2:g},{y2:g},{NAMES[n]}" for stem, n, x1, y1, x2, y2 in rows]
        (folder / "_annotations.csv").write_text("\n".join([*lines, "c.jpg,,,,,"]))
        (folder / "_classes.csv").write_text("bolt,0\nnut,1\n")
    write_images(folder)


@pytest.mark.parametrize("kind", ["coco", "createml", "voc", "tensorflow", "retinanet"])
def test_an_export_of_roboflow_is_read_from_a_yaml_and_by_its_folder(kind, tmp_path):
    for split in ("train", "valid"):
        write_roboflow(tmp_path / "export" / split, kind)
    (tmp_path / "export/README.roboflow.txt").write_text("Roboflow")
    data = open_data_set(tmp_path / "export")
    assert data.names == NAMES
    for split in ("train", "val"):
        assert_the_same(data, split=split)
        assert_the_same(open_data_set(data_yaml(tmp_path, f"export/{'valid' if split == 'val' else split}")))


def test_the_yaml_of_roboflow_finds_its_folders(tmp_path):
    for split in ("train", "valid"):
        write_images(tmp_path / "export" / split / "images")
        shutil.copytree(FOLDER / "supervision/yolo", tmp_path / "export" / split / "labels")
    written = "train: ../train/images\nval: ../valid/images\ntest: ../test/images\n\nnc: 2\nnames: ['bolt', 'nut']\n\n"
    written += "roboflow:\n  workspace: mine\n  project: bolts\n  version: 3\n  license: CC BY 4.0\n  url: https://x\n"
    (tmp_path / "export/data.yaml").write_text(written)
    data = open_data_set(tmp_path / "export/data.yaml")
    assert_the_same(data)
    assert_the_same(data, split="val")


def test_a_category_without_annotations_needs_no_name_and_a_used_one_does(tmp_path):
    write_roboflow(tmp_path / "train", "coco")
    file = tmp_path / "train/_annotations.coco.json"
    assert read_coco(str(file)).names == NAMES
    content = json.loads(file.read_text())
    content["annotations"][0]["category_id"] = 0
    file.write_text(json.dumps(content))
    assert read_coco(str(file)).names == ("parts", *NAMES)
    with pytest.raises(DataError, match=r"_annotations\.coco\.json: category 'parts' is not among the names"):
        open_split(open_data_set(data_yaml(tmp_path, "train")), "train", CONFIG)


# Hugging Face


def hugging_face_objects(stem: str, *, named: bool) -> dict:
    boxes = [[x1, y1, x2 - x1, y2 - y1] for _, x1, y1, x2, y2 in BOXES[stem]]
    return {"bbox": boxes, "categories": [NAMES[box[0]] if named else box[0] for box in BOXES[stem]]}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_a_folder_with_metadata_is_read(ending, named, tmp_path):
    folder = tmp_path / "train"
    write_images(folder)
    objects = {stem: hugging_face_objects(stem, named=named) for stem in BOXES}
    if ending == "jsonl":
        lines = [json.dumps({"file_name": f"{stem}.jpg", "objects": own}) for stem, own in objects.items()]
    else:
        quoted = {stem: json.dumps(own).replace('"', '""') for stem, own in objects.items()}
        lines = ["file_name,objects", *(f'{stem}.jpg,"{own}"' for stem, own in quoted.items())]
    (folder / f"metadata.{ending}").write_text("\n".join(lines) + "\n")
    assert_the_same(open_data_set(data_yaml(tmp_path, "train")))
    assert open_data_set(folder).names == (NAMES if named else ("0", "1"))


def hugging_face_set(folder: Path):
    """The three images as a `datasets.Dataset`, with their bytes."""
    import datasets

    write_images(folder)
    objects = {"bbox": datasets.List(datasets.List(datasets.Value("float32"))),
               "category": datasets.List(datasets.ClassLabel(names=list(NAMES)))}  # fmt: skip
    features = datasets.Features({"image": datasets.Image(), "image_id": datasets.Value("int64"), "objects": objects})
    rows = [
        {
            "image": {"bytes": (folder / f"{stem}.jpg").read_bytes(), "path": f"{stem}.jpg"},
            "image_id": number,
            "objects": {
                "bbox": (own := hugging_face_objects(stem, named=False))["bbox"],
                "category": own["categories"],
            },
        }
        for number, stem in enumerate(BOXES)
    ]
    return datasets.Dataset.from_list(rows, features=features)


@pytest.mark.parametrize("kind", ["parquet", "parquet folder", "parquet prefix", "saved"])
def test_data_sets_that_the_datasets_package_writes_are_read(kind, tmp_path):
    pytest.importorskip("datasets", reason="datasets is not installed")
    data = hugging_face_set(tmp_path / "images")
    if kind == "saved":
        data.save_to_disk(tmp_path / "set/train")
        entry = "set/train"
    else:
        (tmp_path / "set/data").mkdir(parents=True)
        data.to_parquet(tmp_path / "set/data/train-00000-of-00001.parquet")
        entry = {"parquet": "set/data/train-00000-of-00001.parquet", "parquet folder": "set/data"}.get(
            kind, "set/data/train"
        )
    assert_the_same(open_data_set(data_yaml(tmp_path, entry)))
    alone = open_data_set(tmp_path / "set")
    assert alone.names == NAMES, "from the features"
    assert_the_same(alone)
    (file,) = annotation_files(str(tmp_path / entry))
    before = cache_folder(file.path)
    assert len(list(before.iterdir())) == 3
    os.utime(file.path, (1, 1))
    assert cache_folder(file.path) != before, "a changed file gets other images"


def test_a_parquet_file_may_have_only_the_paths_of_its_images(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    write_images(tmp_path / "set/images")
    rows = [
        {
            "image": {"bytes": None, "path": path},
            "objects": {
                "bbox": [[x1, y1, x2 - x1, y2 - y1] for _, x1, y1, x2, y2 in boxes],
                "category": [NAMES[kind] for kind, *_ in boxes],
            },
        }
        for (_, boxes), path in zip(
            BOXES.items(), ["images/a.jpg", str(tmp_path / "set/images/b.jpg"), "images/c.jpg"], strict=True
        )
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "set/train.parquet")
    assert_the_same(open_data_set(data_yaml(tmp_path, "set/train.parquet")))
    (tmp_path / "set/images/b.jpg").unlink()
    os.utime(tmp_path / "set/train.parquet", (1, 1))
    with pytest.raises(DataError, match=r"row 1 has only the path of its image, .*b\.jpg, and there is no such file"):
        open_split(open_data_set(data_yaml(tmp_path, "set/train.parquet")), "train", CONFIG)


def test_a_damaged_parquet_file_is_named(tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    (tmp_path / "train.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"train\.parquet: neither parquet nor arrow"):
        open_data_set(tmp_path / "train.parquet")


def test_a_parquet_file_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"needs pyarrow, which is not installed\. Run `pip install pyarrow`"):
        open_data_set(tmp_path / "train.parquet")


def test_class_names_are_found_in_the_features_of_either_version_of_datasets():
    label = {"names": list(NAMES), "_type": "ClassLabel"}
    for objects in (
        {"category": {"feature": label, "_type": "List"}},
        {"feature": {"category": label}, "_type": "Sequence"},
        [{"category": label}],
    ):
        content = {"info": {"features": {"image": {"_type": "Image"}, "objects": objects}}}
        assert class_names({b"huggingface": json.dumps(content).encode()}) == NAMES
    scene = {"names": ["indoors", "outdoors"], "_type": "ClassLabel"}
    for before, after in (({"scene": scene}, {}), ({}, {"scene": scene})):
        content = {"info": {"features": {**before, "objects": objects, **after}}}
        assert class_names({b"huggingface": json.dumps(content).encode()}) == NAMES, "not those of whole images"
    for metadata in (None, {}, {b"huggingface": b"{"}, {b"huggingface": b"[]"}):
        assert class_names(metadata) == ()


# Which files belong to an image


def test_one_yolo_label_is_enough_to_ignore_other_files(tmp_path):
    write_images(tmp_path / "train")
    shutil.copytree(FOLDER / "labelme", tmp_path / "train", dirs_exist_ok=True)
    write_roboflow(tmp_path / "other", "coco")
    shutil.copyfile(tmp_path / "other/_annotations.coco.json", tmp_path / "train/_annotations.coco.json")
    (tmp_path / "train/b.txt").write_text("0 0.5 0.5 0.1 0.1\n")
    images = open_split(open_data_set(data_yaml(tmp_path, "train")), "train", CONFIG).images
    assert np.diff(images.labels.first_N).tolist() == [0, 1, 0]


def test_json_files_of_another_kind_are_no_labels(tmp_path):
    write_images(tmp_path / "train")
    for stem in BOXES:
        (tmp_path / "train" / f"{stem}.json").write_text('{"camera": "left"}')
    places = {finding.topic for finding in check_data_set(data_yaml(tmp_path, "train"), CHECK).findings}
    assert "label-missing" in places and "label-encoding" not in places


def test_images_of_a_named_folder_without_a_row_are_background_and_those_of_a_named_file_are_not_used(tmp_path):
    write_roboflow(tmp_path / "train", "tensorflow")
    for entry, stems in (("train", "abc"), ("train/_annotations.csv", "ab")):
        assert_the_same(open_data_set(data_yaml(tmp_path, entry)), tuple(stems))


def test_a_list_of_images_that_is_named_csv_is_still_a_list(tmp_path):
    write_images(tmp_path)
    (tmp_path / "list.csv").write_text(f"{tmp_path}/a.jpg\n{tmp_path}/b.jpg\n")
    assert recognise(str(tmp_path / "list.csv")) is None
    assert len(open_split(open_data_set(data_yaml(tmp_path, "list.csv")), "train", CONFIG).images) == 2


# Damaged files

BOMB = """<?xml version="1.0"?>
<!DOCTYPE annotations [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>
<annotations><image id="0" name="&b;" width="64" height="48"/></annotations>"""


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("t.xml", "<annotations>\n<image", r"t\.xml:2: not valid XML: unclosed token\. Export it again\."),
        ("t.xml", BOMB, r"t\.xml:2: XML with a document type declaration"),
        ("t.xml", "<annotation></annotation>", r"t\.xml: not a file of CVAT, .* It looks like Pascal VOC"),
        ("t.xml", "<annotations>\n<track id='0'/></annotations>", r't\.xml:2: .* "CVAT for images 1\.1"'),
        ("t.xml", "<annotations>\n\n<image name='a.jpg'/></annotations>", r"t\.xml:3: an image without name, width"),
        ("t.json", '[{"image": "a.jpg", "annotations": []},\n{"image": }]', r"t\.json:2: not valid JSON: Expecting"),
        ("t.json", '[{"image": "a.jpg"}\n{"image": "b.jpg"}]', r"t\.json:2: not valid JSON: a comma or \] is missing"),
        ("t.json", '[{"image": "a.jpg"},\n', r"t\.json:2: not valid JSON"),
        ("t.json", "[" * 100_000, r"t\.json:1: not valid JSON"),
        ("t.json", "[7]", r"t\.json:1: not a record of CreateML"),
        ("t.json", b"[\xff]", r"t\.json: not UTF-8 text: byte 1"),
        ("t.csv", "ImageID,LabelName,XMin\n", r"t\.csv:1: there is no column XMax"),
        ("t.csv", "ImageID,LabelName,XMin,XMax,YMin,YMax\n,,,,,\n", r"t\.csv:2: a row without the name of an image"),
        ("t.csv", 'ImageID,LabelName,XMin,XMax,YMin,YMax\n"a', r"t\.csv:2: not valid CSV: unexpected end"),
        ("t.csv", b"ImageID,LabelName,XMin,XMax,YMin,YMax\n\xff", r"t\.csv:.*: not UTF-8 text"),
        ("t.jsonl", '{"file_name": "a.jpg"}\n{"file_name":\n', r"t\.jsonl:2: not valid JSON: Expecting value"),
        ("t.jsonl", '{"file_name": "a.jpg"}\n{}\n', r"t\.jsonl:2: a record without file_name"),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence_with_its_line(file, content, said, tmp_path):
    write_images(tmp_path)
    path = tmp_path / file
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for given in (path, data_yaml(tmp_path, file)):
        with pytest.raises(DataError, match=said) as caught:
            open_split(open_data_set(given), "train", CONFIG)
        assert "\n" not in str(caught.value)
    assert main(["yolo", "check", str(path), "--quick"]) == 3


def test_a_damaged_file_of_labelme_costs_only_its_own_labels(tmp_path):
    shutil.copytree(FOLDER / "labelme", tmp_path / "train")
    write_images(tmp_path / "train")
    (tmp_path / "train/b.json").write_text('{"shapes": [\n}')
    findings = check_data_set(data_yaml(tmp_path, "train"), CHECK).findings
    ((where, text),) = {(each.where, each.value) for each in findings if each.topic == "label-encoding"}
    assert where.endswith("train/b.json") and "not valid JSON: Expecting value" in text


def test_images_that_are_nowhere_are_reported_with_the_folders_that_were_searched(tmp_path):
    shutil.copyfile(FOLDER / "datumaro/cvat/train.xml", tmp_path / "train.xml")
    with pytest.raises(DataError, match=r"train\.xml: its first image 'a\.jpg' is in none of these folders: "):
        open_split(open_data_set(data_yaml(tmp_path, "train.xml")), "train", CONFIG)


# Findings

OPEN_IMAGES = "ImageID,LabelName,XMin,XMax,YMin,YMax,IsGroupOf\n"
BAD_LABELS = {
    "cvat": (
        "annotations.xml",
        '<annotations>\n<image id="0" name="a.jpg" width="64" height="48">\n<box label="washer" xtl="1" ytl="1" '
        'xbr="9" ybr="9"/>\n<box label="nut" xtl="9" ytl="1" xbr="9" ybr="9"/></image></annotations>',
        {"class-beyond-names": "annotations.xml:3", "label-zero-area": "annotations.xml:4"},
    ),
    "open images": (
        "train-annotations-bbox.csv",
        f"{OPEN_IMAGES}a,washer,0,0.1,0,0.1,0\na,nut,0.2,0.1,0,0.1,0\na,nut,0,x,0,1,0\na,nut,0,1,0,1,1\n",
        {
            "class-beyond-names": "train-annotations-bbox.csv:2",
            "label-zero-area": "train-annotations-bbox.csv:3",
            "label-columns": "train-annotations-bbox.csv:4",
        },
    ),
    "createml": (
        "_annotations.createml.json",
        '[\n{"image": "b.jpg", "annotations": []},\n{"image": "a.jpg", "annotations": [{"label": "washer", '
        '"coordinates": {"x": 9, "y": 9, "width": 4, "height": 4}}, {"label": "nut"}]}]',
        {"class-beyond-names": "_annotations.createml.json:3", "label-columns": "_annotations.createml.json:3"},
    ),
    "metadata": (
        "metadata.jsonl",
        '{"file_name": "b.jpg"}\n{"file_name": "a.jpg", "objects": {"bbox": [[1, 1, 5], [1, 1, 5, 0]], '
        '"category": [0, 0]}}\n',
        {"label-columns": "metadata.jsonl:2", "label-zero-area": "metadata.jsonl:2"},
    ),
    "labelme": (
        "a.json",
        '{"shapes": [{"label": "washer", "points": [[1, 1], [5, 5]], "shape_type": "rectangle"}, {"label": "nut", '
        '"points": []}]}',
        {"class-beyond-names": "a.json", "label-columns": "a.json"},
    ),
    "voc": (
        "a.xml",
        "<annotation><object><name>washer</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax></bndbox>"
        "</object><object><name>nut</name></object></annotation>",
        {"class-beyond-names": "a.xml", "label-columns": "a.xml"},
    ),
}


def test_a_bad_row_belongs_to_its_image_whatever_the_first_column_is(tmp_path):
    write_images(tmp_path / "train")
    rows = ["0,a.jpg,64,48,nut,1,1,9,9", "1,b.jpg,64,48,nut,1,1,9,x"]
    file = tmp_path / "train/_annotations.csv"
    file.write_text("\n".join([",filename,width,height,class,xmin,ymin,xmax,ymax", *rows]))
    listed = read_tensorflow(str(file)).images
    assert [(image.name, len(image.objects.names), len(image.objects.problems)) for image in listed] == [
        ("a.jpg", 1, 0),
        ("b.jpg", 0, 1),
    ]
    file.write_text(file.read_text() + "\n2,,64,48,nut,1,1,9,9\n")
    with pytest.raises(DataError, match=r"_annotations\.csv:4: a row without the name of an image"):
        read_tensorflow(str(file))


@pytest.mark.parametrize("kind", BAD_LABELS)
def test_a_finding_names_the_file_and_its_line(kind, tmp_path):
    name, content, places = BAD_LABELS[kind]
    write_images(tmp_path / "train")
    (tmp_path / "train" / name).write_text(content)
    findings = check_data_set(data_yaml(tmp_path, "train"), CHECK).findings
    for check, place in places.items():
        assert {finding.where for finding in findings if finding.topic == check} == {str(tmp_path / "train" / place)}


def test_findings_about_boxes_name_the_image_where_one_file_has_the_labels_of_all(tmp_path):
    write_images(tmp_path / "train")
    (tmp_path / "train/train-annotations-bbox.csv").write_text(f"{OPEN_IMAGES}a,nut,0,0.02,0,0.02,0\n")
    findings = check_data_set(data_yaml(tmp_path, "train"), CheckConfig(**{**vars(CHECK), "img_size": 64})).findings
    assert any(finding.topic == "box-tiny" and finding.where.endswith("train/a.jpg") for finding in findings)
    assert "stem-shared" not in {finding.topic for finding in findings}


def test_labels_for_an_image_of_another_shape_are_reported(tmp_path):
    shutil.copytree(FOLDER / "datumaro/cvat", tmp_path / "train")
    write_images(tmp_path / "train")
    (tmp_path / "train/a.jpg").write_bytes(jpeg(48, 64))
    findings = check_data_set(data_yaml(tmp_path, "train/train.xml"), CHECK).findings
    (found, *_) = (finding for finding in findings if finding.topic == "label-image-size")
    assert found.value == "the labels are for an image of 64 x 48 px, but it has 48 x 64"


def test_a_copy_of_the_images_at_another_size_needs_no_other_labels(tmp_path):
    shutil.copytree(FOLDER / "datumaro/cvat", tmp_path / "train")
    write_images(tmp_path / "train")
    (tmp_path / "train/a.jpg").write_bytes(jpeg(128, 96))
    assert_the_same(open_data_set(data_yaml(tmp_path, "train/train.xml")))


def test_too_many_labels_are_refused_in_every_format():
    objects = Objects()
    for _ in range(10_001):
        objects.add("nut", (0, 0, 1, 1))
    labels = to_labels(AnnotatedImage("a.jpg", objects, (1, 1)), ClassNumbers(NAMES), (64, 48))
    assert [problem.check for problem in labels.problems] == ["label-too-many"]


# Caches


@pytest.mark.parametrize("kind", ["labelme", "datumaro/cvat", "supervision/createml", "datumaro/open_images"])
def test_a_changed_label_is_noticed_although_the_scan_is_cached(kind, tmp_path):
    source, place, entry = PLACED[kind]
    shutil.copytree(FOLDER / source, tmp_path / place, ignore=shutil.ignore_patterns("shapes.json"))
    write_images(tmp_path / place)
    old_ns = time.time_ns() - 60_000_000_000
    for path in (tmp_path / place).iterdir():
        os.utime(path, ns=(old_ns, old_ns))
    config = SplitConfig(scan=CONFIG.scan, cache_folder=tmp_path / "labels")
    data = open_data_set(data_yaml(tmp_path, str(tmp_path / entry)))
    assert_the_same(data, config=config)
    assert_the_same(data, config=config)
    for path in (tmp_path / place).iterdir():
        if path.suffix in (".json", ".xml") or path.name.endswith("bbox.csv"):
            path.write_text(path.read_text().replace("nut", "bolt"))
    images = open_split(data, "train", config).images
    assert set(images.labels.class_box_T5[:, 0].tolist()) == {0.0}


def test_images_are_found_without_their_labels_for_export_and_profile(tmp_path):
    shutil.copytree(FOLDER / "datumaro/cvat", tmp_path / "train")
    write_images(tmp_path / "train")
    write_images(tmp_path / "more")
    found = images_of([str(tmp_path / "train/train.xml"), str(tmp_path / "more"), str(tmp_path / "none")], NAMES)
    assert [Path(path).parent.name for path in found.paths] == ["more"] * 3 + ["train"] * 3
    assert found.absent == [str(tmp_path / "none")]


def test_a_folder_is_found_as_a_data_set_and_a_name_as_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "export").mkdir()
    data_yaml(tmp_path / "export", "train")
    assert find_data("export") == Path("export")
    assert find_data("bolts.yaml") == Path("export/bolts.yaml")


# Hostile files

READ = {
    "labelme/shapes.json": lambda path: parse_labelme(path.read_bytes(), NAMES, (64, 48)),
    "supervision/voc/a.xml": lambda path: parse_voc(path.read_bytes(), NAMES, (64, 48)),
    "supervision/coco/annotations.json": lambda path: all_labels(read_coco(str(path))),
    "supervision/createml/annotations.json": lambda path: all_labels(read_createml(str(path))),
    "datumaro/cvat/train.xml": lambda path: all_labels(read_cvat(str(path))),
    "datumaro/open_images/annotations/train-annotations-bbox.csv": lambda path: all_labels(read_open_images(str(path))),
}


def all_labels(file):
    return [to_labels(image, ClassNumbers(NAMES), (64, 48)) for image in file.images]


@pytest.mark.parametrize("name", READ)
def test_no_change_of_a_file_leads_to_anything_but_a_problem_or_a_data_error(name, tmp_path):
    good, path = (FOLDER / name).read_bytes(), tmp_path / Path(name).name
    write_images(tmp_path)
    rng = np.random.default_rng(7)
    pieces = (b"nan", b"-1", b"1e999", b"9" * 400, b'"', b"{}", b"[]", b"null", b"true", b"\xff", b"&a;", b"", b"\n")
    outcomes = {"read": 0, "refused": 0}
    for _ in range(120):
        at, length = int(rng.integers(len(good))), int(rng.integers(0, 12))
        path.write_bytes(good[:at] + pieces[rng.integers(len(pieces))] + good[at + length :])
        try:
            READ[name](path)
            outcomes["read"] += 1
        except DataError:
            outcomes["refused"] += 1
    # Files of one image report their damage as a problem, so that the others can be used.
    assert outcomes["read"] > 0 and (outcomes["refused"] > 0) == (name.split("/")[-1] not in ("shapes.json", "a.xml"))
