"""Damaged, mislabelled and malicious image files, written to a folder; the same bytes in every run."""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np

from tests.yolo.data.drawn_set import chunk, encoded, exif, flat_png, jpeg, oriented_jpeg, png, random_image

ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""First column, first row, column step and row step of each pass of an interlaced PNG."""
PNG = b"\x89PNG\r\n\x1a\n"


def jpeg_of_size(width: int, height: int) -> bytes:
    """A small JPEG whose header declares another size."""
    content = bytearray(jpeg())
    at = content.index(b"\xff\xc0") + 5
    content[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(content)


def interlaced_png(side: int = 16) -> bytes:
    """A black, grey-scale PNG with Adam7 interlacing."""
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
    """A TIFF directory without pixels."""
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


def segments(content: bytes) -> list[bytes]:
    """The segments of a JPEG after its start marker; the last one includes the pixels."""
    found, offset = [], 2
    while content[offset + 1] != 0xDA:
        end = offset + 2 + int.from_bytes(content[offset + 2 : offset + 4], "big")
        found.append(content[offset:end])
        offset = end
    return [*found, content[offset:]]


def segment(marker: int, content: bytes, length: int | None = None) -> bytes:
    """A JPEG segment, with a wrong `length` if one is given."""
    return bytes((0xFF, marker)) + struct.pack(">H", len(content) + 2 if length is None else length) + content


def exif_segment(orientation: int) -> bytes:
    return segment(0xE1, b"Exif\0\0" + exif(orientation))


def odd_jpegs() -> dict[str, bytes]:
    """JPEG files with odd headers; OpenCV reads some of them and not others."""
    plain = jpeg()
    parts = segments(plain)
    frame = next(part for part in parts if part[1] == 0xC0)

    def with_before(number: int, odd: bytes) -> bytes:
        return plain[:2] + b"".join(parts[:number]) + odd + b"".join(parts[number:])

    found = {}
    for number in range(len(parts)):
        for name, odd in {"text": b"stray!!", "fill": b"\xff" * 5, "zeros": bytes(3), "ff00": b"\xff\0" * 3}.items():
            found[f"{name} before segment {number}"] = with_before(number, odd)
    found |= {f"APP0 of length {length}": plain[:4] + struct.pack(">H", length) + plain[6:] for length in (0, 1, 2, 15)}
    found |= {f"APP0 of length {length}": plain[:4] + struct.pack(">H", length) + plain[6:] for length in (17, 25)}
    return found | {
        "70,000 stray bytes": with_before(1, b"s" * 70_000),
        "70,000 fill bytes": with_before(1, b"\xff" * 70_000),
        "stray bytes everywhere": plain[:2] + parts[0] + b"".join(b"xy" + part for part in parts[1:]),
        "3,000 segments": with_before(0, segment(0xE5, b"") * 3000),
        "restart marker": with_before(1, b"\xff\xd0"),
        "end marker": with_before(1, b"\xff\xd9"),
        "two start markers": plain[:2] + plain,
        "garbage before it": b"abc" + plain,
        "APP5 beyond its end": with_before(0, segment(0xE5, b"abc", 300)),
        "APP5 of odd length": with_before(0, segment(0xE5, b"a")),
        "APP5 too short": with_before(0, segment(0xE5, b"abcdefgh", 4)),
        "unknown marker": with_before(0, segment(0xF0, b"ab")),
        "two frames": plain.replace(frame, frame + frame),
        "no frame": plain.replace(frame, b""),
        "no quantisation table": plain[:2] + b"".join(part for part in parts if part[1] != 0xDB),
        "no Huffman table": plain[:2] + b"".join(part for part in parts if part[1] != 0xC4),
        "12 bits": plain.replace(frame, frame[:4] + b"\x0c" + frame[5:]),
        "cut after the frame": plain[:2] + b"".join(parts[:5]),
        "cut in the last segment": plain[:2] + b"".join(parts[:-1]) + parts[-1][:6],
        "no end marker": plain[:-2],
        "half an end marker": plain[:-1],
        "bytes after the end": plain + b"abc" * 9,
        "stray bytes, then EXIF": with_before(1, b"junk" + exif_segment(6)),
        "stray bytes, and cut": with_before(1, b"junk")[:-300],
        "EXIF after the frame": with_before(len(parts) - 1, exif_segment(6)),
        "EXIF 1, then EXIF 8": with_before(0, exif_segment(1) + exif_segment(8)),
        "invalid EXIF, then EXIF 6": with_before(0, segment(0xE1, b"Exif\0\0garbage!") + exif_segment(6)),
        "XMP, then EXIF 6": with_before(0, segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0<x/>") + exif_segment(6)),
    }


def odd_exif(order: str) -> dict[str, bytes]:
    """EXIF blocks with orientation 6, valid and not quite valid; `order` is "<" or ">"."""

    def block(*entries: tuple[int, int, int, bytes], magic: int = 42, count: int | None = None) -> bytes:
        table = b"".join(struct.pack(f"{order}HHI", *entry[:3]) + entry[3] for entry in entries)
        count = len(entries) if count is None else count
        return {"<": b"II", ">": b"MM"}[order] + struct.pack(f"{order}HIH", magic, 8, count) + table + bytes(4)

    six, far = struct.pack(f"{order}Hxx", 6), struct.pack(f"{order}I", 90_000)
    found = {f"of type {kind}": block((274, kind, 1, six)) for kind in (0, 1, 2, 3, 4, 7, 8, 99)}
    found |= {f"{count} of them": block((274, 3, count, six)) for count in (0, 2, 3)}
    return found | {
        "a long": block((274, 4, 1, struct.pack(f"{order}I", 6))),
        "6, then 8": block((274, 3, 1, six), (274, 3, 1, struct.pack(f"{order}Hxx", 8))),
        "another magic": block((274, 3, 1, six), magic=43),
        "more entries than there are": block((274, 3, 1, six), count=9),
        "cut": block((274, 3, 1, six))[:-6],
        "after a text far away": block((271, 2, 90, far), (274, 3, 1, six)),
        "before a text far away": block((274, 3, 1, six), (305, 2, 90, far)),
        "after a fraction far away": block((282, 5, 1, far), (274, 3, 1, six)),
        "after 600 others": block(*[(40_000, 3, 1, six)] * 600, (274, 3, 1, six)),
    }


def webp_with_exif(block: bytes, flags: int = 0x08) -> bytes:
    plain = encoded(".webp", random_image(), cv2.IMWRITE_WEBP_QUALITY, 101)
    canvas = struct.pack("<B3x", flags) + (63).to_bytes(3, "little") + (47).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + canvas + plain[12:]
    body += b"EXIF" + struct.pack("<I", len(block)) + block + bytes(len(block) % 2)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def animated_png(
    colour: int, *, is_default_apart: bool, is_moved: bool, dispose: int = 0, blend: int = 0
) -> tuple[bytes, np.ndarray]:
    """A PNG with two frames of noise, 64 x 48, and its default image, BGR, which viewers of still images show.

    With `is_default_apart` the default image is not part of the animation; with `is_moved` the frames are smaller and
    at an offset.
    """
    samples = {0: 1, 2: 3, 4: 2, 6: 4}[colour]
    rng = np.random.default_rng(colour)

    def frame(width: int = 64, height: int = 48) -> np.ndarray:
        return rng.integers(0, 256, (height, width, samples), np.uint8)

    def rows(image: np.ndarray) -> bytes:
        return zlib.compress(b"".join(b"\0" + row.tobytes() for row in image))

    def control(number: int, image: np.ndarray, x: int, y: int) -> bytes:
        area = struct.pack(">IIIII", number, image.shape[1], image.shape[0], x, y)
        return chunk(b"fcTL", area + struct.pack(">HHBB", 1, 10, dispose, blend))

    still, first = frame(), frame(20, 10) if is_moved else frame()
    second, x, y = (frame(20, 16), 7, 9) if is_moved else (frame(), 0, 0)
    content = PNG + chunk(b"IHDR", struct.pack(">IIBBBBB", 64, 48, 8, colour, 0, 0, 0))
    content += chunk(b"acTL", struct.pack(">II", 2, 0))
    if is_default_apart:
        content += chunk(b"IDAT", rows(still)) + control(0, first, 5 if is_moved else 0, 6 if is_moved else 0)
        content += chunk(b"fdAT", struct.pack(">I", 1) + rows(first))
    else:
        content += control(0, still, 0, 0) + chunk(b"IDAT", rows(still))
    content += control(2, second, x, y) + chunk(b"fdAT", struct.pack(">I", 3) + rows(second)) + chunk(b"IEND", b"")
    return content, still[..., 2::-1] if samples > 2 else np.repeat(still[..., :1], 3, 2)


def tiff_of_size(width: int, height: int, compression: int, bits: int = 8) -> bytes:
    """A TIFF of a few bytes that claims to contain a strip of this size."""
    values = {256: width, 257: height, 258: bits, 259: compression, 262: 1, 273: 200, 277: 1, 278: height, 279: 60}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in values.items())
    head = b"II*\0" + struct.pack("<IH", 8, len(values)) + entries + bytes(4)
    return head.ljust(200, b"\0") + zlib.compress(bytes(200)).ljust(60, b"\0")


def oversized_headers() -> dict[str, bytes]:
    """Files of very few bytes whose headers declare a hundred million pixels."""
    idat = chunk(b"IDAT", zlib.compress(bytes(20)))
    head = {kind: chunk(b"IHDR", struct.pack(">IIBBBBB", 10_000, 10_000, 8, kind, 0, 0, 0)) for kind in (2, 6)}
    runs = struct.pack("<IHHI", 1154, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, 10_000, 10_000, 1, 8, 1, *[0] * 5)
    return {
        "png": PNG + head[2] + idat + chunk(b"IEND", b""),
        "png with alpha": PNG + head[6] + idat + chunk(b"IEND", b""),
        "animated png": PNG + head[6] + chunk(b"acTL", bytes(8)) + idat + chunk(b"IEND", b""),
        "bmp": bmp_of_size(10_000, 10_000),
        "bmp of runs": b"BM" + runs + bytes(1100),
        "webp": webp_of_size(10_000, 10_000),
        "jpeg": jpeg_of_size(10_000, 10_000),
        "ppm": b"P6 10000 10000 255\n",
        **{f"tiff {code}": tiff_of_size(10_000, 10_000, code) for code in (1, 4, 5, 7, 8, 32773, 34712)},
        **{f"tiff {code}, 12 bits": tiff_of_size(18_000, 18_000, code, 12) for code in (1, 5, 8)},
    }


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
    "gif.jpg": encoded(".gif", random_image()),
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
    "16bit.png": encoded(".png", random_image().astype("u2") * 99),
    "png.jpg": png(),
    "jpeg.png": jpeg(),
    "exif6.jpg": oriented_jpeg(6),
    "exif99.jpg": oriented_jpeg(99),
    "exif_cut.jpg": with_segment(0xE1, b"Exif\0\0II*\0\xff\xff\xff\xff"),
    "exif_many.jpg": with_segment(0xE1, b"Exif\0\0II*\0" + struct.pack("<IH", 8, 65535)),
    "exif_loop.jpg": with_segment(0xE1, b"Exif\0\0" + exif(6)[:8] + b"\x01\0" + struct.pack("<HHII", 274, 3, 9, 0)),
    "grey.jpg": encoded(".jpg", random_image()[..., 0]),
    "progressive.jpg": encoded(".jpg", random_image(), cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
    "cut_progressive.jpg": encoded(".jpg", random_image(), cv2.IMWRITE_JPEG_PROGRESSIVE, 1)[:600],
    "interlaced.png": interlaced_png(),
    "icc.jpg": with_segment(0xE2, b"ICC_PROFILE\0\1\1" + bytes(200)),
    "icc.png": png()[:33] + chunk(b"iCCP", b"x\0\0garbage") + png()[33:],
    "alpha.png": encoded(".png", np.dstack((random_image(), random_image()[..., 0]))),
    "1x1.png": png(1, 1),
    "1x9000.png": png(1, 9000),
    "9000x1.jpg": jpeg(9000, 1),
    "12x9000.jpg": jpeg(12, 9000),
    "UPPER.JPG": jpeg(),
    "good.webp": encoded(".webp", random_image()),
    "cut.webp": encoded(".webp", random_image())[:60],
    "lie.webp": webp_of_size(1 << 24, 1 << 24),
    "frames.webp": webp_of_size(64, 48, 0x02),
    "exif_lie.webp": webp_of_size(64, 48, 0x08),
    "good.tif": encoded(".tif", random_image()),
    "cut.tif": encoded(".tif", random_image())[:99],
    "lie.tif": tiff(1 << 31, 1 << 31),
    "loop.tif": tiff(64, 48, next_at=8),
    "many.tif": tiff(64, 48, count=65535),
    "empty.tif": tiff(64, 48),
    "large.tif": tiff(9_900, 9_900),
    "far.tif": b"MM\0*\xff\xff\xff\xf0",
    "big.tif": b"II+\0" + bytes(12),
    "good.bmp": encoded(".bmp", random_image()),
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
    """Write every fixed case, and things that are not regular files; returns their paths."""
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
    """Good images of every format, truncated at many positions and with flipped bits."""
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
        content = encoded(suffix, random_image(seed=number), *options)
        for cut in np.linspace(0, len(content), num_cuts, endpoint=False).astype(int).tolist():
            yield f"cut{number}_{cut}{suffix}", content[:cut]
        for seed in range(num_flips // num_originals):
            yield f"flip{number}_{seed}{suffix}", flipped(content, seed, count=1 + seed % 20)
