"""Pictures that were damaged, mislabelled or made to hurt: written into a folder, the same on every run."""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np

from tests.yolo.data.drawn_set import chunk, drawn, encoded, exif, flat_png, jpeg, png, turned_jpeg

ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""First column, first row and steps of each pass of an interlaced PNG."""
PNG = b"\x89PNG\r\n\x1a\n"


def jpeg_of_size(width: int, height: int) -> bytes:
    """A small JPEG whose header lies about its size."""
    content = bytearray(jpeg())
    at = content.index(b"\xff\xc0") + 5
    content[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(content)


def interlaced_png(side: int = 16) -> bytes:
    """Grey, Adam7, all black."""
    rows = b""
    for x, y, dx, dy in (
        (0, 0, 8, 8),
        (4, 0, 8, 8),
        (0, 4, 4, 8),
        (2, 0, 4, 4),
        (0, 2, 2, 4),
        (1, 0, 2, 2),
        (0, 1, 1, 2),
    ):
        rows += bytes((len(range(x, side, dx)) + 1) * len(range(y, side, dy)))
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 1))
    return PNG + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def tiff(width: int, height: int, *, count: int = 3, next_at: int = 0) -> bytes:
    """A TIFF directory without any pixel."""
    tags = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in ((256, width), (257, height), (277, 3))]
    return b"II*\0" + struct.pack("<IH", 8, count) + b"".join(tags) + struct.pack("<I", next_at) + bytes(64)


def webp_of_size(width: int, height: int, flags: int = 0) -> bytes:
    canvas = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<IB3x", 10, flags) + canvas
    return b"RIFF" + struct.pack("<I", len(body)) + body


def bmp_of_size(width: int, height: int) -> bytes:
    return (
        b"BM"
        + struct.pack("<IHHI", 154, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, *[0] * 6)
        + bytes(100)
    )


def with_segment(marker: int, content: bytes) -> bytes:
    plain = jpeg()
    return plain[:2] + bytes((0xFF, marker)) + struct.pack(">H", len(content) + 2) + content + plain[2:]


def flipped(content: bytes, seed: int, count: int = 20) -> bytes:
    rng = np.random.default_rng(seed)
    damaged = bytearray(content)
    for place in rng.integers(0, len(content), count):
        damaged[place] ^= 1 << int(rng.integers(8))
    return bytes(damaged)


FIXED: dict[str, bytes] = {
    "good.jpg": jpeg(),
    "half.jpg": jpeg()[:700],
    "no_end.jpg": jpeg()[:-2],
    "no_tail.jpg": jpeg()[: len(jpeg()) * 9 // 10],
    "flipped.jpg": flipped(jpeg(), 1),
    "empty.jpg": b"",
    "one_byte.jpg": b"\xff",
    "two_bytes.jpg": b"\xff\xd8",
    "soi_only.jpg": b"\xff\xd8\xff",
    "text.jpg": b"hello world",
    "page.jpg": b"<!DOCTYPE html><html></html>",
    "gif.jpg": encoded(".gif", drawn()),
    "good.png": png(),
    "crc.png": png()[:60] + b"\0" + png()[61:],
    "cut.png": png()[:200],
    "lie.png": PNG + chunk(b"IHDR", struct.pack(">IIBBBBB", 65_500, 65_500, 8, 2, 0, 0, 0)) + png()[33:],
    "bomb.png": flat_png(12_000, 12_000),
    "large.png": flat_png(9_900, 9_900),
    "lie.jpg": jpeg_of_size(65_500, 65_500),
    "half_lie.jpg": jpeg_of_size(9_999, 9_999),
    "zero.jpg": jpeg_of_size(0, 0),
    "flat_lie.jpg": jpeg_of_size(65_500, 10),
    "16bit.png": encoded(".png", drawn().astype("u2") * 99),
    "png.jpg": png(),
    "jpeg.png": jpeg(),
    "exif6.jpg": turned_jpeg(6),
    "exif99.jpg": turned_jpeg(99),
    "exif_cut.jpg": with_segment(0xE1, b"Exif\0\0II*\0\xff\xff\xff\xff"),
    "exif_many.jpg": with_segment(0xE1, b"Exif\0\0II*\0" + struct.pack("<IH", 8, 65535)),
    "exif_loop.jpg": with_segment(0xE1, b"Exif\0\0" + exif(6)[:8] + b"\x01\0" + struct.pack("<HHII", 274, 3, 9, 0)),
    "grey.jpg": encoded(".jpg", drawn()[..., 0]),
    "progressive.jpg": encoded(".jpg", drawn(), cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
    "cut_progressive.jpg": encoded(".jpg", drawn(), cv2.IMWRITE_JPEG_PROGRESSIVE, 1)[:600],
    "interlaced.png": interlaced_png(),
    "icc.jpg": with_segment(0xE2, b"ICC_PROFILE\0\1\1" + bytes(200)),
    "icc.png": png()[:33] + chunk(b"iCCP", b"x\0\0garbage") + png()[33:],
    "alpha.png": encoded(".png", np.dstack((drawn(), drawn()[..., 0]))),
    "1x1.png": png(1, 1),
    "1x9000.png": png(1, 9000),
    "9000x1.jpg": jpeg(9000, 1),
    "12x9000.jpg": jpeg(12, 9000),
    "UPPER.JPG": jpeg(),
    "good.webp": encoded(".webp", drawn()),
    "cut.webp": encoded(".webp", drawn())[:60],
    "lie.webp": webp_of_size(1 << 24, 1 << 24),
    "frames.webp": webp_of_size(64, 48, 0x02),
    "exif_lie.webp": webp_of_size(64, 48, 0x08),
    "good.tif": encoded(".tif", drawn()),
    "cut.tif": encoded(".tif", drawn())[:99],
    "lie.tif": tiff(1 << 31, 1 << 31),
    "loop.tif": tiff(64, 48, next_at=8),
    "many.tif": tiff(64, 48, count=65535),
    "empty.tif": tiff(64, 48),
    "large.tif": tiff(9_900, 9_900),
    "far.tif": b"MM\0*\xff\xff\xff\xf0",
    "big.tif": b"II+\0" + bytes(12),
    "good.bmp": encoded(".bmp", drawn()),
    "lie.bmp": bmp_of_size(1 << 30, 1 << 30),
    "large.bmp": bmp_of_size(9_900, 9_900),
    "topdown.bmp": bmp_of_size(64, -48),
    "core.bmp": b"BM" + bytes(12) + struct.pack("<I", 12) + bytes(8),
    "cut.bmp": b"BM",
    "segments.jpg": b"\xff\xd8" + b"\xff\xe5\0\2" * 100_000,
    "fill.jpg": b"\xff\xd8" + b"\xff" * 100_000,
    "no_length.jpg": b"\xff\xd8\xff\xe0\0\0" + jpeg()[2:],
    "trailing.jpg": jpeg() + bytes(50_000),
    "trailing.png": png() + b"x",
    "frames.png": png()[:33] + chunk(b"acTL", bytes(8)) + png()[33:],
    "chunks.png": png()[:33] + chunk(b"teXt", b"") * 50_000 + png()[33:],
    "zip.jpg": b"PK\x03\x04" + bytes(100),
    "ff.jpg": b"\xff" * 5000,
    "nul.png": bytes(5000),
    "noise.jpg": np.random.default_rng(0).bytes(5000),
    "heic.jpg": b"\0\0\0\x18ftypheic" + bytes(40),
    "é ü 漢字.jpg": jpeg(),
    "line\nbreak.jpg": jpeg(),
    "l" * 240 + ".jpg": jpeg(),
    "dots..jpg": jpeg(),
}


def write_fixed(folder: Path) -> list[Path]:
    """Every fixed case, and what is no file at all."""
    folder.mkdir(parents=True)
    for name, content in FIXED.items():
        (folder / name).write_bytes(content)
    (folder / "folder.jpg").mkdir()
    (folder / "loop.jpg").symlink_to("loop.jpg")
    (folder / "nowhere.jpg").symlink_to("/no/such/file.jpg")
    os.mkfifo(folder / "pipe.jpg")
    os.close(os.open(os.fsencode(folder) + b"/bytes\xff.jpg", os.O_CREAT))
    return sorted(folder.iterdir())


def generated(num_originals: int, num_cuts: int, num_flips: int) -> Iterator[tuple[str, bytes]]:
    """Good pictures of every format, cut at many places and with flipped bits."""
    kinds = [
        (".jpg", ()),
        (".png", ()),
        (".webp", ()),
        (".tif", ()),
        (".bmp", ()),
        (".jpg", (cv2.IMWRITE_JPEG_PROGRESSIVE, 1)),
    ]
    for number in range(num_originals):
        suffix, options = kinds[number % len(kinds)]
        content = encoded(suffix, drawn(seed=number), *options)
        for cut in np.linspace(0, len(content), num_cuts, endpoint=False).astype(int).tolist():
            yield f"cut{number}_{cut}{suffix}", content[:cut]
        for seed in range(num_flips // num_originals):
            yield f"flip{number}_{seed}{suffix}", flipped(content, seed, count=1 + seed % 20)
