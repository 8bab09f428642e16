"""A resized tree trains like its source: it has the same labels, names and ids, and only the images are smaller."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import yaml

import flatout.yolo
from flatout.__main__ import main
from flatout.errors import ConfigError, DataError, ResourceError
from flatout.images import header_of, read_image
from flatout.runs.lock import RunLock
from flatout.yolo.data import resized_tree
from flatout.yolo.data.coco import annotation_file, resized_annotations, resized_mask
from flatout.yolo.data.data_yaml import Split, read_data_yaml
from flatout.yolo.data.letterbox import resize_long_side
from flatout.yolo.data.open_data import open_data_set
from flatout.yolo.data.open_set import SplitConfig, open_split
from flatout.yolo.data.resized_tree import ResizeConfig, resized_file, target_hw
from flatout.yolo.data.scan import ScanConfig
from flatout.yolo.find_file import resize_hint
from tests.yolo.data.drawn_set import SmallDataSet, encoded, jpeg, oriented_jpeg, png, random_image

ROOT = Path(__file__).parents[3]
CONFIG = SplitConfig(scan=ScanConfig(workers=0, progress=False))
LABELS = "0 0.5 0.5 0.4 0.4\n1 0.1 0.1 0.3 0.1 0.3 0.3\n"


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def states_below(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in sorted(folder.rglob("*"))}


def opened(data: Path, split: Split = "train"):
    return open_split(open_data_set(data), split, CONFIG).images


def assert_same_labels(one, other) -> None:
    assert [Path(path).name for path in one.paths] == [Path(path).name for path in other.paths]
    assert one.names == other.names
    for field in ("class_box_T5", "first_N", "point_P2", "first_point_T"):
        if hasattr(one.labels, field):
            np.testing.assert_array_equal(getattr(one.labels, field), getattr(other.labels, field))


@pytest.fixture
def source(tmp_path: Path) -> SmallDataSet:
    """Landscape, portrait, small, grey and rotated images in five formats, with labels, without, with an empty file."""
    made = SmallDataSet(tmp_path / "source", num_train=0, num_val=2)
    made.put("train", "landscape", jpeg(200, 150, 1), LABELS)
    made.put("train", "portrait", png(90, 171, 2), LABELS, suffix="png")
    made.put("train", "small", jpeg(50, 40, 3), LABELS)
    made.put("train", "grey", encoded(".png", random_image(130, 90, 4)[..., 0]), "", suffix="png")
    made.put("train", "turned", oriented_jpeg(6, 5, 200, 150), LABELS)
    made.put("train", "webp", encoded(".webp", random_image(140, 100, 6)), LABELS, suffix="webp")
    made.put("train", "bmp", encoded(".bmp", random_image(140, 100, 7)), LABELS, suffix="bmp")
    made.put("train", "tiff", encoded(".tiff", random_image(140, 100, 8)), suffix="tiff")
    made.put("train", "below/named", png(150, 70, 9), LABELS, suffix="jpg")  # PNG by its content
    made.put("val", "large", jpeg(301, 203, 10), LABELS)
    return made


@pytest.fixture
def data(source: SmallDataSet) -> Path:
    return source.yaml()


# -- sizes and pixels ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [32, 64, 320])
def test_the_longer_side_is_exact_the_aspect_ratio_stays_and_nothing_grows(size):
    rng = np.random.default_rng(size)
    config = ResizeConfig(size=size)
    for native_hw in map(tuple, rng.integers(10, 900, (2000, 2)).tolist()):
        new_hw = target_hw(native_hw, config)
        assert target_hw(new_hw, config) == new_hw
        if max(native_hw) <= size:
            assert new_hw == native_hw
            continue
        ratio = max(new_hw) / max(native_hw)
        assert all(abs(new - old * ratio) < 1 for new, old in zip(new_hw, native_hw, strict=True))
        assert min(new_hw) >= 10
        if min(native_hw) * size >= 10 * max(native_hw):
            assert max(new_hw) == size


def test_a_long_thin_image_keeps_the_side_without_which_training_drops_it():
    assert target_hw((20, 5000), ResizeConfig(size=320)) == (10, 2500)


def test_images_are_stretched_or_enlarged_only_on_request():
    assert target_hw((30, 60), ResizeConfig(size=96)) == (30, 60)
    assert target_hw((30, 60), ResizeConfig(size=96, enlarge=True)) == (48, 96)
    assert target_hw((30, 60), ResizeConfig(size=96, stretch=True)) == (96, 96)


@pytest.mark.parametrize("native_wh", [(200, 150), (90, 171), (301, 203), (640, 427)])
def test_validation_sees_the_same_pixels_as_in_the_source(native_wh, tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(png(*native_wh))
    expected = resize_long_side(read_image(str(path)), 64, augment=False).image
    path.write_bytes(resized_file(path.read_bytes(), ResizeConfig(size=64)))
    small = read_image(str(path))
    np.testing.assert_array_equal(small, expected)
    assert resize_long_side(small, 64, augment=False).image is small


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_rotated_image_is_stored_upright(orientation):
    content = oriented_jpeg(orientation, seed=3, width=160, height=120)
    made = resized_file(content, ResizeConfig(size=64, quality=100))
    header = header_of(made)
    assert (header.orientation, header.size_wh) == (1, (64, 48) if orientation < 5 else (48, 64))
    upright = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)
    expected = cv2.resize(upright, header.size_wh, interpolation=cv2.INTER_AREA)
    got = cv2.imdecode(np.frombuffer(made, np.uint8), cv2.IMREAD_COLOR)
    assert np.abs(got.astype(int) - expected).mean() < 3


def test_formats_and_names_stay(data, tmp_path):
    flatout.yolo.resize(data, tmp_path / "out", size=64)
    for path in (tmp_path / "source/images").rglob("*.*"):
        made = tmp_path / "out" / path.relative_to(tmp_path / "source")
        before, after = header_of(path.read_bytes()), header_of(made.read_bytes())
        assert (after.format, after.channels) == (before.format, before.channels), path.name
        assert max(after.size_wh) == min(64, max(before.size_wh))


def test_small_images_are_copied_byte_for_byte(data, tmp_path):
    done = flatout.yolo.resize(data, tmp_path / "out", size=64)
    small = "images/train/small.jpg"
    assert (tmp_path / "out" / small).read_bytes() == (tmp_path / "source" / small).read_bytes()
    assert (done.num_copied, done.num_resized) == (3, 9)  # 0.jpg and 1.jpg of val are 64 px wide


def test_a_higher_quality_makes_a_larger_jpeg():
    sizes = [len(resized_file(jpeg(400, 300), ResizeConfig(size=200, quality=quality))) for quality in (40, 80, 95)]
    assert sizes == sorted(sizes) and len(set(sizes)) == 3


# -- the tree ------------------------------------------------------------------------------------------------------


def test_training_reads_the_same_labels_from_anywhere(data, tmp_path, monkeypatch):
    before = files_below(tmp_path / "source"), states_below(tmp_path / "source")
    done = flatout.yolo.resize(data, tmp_path / "out", size=64)
    assert done.data == tmp_path / "out/out.yaml" and done.num_images == 12 and not done.skipped
    assert (files_below(tmp_path / "source"), states_below(tmp_path / "source")) == before
    assert files_below(tmp_path / "out/labels") == files_below(tmp_path / "source/labels")
    # Including the folder of the source, where a relative `images/train` would be the wrong one.
    for folder in (tmp_path, tmp_path / "out", tmp_path / "source"):
        monkeypatch.chdir(folder)
        for split in ("train", "val"):
            small = opened(done.data, split)
            assert_same_labels(small, opened(data, split))
            assert small.size_wh_N2.max() == 64


def test_the_tree_may_be_moved(data, tmp_path, monkeypatch):
    flatout.yolo.resize(data, tmp_path / "out", size=64)
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "out", tmp_path / "elsewhere/out")
    monkeypatch.chdir("/")
    assert len(opened(tmp_path / "elsewhere/out/out.yaml")) == 9


def test_names_and_other_keys_of_the_yaml_stay(source, tmp_path):
    source.values |= {
        "names": ["no", "007: \u00e4"],
        "heads": 2,
        "grouping": "standard",
        "download": "rm -rf /",
        "path": "/",
    }
    done = flatout.yolo.resize(source.yaml(), tmp_path / "out", size=64)
    read = read_data_yaml(done.data)
    assert read.names == ("no", "007: \u00e4")
    assert (read.written.nc, read.written.heads, read.written.grouping) == (2, 2, "standard")
    assert (read.written.download, read.written.path) == (None, None)


LAYOUTS = {
    "folder per split above images": ("train/images", "valid/images"),
    "labels beside the images": ("train", "valid"),
    "one folder for both": ("all", "all"),
    "a folder named images twice": ("images/set/images/train", "images/set/images/valid"),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_every_layout_is_kept(layout, tmp_path):
    folder = tmp_path / "source"
    for seed, split in enumerate(dict.fromkeys(layout)):
        image = folder / split / "a.jpg"
        label = Path(str(image).replace("/images/", "/labels/", 1)).with_suffix(".txt")
        for path, content in ((image, jpeg(100, 80, seed)), (label, LABELS.encode())):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    data = folder / "data.yaml"
    train, val = layout
    data.write_text(yaml.safe_dump({"train": f"{folder}/{train}", "val": f"{folder}/{val}", "names": ["a", "b"]}))
    done = flatout.yolo.resize(data, tmp_path / "out", size=64)
    for split in ("train", "val"):
        assert_same_labels(opened(done.data, split), opened(data, split))
        assert len(opened(done.data, split).labels.class_box_T5) == 2
    # The files at the top must not be replaced by an image or label.
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_file()} == {"out.yaml", "resize.json"}


def test_lists_contain_the_images_of_the_tree(source, tmp_path):
    folder = source.folder
    (folder / "train.txt").write_text("./images/train/landscape.jpg\n./images/train/portrait.png\n")
    (folder / "lists").mkdir()
    (folder / "lists/train.txt").write_text(f"{folder}/images/val/large.jpg\n")
    source.values |= {"train": str(folder / "train.txt"), "val": [str(folder / "lists/train.txt")]}
    data = source.yaml()
    done = flatout.yolo.resize(data, tmp_path / "out", size=64)
    for split in ("train", "val"):
        assert_same_labels(opened(done.data, split), opened(data, split))
    assert sorted(path.name for path in (tmp_path / "out").glob("*.txt")) == ["train_0_train.txt", "val_1_train.txt"]
    assert not (tmp_path / "out/images/train/small.jpg").exists()


def test_a_missing_test_split_is_left_out_and_other_missing_splits_are_refused(source, tmp_path, caplog):
    (source.folder / "test.txt").write_text("./images/test2017/1.jpg\n")
    source.values["test"] = str(source.folder / "test.txt")
    done = flatout.yolo.resize(source.yaml(), tmp_path / "out", size=64)
    assert "`test` is left out" in caplog.text and not read_data_yaml(done.data).entries["test"]
    source.values["val"] = "nowhere/val"
    with pytest.raises(DataError, match="nowhere/val does not exist"):
        flatout.yolo.resize(source.yaml(), tmp_path / "other", size=64)
    assert not (tmp_path / "other").exists()


# -- again ---------------------------------------------------------------------------------------------------------


def test_a_second_call_does_nothing(data, tmp_path):
    flatout.yolo.resize(data, tmp_path / "out", size=64)
    before = states_below(tmp_path / "out/images"), files_below(tmp_path / "out")
    done = flatout.yolo.resize(data, tmp_path / "out", size=64)
    assert (done.num_kept, done.num_resized, done.num_copied) == (12, 0, 0)
    assert (states_below(tmp_path / "out/images"), files_below(tmp_path / "out")) == before


def test_missing_empty_and_changed_files_are_made_again(source, tmp_path):
    data, out = source.yaml(), tmp_path / "out"
    flatout.yolo.resize(data, out, size=64)
    (out / "images/train/landscape.jpg").unlink()
    (out / "images/train/portrait.png").write_bytes(b"")  # as after a power cut
    (out / "labels/val/large.txt").unlink()
    cut_off = out / "labels/train/small.txt"
    time_ns = cut_off.stat().st_mtime_ns
    cut_off.write_text("")
    os.utime(cut_off, ns=(time_ns, time_ns))
    (out / "images/train/.4711.part").write_bytes(b"left by a process that was killed")
    later = time.time() + 10
    for split, stem, image, label in (
        ("train", "turned", None, "0 0.2 0.2 0.1 0.1\n"),
        ("train", "bmp", encoded(".bmp", random_image(140, 100, 99)), None),
    ):
        for path in source.put(split, stem, image, label, suffix="bmp" if image else "jpg"):
            os.utime(path, (later, later))
    (source.folder / "labels/train/webp.txt").unlink()
    done = flatout.yolo.resize(data, out, size=64)
    assert (done.num_resized, done.num_copied, done.num_kept) == (6, 1, 5)
    flatout.yolo.resize(data, tmp_path / "unbroken", size=64)
    assert _without_own_name(out) == _without_own_name(tmp_path / "unbroken")


def _without_own_name(tree: Path) -> dict[str, bytes]:
    """All files but the data YAML, which contains the name of its folder."""
    return {name: content for name, content in files_below(tree).items() if name != f"{tree.name}.yaml"}


def test_an_interrupted_tree_is_completed_to_the_uninterrupted_one(tmp_path):
    made = SmallDataSet(tmp_path / "source", num_train=0, num_val=1)
    contents = [jpeg(900, 700, seed) for seed in range(3)]
    for number in range(120):
        made.put("train", f"{number:03}", contents[number % 3], LABELS)
    command = ["yolo", "resize", str(made.yaml()), "--size", "320", "--workers", "2", "--out"]
    flatout.yolo.resize(made.yaml(), tmp_path / "unbroken", size=320, workers=0)
    out = tmp_path / "out"
    child = subprocess.Popen(
        [sys.executable, "-m", "flatout", *command, str(out)],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while child.poll() is None and not list(out.glob("images/train/*.jpg")):
        time.sleep(0.005)
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate(timeout=60)
    assert (child.returncode, said) == (
        75, "flatout: SIGTERM: everything is saved. Run the same command again to continue.\n"
    )  # fmt: skip
    assert len(list(out.glob("images/train/*.jpg"))) < 120 and not (out / "out.yaml").exists()
    assert not json.loads((out / "resize.json").read_text())["complete"]
    assert main([*command, str(out)]) == 0
    assert _without_own_name(out) == _without_own_name(tmp_path / "unbroken")
    assert not list(out.rglob(".*"))


def test_copies_of_listed_images_that_are_gone_are_kept(source, tmp_path):
    (source.folder / "train.txt").write_text("./images/train/landscape.jpg\n./images/train/portrait.png\n")
    source.values["train"] = str(source.folder / "train.txt")
    flatout.yolo.resize(source.yaml(), tmp_path / "out", size=64)
    before = files_below(tmp_path / "out")
    (source.folder / "images/train/landscape.jpg").unlink()
    assert flatout.yolo.resize(source.yaml(), tmp_path / "out", size=64).num_kept == 5
    assert files_below(tmp_path / "out") == before


def test_only_a_complete_tree_has_its_data_yaml(source, tmp_path, monkeypatch):
    data, out = source.yaml(), tmp_path / "out"
    assert flatout.yolo.resize(data, out, size=64).data.is_file()
    source.put("train", "new", jpeg(100, 80))
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "free")(0))
        with pytest.raises(ResourceError):
            flatout.yolo.resize(data, out, size=64)
    assert not (out / "out.yaml").exists()
    assert flatout.yolo.resize(data, out, size=64).data.is_file()


def test_a_second_resize_into_the_same_folder_is_refused_while_one_runs(data, tmp_path):
    (tmp_path / "out").mkdir()
    with RunLock(tmp_path / "out"), pytest.raises(ConfigError, match="another `flatout yolo resize` is writing to it"):
        flatout.yolo.resize(data, tmp_path / "out", size=64)
    assert flatout.yolo.resize(data, tmp_path / "out", size=64).num_images == 12


def test_images_that_the_source_no_longer_has_are_named(source, tmp_path, caplog):
    data = source.yaml()
    flatout.yolo.resize(data, tmp_path / "out", size=64)
    (source.folder / "images/train/bmp.bmp").unlink()
    flatout.yolo.resize(data, tmp_path / "out", size=64)
    assert "The copy still has 1 image that the source no longer has" in caplog.text and "bmp.bmp" in caplog.text


# -- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"size": 96}, "size was 64, now 96"),
        ({"quality": 80}, "quality was 95, now 80"),
        ({"stretch": True}, "stretch was False, now True"),
        ({"enlarge": True}, "enlarge was False, now True"),
    ],
)
def test_other_settings_need_another_folder(changed, said, data, tmp_path):
    flatout.yolo.resize(data, tmp_path / "out", size=64)
    before = files_below(tmp_path / "out")
    with pytest.raises(ConfigError, match=f"was made with other settings: {said}"):
        flatout.yolo.resize(data, tmp_path / "out", **({"size": 64} | changed))
    assert files_below(tmp_path / "out") == before


def test_a_folder_with_other_files_is_left_alone(data, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match=r"contains other files, such as thesis\.tex"):
        flatout.yolo.resize(data, tmp_path / "out", size=64)
    assert files_below(tmp_path / "out") == {"thesis.tex": b"mine"}


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("source/labels/train/small", "inside .*labels"),
        ("source/images/small", "inside a folder named `images`"),
        ("images/small", "inside a folder named `images`"),
        ("source", "contains other files"),
        ("source/data.yaml", "is a file"),
    ],
)
def test_places_that_would_harm_the_source_are_refused(out, said, source, tmp_path):
    data = source.yaml()
    before = files_below(tmp_path)
    with pytest.raises(ConfigError, match=said):
        flatout.yolo.resize(data, tmp_path / out, size=64)
    assert files_below(tmp_path) == before


def test_a_copy_inside_an_image_folder_of_the_source_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/0.jpg").write_bytes(jpeg())
    (tmp_path / "data.yaml").write_text(f"train: {tmp_path}\nval: {tmp_path}\nnames: [a]\n")
    with pytest.raises(ConfigError, match="a folder of the source"):
        flatout.yolo.resize(tmp_path / "data.yaml", tmp_path / "small", size=64)


def test_pascal_voc_is_refused(tmp_path):
    for name in ("JPEGImages/a.jpg", "Annotations/a.xml"):
        (tmp_path / "voc" / name).parent.mkdir(parents=True)
    (tmp_path / "voc/JPEGImages/a.jpg").write_bytes(jpeg())
    (tmp_path / "voc/Annotations/a.xml").write_text("<a><object><name>bolt</name></object></a>")
    with pytest.raises(ConfigError, match="Pascal VOC labels are in pixels"):
        flatout.yolo.resize(tmp_path / "voc", tmp_path / "out", size=64)


@pytest.mark.parametrize(
    ("words", "said"), [("--size 8", "size=8 is too small"), ("--size 64 --quality 0", "from 1 to 100")]
)
def test_wrong_numbers_end_with_exit_code_2(words, said, data, tmp_path, capsys):
    assert main(["yolo", "resize", str(data), "--out", str(tmp_path / "out"), *words.split()]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_disk_that_is_too_small_is_noticed_before_the_first_image(data, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 20_000))
    with pytest.raises(
        ResourceError, match=r"about 0\.00 GB are needed for 12 images, but only 0\.00 GB are free\. Free some"
    ):
        flatout.yolo.resize(data, tmp_path / "out", size=64)
    assert not list((tmp_path / "out").rglob("*.jpg"))
    monkeypatch.undo()
    assert flatout.yolo.resize(data, tmp_path / "out", size=64).num_images == 12


def test_a_full_disk_ends_with_exit_code_5_and_finished_files_stay(data, tmp_path, monkeypatch, capsys):
    written = []

    def full(path: str, content: bytes, *, time_ns: int | None = None) -> None:
        if path.endswith(".png") and written:
            raise OSError(28, "No space left on device")
        written.append(path)
        before(path, content, time_ns=time_ns)

    before = resized_tree.write_atomically
    monkeypatch.setattr(resized_tree, "write_atomically", full)
    words = ["yolo", "resize", str(data), "--size", "64", "--out", str(tmp_path / "out")]
    assert main(words) == 5
    assert re.search(r"grey\.png: cannot be written: No space left", capsys.readouterr().err)
    monkeypatch.undo()
    assert main(words) == 0
    assert "12 images (" in capsys.readouterr().out


# -- images that cannot be read ----------------------------------------------------------------------------------


def test_one_damaged_image_in_a_hundred_is_named_and_left_out(tmp_path, capsys):
    made = SmallDataSet(tmp_path / "source", num_train=119, num_val=1)
    made.put("train", "broken", png(200, 100)[:-200], LABELS, suffix="png")
    (made.folder / "train.txt").write_text("./images/train/0.jpg\n./images/train/broken.png\n")
    made.values["train"] = [str(made.folder / "images/train"), str(made.folder / "train.txt")]
    data, out = made.yaml(), tmp_path / "out"
    assert main(["yolo", "resize", str(data), "--size", "48", "--out", str(out), "--workers", "2"]) == 0
    said = capsys.readouterr().out
    assert "broken.png: left out: OpenCV cannot decode this PNG" in said and "120 images (" in said
    assert not list(out.rglob("broken.*"))
    assert list(json.loads((out / "resize.json").read_text())["skipped"]) == [
        str(made.folder / "images/train/broken.png")
    ]
    assert (out / "train.txt").read_text() == "./images/train/0.jpg\n"
    assert_same_labels(opened(out / "out.yaml"), opened(data))


def test_more_than_one_in_a_hundred_is_exit_code_3_and_all_others_are_copied(source, tmp_path, capsys):
    source.put("train", "torn", jpeg(200, 150)[:900])
    source.put("train", "empty", b"")
    data, out = source.yaml(), tmp_path / "out"
    assert main(["yolo", "resize", str(data), "--size", "64", "--out", str(out)]) == 3
    said = capsys.readouterr().err
    assert "2 of 14 images cannot be read" in said and "the file is empty" in said and "torn.jpg (truncated" in said
    assert_same_labels(opened(out / "out.yaml"), opened(data))


# -- COCO ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    """The layout of COCO in small: lists, folders, labels and annotations; one image is in no list."""
    folder = tmp_path / "coco"
    rng = np.random.default_rng(0)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for split, numbers in (("train2017", (1, 2)), ("val2017", (7, 9, 11))):
        for path in (folder / "images" / split, folder / "labels" / split):
            path.mkdir(parents=True)
        lines = []
        for number in numbers:
            width, height = (200, 150) if number != 9 else (60, 45)
            (folder / f"images/{split}/{number:012}.jpg").write_bytes(jpeg(width, height, number))
            lines.append(f"./images/{split}/{number:012}.jpg\n")
            images.append({"id": number, "file_name": f"{number:012}.jpg", "width": width, "height": height})
            rows = []
            for _ in range(4):
                w, h = rng.uniform(8, 0.5 * width), rng.uniform(8, 0.5 * height)
                x, y = rng.uniform(0, width - w), rng.uniform(0, height - h)
                corners = [x, y, x + w, y, x + w, y + h, x, y + h]
                annotations.append(
                    {
                        "id": len(annotations) + 1, "image_id": number, "category_id": int(rng.choice([1, 3])),
                        "bbox": [x, y, w, h], "area": w * h, "iscrowd": 0, "segmentation": [corners],
                    }
                )  # fmt: skip
                rows.append(f"0 {(x + w / 2) / width} {(y + h / 2) / height} {w / width} {h / height}\n")
            (folder / f"labels/{split}/{number:012}.txt").write_text("".join(rows))
        (folder / f"{split}.txt").write_text("".join(lines[:2]))
    (folder / "annotations").mkdir()
    categories = [{"id": 1, "name": "person"}, {"id": 3, "name": "car"}]
    for split, numbers in (("train2017", (1, 2)), ("val2017", (7, 9, 11))):
        content = {
            "info": {"year": 2017},
            "categories": categories,
            "images": [each for each in images if each["id"] in numbers],
            "annotations": [each for each in annotations if each["image_id"] in numbers],
        }
        (folder / f"annotations/instances_{split}.json").write_text(json.dumps(content))
    (folder / "coco.yaml").write_text("train: train2017.txt\nval: val2017.txt\nnc: 2\nnames: [person, car]\n")
    return folder


def test_coco_annotations_fit_the_new_images(coco, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = flatout.yolo.resize("coco/coco.yaml", "coco100", size=100)
    assert done.data == tmp_path / "coco100/coco100.yaml"
    small_set = read_data_yaml(done.data)
    path = annotation_file(small_set, "val")
    assert path == tmp_path / "coco100/annotations/instances_val2017.json"
    small, large = (json.loads(file.read_text()) for file in (path, coco / "annotations/instances_val2017.json"))
    assert (tmp_path / "coco100/annotations/instances_train2017.json").is_file()
    assert [each["id"] for each in small["annotations"]] == [each["id"] for each in large["annotations"]]
    assert [(each["width"], each["height"]) for each in small["images"]] == [(100, 75), (60, 45), (100, 75)]
    halves = {7: 0.5, 9: 1, 11: 0.5}
    for one, other in zip(small["annotations"], large["annotations"], strict=True):
        half = halves[one["image_id"]]
        np.testing.assert_allclose(one["bbox"], np.array(other["bbox"]) * half, atol=1e-3)
        np.testing.assert_allclose(one["segmentation"], np.array(other["segmentation"]) * half, atol=1e-3)
        assert one["area"] == pytest.approx(other["area"] * half**2, abs=1e-3)
    assert (small["info"], small["categories"]) == (large["info"], large["categories"])


def test_an_annotation_file_that_the_yaml_names_is_scaled_and_named_in_the_new_yaml(coco, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (coco / "annotations/instances_val2017.json").rename(coco / "mine.json")
    (coco / "coco.yaml").write_text((coco / "coco.yaml").read_text() + "annotations: mine.json\n")
    done = flatout.yolo.resize("coco/coco.yaml", "coco100", size=100)
    path = annotation_file(read_data_yaml(done.data), "val")
    assert path is not None and path.resolve() == tmp_path / "coco100/annotations/mine.json"
    assert [each["width"] for each in json.loads(path.read_text())["images"]] == [100, 60, 100]


def test_ap_is_that_of_the_source(coco, tmp_path):
    pytest.importorskip("hotcoco", reason="no COCO evaluator is installed (extra `eval`)")
    from flatout.yolo.metrics.coco import coco_scores

    done = flatout.yolo.resize(coco / "coco.yaml", tmp_path / "small", size=100)
    rng = np.random.default_rng(1)
    truth = json.loads((coco / "annotations/instances_val2017.json").read_text())
    rows = [
        [a["image_id"], *(np.array(a["bbox"]) + rng.normal(0, 2, 4)), rng.random(), a["category_id"]]
        for a in truth["annotations"]
    ]
    table = np.array(rows)
    scaled = table.copy()
    scaled[table[:, 0] != 9, 1:5] /= 2
    before = coco_scores(coco / "annotations/instances_val2017.json", table)
    after = coco_scores(annotation_file(read_data_yaml(done.data), "val"), scaled)
    assert 0.1 < before.ap < 0.95
    assert (after.ap, after.ap50, after.ap75, after.ar100) == pytest.approx(
        (before.ap, before.ap50, before.ap75, before.ar100), abs=1e-6
    )


def test_labels_in_a_coco_file_give_the_same_boxes(coco, tmp_path):
    train, val = (str(coco / f"annotations/instances_{split}.json") for split in ("train2017", "val2017"))
    (coco / "json.yaml").write_text(yaml.safe_dump({"train": train, "val": val, "names": ["person", "car"]}))
    (coco / "images/train2017/000000000001.jpg").write_bytes(jpeg(200, 150)[:500])
    with pytest.raises(DataError, match="1 of 5 images cannot be read"):
        flatout.yolo.resize(coco / "json.yaml", tmp_path / "small", size=100)
    for split in ("train", "val"):
        one, other = opened(tmp_path / "small/small.yaml", split), opened(coco / "json.yaml", split)
        assert [Path(path).name for path in one.paths] == [Path(path).name for path in other.paths]
        np.testing.assert_allclose(one.labels.class_box_T5, other.labels.class_box_T5, atol=2e-5)
        assert one.size_wh_N2.max() == 100


def test_annotations_of_another_data_set_are_not_copied(coco, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where YOLOv7 would look for coco/annotations
    flatout.yolo.resize(source.yaml(), tmp_path / "out", size=64)
    assert not (tmp_path / "out/annotations").exists()


@pytest.mark.parametrize("compact", [False, True])
def test_a_resized_mask_keeps_its_position(compact):
    mask = np.zeros((40, 60), np.uint8)
    mask[10:30, 20:50] = 1
    runs = np.diff(np.concatenate(([0], np.flatnonzero(np.diff(mask.T.reshape(-1), prepend=0)), [mask.size]))).tolist()
    counts: object = runs
    if compact:
        hotcoco = pytest.importorskip("hotcoco", reason="no COCO evaluator is installed (extra `eval`)")
        counts = hotcoco.mask.encode(np.asfortranarray(mask))["counts"]
        counts = counts.decode() if isinstance(counts, bytes) else counts
    small = resized_mask({"size": [40, 60], "counts": counts}, (30, 20))
    filled = np.repeat(np.arange(len(small["counts"])) % 2, small["counts"]).reshape(30, 20).T
    expected = np.zeros((20, 30))
    expected[5:15, 10:25] = 1
    assert small["size"] == [20, 30]
    np.testing.assert_array_equal(filled, expected)


@pytest.mark.parametrize(
    "mask",
    [
        {},
        {"size": [4, 4]},
        {"size": [4, 4], "counts": [3]},
        {"size": [10**9] * 2, "counts": [0]},
        {"size": 1, "counts": []},
    ],
)
def test_a_damaged_mask_is_dropped(mask):
    assert resized_mask(mask, (2, 2)) == []


def test_keypoints_keep_their_visibility():
    content = {
        "images": [{"id": 1, "width": 100, "height": 50}],
        "annotations": [{"image_id": 1, "keypoints": [10, 20, 2, 0, 0, 0], "bbox": "broken"}],
        "categories": [],
    }
    (made,) = resized_annotations(content, lambda image: (50, 25), path="x.json")["annotations"]
    assert made == {"image_id": 1, "keypoints": [5, 10, 2, 0, 0, 0], "bbox": "broken"}


# -- errors that suggest the command -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("./coco320/images/train2017", "--size 320 --out ./coco320"),
        ("/data/coco_640/train.txt", "--size 640 --out /data/coco_640"),
        ("coco256.yaml", "--size 256 --out coco256"),
        ("coco1280", "--size 1280 --out coco1280"),
        ("coco/images/train2017", ""),
        ("coco2017/train.txt", ""),
        ("coco128", ""),
        ("coco3200", ""),
        ("bolts320/images", ""),
    ],
)
def test_the_path_of_a_missing_copy_of_coco_gives_the_command(path, said):
    assert resize_hint(path) == (f" Make it from COCO with: flatout yolo resize coco.yaml {said}" if said else "")


def test_the_error_for_a_missing_copy_of_coco_names_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words in (["train", "--data"], ["check"]):
        assert main(["yolo", *words, str(ROOT / "data/coco320.yaml")]) == 3
        captured = capsys.readouterr()
        assert "flatout yolo resize coco.yaml --size 320 --out ./coco320" in captured.out + captured.err, words


def test_coco320_yaml_finds_what_the_command_makes(coco, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the second time with a YAML below this folder that must not be taken for COCO's own
        assert main(["yolo", "resize", "coco.yaml", "--size", "320", "--out", "coco320"]) == 0
    images = opened(ROOT / "data/coco320.yaml", "val")
    assert [Path(path).stem for path in images.paths] == ["000000000007", "000000000009"]
