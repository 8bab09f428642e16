"""Every check finds the fault it looks for, and finds nothing in a data set without faults."""

import importlib.util
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg

from flatout.__main__ import main
from flatout.charts.canvas import colour_of
from flatout.errors import ConfigError, DataError
from flatout.images import DecodedImage, Header, decoder_messages, read_image
from flatout.yolo.data.check import facts
from flatout.yolo.data.check.facts import CHECKS
from flatout.yolo.data.check.run import CheckConfig, check_data_set
from flatout.yolo.data.data_yaml import require_valid
from flatout.yolo.data.file_records import FileRecords
from flatout.yolo.data.open_data import open_data_set
from flatout.yolo.data.open_set import open_training_splits
from flatout.yolo.data.scan import scan_image
from flatout.yolo.options import TrainOptions
from tests.yolo.data.damaged_images import Damaged, damaged, originals
from tests.yolo.data.drawn_set import SmallDataSet, chunk, encoded, flat_png, jpeg, oriented_jpeg, png, random_image

CONFIG = CheckConfig(workers=0, progress=False, img_size=64, anchors_px=(16, 16, 32, 32, 8, 12))
QUICK = replace(CONFIG, quick=True)
GOOD_LINE = "0 0.5 0.5 0.4 0.4\n"

Spoil = Callable[[SmallDataSet], object]


def label(line: str | bytes) -> Spoil:
    """Give one image a label file with this content."""
    return lambda made: made.put("train", "0", label=line)


def extra_image(content: bytes, suffix: str = "jpg") -> Spoil:
    """Add an image with this content and a good label."""
    return lambda made: made.put("train", "new", content, GOOD_LINE, suffix)


def yaml_has(**values: object) -> Spoil:
    return lambda made: made.values.update(values)


def cmyk() -> bytes:
    """A JPEG whose frame header declares four components; its pixels do not matter here."""
    plain = jpeg(seed=7)
    at = plain.index(b"\xff\xc0")
    length, bits, height, width, _ = struct.unpack(">HBHHB", plain[at + 2 : at + 10])
    frame = struct.pack(">HBHHB", length + 3, bits, height, width, 4) + plain[at + 10 : at + 2 + length] + b"\4\x11\0"
    return plain[: at + 2] + frame + plain[at + 2 + length :]


def two_pages() -> bytes:
    ok, content = cv2.imencodemulti(".tif", [random_image(seed=8), random_image(seed=9)])
    assert ok
    return content.tobytes()


def undecodable_pixels() -> bytes:
    """A PNG with a correct checksum over damaged pixel data."""
    good = png(seed=6)
    return good[:33] + chunk(b"IDAT", b"no pixels") + chunk(b"IEND", b"")


def self_link(made: SmallDataSet) -> None:
    (made.folder / "images/train/loop.jpg").symlink_to("loop.jpg")


def pipe_as_label(made: SmallDataSet) -> None:
    (made.folder / "labels/train/0.txt").unlink()
    os.mkfifo(made.folder / "labels/train/0.txt")


def rename_label(made: SmallDataSet) -> None:
    (made.folder / "labels/train/0.txt").rename(made.folder / "labels/train/0.TXT")


def list_twice(made: SmallDataSet) -> None:
    names = [f"./images/train/{number}.jpg" for number in (0, 1, 1)]
    (made.folder / "list.txt").write_text("\n".join(names))
    made.values["train"] = str(made.folder / "list.txt")


def broken_coco(made: SmallDataSet) -> None:
    (made.folder / "coco.json").write_text("[")
    made.values["val"] = str(made.folder / "coco.json")


def empty_folder_beside_images(made: SmallDataSet) -> None:
    (made.folder / "void").mkdir()
    made.values["train"] = [made.values["train"], str(made.folder / "void")]


def copy(split: str, source: str = "train/0") -> Spoil:
    def spoil(made: SmallDataSet) -> None:
        made.put(split, "copy", (made.folder / f"images/{source}.jpg").read_bytes(), GOOD_LINE)

    return spoil


def reencoded_copy(made: SmallDataSet) -> None:
    image = read_image(str(made.folder / "images/train/0.jpg"))
    made.put("val", "again", encoded(".png", image), GOOD_LINE, "png")


def no_labels(split: str) -> Spoil:
    return lambda made: shutil.rmtree(made.folder / "labels" / split)


