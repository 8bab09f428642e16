"""Boxes survive every conversion, and `flatout yolo convert-data` writes sets that train like their source."""

import json
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import flatout.yolo
from flatout.__main__ import main
from flatout.errors import ConfigError, DataError, Interrupted, ResourceError
from flatout.yolo.commands.convert_data import FORMATS
from flatout.yolo.data import converted_set
from flatout.yolo.data.data_yaml import read_data_yaml
from flatout.yolo.data.formats.annotated import ClassNumbers, ImageToWrite, to_labels
from flatout.yolo.data.formats.coco import read_coco
from flatout.yolo.data.formats.createml import read_createml
from flatout.yolo.data.formats.csv_tables import read_open_images
from flatout.yolo.data.formats.cvat import read_cvat
from flatout.yolo.data.formats.huggingface import read_metadata
from flatout.yolo.data.formats.registry import LAYOUTS
from flatout.yolo.data.formats.sidecars import SIDECARS
from flatout.yolo.data.label_text import ImageLabels, parse_labels
from flatout.yolo.data.open_set import SplitConfig, open_split
from flatout.yolo.data.scan import ScanConfig
from tests.yolo.data.drawn_set import SmallDataSet, jpeg, png

CONFIG = SplitConfig(scan=ScanConfig(workers=0, progress=False))
NAMES = ("bolt", "nut & <washer>", 'ring, "x"')
ROUNDING_PX = {
    "yolo": 1e-3, "coco": 2e-3, "voc": 0.5 + 1e-3, "labelme": 2e-3, "cvat": 2e-3, "createml": 2e-3, "openimages": 1e-3,
    "huggingface": 2e-3,
}  # fmt: skip
"""How far a corner may move when a box of an image below 2,000 px is written once: half a unit of the last decimal, for
centre and size together, and what float32 loses."""


@pytest.fixture(autouse=True)
def _caches_here(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# Round trips of label files

READERS = {
    "coco": read_coco, "cvat": read_cvat, "createml": read_createml, "openimages": read_open_images,
    "huggingface": read_metadata,
}  # fmt: skip


def read_back(kind: str, image: ImageToWrite) -> ImageLabels:
    """Write an image in a format, and read it with the reader of that format."""
    layout = LAYOUTS[kind]
    if layout.write_image is not None:
        content, ending = layout.write_image(image, NAMES), os.path.splitext(layout.labels)[1]
        return parse_labels(content) if ending == ".txt" else SIDECARS[ending].parse(content, NAMES, image.size_wh)
    assert layout.write_set is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, os.path.basename(layout.labels.format(split="train")))
        path.write_text("".join(layout.write_set([image], NAMES)))
        images = READERS[kind](str(path)).images
        return to_labels(images[0], ClassNumbers(NAMES), image.size_wh) if images else parse_labels(b"")


def as_written(labels: ImageLabels, size_wh: tuple[int, int]) -> ImageToWrite:
    box_n5 = labels.class_box_n5.astype(float)
    corners_n4 = np.concatenate((box_n5[:, 1:3] - box_n5[:, 3:] / 2, box_n5[:, 1:3] + box_n5[:, 3:] / 2), 1)
    return ImageToWrite("a.jpg", size_wh, box_n5[:, 0].astype(int).tolist(), corners_n4, labels.polygons)


@st.composite
def images_to_write(draw) -> ImageToWrite:
    """An image with up to four boxes of at least 3 px, all inside it."""
    width, height = draw(st.tuples(st.integers(10, 2000), st.integers(10, 2000)))
    classes, boxes = [], []
    for _ in range(draw(st.integers(0, 4))):
        classes.append(draw(st.integers(0, len(NAMES) - 1)))
        x1, y1 = draw(st.floats(0, width - 4)), draw(st.floats(0, height - 4))
        x2, y2 = draw(st.floats(x1 + 3, width)), draw(st.floats(y1 + 3, height))
        boxes.append((x1 / width, y1 / height, x2 / width, y2 / height))
    return ImageToWrite("a.jpg", (width, height), classes, np.array(boxes).reshape(-1, 4), [])


@pytest.mark.parametrize("first", FORMATS)
@settings(max_examples=10, deadline=None)
@given(image=images_to_write())
def test_boxes_survive_any_two_formats_within_their_rounding(first, image):
    there = as_written(read_back(first, image), image.size_wh)
    for second in FORMATS:
        back = as_written(read_back(second, there), image.size_wh)
        if "yolo" in (first, second) and len(back.class_n) < len(image.class_n):
            continue  # YOLO text drops duplicates, also those that rounding makes
        assert back.class_n == image.class_n
        allowed = ROUNDING_PX[first] + ROUNDING_PX[second]
        np.testing.assert_allclose(back.corners_px(), image.corners_px(), atol=allowed)


