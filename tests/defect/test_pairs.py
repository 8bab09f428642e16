"""Pairs of template and inspected board become images of three planes."""

import os
from pathlib import Path

import cv2
import numpy as np
import pytest
import tifffile

from bench.defect_boards import _floor, best_shift, moved
from flatout.defect.data.find import EvaluationImage
from flatout.defect.data.items import read_mask
from flatout.defect.data.pairs import PairReader, holds_pairs, list_pair_images, read_planes, read_template_planes
from flatout.defect.evaluate.evaluate import evaluate_images
from flatout.defect.evaluate.maps import HostMapMaker
from flatout.errors import DataError
from flatout.feed import DecodeError

BOARDS = Path(os.environ.get("FLATOUT_DATA", "none")) / "deeppcb_mini"


def write_pair(folder: Path, name: str, template: np.ndarray, inspected: np.ndarray) -> None:
    for kind, image in (("temp", template), ("test", inspected)):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / kind / f"{name}.png"), image)


def test_the_template_serves_as_both_references(tmp_path):
    template = np.full((40, 50), 255, np.uint8)
    inspected = template.copy()
    inspected[10:15, 20:25] = 0
    write_pair(tmp_path, "a", template, inspected)
    (pair,) = list_pair_images(tmp_path)
    assert pair.mask is None
    np.testing.assert_array_equal(read_planes(pair), np.stack((inspected, template, template)))
    np.testing.assert_array_equal(read_template_planes(pair.references[0]), np.stack([template] * 3))


def test_images_and_masks_of_pairs_may_be_bmp_files(tmp_path):
    inspected = np.random.default_rng(0).integers(0, 256, (9, 10)).astype(np.uint8)
    for kind, image in (("temp", inspected[::-1]), ("test", inspected), ("mask", (inspected > 200) * np.uint8(255))):
        (tmp_path / kind).mkdir()
        cv2.imwrite(str(tmp_path / kind / "a.bmp"), image)
    assert holds_pairs(tmp_path / "test/a.bmp")
    (pair,) = list_pair_images(tmp_path)
    np.testing.assert_array_equal(read_planes(pair), np.stack((inspected, inspected[::-1], inspected[::-1])))
    assert pair.mask is not None
    np.testing.assert_array_equal(read_mask(pair.mask), inspected > 200)


@pytest.mark.parametrize("shape", [(1, 9, 10), (9, 10, 1)])
def test_an_axis_of_one_plane_is_no_second_plane(tmp_path, shape):
    plane = np.arange(90, dtype=np.uint8).reshape(shape)
    for kind in ("temp", "test"):
        (tmp_path / kind).mkdir()
        tifffile.imwrite(tmp_path / kind / "a.tif", plane)
    (pair,) = list_pair_images(tmp_path)
    np.testing.assert_array_equal(read_planes(pair), np.stack([plane.reshape(9, 10)] * 3))


def test_a_board_without_template_is_named(tmp_path):
    write_pair(tmp_path, "a", np.zeros((9, 9), np.uint8), np.zeros((9, 9), np.uint8))
    (tmp_path / "temp/a.png").rename(tmp_path / "temp/b.png")
    with pytest.raises(DataError, match=r"a\.png: it has no partner of the same name in .*temp"):
        list_pair_images(tmp_path)
    with pytest.raises(DataError, match=r"no inspected images\. File names must end in \.bmp, "):
        list_pair_images(tmp_path / "none")


def test_spreadsheets_write_tables_with_semicolons_spaces_and_capitals(tmp_path):
    write_pair(tmp_path / "ä ö", "b 1", np.zeros((9, 9), np.uint8), np.ones((9, 9), np.uint8))
    rows = ["Template; TEST", '"ä ö/temp/b 1.png"; ä ö/test/b 1.png']
    for separator in ";\t,":
        text = "\r\n".join(["", *rows]).replace(";", separator).strip()
        (tmp_path / "pairs.csv").write_text(f"\ufeff{text}\r\n\r\n", encoding="utf-8")
        (pair,) = list_pair_images(tmp_path / "pairs.csv")
        assert pair.path == tmp_path / "ä ö/test/b 1.png" and pair.references == (tmp_path / "ä ö/temp/b 1.png",)


def test_two_files_of_one_name_are_not_chosen_between(tmp_path):
    write_pair(tmp_path, "a", np.zeros((9, 9), np.uint8), np.zeros((9, 9), np.uint8))
    cv2.imwrite(str(tmp_path / "test/a.jpg"), np.zeros((9, 9), np.uint8))
    with pytest.raises(DataError, match=r"test/a\.jpg: a\.png has the same name"):
        list_pair_images(tmp_path)