def bad_lines(num_bad: int) -> Spoil:
    """Write `num_bad` of the 8 labels of train in pixels."""

    def spoil(made: SmallDataSet) -> None:
        for number in range(4):
            lines = [
                "0 32 24 10 10\n" if 2 * number + place < num_bad else f"{place} 0.5 0.5 0.4 0.4\n" for place in (0, 1)
            ]
            made.put("train", str(number), label="".join(lines))

    return spoil


def relabel_all(text: str) -> Spoil:
    def spoil(made: SmallDataSet) -> None:
        for path in (made.folder / "labels").rglob("*.txt"):
            path.write_text(text)

    return spoil


def mostly_background(made: SmallDataSet) -> None:
    for number in range(3):
        made.put("train", str(number), label="")


def wrong_size_in_header(made: SmallDataSet) -> None:
    """An image for which the test replaces the decoder by one that returns another size than the header."""
    made.put("train", "new", jpeg(seed=5), GOOD_LINE)


BOXES = "\n".join(f"0 {0.1 + n * 0.001:.4f} 0.5 0.1 0.1" for n in range(501))
CORNERS = "\n".join(f"0 0.{6 + n % 3} 0.{6 + n % 2} 0.{93 + n // 3} 0.{93 + n // 3}" for n in range(7))


def labelme(points, shape_type="rectangle", **values):
    """Replace the labels of train by those of labelme, with one shape."""

    def change(made):
        for file in (made.folder / "labels/train").iterdir():
            file.unlink()
        shape = {"label": "bolt", "points": points, "shape_type": shape_type}
        content = {"shapes": [shape], "imageWidth": 64, "imageHeight": 48, **values}
        (made.folder / "images/train/0.json").write_text(json.dumps(content))

    return change


