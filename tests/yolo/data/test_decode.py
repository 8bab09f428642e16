"""Pictures decode to the pixels that cv2.imread gives, whichever way they take."""

import builtins
import os
from pathlib import Path

import cv2
import numpy as np
import pytest

from flatout.feed import DecodeError
from flatout.images import decode, header_of, read_picture
from flatout.yolo.data.letterbox import fit, fit_stretched, fit_tightly, letterbox
from flatout.yolo.data.resize import kept_size_hw, resize_long_side
from tests.yolo.data.drawn_set import chunk, drawn, encoded, exif, jpeg, png, turned_jpeg

ORIENTATIONS = range(1, 9)
SUBSAMPLINGS = {"444": 0x111111, "422": 0x211111, "420": 0x221111, "440": 0x121111, "411": 0x411111}


def as_imread(content: bytes, folder: Path, suffix: str) -> np.ndarray:
    path = folder / f"picture{suffix}"
    path.write_bytes(content)
    image = cv2.imread(str(path))
    assert image is not None
    return image


@pytest.mark.parametrize("sampling", SUBSAMPLINGS)
@pytest.mark.parametrize("progressive", [0, 1])
@pytest.mark.parametrize("grey", [False, True])
def test_jpeg_decodes_to_the_pixels_of_imread(sampling, progressive, grey, tmp_path):
    image = drawn(83, 61, seed=3)
    content = encoded(
        ".jpg", image[..., 0] if grey else image,
        cv2.IMWRITE_JPEG_SAMPLING_FACTOR, SUBSAMPLINGS[sampling], cv2.IMWRITE_JPEG_PROGRESSIVE, progressive,
    )  # fmt: skip
    found = decode(content)
    np.testing.assert_array_equal(found.image, as_imread(content, tmp_path, ".jpg"))
    assert found.header.progressive == bool(progressive)
    assert found.missing == 0


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_every_orientation_is_obeyed_as_imread_does(orientation, tmp_path):
    content = turned_jpeg(orientation, seed=4)
    found = decode(content)
    np.testing.assert_array_equal(found.image, as_imread(content, tmp_path, ".jpg"))
    assert found.header.orientation == orientation
    assert found.header.size_wh == found.image.shape[1::-1]
    assert found.image.flags.c_contiguous


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_the_orientation_of_a_png_is_obeyed_too(orientation, tmp_path):
    plain = png(seed=4)
    content = plain[:33] + chunk(b"eXIf", exif(orientation)) + plain[33:]
    found = decode(content)
    np.testing.assert_array_equal(found.image, as_imread(content, tmp_path, ".png"))
    assert found.header.size_wh == found.image.shape[1::-1]


FORMATS = {
    "png": png(), "png grey": encoded(".png", drawn()[..., 0]),
    "png 16 bit": encoded(".png", drawn().astype("u2") * 200),
    "png alpha": encoded(".png", np.dstack((drawn(), drawn()[..., 1]))), "bmp": encoded(".bmp", drawn()),
    "webp": encoded(".webp", drawn()), "webp lossless": encoded(".webp", drawn(), cv2.IMWRITE_WEBP_QUALITY, 101),
    "tiff": encoded(".tif", drawn()), "tiff grey": encoded(".tif", drawn()[..., 0]),
    "tiff 16 bit": encoded(".tif", drawn().astype("u2") * 200),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_other_formats_decode_by_their_content(name, tmp_path):
    found = decode(FORMATS[name])
    # Under a wrong name: only the content counts.
    np.testing.assert_array_equal(found.image, as_imread(FORMATS[name], tmp_path, ".jpg"))
    assert found.header.format == name.split()[0]
    assert found.header.size_wh == (64, 48)
    assert found.header.bits == (16 if "16" in name else 8)


def test_without_simplejpeg_the_pixels_are_the_same(monkeypatch):
    contents = [turned_jpeg(6), jpeg(seed=1), jpeg(seed=2)[:-2], jpeg(seed=2)[:900]]
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


def test_a_missing_end_marker_is_forgiven_and_missing_rows_are_not(tmp_path):
    content = jpeg(256, 256, seed=9)
    path = tmp_path / "cut.jpg"
    path.write_bytes(content[:-2])
    np.testing.assert_array_equal(read_picture(str(path)), decode(content).image)
    path.write_bytes(content[: len(content) // 2])
    assert 0.3 < decode(path.read_bytes()).missing < 0.7
    np.testing.assert_array_equal(decode(path.read_bytes()).image, cv2.imread(str(path)))
    with pytest.raises(DecodeError, match=r"cut off: \d+% of its rows are missing"):
        read_picture(str(path))


def test_a_header_that_lies_is_refused_before_any_memory_is_taken():
    content = bytearray(jpeg())
    at = content.index(b"\xff\xc0") + 5
    content[at : at + 4] = (9999).to_bytes(2, "big") * 2
    with pytest.raises(DecodeError, match=r"9999 x 9999, which \d+ bytes cannot hold"):
        decode(bytes(content))
    content[at : at + 4] = (65_500).to_bytes(2, "big") * 2
    with pytest.raises(DecodeError, match=r"65500 x 65500 pixels; 100,000,000 is the most"):
        decode(bytes(content))


def test_a_smaller_decode_is_never_below_what_was_asked():
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
        np.testing.assert_array_equal(read_picture(str(path)), cv2.imread(str(path)))
        assert header_of(path.read_bytes()).size_wh == read_picture(str(path)).shape[1::-1]


@pytest.mark.parametrize("hw", [(1, 900), (900, 1), (7, 3), (640, 640), (480, 641)])
def test_any_shape_survives_resize_and_letterbox(hw):
    image = drawn(hw[1], hw[0])
    resized = resize_long_side(image, 64, augment=False)
    assert max(resized.hw) in (63, 64)
    assert resized.hw == tuple(max(side, 1) for side in kept_size_hw(hw, 64))
    for fitted in (fit(hw, (64, 96)), fit(hw, (64, 96), enlarge=False), fit_stretched(hw, (64, 96))):
        assert fitted.size_hw == (64, 96)
        assert letterbox(image, fitted).shape == (64, 96, 3)
    tight = fit_tightly(hw, (64, 64), stride=32)
    assert letterbox(image, tight).shape[:2] == tight.size_hw
    assert all(side % 32 == 0 for side in tight.size_hw)
