"""Images decode to the pixels of cv2.imread, whichever decoder is used."""

import builtins
import io
import itertools
import os
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from flatout.feed import DecodeError
from flatout.images import DecodedImage, decode, header_of, read_image
from flatout.yolo.data.letterbox import fit, fit_tightly, letterbox, resize_long_side, resized_hw
from tests.reference.boxes_of_yolov7 import fit_stretched
from tests.yolo.data.drawn_set import chunk, encoded, exif, flat_png, jpeg, oriented_jpeg, png, random_image
from tests.yolo.data.hostile_images import animated_png, odd_exif, odd_jpegs, oversized_headers, segment, webp_with_exif

ORIENTATIONS = range(1, 9)
SUBSAMPLINGS = {"444": 0x111111, "422": 0x211111, "420": 0x221111, "440": 0x121111, "411": 0x411111}


def as_imread(content: bytes, folder: Path, suffix: str) -> np.ndarray:
    path = folder / f"image{suffix}"
    path.write_bytes(content)
    image = cv2.imread(str(path))
    assert image is not None
    return image


@pytest.mark.parametrize("sampling", SUBSAMPLINGS)
@pytest.mark.parametrize("progressive", [0, 1])
@pytest.mark.parametrize("grey", [False, True])
def test_jpeg_decodes_to_the_pixels_of_imread(sampling, progressive, grey, tmp_path):
    image = random_image(83, 61, seed=3)
    content = encoded(
        ".jpg", image[..., 0] if grey else image,
        cv2.IMWRITE_JPEG_SAMPLING_FACTOR, SUBSAMPLINGS[sampling], cv2.IMWRITE_JPEG_PROGRESSIVE, progressive,
    )  # fmt: skip
    found = decode(content)
    np.testing.assert_array_equal(found.image, as_imread(content, tmp_path, ".jpg"))
    assert found.missing == 0


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_every_orientation_is_applied_as_by_imread(orientation, tmp_path):
    content = oriented_jpeg(orientation, seed=4)
    found = decode(content)
    np.testing.assert_array_equal(found.image, as_imread(content, tmp_path, ".jpg"))
    assert found.header.orientation == orientation
    assert found.header.size_wh == found.image.shape[1::-1]
    assert found.image.flags.c_contiguous


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_the_orientation_of_a_png_is_applied_too(orientation, tmp_path):
    plain = png(seed=4)
    content = plain[:33] + chunk(b"eXIf", exif(orientation)) + plain[33:]
    found = decode(content)
    np.testing.assert_array_equal(found.image, as_imread(content, tmp_path, ".png"))
    assert found.header.size_wh == found.image.shape[1::-1]


@pytest.mark.parametrize("name", odd_jpegs())
def test_a_jpeg_with_an_odd_header_decodes_as_with_imread_or_is_refused_where_imread_fails(name, tmp_path):
    content = odd_jpegs()[name]
    (tmp_path / "odd.jpg").write_bytes(content)
    expected = cv2.imread(str(tmp_path / "odd.jpg"))
    if expected is None:
        with pytest.raises(DecodeError) as refused:
            decode(content)
        assert "first pixel" not in str(refused.value) and "subsampling" not in str(refused.value)
        return
    found = decode(content)
    np.testing.assert_array_equal(found.image, expected)
    assert found.header.size_wh == expected.shape[1::-1]
    assert bool(found.complaint) == any(
        word in name for word in ("text", "zeros", "ff00", "stray", "APP0", "too short", "end marker")
    ), found.complaint
    # Rows are missing only from the truncated one, even if the header is odd.
    assert (found.missing > 0.1) == ("and cut" in name)


@pytest.mark.parametrize("name", odd_jpegs())
def test_an_odd_jpeg_gives_the_same_result_without_simplejpeg(name, monkeypatch):
    found = outcome(odd_jpegs()[name])
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    again = outcome(odd_jpegs()[name])
    assert type(again) is type(found)
    if isinstance(found, DecodedImage):
        np.testing.assert_array_equal(again.image, found.image)
        assert again.missing == found.missing