FAULTS: dict[str, Spoil] = {
    "names-count": yaml_has(nc=3),
    "names-holes": yaml_has(names={0: "bolt", 2: "nut"}),
    "names-duplicate": yaml_has(names=["bolt", "Bolt"]),
    "names-blank": yaml_has(names=["bolt", " "]),
    "split-missing": lambda made: made.values.pop("val"),
    "split-unreadable": broken_coco,
    "path-missing": yaml_has(val="/no/such/folder"),
    "path-empty": empty_folder_beside_images,
    "path-backslash": lambda made: made.put("train", "a\\b", jpeg(seed=4), GOOD_LINE),
    "download-refused": yaml_has(download="bash get_everything.sh"),
    "list-duplicate": list_twice,
    "name-odd": lambda made: made.put("train", "a\nb", jpeg(seed=4), GOOD_LINE),
    "name-hidden": lambda made: made.put("train", ".hidden", jpeg()),
    "name-other": lambda made: made.put("train", "photo", jpeg(), suffix="jpgx"),
    "stem-shared": lambda made: made.put("train", "0", png(seed=4), suffix="png"),
    "image-unreadable": self_link,
    "image-empty": extra_image(b""),
    "image-format": extra_image(b"this is no image at all, whatever its name says"),
    "image-unsupported": extra_image(b"GIF89a\x40\0\x30\0" + bytes(20)),
    "image-corrupt": extra_image(b"\xff\xd8\xff\xe0\0\x10JFIF"),
    "image-truncated": extra_image(jpeg(seed=4)[:900]),
    "image-no-end": extra_image(jpeg(seed=4)[:-2]),
    "image-too-small": extra_image(png(9, 40), "png"),
    "image-huge": extra_image(flat_png(12_000, 12_000), "png"),
    "image-large": extra_image(jpeg(300, 200)),
    "image-aspect": extra_image(jpeg(200, 12)),
    "image-extension": extra_image(png(seed=4)),
    "image-bytes-after-end": extra_image(jpeg(seed=4) + b"and more"),
    "exif-rotated": extra_image(oriented_jpeg(6)),
    "exif-mirrored": extra_image(oriented_jpeg(2)),
    "image-16-bit": extra_image(encoded(".png", random_image(seed=4).astype(np.uint16) * 256), "png"),
    "image-cmyk": extra_image(cmyk()),
    "image-alpha": extra_image(encoded(".png", np.dstack((random_image(seed=4), random_image(seed=5)[..., 0]))), "png"),
    "image-pages": extra_image(two_pages(), "tif"),
    "image-decode": extra_image(undecodable_pixels(), "png"),
    "image-damaged": extra_image(jpeg(seed=4)[:700] + bytes(40) + jpeg(seed=4)[740:]),
    "image-header-lies": wrong_size_in_header,
    "image-blank": extra_image(encoded(".jpg", np.full((48, 64, 3), 40, np.uint8))),
    "image-grey": extra_image(encoded(".jpg", random_image(seed=4)[..., 0])),
    "formats-mixed": extra_image(png(seed=4), "png"),
    "image-copy": copy("train"),
    "leak-path": lambda made: made.values.update(test=made.values["train"]),
    "leak-content": copy("val"),
    "leak-pixels": reencoded_copy,
    "labels-none": no_labels("train"),
    "labels-none-val": no_labels("val"),
    "labels-mostly-dropped": bad_lines(5),
    "labels-often-dropped": bad_lines(4),
    "label-too-many": label("".join(f"0 0.5 0.5 0.4 {number / 20_000:.6f}\n" for number in range(1, 10_002))),
    "label-missing": lambda made: (made.folder / "labels/train/0.txt").unlink(),
    "label-empty": label(" \n"),
    "label-case": rename_label,
    "label-orphan": lambda made: made.put("train", "orphan", label=GOOD_LINE),
    "label-unreadable": pipe_as_label,
    "label-encoding": label(GOOD_LINE.encode("utf-16")),
    "label-bom": label(b"\xef\xbb\xbf" + GOOD_LINE.encode()),
    "label-columns": label("0 0.5 0.5 0.4\n"),
    "label-not-a-number": label("bolt 0.5 0.5 0.4 0.4\n"),
    "label-separator": label("0,0.5,0.5,0.4,0.4\n"),
    "label-nan": label("0 nan 0.5 0.4 0.4\n"),
    "label-negative": label("0 -0.1 0.5 0.4 0.4\n"),
    "label-above-one": label("0 0.5 0.5 1.01 0.4\n"),
    "label-in-pixels": label("0 32 24 10 10\n"),
    "label-class-negative": label("-1 0.5 0.5 0.4 0.4\n"),
    "label-class-fraction": label("0.5 0.5 0.5 0.4 0.4\n"),
    "label-image-size": labelme([[4, 4], [30, 30]], imageWidth=48, imageHeight=64),
    "label-rotated": labelme([[4, 9], [9, 4], [30, 25], [25, 30]], "oriented_rectangle"),
    "label-shape": labelme([[4, 4], [30, 30]], "line"),
    "label-zero-area": label("0 0.5 0.5 0 0.4\n"),
    "label-duplicate": label(GOOD_LINE * 2),
    "label-blank-line": label(f"{GOOD_LINE}\n1 0.5 0.5 0.4 0.4\n"),
    "label-polygon-odd": label("0 0.1 0.1 0.5 0.1 0.5 0.5 0.1\n"),
    "label-polygon-outside": label("0 0.1 0.1 1.2 0.1 0.5 0.5\n"),
    "label-mixed": label(f"{GOOD_LINE}0 0.1 0.1 0.5 0.1 0.5 0.5\n"),
    "class-beyond-names": label("2 0.5 0.5 0.4 0.4\n"),
    "class-from-one": relabel_all("1 0.5 0.5 0.4 0.4\n2 0.3 0.3 0.2 0.3\n"),
    "box-outside": label("0 0.95 0.5 0.4 0.4\n"),
    "box-tiny": label("0 0.5 0.5 0.01 0.4\n"),
    "box-no-pixel": label("0 0.5 0.5 0.000001 0.4\n"),
    "box-whole": label("0 0.5 0.5 1 1\n"),
    "box-crowd": label(BOXES),
    "box-two-classes": label("0 0.5 0.5 0.4 0.4\n1 0.5 0.5 0.4 0.4\n"),
    "boxes-as-corners": relabel_all(CORNERS),
    "class-unused": relabel_all(GOOD_LINE),
    "class-rare": lambda made: None,  # with four images every class is rare
    "class-balance": label(BOXES),
    "class-only-in-val": yaml_has(names=["bolt", "nut", "washer"], nc=3),
    "class-not-in-val": lambda made: [made.put("val", str(n), label=GOOD_LINE) for n in range(3)],
    "val-small": lambda made: None,
    "background-share": mostly_background,
    "anchor-fit": label("0 0.5 0.5 0.02 1\n" + GOOD_LINE),
}  # fmt: skip
ALWAYS = {"class-rare", "val-small"}
"""Findings that a set of seven images cannot avoid."""


