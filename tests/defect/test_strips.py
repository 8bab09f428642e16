"""Files of any layout and range become the same canonical planes."""

import io
from pathlib import Path

import cv2
import numpy as np
import pytest
import tifffile

from flatout.defect.strips.canonical import canonical
from flatout.defect.strips.decode import decode
from flatout.defect.strips.find import list_images, list_judged, root_of, training_folder
from flatout.defect.strips.items import Strips, read_canonical, read_mask
from flatout.errors import DataError
from flatout.feed.source import DecodeError
from tests.defect.golden_files import records
from tests.defect.lzw_files import LZW_FILES, planes
from tests.golden_cases import golden_cases


@pytest.mark.parametrize("case", golden_cases("defect/ingest.json", records("cases"), also=("defect/ingest.npz",)))
def test_a_file_becomes_its_canonical_planes(case):
    record, arrays = case
    name = record["name"]
    if f"bytes_{name}" not in arrays or f"hwc_{name}" not in arrays:
        pytest.skip("the file or its canonical form is absent")
    planes_CHW = canonical(decode(arrays[f"bytes_{name}"].tobytes()))
    assert planes_CHW.dtype == np.float32
    assert planes_CHW.flags.c_contiguous
    np.testing.assert_allclose(planes_CHW.transpose(1, 2, 0), arrays[f"hwc_{name}"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("planes", [3, 4])
@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_lzw_written_by_opencv_keeps_its_stored_plane_order(kind, planes):
    stored = np.random.default_rng(0).integers(0, 250, (20, 30, planes)).astype(kind)
    as_opencv_wants_it = stored.copy()
    as_opencv_wants_it[..., :3] = stored[..., 2::-1]
    content = cv2.imencode(".tiff", as_opencv_wants_it)[1].tobytes()
    with pytest.raises(ValueError, match="LZW"):
        tifffile.imread(io.BytesIO(content))
    np.testing.assert_array_equal(decode(content), stored)


@pytest.mark.parametrize("name", LZW_FILES)
def test_lzw_with_planes_one_after_another_or_of_grey_gives_what_is_stored(name):
    kind, num = name.split(", ")[0], int(name.split()[1])
    np.testing.assert_array_equal(canonical(decode(LZW_FILES[name])), planes(kind, num)[:3].astype(np.float32))


def test_pages_of_a_tiff_are_planes():
    planes = [np.full((20, 30), value, np.uint8) for value in (1, 2, 3)]
    content = cv2.imencodemulti(".tiff", planes)[1].tobytes()
    assert canonical(decode(content))[:, 0, 0].tolist() == [1, 2, 3]


def test_blue_of_a_png_is_target_and_grey_fills_all_planes():
    blue_green_red = np.dstack([np.full((8, 9), value, np.uint8) for value in (10, 20, 30)])
    assert canonical(decode(cv2.imencode(".png", blue_green_red)[1].tobytes()))[:, 0, 0].tolist() == [10, 20, 30]
    grey = cv2.imencode(".png", np.full((8, 9), 7, np.uint8))[1].tobytes()
    assert canonical(decode(grey))[:, 3, 3].tolist() == [7, 7, 7]
    with_alpha = cv2.imencode(".png", np.dstack([blue_green_red, blue_green_red[..., :1]]))[1].tobytes()
    assert canonical(decode(with_alpha)).shape == (3, 8, 9)


def test_canonical_never_writes_into_what_it_was_given():
    stored = np.full((3, 10, 12), 300, np.float32)
    stored[0, 0, 0] = -5
    kept = stored.copy()
    canonical(stored)
    np.testing.assert_array_equal(stored, kept)


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.zeros((20, 20), np.uint8), "three planes"),
        (np.zeros((20, 20, 5), np.uint8), "no axis of 3 or 4 planes"),
        (np.zeros((2, 20, 20), np.uint8), "no axis of 3 or 4 planes"),
        (np.full((3, 20, 20), np.nan, np.float32), "not finite"),
        (np.zeros((3, 20, 20), np.complex64), "as numbers"),
    ],
)
def test_what_is_no_image_is_refused(array, text):
    with pytest.raises(DecodeError, match=text):
        canonical(array)


@pytest.mark.parametrize("content", [b"", b"II*\0", b"\x89PNG\r\n", b"hello", b"II*\0" + bytes(range(256))])
def test_broken_files_name_themselves(content, tmp_path: Path):
    path = tmp_path / "broken.tiff"
    path.write_bytes(content)
    with pytest.raises(DecodeError, match=r"broken\.tiff"):
        read_canonical(path)


def test_an_image_of_another_size_is_an_error_that_names_it(tmp_path: Path):
    for name, height in (("a.tiff", 20), ("b.tiff", 21)):
        tifffile.imwrite(tmp_path / name, np.zeros((3, height, 30), np.float32))
    strips = Strips(list_images(tmp_path, "tiff"))
    with pytest.raises(DecodeError, match=r"b\.tiff.*21 x 30.*20 x 30"):
        strips.decode(1)


def test_files_are_listed_by_name_whatever_the_case_of_their_extension(tmp_path: Path):
    for name in ("b.TIFF", "a.tif", "c.png", "C.tiff"):
        (tmp_path / name).touch()
    assert [path.name for path in list_images(tmp_path, "tiff")] == ["C.tiff", "a.tif", "b.TIFF"]
    with pytest.raises(DataError, match="no such folder"):
        list_images(tmp_path / "none", "tiff")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no \.tiff or \.tif files"):
        list_images(tmp_path / "empty", "tiff")


def test_the_root_is_found_with_and_without_a_slash(tmp_path: Path):
    (tmp_path / "train/good").mkdir(parents=True)
    for text in (f"{tmp_path}/train/good/", f"{tmp_path}/train/good", str(tmp_path)):
        assert root_of(text) == tmp_path
        assert training_folder(text) == tmp_path / "train/good"


def test_judged_images_know_their_masks(tmp_path: Path):
    for name in ("test/good/g.tiff", "test/bright_spots/a.tiff", "test/bright_spots/b.tiff"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "ground_truth/bright_spots").mkdir(parents=True)
    (tmp_path / "ground_truth/bright_spots/a_mask.png").touch()
    good, a, b = list_judged(tmp_path, "test", "tiff")
    assert good.is_good and good.is_known and good.mask is None
    assert a.mask is not None and a.mask.name == "a_mask.png" and not a.is_good
    assert not b.is_known
    assert list_judged(tmp_path, "valid", "tiff") == []


@pytest.mark.parametrize("shape", [(12, 10), (3, 12, 10), (12, 10, 3), (1, 12, 10)])
def test_masks_of_any_layout_are_read(shape, tmp_path: Path):
    mask = np.zeros((12, 10), np.uint8)
    mask[3:5, 4:7] = 255
    stored = np.broadcast_to(mask[..., None] if shape[-1] == 3 else mask, shape)
    tifffile.imwrite(tmp_path / "m.tiff", np.ascontiguousarray(stored))
    np.testing.assert_array_equal(read_mask(tmp_path / "m.tiff"), mask > 0)