def test_masks_of_other_names_are_not_silently_left_out(tmp_path):
    write_pair(tmp_path, "a", np.zeros((9, 9), np.uint8), np.zeros((9, 9), np.uint8))
    (tmp_path / "mask").mkdir()
    cv2.imwrite(str(tmp_path / "mask/a_mask.png"), np.zeros((9, 9), np.uint8))
    with pytest.raises(DataError, match=r"no file in it has the name of an image in .*a_mask\.png"):
        list_pair_images(tmp_path)


def test_one_inspected_image_is_a_pair_with_its_template(tmp_path):
    for name in "ab":
        write_pair(tmp_path, name, np.zeros((9, 9), np.uint8), np.ones((9, 9), np.uint8))
        for kind in ("temp", "test"):
            (tmp_path / f"{name}_{kind}.png").write_bytes((tmp_path / kind / f"{name}.png").read_bytes())
    for path in (tmp_path / "test/b.png", tmp_path / "b_test.png"):
        assert holds_pairs(path)
        if path.parent == tmp_path:
            (tmp_path / "temp").rename(tmp_path / "elsewhere")
        (pair,) = list_pair_images(path)
        assert pair.path == path and len(pair.references) == 1
    assert not holds_pairs(tmp_path / "b_temp.png") and not holds_pairs(tmp_path / "none_test.png")


def test_pairs_in_a_folder_named_good_are_good_unless_a_label_says_otherwise(tmp_path):
    good = tmp_path / "good"
    for name in "abc":
        write_pair(good, name, np.zeros((9, 9), np.uint8), np.zeros((9, 9), np.uint8))
    (good / "boxes").mkdir()
    (good / "boxes/b.txt").write_text("1 1 3 3\n")
    (good / "boxes/c.txt").write_text("")
    assert [image.is_good for image in list_pair_images(good)] == [True, False, True]


def test_colours_of_16_bits_become_brightness_without_wrapping_around(tmp_path):
    rng = np.random.default_rng(0)
    inspected = rng.integers(0, 1 << 16, (9, 9, 3)).astype(np.uint16)
    write_pair(tmp_path, "a", np.zeros((9, 9), np.uint16), inspected)
    (pair,) = list_pair_images(tmp_path)
    expected = inspected @ np.array([0.114, 0.587, 0.299])
    np.testing.assert_allclose(read_planes(pair)[0], expected * 255 / expected.max(), atol=0.01)


def test_pairs_of_different_depth_are_refused(tmp_path):
    write_pair(tmp_path, "a", np.full((9, 9), 40_000, np.uint16), np.full((9, 9), 200, np.uint8))
    (pair,) = list_pair_images(tmp_path)
    with pytest.raises(DecodeError, match=r"its values are uint8, those of its reference .* are uint16"):
        read_planes(pair)


@pytest.mark.skipif(not BOARDS.is_dir(), reason="FLATOUT_DATA names no folder with deeppcb_mini")
def test_a_plain_difference_reaches_its_published_overlap_on_real_boards():
    pairs = list_pair_images(BOARDS / "val")
    images = [EvaluationImage(pair.path, pair.mask, is_good=False) for pair in pairs]
    outcome = evaluate_images(HostMapMaker(_floor), images, read=PairReader(pairs, None), threshold=0.5)
    assert outcome.scores()["pixel_IoU"] == pytest.approx(0.462, abs=0.005)


@pytest.mark.parametrize("shift", [(0, 0), (1, -2), (-4, 4), (3, 0)])
def test_a_template_is_moved_to_where_it_fits_whatever_the_defects(shift):
    rng = np.random.default_rng(3)
    target = cv2.resize((rng.random((12, 14)) > 0.5).astype(np.uint8) * 255, (112, 96), interpolation=cv2.INTER_NEAREST)
    reference = moved(target, (-shift[0], -shift[1]))
    target[20:26, 30:38] = 255 - target[20:26, 30:38]
    assert best_shift(target, reference, 4) == shift
    inner = slice(4, -4)
    differs = moved(reference, shift)[inner, inner] != target[inner, inner]
    assert differs.sum() == 6 * 8, "the defect, and nothing else"


def test_a_template_that_fits_everywhere_stays_where_it_is():
    plane = np.full((32, 40), 90, np.uint8)
    assert best_shift(plane, plane, 3) == (0, 0)
    np.testing.assert_array_equal(moved(plane, (0, 0)), plane)


def test_a_coloured_image_is_converted_to_its_brightness(tmp_path):
    template = np.full((40, 48), 255, np.uint8)
    inspected = np.full((40, 48, 3), 255, np.uint8)
    inspected[10:20, 10:20] = (0, 0, 200)  # red: dark in blue and green, yet not black
    write_pair(tmp_path, "a", template, inspected)
    (pair,) = list_pair_images(tmp_path)
    target, ref1, _ = read_planes(pair)
    assert target[15, 15] == round(0.299 * 200)
    np.testing.assert_array_equal(target[:10], ref1[:10])