def outcome(content: bytes) -> DecodedImage | type[DecodeError]:
    try:
        return decode(content)
    except DecodeError:
        return DecodeError


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("name", odd_exif("<"))
def test_an_odd_exif_block_rotates_an_image_as_with_imread(name, order, tmp_path):
    block, plain = odd_exif(order)[name], png(seed=4)
    for suffix, content in {
        ".jpg": jpeg()[:2] + segment(0xE1, b"Exif\0\0" + block) + jpeg()[2:],
        ".png": plain[:33] + chunk(b"eXIf", block) + plain[33:],
        ".webp": webp_with_exif(block),
    }.items():
        found, expected = decode(content), as_imread(content, tmp_path, suffix)
        np.testing.assert_array_equal(found.image, expected)
        assert found.header.size_wh == expected.shape[1::-1], f"{suffix}: {found.header.orientation}"


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("flags", [0x08, 0])
@pytest.mark.parametrize("prefix", [b"", b"Exif\0\0"])
def test_the_orientation_of_a_webp_is_the_one_that_imread_applies(orientation, flags, prefix, tmp_path):
    content = webp_with_exif(prefix + exif(orientation), flags)
    found, expected = decode(content), as_imread(content, tmp_path, ".webp")
    np.testing.assert_array_equal(found.image, expected)
    assert found.header.size_wh == expected.shape[1::-1]
    assert found.header.orientation == (orientation if flags and not prefix else 1)


def test_the_orientation_of_a_png_counts_at_any_position_but_only_with_a_correct_checksum(tmp_path):
    plain, block = png(seed=4), chunk(b"eXIf", exif(6))
    for content, turned in (
        (plain[:-12] + block + plain[-12:], True),
        (plain[:33] + block[:-1] + b"?" + plain[33:], False),
    ):
        assert (header_of(content).orientation == 6) == turned
        assert header_of(content).size_wh == as_imread(content, tmp_path, ".png").shape[1::-1]


@pytest.mark.parametrize("colour", [0, 2, 4, 6])
@pytest.mark.parametrize("is_default_apart", [False, True])
@pytest.mark.parametrize("is_moved", [False, True])
def test_an_animated_png_decodes_to_its_default_image(colour, is_default_apart, is_moved, tmp_path):
    for dispose, blend in itertools.product(range(3), range(2)):
        content, still = animated_png(
            colour, is_default_apart=is_default_apart, is_moved=is_moved, dispose=dispose, blend=blend
        )
        found = decode(content)
        np.testing.assert_array_equal(found.image, still)
        np.testing.assert_array_equal(as_imread(content, tmp_path, ".png"), still)
        assert found.header.pages == 2


def test_pillow_decodes_an_animated_png_to_the_same_image():
    Image = pytest.importorskip("PIL.Image", reason="Pillow is only used to confirm the result")
    for colour, is_default_apart, is_moved in itertools.product((0, 2), (False, True), (False, True)):
        content, still = animated_png(colour, is_default_apart=is_default_apart, is_moved=is_moved)
        shown = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
        np.testing.assert_array_equal(shown[..., ::-1], still)


READ_ALL = """
import os, sys
import cv2
from flatout.defect.data.decode import read_stored
from flatout.feed import DecodeError
from flatout.images import read_image
from flatout.spike.data.frames import read_frame
import tifffile

def peak_mib():
    return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]) / 1024

read_image(sys.argv[2])  # the decoders are loaded
before = peak_mib()
for name in sorted(os.listdir(sys.argv[1])):
    for read in (read_image, read_stored, read_frame):
        try:
            read(os.path.join(sys.argv[1], name))
            sys.exit(f"{read.__name__} reads {name}")
        except DecodeError:
            pass
        if peak_mib() - before > 50:
            sys.exit(f"{read.__name__} took {peak_mib() - before:.0f} MiB for {name}")
"""