def found_in(made: SmallDataSet, config: CheckConfig = CONFIG) -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    for finding in check_data_set(made.yaml(), config).findings:
        places.setdefault(finding.topic, []).append(f"{finding.where}: {finding.value}")
    return places


def test_there_are_at_least_45_checks_and_a_fault_for_each():
    assert len(CHECKS) >= 45
    assert set(FAULTS) == set(CHECKS)


def test_a_data_set_without_faults_has_no_findings_but_its_small_size(tmp_path):
    assert set(found_in(SmallDataSet(tmp_path))) == ALWAYS


@pytest.mark.parametrize("check", FAULTS)
def test_each_check_finds_its_fault(check, tmp_path, monkeypatch):
    made = SmallDataSet(tmp_path)
    FAULTS[check](made)
    if check == "class-only-in-val":
        made.put("val", "0", label="2 0.5 0.5 0.4 0.4\n")
    if check == "image-header-lies":
        monkeypatch.setattr(facts, "decode", lambda content: decoded_image())
    places = found_in(made)
    assert check in places, f"found only {sorted(places)}"
    if CHECKS[check].severity == "error" and check.startswith("label-") and check not in NO_LINE:
        assert ".txt:1: " in places[check][0], "an error in a label names its line"


@pytest.mark.parametrize("split", ["train", "val"])
def test_nothing_is_said_about_the_classes_of_a_split_that_is_not_there(split, tmp_path):
    made = SmallDataSet(tmp_path)
    yaml_has(**{split: "/no/such/folder"})(made)
    found = set(found_in(made))
    assert "path-missing" in found
    assert not {"class-unused", "class-only-in-val", "class-not-in-val"} & found


