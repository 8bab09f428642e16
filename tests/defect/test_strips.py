"""Files of any layout and range become the same canonical planes."""

import importlib.util
import io
import struct
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import tifffile

from flatout.defect.check import _Checker
from flatout.defect.data.decode import decode
from flatout.defect.data.find import list_images, list_split, root_of, training_folder
from flatout.defect.data.items import Strips, canonical, read_canonical, read_mask
from flatout.defect.input import InputConfig, store_config
from flatout.errors import DataError
from flatout.feed.source import DecodeError
from tests.defect.golden_files import records
from tests.defect.hostile_strips import packed_tiff
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


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("bits", [2, 4, 6, 10, 12, 14, 24])
@pytest.mark.parametrize("shape", [(13, 21), (13, 21, 3), (6, 1)])
def test_packed_integers_are_the_values_that_are_stored(bits, shape, order):
    """tifffile unpacks them only with an extra package, OpenCV scales them to 16 bits: 4080 where 255 is stored."""
    stored = np.random.default_rng(bits).integers(0, 1 << bits, shape)
    stored.flat[0] = min(255, (1 << bits) - 1)
    content = packed_tiff(stored, bits, order=order)
    np.testing.assert_array_equal(decode(content).reshape(shape), stored)
    # Not interpreted: neither MINISWHITE nor an orientation changes the stored values.
    for tags in ({"t262": 0}, {"t274": 6}, {"t274": 3}):
        if len(shape) == 2:
            np.testing.assert_array_equal(decode(packed_tiff(stored, bits, order=order, **tags)).reshape(shape), stored)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("planes_last", [False, True])
def test_packed_integers_in_tiles_are_the_values_that_are_stored(planes_last, order):
    """Tiles of 32 x 16 pixels, those at the edges padded, first written as bytes; then their tags say 12 bits."""
    per_row = 3 if planes_last else 1
    stored = np.random.default_rng(0).integers(0, 4096, (20, 40, 3) if planes_last else (3, 20, 40))
    bits = stored.reshape(*stored.shape[: 1 if planes_last else 2], -1)[..., None] >> np.arange(12)[::-1] & 1
    packed = np.packbits(bits.reshape(*bits.shape[:-2], -1).astype(np.uint8), axis=-1)
    sink = io.BytesIO()
    layout = {} if planes_last else {"planarconfig": "separate", "photometric": "rgb"}
    tifffile.imwrite(sink, packed, tile=(16, 48 * per_row), byteorder=order, metadata=None, **layout)
    content = bytearray(sink.getvalue())
    with tifffile.TiffFile(io.BytesIO(content)) as file:
        tags = file.pages.first.tags
        for tag, kind, value in ((256, "I", 40), (322, "I", 32), (258, "H", 12)):
            for number in range(tags[tag].count):
                struct.pack_into(order + kind, content, tags[tag].valueoffset + 2 * number, value)
        if planes_last:
            struct.pack_into(f"{order}H", content, tags[277].valueoffset, 3)
    np.testing.assert_array_equal(decode(bytes(content)), stored)


def test_imagecodecs_changes_nothing():
    pytest.importorskip("imagecodecs", reason="compares with this optional package")
    stored = np.random.default_rng(0).integers(0, 4096, (13, 21, 3)).astype(np.uint16)
    for content in (packed_tiff(stored, 12), *LZW_FILES.values()):
        np.testing.assert_array_equal(decode(content), tifffile.imread(io.BytesIO(content)))


@pytest.mark.parametrize("name", LZW_FILES)
@pytest.mark.parametrize(("tag", "value"), [(262, 0), (274, 6), (274, 3)])
def test_lzw_gives_the_stored_values_whatever_other_tags_say(name, tag, value):
    content, order = bytearray(LZW_FILES[name]), "<" if LZW_FILES[name][:2] == b"II" else ">"
    expected = decode(bytes(content))
    # The entry of the resolution unit, which is not needed, is replaced by another tag.
    with tifffile.TiffFile(io.BytesIO(content)) as file:
        unit = file.pages.first.tags[296]
    struct.pack_into(f"{order}HHIHxx", content, unit.offset, tag, 3, 1, value)
    np.testing.assert_array_equal(decode(bytes(content)), expected)


