"""What `test` and `predict` write about blobs: masks, boxes, verdicts, and a page that needs nothing else."""

import csv
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import cv2
import numpy as np
import pytest
import tifffile

from flatout.__main__ import main
from flatout.defect import predict as prediction
from flatout.defect.data.find import EvaluationImage
from flatout.defect.evaluate.blobs import inspect_blobs
from flatout.defect.evaluate.evaluate import EvaluatedImage, evaluate_images
from flatout.defect.evaluate.maps import HostMapMaker, Mapped
from flatout.defect.options import TestOptions
from flatout.defect.plots import overlay
from flatout.defect.report import MAX_CROPS, Report, crop_around
from tests.defect.boards import write_boards

SHAPE = (60, 50)


def board(number: int) -> np.ndarray:
    """Three planes; target has a bright square of heat 0.8, and image 1 also a fainter one of heat 0.6."""
    planes = np.full((3, *SHAPE), 50, np.float32)
    planes[0, 10:14, 20:25] = 204
    if number == 1:
        planes[0, 40:42, 5:7] = 153
    return planes


def heat_of(planes_CHW: np.ndarray) -> np.ndarray:
    """Heat by brightness: 204 is 0.8."""
    return np.where(planes_CHW[0] > 100, planes_CHW[0] / 255, 0).astype(np.float32)


def evaluated(planes_CHW: np.ndarray, heat_HW: np.ndarray, mask_HW: np.ndarray) -> EvaluatedImage:
    image = EvaluationImage(Path("0.tiff"), None, is_good=False)
    return EvaluatedImage(image, Mapped(heat_HW, lambda: planes_CHW), mask_HW, [])


def written(folder: Path, *, threshold: float, is_labelled: bool = True, **options) -> Path:
    """The files of two images: the square of the first is labelled, in the second it is a false one."""
    out = folder / "out"
    images = []
    for number in range(2):
        path = folder / f"{number}.tiff"
        tifffile.imwrite(path, board(number), photometric="minisblack")
        mask = np.zeros(SHAPE, np.uint8)
        mask[10:14, 20:25] = 255
        mask[50:53, 40:43] = 255  # heat 0: missed
        tifffile.imwrite(folder / "mask.tiff", mask)
        is_good = number == 1 and is_labelled
        images.append(EvaluationImage(path, folder / "mask.tiff" if is_labelled and not number else None, is_good))
    writer = prediction._Writer(TestOptions(output_dir=str(out), **options), images, threshold=threshold)
    writer.finish(
        evaluate_images(HostMapMaker(heat_of), images, threshold=threshold, observers=[writer], in_threads=writer.write)
    )
    return out


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_masks_boxes_and_verdicts_are_those_at_the_threshold(tmp_path):
    out = written(tmp_path, threshold=0.7)
    mask = cv2.imread(str(out / "1_mask.png"), cv2.IMREAD_UNCHANGED)
    np.testing.assert_array_equal(mask, np.where(heat_of(board(1)) >= 0.7, 255, 0))
    box = {"x1": "20", "y1": "10", "x2": "25", "y2": "14", "area_px": "20", "score": str(float(np.float32(0.8)))}
    assert table(out / "blobs.csv") == [
        {"image": "0.tiff", **box, "is_hit": "True"},
        {"image": "1.tiff", **box, "is_hit": "False"},
    ]
    rows = table(out / "images.csv")
    assert [(row["verdict"], row["num_blobs"], row["num_false_blobs"], row["area_px"]) for row in rows] == [
        ("fail", "1", "0", "20"),
        ("fail", "1", "1", "20"),
    ]
    scores = json.loads((out / "results.json").read_text())
    assert scores["false_blobs_per_image"] == 0.5 and scores["blob_recall"] == 0.5
    assert scores["pixel_F1"] == pytest.approx(2 * 20 / (2 * 20 + 20 + 9))
    assert {row["verdict"] for row in table(written(tmp_path, threshold=0.9) / "images.csv")} == {"pass"}


def test_images_without_a_label_get_verdicts_and_no_scores(tmp_path):
    out = written(tmp_path, threshold=0.55, is_labelled=False)
    rows = table(out / "images.csv")
    assert [(row["verdict"], row["num_blobs"], row["num_false_blobs"]) for row in rows] == [
        ("fail", "1", ""),
        ("fail", "2", ""),
    ]
    assert {row["is_hit"] for row in table(out / "blobs.csv")} == {""}
    assert json.loads((out / "results.json").read_text())["pixel_F1"] is None
    page = (out / "report.html").read_text()
    assert "Found: 3 blobs" in page and "Missed" not in page and "All scores" not in page