@pytest.mark.parametrize("kind", [name for name in FORMATS if LAYOUTS[name].keeps_polygons])
def test_polygons_survive_where_the_format_has_them(kind):
    points = np.array([[0.1, 0.2], [0.5, 0.25], [0.4, 0.8]])
    image = ImageToWrite("a.jpg", (640, 480), [1], np.array([[0.1, 0.2, 0.5, 0.8]]), [points])
    labels = read_back(kind, image)
    np.testing.assert_allclose(labels.polygons[0], points, atol=1e-5)
    np.testing.assert_allclose(labels.class_box_n5, [[1, 0.3, 0.5, 0.4, 0.6]], atol=1e-5)


def test_voc_writes_a_box_of_at_least_one_pixel_inside_the_image():
    for box in ([0.999, 0.999, 1, 1], [0, 0, 0.0001, 0.0001], [0.5001, 0.5, 0.5002, 0.6]):
        image = ImageToWrite("a.jpg", (64, 48), [0], np.array([box]), [])
        labels = read_back("voc", image)
        assert len(labels.class_box_n5) == 1
        assert (labels.class_box_n5[0, 3:] * [64, 48] >= 1 - 1e-5).all()


# Whole data sets


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A set with PNG and JPEG images, odd names, background, and the same name in both splits and in a subfolder."""
    made = SmallDataSet(tmp_path / "source", num_train=3, num_val=2)
    made.put("train", "empty", jpeg(seed=20), "")
    made.put("train", "with space {x}", png(90, 40, seed=21), "1 0.25 0.5 0.125 0.25\n", suffix="png")
    made.put("train", "deeper/0", jpeg(seed=22), "0 0.25 0.5 0.125 0.25\n")
    return made.yaml()


@pytest.mark.parametrize("kind", FORMATS)
def test_the_labels_to_train_on_are_the_same_in_every_format(kind, source, tmp_path, capsys):
    assert main(["yolo", "convert-data", str(source), str(tmp_path / "out"), "--to", kind]) == 0
    assert "data.yaml: 8 images, 12 labels" in capsys.readouterr().out
    for split in ("train", "val"):
        expected = open_split(read_data_yaml(source), split, CONFIG).images
        found = open_split(read_data_yaml(tmp_path / "out/data.yaml"), split, CONFIG).images
        assert found.names == expected.names
        # Names may differ where two images had the same: they are compared by what they show.
        theirs = {Path(path).read_bytes(): row for row, path in enumerate(found.paths)}
        assert len(theirs) == len(found.paths) == len(expected.paths)
        for row, path in enumerate(expected.paths):
            at = theirs[Path(path).read_bytes()]
            size_4 = np.tile(expected.size_wh_N2[row], 2)
            np.testing.assert_array_equal(found.size_wh_N2[at], expected.size_wh_N2[row])
            ours, other = expected.labels.of(row), found.labels.of(at)
            assert other[:, 0].tolist() == ours[:, 0].tolist()
            np.testing.assert_allclose(other[:, 1:] * size_4, ours[:, 1:] * size_4, atol=2 * ROUNDING_PX[kind])


@pytest.mark.parametrize("kind", FORMATS)
def test_a_conversion_there_and_back_gives_the_same_files(kind, source, tmp_path):
    there = flatout.yolo.convert_data(source, tmp_path / "there", to=kind)
    flatout.yolo.convert_data(there.data, tmp_path / "back", to="yolo")
    flatout.yolo.convert_data(source, tmp_path / "direct", to="yolo")
    tolerance = 1 / 40 if kind == "voc" else 1e-4
    direct, back = (_labels_by_image(tmp_path / name) for name in ("direct", "back"))
    assert direct.keys() == back.keys() and len(direct) == 8
    for image, numbers in direct.items():
        np.testing.assert_allclose(back[image], numbers, atol=tolerance)


@pytest.mark.parametrize("kind", FORMATS)
def test_names_and_endings_of_any_kind_are_found_again_in_every_format(kind, tmp_path):
    """Open Images names images without their ending; lists of VOC may have a number after each name."""
    made = SmallDataSet(tmp_path / "source", num_train=1, num_val=1)
    made.put("train", "scan 0", jpeg(seed=30), "0 0.25 0.5 0.125 0.25\n", suffix="JPG")
    made.put("train", "scan 1", png(seed=31), "1 0.25 0.5 0.125 0.25\n", suffix="tif")
    made.put("train", "scan -1", png(seed=32), "1 0.5 0.5 0.125 0.25\n", suffix="TIF")
    done = flatout.yolo.convert_data(made.yaml(), tmp_path / "out", to=kind)
    images = open_split(read_data_yaml(done.data), "train", CONFIG).images
    assert {Path(path).suffix for path in images.paths} == {".jpg", ".JPG", ".tif", ".TIF"}
    assert [len(images.labels.of(row)) for row in range(len(images)) if "scan" in images.paths[row]] == [1, 1, 1]


SUPERVISION = {
    "yolo": ("from_yolo", "images/train", "labels/train", "data.yaml"),
    "coco": ("from_coco", "images/train", "annotations/instances_train.json"),
    "voc": ("from_pascal_voc", "JPEGImages", "Annotations"),
    "labelme": ("from_labelme", "train", "train"),
    "createml": ("from_createml", "train", "train/_annotations.createml.json"),
}
"""Format -> how the package supervision reads it."""


@pytest.mark.parametrize("kind", SUPERVISION)
def test_another_program_reads_the_same_boxes_in_what_is_written(kind, source, tmp_path):
    supervision = pytest.importorskip("supervision", reason="needs the extra `track`")
    done = flatout.yolo.convert_data(source, tmp_path / "out", to=kind)
    method, *paths = SUPERVISION[kind]
    read = getattr(supervision.DetectionDataset, method)(*(str(tmp_path / "out" / path) for path in paths))
    images = open_split(read_data_yaml(done.data), "train", CONFIG).images
    for row, path in enumerate(images.paths):
        label_n5, size_wh = images.labels.of(row).astype(float), images.size_wh_N2[row]
        corners_n4 = np.concatenate((label_n5[:, 1:3] - label_n5[:, 3:] / 2, label_n5[:, 1:3] + label_n5[:, 3:] / 2), 1)
        (found,) = (own for name, own in read.annotations.items() if Path(name).name == Path(path).name)
        names = [read.classes[number] for number in found.class_id.tolist()]
        assert names == [images.names[int(number)] for number in label_n5[:, 0]]
        # One pixel: supervision rounds, and counts the pixels of VOC in its own way.
        np.testing.assert_allclose(found.xyxy, corners_n4 * np.tile(size_wh, 2), atol=1.01)


def test_the_datasets_package_reads_what_is_written_for_hugging_face(source, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    flatout.yolo.convert_data(source, tmp_path / "out", to="huggingface")
    read = datasets.load_dataset("imagefolder", data_dir=str(tmp_path / "out"), cache_dir=str(tmp_path / "hf"))
    assert (read["train"].num_rows, read["validation"].num_rows) == (6, 2)
    objects = [row["objects"] for part in read.values() for row in part]
    assert sum(len(each["bbox"]) for each in objects) == 12
    assert {name for each in objects for name in each["category"]} == {"bolt", "nut"}


def _labels_by_image(folder: Path) -> dict[bytes, list[float]]:
    """Content of each image -> the numbers in its label file."""
    found = {}
    for image in (folder / "images").rglob("*.*"):
        label = folder / "labels" / image.parent.name / f"{image.stem}.txt"
        found[image.read_bytes()] = [float(word) for word in label.read_text().split()]
    return found


def test_images_can_be_links_or_left_out(source, tmp_path):
    linked = flatout.yolo.convert_data(source, tmp_path / "linked", to="yolo", images="link")
    images = sorted((tmp_path / "linked/images/train").iterdir())
    assert all(path.is_symlink() and path.exists() for path in images) and len(images) == 6
    assert open_split(read_data_yaml(linked.data), "train", CONFIG).images.labels.first_N[-1] == 8
    assert main(["yolo", "convert-data", str(source), str(tmp_path / "bare"), "--to", "voc", "--labels-only"]) == 0
    files = {path.name for path in (tmp_path / "bare").rglob("*") if path.is_file()}
    assert "data.yaml" not in files and not [name for name in files if name.endswith((".jpg", ".png"))]
    assert (tmp_path / "bare/classes.txt").read_text() == "bolt\nnut\n"
    assert len(list((tmp_path / "bare/Annotations").iterdir())) == 8


def test_a_second_call_makes_only_what_is_missing_or_has_changed(source, tmp_path):
    out = tmp_path / "out"
    done = flatout.yolo.convert_data(source, out, to="labelme")
    assert (done.num_images, done.num_kept) == (8, 0)
    before = {path: path.stat() for path in out.rglob("*.j*") if path.name != "convert.json"}
    gone = out / "train/empty.jpg"
    gone.unlink()
    (tmp_path / "source/labels/val/1.txt").write_text("1 0.5 0.5 0.5 0.5\n")
    done = flatout.yolo.convert_data(source, out, to="labelme")
    assert (done.num_kept, done.data) == (7, out / "data.yaml") and gone.exists()
    changed = [path for path, state in before.items() if path.stat().st_mtime_ns != state.st_mtime_ns]
    assert changed == [out / "val/1.json"], "copies have the time of their source"


def test_images_that_the_source_no_longer_has_are_reported(source, tmp_path, caplog):
    flatout.yolo.convert_data(source, tmp_path / "out", to="yolo")
    assert "no longer has" not in caplog.text
    (source.parent / "images/train/empty.jpg").unlink()
    flatout.yolo.convert_data(source, tmp_path / "out", to="yolo")
    assert "1 image that the source no longer has" in caplog.text and "train/empty.jpg. Delete them" in caplog.text


def test_after_a_signal_the_same_command_continues(source, tmp_path, monkeypatch):
    monkeypatch.setattr(converted_set, "CHUNK", 1)
    out, copy = tmp_path / "out", converted_set._copy

    def copy_and_signal(*args, **flags):
        copy(*args, **flags)
        if len(list(out.rglob("*.jpg"))) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(converted_set, "_copy", copy_and_signal)
        with pytest.raises(Interrupted, match="Run the same command again"):
            flatout.yolo.convert_data(source, out, to="coco")
    assert not (out / "data.yaml").exists() and not json.loads((out / "convert.json").read_text())["complete"]
    assert not list(out.rglob("*.part"))
    done = flatout.yolo.convert_data(source, out, to="coco")
    assert 2 <= done.num_kept < 8 and json.loads((out / "convert.json").read_text())["complete"]
    assert len(open_split(read_data_yaml(done.data), "train", CONFIG).images) == 6


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("{source} {tmp}/foreign --to coco", 2, "contains other files, such as mine.txt. They were not touched"),
        ("{source} {tmp}/mine.txt --to coco", 2, "mine.txt is a file. Give a folder."),
        ("{source} {folder}/images/train/out --to coco", 2, "is inside a folder named `images`"),
        ("{source} {tmp}/done --to cvat", 2, "was made with other settings: to was coco, now cvat"),
        ("{tmp}/none.yaml {tmp}/out --to coco", 2, "no such file here or in a subfolder"),
        ("{tmp}/foreign {tmp}/out --to coco", 2, "is a folder without a data YAML"),
        ("{tmp}/wrong.yaml {tmp}/out --to coco", 3, "has labels of class 1, which has no name"),
        ("{tmp}/gone.yaml {tmp}/out --to coco", 3, "nowhere does not exist"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(words, code, said, source, tmp_path, capsys):
    (tmp_path / "foreign").mkdir()
    for place in ("foreign/mine.txt", "mine.txt"):
        (tmp_path / place).write_text("mine")
    flatout.yolo.convert_data(source, tmp_path / "done", to="coco")
    values = yaml.safe_load(source.read_text())
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump({**values, "nc": 1, "names": ["bolt"]}))
    (tmp_path / "gone.yaml").write_text(yaml.safe_dump({**values, "val": "nowhere"}))
    filled = words.format(source=source, tmp=tmp_path, folder=source.parent)
    assert main(["yolo", "convert-data", *filled.split()]) == code
    assert said in re.sub(r"\s+", " ", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_noticed_before_the_first_image(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ResourceError, match=r"8 images need .* GB are free\. Use --images link"):
        flatout.yolo.convert_data(source, tmp_path / "out", to="yolo")
    assert not list((tmp_path / "out").rglob("*.jpg"))


def test_labels_and_images_that_cannot_be_used_are_counted(source, tmp_path, caplog):
    made = source.parent
    (made / "images/train/bad.jpg").write_bytes(b"no image")
    (made / "labels/train/1.txt").write_text("0 0.5 0.5 0.2 0.2\n0 7 7 7 7\n")
    done = flatout.yolo.convert_data(source, tmp_path / "out", to="voc")
    assert (done.num_images, done.num_left_out, done.num_dropped) == (8, 1, 1)
    assert "1 image and 1 label of the source cannot be used" in caplog.text


def test_an_unknown_format_is_refused(source, tmp_path):
    with pytest.raises(ConfigError, match=r"'tfrecord' is no format that can be written\. Use one of yolo, coco"):
        flatout.yolo.convert_data(source, tmp_path / "out", to="tfrecord")
    for name in ("JPEGImages", "Annotations"):
        (tmp_path / "voc" / name).mkdir(parents=True)
    with pytest.raises(DataError, match="its labels name no object"):
        flatout.yolo.convert_data(tmp_path / "voc", tmp_path / "out", to="yolo")


def test_the_formats_of_the_command_are_those_of_the_registry():
    assert tuple(LAYOUTS) == FORMATS