@pytest.mark.parametrize("name", LZW_FILES)
def test_lzw_data_that_ends_early_is_refused_not_filled_with_black(name):
    content = LZW_FILES[name]
    with tifffile.TiffFile(io.BytesIO(content)) as file:
        page = file.pages.first
        start, count = page.dataoffsets[-1], page.databytecounts[-1]
    damaged = content[: start + count // 2] + b"\xff" * (count - count // 2) + content[start + count :]
    with pytest.raises(DecodeError, match=r"cannot be uncompressed \(LZW\)"):
        decode(damaged)


@pytest.mark.parametrize("code", [34712, 34933, 50000, 50001])
def test_a_missing_codec_is_named_and_never_decodes_to_black(code):
    if importlib.util.find_spec("imagecodecs") is not None:
        pytest.skip("imagecodecs is installed")
    content = packed_tiff(np.zeros((8, 9), int), 8, t259=code)
    with pytest.raises(DecodeError, match=r"needs the package imagecodecs .* save it uncompressed"):
        decode(content)


def test_jpeg_inside_tiff_is_decoded_by_opencv_or_refused():
    image = cv2.resize(np.random.default_rng(0).integers(0, 256, (4, 5, 3), np.uint8), (40, 32))
    content = cv2.imencode(".tiff", image, [cv2.IMWRITE_TIFF_COMPRESSION, 7])[1].tobytes()
    found = decode(content)
    assert np.abs(found.astype(int) - image[..., ::-1]).mean() < 20
    with tifffile.TiffFile(io.BytesIO(content)) as file:
        photometric = file.pages.first.tags[262]
    turned = bytearray(content)
    struct.pack_into("<HHIHxx", turned, photometric.offset, 262, 3, 1, 0)
    with pytest.raises(DecodeError, match="JPEG data of a kind that is not supported"):
        decode(bytes(turned))


def test_pages_of_a_tiff_are_planes():
    planes = [np.full((20, 30), value, np.uint8) for value in (1, 2, 3)]
    content = cv2.imencodemulti(".tiff", planes)[1].tobytes()
    assert canonical(decode(content))[:, 0, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("names", "there"),
    [
        (["README", "a.md"], "; it holds .md files and files without an extension."),
        (["README"], "; it holds files without an extension."),
        (["a.md", "b.txt", ".hidden"], "; it holds .md, .txt files."),
        ([], "."),
    ],
)
def test_a_folder_without_images_says_what_it_holds(tmp_path, names, there):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(DataError) as caught:
        list_images(tmp_path, "tiff")
    assert str(caught.value) == f"{tmp_path}: no .tiff or .tif files{there}"


def test_blue_of_a_png_is_target_and_grey_fills_all_planes():
    blue_green_red = np.dstack([np.full((8, 9), value, np.uint8) for value in (10, 20, 30)])
    assert canonical(decode(cv2.imencode(".png", blue_green_red)[1].tobytes()))[:, 0, 0].tolist() == [10, 20, 30]
    grey = cv2.imencode(".png", np.full((8, 9), 7, np.uint8))[1].tobytes()
    assert canonical(decode(grey))[:, 3, 3].tolist() == [7, 7, 7]
    with_alpha = cv2.imencode(".png", np.dstack([blue_green_red, blue_green_red[..., :1]]))[1].tobytes()
    assert canonical(decode(with_alpha)).shape == (3, 8, 9)


def test_canonical_never_modifies_its_argument():
    stored = np.full((3, 10, 12), 300, np.float32)
    stored[0, 0, 0] = -5
    kept = stored.copy()
    canonical(stored)
    np.testing.assert_array_equal(stored, kept)


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.zeros((20, 20), np.uint8), "three planes"),
        (np.zeros((20, 20, 5), np.uint8), r"has no first or last axis of 3 planes \(target, ref1, ref2\) or 4"),
        (np.zeros((2, 20, 20), np.uint8), r"has no first or last axis of 3 planes \(target, ref1, ref2\) or 4"),
        (np.full((3, 20, 20), np.nan, np.float32), "not finite"),
        (np.zeros((3, 20, 20), np.complex64), "as numbers"),
    ],
)
def test_arrays_that_are_not_images_are_refused(array, text):
    with pytest.raises(DecodeError, match=text):
        canonical(array)


@pytest.mark.parametrize("content", [b"", b"II*\0", b"\x89PNG\r\n", b"hello", b"II*\0" + bytes(range(256))])
def test_errors_name_the_broken_file(content, tmp_path: Path):
    path = tmp_path / "broken.tiff"
    path.write_bytes(content)
    with pytest.raises(DecodeError, match=r"broken\.tiff"):
        read_canonical(path)


def test_an_image_of_another_size_is_an_error_that_names_it(tmp_path: Path):
    for name, height in (("a.tiff", 20), ("b.tiff", 21)):
        tifffile.imwrite(tmp_path / name, np.zeros((3, height, 30), np.float32))
    strips = Strips(list_images(tmp_path, "tiff"))
    with pytest.raises(DecodeError, match=r"b\.tiff.*30 x 21.*30 x 20"):
        strips.decode(1)