def test_masks_and_report_can_be_switched_off(tmp_path):
    out = written(tmp_path, threshold=0.7, save_masks=False, report=False, save_maps=False, save_pictures=False)
    assert {path.name for path in out.iterdir()} == {"images.csv", "blobs.csv", "detections.csv", "results.json"}


class Links(HTMLParser):
    """Everything that a browser would load, and tags that are not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("img", "br", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_needs_no_other_file_and_no_network(tmp_path):
    page = (written(tmp_path, threshold=0.7) / "report.html").read_text()
    parsed = Links(page)
    assert parsed.open == [] and parsed.links and all(link.startswith("data:image/") for link in parsed.links)
    assert not re.search(r"<script|@import|url\(|https?:", page)
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page
    assert "Missed: 1 of 2 labelled defects" in page and "False: 1 blob on no defect" in page
    assert "Worst: 2 images with" in page and "x 40 to 42, y 50 to 52; 9 px" in page


def test_the_page_shows_the_worst_and_says_how_many_are_left_out():
    report = Report(0.5)
    for number in range(MAX_CROPS + 6):
        heat = np.zeros(SHAPE, np.float32)
        heat[20, 20] = 0.5 + number / 100
        found = inspect_blobs(heat, 0.5, np.zeros(SHAPE, np.bool_))
        report.add(f"<{number}>.tiff", evaluated(board(0), heat, np.zeros(SHAPE, np.bool_)), found)
    page = report.page({"threshold": 0.5}, title="a & b")
    assert "6 more are not shown" in page and "&lt;29&gt;.tiff" in page and "heat up to 0.790" in page
    assert "heat up to 0.550" not in page, "the lowest are those that are left out"
    assert "a &amp; b" in page


def test_one_bad_image_does_not_fill_the_page():
    heat = np.zeros((200, 200), np.float32)
    heat[::10, ::10] = 0.6
    heat[40, 40:44] = heat[80, 80:82] = 0.6  # the largest of equal ones are shown
    good = np.zeros(heat.shape, np.bool_)
    report = Report(0.5)
    report.add("bad.tiff", evaluated(np.zeros((3, 200, 200)), heat, good), inspect_blobs(heat, 0.5, good))
    page = report.page({"threshold": 0.5}, title="bad")
    assert page.count('<figure class="false">') == 4 and "396 more are not shown" in page
    assert "4 px, heat" in page and "2 px, heat" in page


@pytest.mark.parametrize("box", [(0, 0, 3, 3), (97, 197, 100, 200), (40, 20, 90, 60), (0, 0, 100, 200)])
def test_a_crop_is_inside_the_image_and_holds_its_box(box):
    rows, columns = crop_around(box, (200, 100))
    assert 0 <= rows.start <= box[1] < box[3] <= rows.stop <= 200
    assert 0 <= columns.start <= box[0] < box[2] <= columns.stop <= 100


@pytest.mark.parametrize(("threshold", "like"), [(0.02, 0.5), (0.25, 0.5), (0.5, 0.5), (0.8, 0.8)])
def test_what_reaches_a_low_threshold_has_the_colour_of_one_half(threshold, like):
    """A network that was trained for an epoch may give no defect more than 0.1."""
    shape = (8, 8)
    target = np.full(shape, 200, np.float32)
    found, expected = (
        overlay(target, np.full(shape, heat, np.float32), None, threshold=limit).astype(int)
        for heat, limit in ((threshold, threshold), (like, 0.5))
    )
    assert np.abs(found - expected).max() <= 4, "a step of the colour map"
    assert np.abs(found - 200).max() > 50


@pytest.mark.parametrize(
    "name", ["00_heat.tiff", "00_result.png", "00_mask.png", "images.csv", "blobs.csv", "results.json", "report.html"]
)
def test_a_result_that_cannot_be_written_is_named_with_exit_code_5(name, tmp_path, capsys):
    boards, out = write_boards(tmp_path / "boards", 1), tmp_path / "out"
    (out / name).mkdir(parents=True)
    assert main(["defect", "test", "--test_path", str(boards), "--output_dir", str(out)]) == 5
    assert f"{out / name}: cannot be written: Is a directory. Make room, or choose another" in capsys.readouterr().err


def test_tables_hold_the_names_of_files_that_are_no_utf_8(tmp_path):
    boards, out = write_boards(tmp_path / "boards", 1), tmp_path / "out"
    for kind in ("temp", "test", "mask"):
        for file in (boards / kind).glob("00.*"):
            os.rename(file, os.fsencode(file.parent) + b"/plat\xfe" + file.suffix.encode())
    assert main(["defect", "predict", "--test_path", str(boards), "--output_dir", str(out)]) == 0
    assert b"plat\xfe.png," in (out / "images.csv").read_bytes()