@pytest.mark.parametrize("check", FAULTS)
def test_training_refuses_exactly_the_findings_that_are_marked_to_stop_it(check, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = SmallDataSet(tmp_path)
    FAULTS[check](made)
    stopping = [finding for finding in check_data_set(made.yaml(), QUICK).findings if CHECKS[finding.topic].stops]
    assert stopping or not CHECKS[check].stops
    with pytest.raises((ConfigError, DataError)) if stopping else nullcontext() as refusal:
        data = require_valid(open_data_set(made.folder / "data.yaml"))
        open_training_splits(data, TrainOptions().split_config())
    if refusal is not None:
        said = str(refusal.value)
        assert any(finding.value in said or finding.where in said for finding in stopping)


def test_the_advice_for_a_box_below_one_pixel_is_not_to_train_at_a_larger_size(tmp_path):
    made = SmallDataSet(tmp_path)
    made.put("train", "0", label="0 0.5 0.5 0.000001 0.4\n0 0.5 0.5 0.02 0.4\n")
    places = found_in(made)
    assert len(places["box-tiny"]) == 1
    assert places["box-tiny"][0].endswith("0.txt: 1.3 x 19.2 px at size 64")
    assert places["box-no-pixel"] == [f"{made.folder}/labels/train/0.txt: 6.4e-05 x 19 px in the image"]
    assert "larger" not in CHECKS["box-no-pixel"].advice


def test_with_tiles_large_images_are_no_fault_and_boxes_are_judged_in_tiles(tmp_path):
    made = SmallDataSet(tmp_path)
    FAULTS["image-huge"](made)
    made.put("train", "strip", jpeg(200, 12), GOOD_LINE)
    made.put("train", "wide", jpeg(640, 480), "0 0.5 0.5 0.01 0.01\n")
    deep = cv2.imencode(".png", np.zeros((5200, 5000), np.uint16))[1].tobytes()  # above the limit of 16 bits
    made.put("train", "deep", deep, GOOD_LINE, "png")
    whole = found_in(made)
    assert {"image-huge", "image-large", "image-aspect", "box-tiny"} <= set(whole)
    assert "--tiles" in CHECKS["image-huge"].advice and "--tiles" in CHECKS["box-tiny"].advice
    tiled = found_in(made, CheckConfig(tiles=64, img_size=64, workers=0, progress=False))
    # 4.8 px of the image are as many in a tile, and none of the huge images was decoded.
    assert not {"image-huge", "image-large", "image-aspect", "image-decode", "box-tiny"} & set(tiled)
    shrunk_tiles = found_in(made, CheckConfig(tiles=320, img_size=64, workers=0, progress=False))
    assert any(place.endswith("wide.txt: 1.3 x 1.0 px at size 64") for place in shrunk_tiles["box-tiny"])


def test_a_tile_or_training_size_that_is_too_small_is_a_mistake(tmp_path, capsys):
    assert main(["yolo", "check", str(SmallDataSet(tmp_path).yaml()), "--tiles", "8"]) == 2
    assert "--tiles 8: tiles have sides of 32 px or more." in capsys.readouterr().err
    assert main(["yolo", "check", str(SmallDataSet(tmp_path).yaml()), "--img-size", "0"]) == 2
    assert "--img-size 0 must be 1 or more." in capsys.readouterr().err


def test_the_report_uses_the_singular_for_one(tmp_path, capsys):
    made = SmallDataSet(tmp_path, num_train=1, num_val=1)
    made.values |= {"names": ["bolt"], "nc": 1}
    for split in ("train", "val"):
        made.put(split, "0", label=GOOD_LINE)
    assert main(["yolo", "check", str(made.yaml()), "--quick", "--no-cache"]) == 0
    said = capsys.readouterr().out
    assert f"{made.folder}/data.yaml: 1 class\n" in said
    assert "train  1 image: " in said
    assert "val: 1 image\n" in said
    assert "train: 1 class: 0 'bolt'" in said


def test_leaked_files_are_reported_in_order_by_their_paths_in_the_data_set(tmp_path):
    made = SmallDataSet(tmp_path / "set")
    FAULTS["leak-path"](made)
    (tmp_path / "link").symlink_to(made.folder)
    made.values.update(test=str(made.values["train"]).replace(str(made.folder), str(tmp_path / "link")))
    assert found_in(made)["leak-path"] == [
        f"{tmp_path}/link/images/train/{number}.jpg: in train and in test" for number in range(4)
    ]


@pytest.mark.parametrize("side", [320, 160])
@pytest.mark.parametrize("quality", [90, 60])
def test_an_image_that_was_saved_again_in_a_lossy_format_or_smaller_is_reported(side, quality, tmp_path):
    made = SmallDataSet(tmp_path)
    made.put("train", "large", jpeg(320, 240, seed=9), GOOD_LINE)
    image = cv2.resize(random_image(320, 240, seed=9), (side, side * 3 // 4))
    made.put("val", "again", encoded(".jpg", image, cv2.IMWRITE_JPEG_QUALITY, quality), GOOD_LINE)
    assert found_in(made)["leak-pixels"] == [
        f"{made.folder}/images/val/again.jpg: val: looks the same as {made.folder}/images/train/large.jpg (train)"
    ]


def test_small_objects_at_different_places_on_a_uniform_background_do_not_look_the_same(tmp_path):
    made = SmallDataSet(tmp_path)
    for split, left in (("train", 8), ("val", 40)):
        image = np.full((48, 64, 3), 90, np.uint8)
        image[20:28, left : left + 12] = 200
        made.put(split, "part", encoded(".png", image), GOOD_LINE, "png")
    assert "leak-pixels" not in found_in(made)


@pytest.mark.parametrize(
    ("content", "check", "reason"),
    [
        pytest.param(b"<html><body>404</body></html>", "image-format", "unreadable_image", id="web page"),
        pytest.param(b"%PDF-1.7\n" + bytes(40), "image-format", "unreadable_image", id="PDF"),
        pytest.param(b"PK\x03\x04" + bytes(40), "image-format", "unreadable_image", id="archive"),
        pytest.param(b"\0\0\0\x18ftypheic" + bytes(40), "image-unsupported", "unreadable_image", id="HEIC"),
        pytest.param(b"P6 32 24 255\n" + bytes(32 * 24 * 3), "image-unsupported", "image_format", id="PPM"),
    ],
)
def test_files_that_are_not_images_and_images_of_unsupported_formats_are_distinguished(
    content, check, reason, tmp_path
):
    (tmp_path / "a.jpg").write_bytes(content)
    scanned = scan_image(str(tmp_path / "a.jpg"), str(tmp_path / "a.txt"), strict=True)
    assert ([problem.check for problem in scanned.problems], scanned.reason) == ([check], reason)


NO_LINE = {"label-case", "label-unreadable", "label-encoding", "label-too-many"}


def decoded_image():
    return DecodedImage(random_image(40, 40), Header("jpeg", 64, 48), 0.0)


class CrashingSource(FileRecords):
    """Kills its process at the image 1.jpg."""

    def sample(self, index, rng):
        if self.where(index).endswith("1.jpg"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().sample(index, rng)


@pytest.mark.parametrize("others", [0, 1, 3])
def test_an_image_that_crashes_its_process_is_one_finding(others, tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "FileRecords", CrashingSource)
    made = SmallDataSet(tmp_path, num_train=0, num_val=1)
    for stem in ["1", "2", "3", "4"][: 1 + others]:
        made.put("train", stem, jpeg(seed=int(stem)), GOOD_LINE)
    places = found_in(made, CheckConfig(workers=1, progress=False, img_size=64))
    (place,) = places["image-decode"]
    assert place == f"{made.folder}/images/train/1.jpg: train: decoding it crashes the process"


def test_nothing_is_known_about_an_image_that_crashes_its_process(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "FileRecords", CrashingSource)
    paths = [str(tmp_path / f"{number}.jpg") for number in range(6)]
    for path in paths:
        Path(path).write_bytes(encoded(".jpg", random_image(seed=4)[..., 0]))
    table = facts.check_decoding(paths, np.arange(6), workers=1, shown=False)
    crashed = np.zeros((), facts.DECODE_RECORD)
    crashed["state"] = facts.CRASHED
    assert table.facts_M["grey"].tolist() == [True, False, True, True, True, True]
    assert table.facts_M[1] == crashed


NOT_DAMAGE = {"image-extension", "image-bytes-after-end", "image-copy", "leak-content", "leak-pixels"}


@pytest.fixture(scope="module")
def damaged_set(tmp_path_factory) -> tuple[SmallDataSet, dict[str, Damaged]]:
    """Every kind of damage in every format, and each undamaged image."""
    made = SmallDataSet(tmp_path_factory.mktemp("damaged"), num_train=0, num_val=0)
    cases = {f"{number:04}": case for number, case in enumerate(damaged())}
    for stem, case in cases.items():
        made.put("train", stem, case.content, GOOD_LINE, "jpg" if case.suffix == "gif" else case.suffix)
    for number, (suffix, content) in enumerate(originals().values()):
        if suffix != "gif":
            made.put("val", f"whole{number}", content, GOOD_LINE, suffix)
    return made, cases


def reports_of_strict_decoders(case: Damaged, folder: Path) -> list[str]:
    """The decoders that report damage in a file: OpenCV, simplejpeg, and Pillow if it is installed."""
    path = folder / f"damaged.{case.suffix}"
    path.write_bytes(case.content)
    reports = [] if cv2.imread(str(path)) is not None else ["OpenCV"]
    if case.suffix == "jpg":
        try:
            simplejpeg.decode_jpeg(case.content)
        except ValueError as error:
            reports.append(f"simplejpeg: {error}")
    if importlib.util.find_spec("PIL") is not None:
        from PIL import Image

        try:
            Image.open(path).verify()
            Image.open(path).load()
        except Exception as error:  # Pillow raises many types for damaged files
            reports.append(f"Pillow: {error}")
    return reports


def test_every_image_in_which_a_strict_decoder_reports_damage_is_named(damaged_set, tmp_path):
    made, cases = damaged_set
    assert len({case.kind for case in cases.values()}) >= 20
    named = {
        Path(finding.where).stem
        for finding in check_data_set(made.yaml(), CONFIG).findings
        if (finding.topic not in NOT_DAMAGE and CHECKS[finding.topic].severity != "note")
        or finding.topic == "image-no-end"
    }
    reports = {stem: reports_of_strict_decoders(case, tmp_path) for stem, case in cases.items()}
    missed = {stem: decoders for stem, decoders in reports.items() if decoders and stem not in named}
    assert not missed, [(cases[stem].format, cases[stem].kind, decoders) for stem, decoders in missed.items()]
    assert sum(map(bool, reports.values())) > 200
    assert not {stem for stem in named if stem.startswith("whole")}, "undamaged images"


@pytest.mark.parametrize("workers", ["0", "1"])
def test_the_check_prints_nothing_but_its_report_on_damaged_images(workers, damaged_set, tmp_path):
    made, _ = damaged_set
    command = [sys.executable, "-m", "flatout", "yolo", "check", str(made.yaml()), "--workers", workers, "--all"]
    command += ["--preview", str(tmp_path / "sheet.png")]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=110, env=environment)
    assert done.returncode == 3
    assert done.stderr == ""
    # Messages of the decoders are part of the report.
    for words in ("extraneous bytes before marker", "libpng error", "wrong checksum"):
        assert words in done.stdout


@pytest.mark.parametrize("level", ["", "SILENT"])
def test_errors_of_libtiff_are_found_at_any_log_level_of_opencv(level, tmp_path):
    case = next(case for case in damaged() if (case.format, case.kind) == ("tiff deflate", "a quarter zero"))
    (tmp_path / "a.tif").write_bytes(case.content)
    call = f"print(decode_facts({str(tmp_path / 'a.tif')!r})['reason'])"
    code = f"from flatout.yolo.data.check.facts import decode_facts; {call}"
    environment = os.environ | ({"OPENCV_LOG_LEVEL": level} if level else {})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert "Decod" in done.stdout and done.stderr == ""


def test_warnings_that_libjpeg_prints_for_a_cmyk_image_count_as_damage():
    image = decoded_image()._replace(header=Header("jpeg", 40, 40, channels=4))
    warning = "Corrupt JPEG data: 7 extraneous bytes before marker 0xd9"
    assert facts.find_damage(jpeg(), image, [warning]) == warning
    assert facts.find_damage(jpeg(), image, []) == ""


def test_only_messages_printed_while_decoding_are_captured(capfd):
    os.write(2, b"before\n")
    with decoder_messages() as messages:
        os.write(2, b"libpng warning: iCCP: known incorrect sRGB profile\n[ERROR:0@0.123] global a.cpp:7 Why not\n")
        os.write(2, b"\x1b[2K a bar\n\n")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "before\nafter\n"
    assert messages == ["libpng warning: iCCP: known incorrect sRGB profile", "Why not"]
    with pytest.raises(ValueError, match="no"), decoder_messages():
        raise ValueError("no")
    os.write(2, b"still\n")
    assert capfd.readouterr().err == "still\n"


def test_a_quick_check_decodes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "decode", lambda content: pytest.fail("decoded"))
    assert set(found_in(SmallDataSet(tmp_path), CheckConfig(quick=True, progress=False, workers=0))) >= {"val-small"}


def test_strict_labels_drop_the_image_and_the_report_names_the_rule(tmp_path):
    made = SmallDataSet(tmp_path)
    made.put("train", "0", label=f"{GOOD_LINE}\n1 0.5 0.5 0.4 0.4\n")
    places = found_in(made, CheckConfig(strict=True, progress=False, workers=0, quick=True))
    assert "YOLOv7 drops the image: ragged rows" in places["label-columns"][0]


def test_the_command_exits_with_3_for_errors_and_writes_a_preview(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = SmallDataSet(tmp_path / "set")
    sheet = tmp_path / "sheet.png"
    arguments = ["yolo", "check", str(made.yaml()), "--workers", "0", "--preview", str(sheet)]
    assert main([*arguments, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["exit_code"] == 0
    assert plain["splits"]["train"]["total"] == 4
    made.put("train", "0", label="0 0.5 0.5 0.4\n")
    assert main(arguments) == 3
    text = capsys.readouterr().out
    assert "labels/train/0.txt:1: 4 columns" in text
    assert str(len(CHECKS)) in text.splitlines()[-1]
    image = cv2.imread(str(sheet))
    last_cell = image[-300:-30, -300:-30]
    assert (last_cell == last_cell[0, 0]).all(), "three of four images have labels, so the last of four cells is empty"
    assert (image == colour_of(0)).all(2).any(), "no box was drawn"


def test_the_check_imports_no_torch(tmp_path):
    code = (
        "import sys; from flatout.__main__ import main\n"
        f"code = main(['yolo', 'check', {str(SmallDataSet(tmp_path).yaml())!r}, '--quick', '--no-cache'])\n"
        "assert 'torch' not in sys.modules and 'cv2' not in sys.modules; sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