def test_files_are_listed_by_name_whatever_the_case_of_their_extension(tmp_path: Path):
    for name in ("b.TIFF", "a.tif", "c.png", "C.tiff"):
        (tmp_path / name).touch()
    assert [path.name for path in list_images(tmp_path, "tiff")] == ["C.tiff", "a.tif", "b.TIFF"]
    with pytest.raises(DataError, match="no such folder"):
        list_images(tmp_path / "none", "tiff")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no \.tiff or \.tif files\.$"):
        list_images(tmp_path / "empty", "tiff")
    for name in ("README", "notes.md"):
        (tmp_path / "empty" / name).touch()
    with pytest.raises(DataError, match=r"no \.tiff or \.tif files; it holds \.md files and files without"):
        list_images(tmp_path / "empty", "tiff")
    (tmp_path / "empty/a.PNG").touch()
    with pytest.raises(DataError, match=r"it holds \.md, \.png files and .* Choose their format with --img_format\.$"):
        list_images(tmp_path / "empty", "tiff")


def test_the_root_is_found_with_and_without_a_slash(tmp_path: Path):
    (tmp_path / "train/good").mkdir(parents=True)
    for text in (f"{tmp_path}/train/good/", f"{tmp_path}/train/good", str(tmp_path)):
        assert root_of(text) == tmp_path
        assert training_folder(text) == tmp_path / "train/good"


def test_the_images_of_a_split_are_listed_with_their_masks(tmp_path: Path):
    for name in ("test/good/g.tiff", "test/bright_spots/a.tiff", "test/bright_spots/b.tiff"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "ground_truth/bright_spots").mkdir(parents=True)
    (tmp_path / "ground_truth/bright_spots/a_mask.png").touch()
    good, a, b = list_split(tmp_path, "test", "tiff")
    assert good.is_good and good.is_labelled and good.mask is None
    assert a.mask is not None and a.mask.name == "a_mask.png" and not a.is_good
    assert not b.is_labelled
    assert list_split(tmp_path, "valid", "tiff") == []


@pytest.mark.parametrize("shape", [(12, 10), (3, 12, 10), (12, 10, 3), (1, 12, 10)])
def test_masks_of_any_layout_are_read(shape, tmp_path: Path):
    mask = np.zeros((12, 10), np.uint8)
    mask[3:5, 4:7] = 255
    stored = np.broadcast_to(mask[..., None] if shape[-1] == 3 else mask, shape)
    tifffile.imwrite(tmp_path / "m.tiff", np.ascontiguousarray(stored))
    np.testing.assert_array_equal(read_mask(tmp_path / "m.tiff"), mask > 0)


def test_groups_replace_a_cache_that_is_too_small_for_all_images_with_a_warning(caplog):
    strips = Strips([f"{number}.tiff" for number in range(8)], shape_hw=(32, 32))
    config = InputConfig(total_batch=2, epochs=1, workers=2, group_images=3, cache_size=5)
    grouped = store_config(strips, config)
    assert (grouped.policy, grouped.budget_bytes) == ("lru", 2 * 3 * strips.item_bytes)
    assert caplog.messages == [
        "--cache_size 5 is less than the 8 images: with --group_images 3, each worker keeps one group instead."
    ]
    caplog.clear()
    assert store_config(strips, replace(config, cache_size=8)).policy != "lru" and not caplog.messages


def test_the_error_of_an_unreadable_mask_names_its_file_once(tmp_path: Path):
    empty, deep = tmp_path / "empty.png", tmp_path / "deep.tiff"
    empty.write_bytes(b"")
    tifffile.imwrite(deep, np.zeros((2, 2, 6, 6), np.uint8))
    for path, reason in ((empty, "it is empty"), (deep, r"the mask has shape \(2, 2, 6, 6\); it must be \[H, W\]")):
        with pytest.raises(DecodeError, match=rf"^{path}: {reason}") as refused:
            read_mask(path)
        assert str(refused.value).count(path.name) == 1
        [finding] = _Checker(patch=32).mask(tmp_path / "image.tiff", path)
        assert finding.where == str(path) and path.name not in finding.value


def test_what_is_given_keeps_its_values_whoever_owns_their_memory():
    memory = np.linspace(0, 4000, 3 * 8 * 10, dtype=np.float32)
    for stored in (memory.reshape(3, 8, 10), memory.reshape(3, 8, 10).view(), memory[:].reshape(8, 10, 3)):
        before = stored.copy()
        assert canonical(stored).max() == 255
        assert (stored == before).all()