def test_files_whose_header_declares_more_than_they_contain_are_refused_below_50_mb_by_every_reader(tmp_path):
    (tmp_path / "oversized").mkdir()
    for name, content in oversized_headers().items():
        assert len(content) < 2000
        (tmp_path / "oversized" / name).write_bytes(content)
    (tmp_path / "good.jpg").write_bytes(jpeg())
    command = [sys.executable, "-c", READ_ALL, str(tmp_path / "oversized"), str(tmp_path / "good.jpg")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_large_undamaged_image_of_one_colour_is_read():
    # Deflate compresses at most 1032 to 1, and this comes close to it.
    assert decode(flat_png(6000, 6000)).image.shape == (6000, 6000, 3)
    blank = np.zeros((2400, 2400, 3), np.uint8)
    for suffix in (".jpg", ".png", ".webp", ".tif"):
        assert decode(encoded(suffix, blank)).image.shape == blank.shape, suffix


FORMATS = {
    "png": png(), "png grey": encoded(".png", random_image()[..., 0]),
    "png 16 bit": encoded(".png", random_image().astype("u2") * 200),
    "png alpha": encoded(".png", np.dstack((random_image(), random_image()[..., 1]))),
    "bmp": encoded(".bmp", random_image()), "webp": encoded(".webp", random_image()),
    "webp lossless": encoded(".webp", random_image(), cv2.IMWRITE_WEBP_QUALITY, 101),
    "tiff": encoded(".tif", random_image()), "tiff grey": encoded(".tif", random_image()[..., 0]),
    "tiff 16 bit": encoded(".tif", random_image().astype("u2") * 200),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_other_formats_decode_by_their_content(name, tmp_path):
    found = decode(FORMATS[name])
    # imread gets a wrong ending, because only the content counts.
    np.testing.assert_array_equal(found.image, as_imread(FORMATS[name], tmp_path, ".jpg"))
    assert found.header.format == name.split()[0]
    assert found.header.size_wh == (64, 48)
    assert found.header.bits == (16 if "16" in name else 8)


def test_without_simplejpeg_the_pixels_are_the_same(monkeypatch):
    contents = [oriented_jpeg(6), jpeg(seed=1), jpeg(seed=2)[:-2], jpeg(seed=2)[:900]]
    expected = [decode(content) for content in contents]
    real_import = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "simplejpeg":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    for content, before in zip(contents, expected, strict=True):
        found = decode(content)
        np.testing.assert_array_equal(found.image, before.image)
        assert found.missing == pytest.approx(before.missing)


def test_a_missing_end_marker_is_accepted_and_missing_rows_are_not(tmp_path):
    content = jpeg(256, 256, seed=9)
    path = tmp_path / "cut.jpg"
    path.write_bytes(content[:-2])
    np.testing.assert_array_equal(read_image(str(path)), decode(content).image)
    path.write_bytes(content[: len(content) // 2])
    assert 0.3 < decode(path.read_bytes()).missing < 0.7
    np.testing.assert_array_equal(decode(path.read_bytes()).image, cv2.imread(str(path)))
    with pytest.raises(DecodeError, match=r"cut off: \d+% of its rows are missing"):
        read_image(str(path))


def test_a_header_with_an_impossible_size_is_refused_before_memory_is_allocated():
    content = bytearray(jpeg())
    at = content.index(b"\xff\xc0") + 5
    content[at : at + 4] = (9999).to_bytes(2, "big") * 2
    with pytest.raises(DecodeError, match=r"9999 x 9999, which \d+ bytes cannot hold"):
        decode(bytes(content))
    content[at : at + 4] = (65_500).to_bytes(2, "big") * 2
    with pytest.raises(DecodeError, match=r"65500 x 65500 pixels; at most 100,000,000 are decoded"):
        decode(bytes(content))


def test_a_scaled_decode_is_never_smaller_than_requested():
    content = jpeg(800, 600)
    for at_least in (50, 100, 101, 200, 400, 799):
        height, width = decode(content, at_least_px=at_least).image.shape[:2]
        assert at_least <= max(height, width) <= 800
        assert abs(width / height - 4 / 3) < 0.05
    assert decode(content, at_least_px=100).image.shape[1] <= 200
    for at_least in (0, 800, 5000):
        np.testing.assert_array_equal(decode(content, at_least_px=at_least).image, decode(content).image)


@pytest.mark.skipif("FLATOUT_DATA" not in os.environ, reason="FLATOUT_DATA names no folder with photographs")
def test_photographs_decode_to_the_pixels_of_imread():
    paths = sorted(Path(os.environ["FLATOUT_DATA"]).rglob("*.jpg"))[::8]
    assert paths
    for path in paths:
        np.testing.assert_array_equal(read_image(str(path)), cv2.imread(str(path)))
        assert header_of(path.read_bytes()).size_wh == read_image(str(path)).shape[1::-1]


@pytest.mark.parametrize("hw", [(1, 900), (900, 1), (7, 3), (640, 640), (480, 641)])
def test_any_shape_can_be_resized_and_letterboxed(hw):
    image = random_image(hw[1], hw[0])
    resized = resize_long_side(image, 64, augment=False)
    assert max(resized.hw) in (63, 64)
    assert resized.hw == tuple(max(side, 1) for side in resized_hw(hw, 64))
    for fitted in (fit(hw, (64, 96)), fit(hw, (64, 96), enlarge=False), fit_stretched(hw, (64, 96))):
        assert fitted.size_hw == (64, 96)
        assert letterbox(image, fitted).shape == (64, 96, 3)
    tight = fit_tightly(hw, (64, 64), stride=32)
    assert letterbox(image, tight).shape[:2] == tight.size_hw
    assert all(side % 32 == 0 for side in tight.size_hw)
