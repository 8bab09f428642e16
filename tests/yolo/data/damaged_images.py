"""More than twenty kinds of damage to images of every format; the same bytes in every run."""

import struct
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import cv2
import numpy as np

from tests.yolo.data.drawn_set import chunk, encoded, random_image


class Damaged(NamedTuple):
    """An image file after it was damaged."""

    kind: str
    format: str
    content: bytes
    original: bytes
    suffix: str


def noisy(seed: int) -> np.ndarray:
    """An image that does not compress to a few bytes in any format, uint8 [96, 128, 3]."""
    noise = np.random.default_rng(seed).integers(-20, 20, (96, 128, 3))
    return np.clip(random_image(128, 96, seed).astype(int) + noise, 0, 255).astype(np.uint8)


def originals(seed: int = 0) -> dict[str, tuple[str, bytes]]:
    """Format -> suffix and content of an undamaged image."""
    image = noisy(seed)
    return {
        "jpeg": ("jpg", encoded(".jpg", image)),
        "jpeg grey": ("jpg", encoded(".jpg", image[..., 0])),
        "jpeg progressive": ("jpg", encoded(".jpg", image, cv2.IMWRITE_JPEG_PROGRESSIVE, 1)),
        "jpeg restarts": ("jpg", encoded(".jpg", image, cv2.IMWRITE_JPEG_RST_INTERVAL, 4)),
        "png": ("png", encoded(".png", image)),
        "png grey": ("png", encoded(".png", image[..., 0])),
        "webp": ("webp", encoded(".webp", image, cv2.IMWRITE_WEBP_QUALITY, 80)),
        "webp lossless": ("webp", encoded(".webp", image, cv2.IMWRITE_WEBP_QUALITY, 101)),
        "bmp": ("bmp", encoded(".bmp", image)),
        "tiff": ("tif", encoded(".tif", image, cv2.IMWRITE_TIFF_COMPRESSION, 1)),
        "tiff lzw": ("tif", encoded(".tif", image, cv2.IMWRITE_TIFF_COMPRESSION, 5)),
        "tiff deflate": ("tif", encoded(".tif", image, cv2.IMWRITE_TIFF_COMPRESSION, 8)),
        "gif": ("gif", encoded(".gif", image)),
    }


def _cut(share: float) -> Callable[[bytes, np.random.Generator], bytes]:
    return lambda content, rng: content[: int(len(content) * share)]


def _filled(value: int, count: int) -> Callable[[bytes, np.random.Generator], bytes]:
    """Fill a block in the second half with one value, like a disk sector that was never written."""

    def damage(content: bytes, rng: np.random.Generator) -> bytes:
        at = int(rng.integers(len(content) // 2, len(content) - count))
        return content[:at] + bytes([value]) * count + content[at + count :]

    return damage


def _flipped(count: int, *, first: float = 0.3) -> Callable[[bytes, np.random.Generator], bytes]:
    def damage(content: bytes, rng: np.random.Generator) -> bytes:
        damaged = bytearray(content)
        for position in rng.integers(int(len(content) * first), len(content), count).tolist():
            damaged[position] ^= 1 << int(rng.integers(8))
        return bytes(damaged)

    return damage


def _swapped(content: bytes, rng: np.random.Generator) -> bytes:
    """Swap two blocks."""
    size = len(content) // 8
    a, b = 4 * size, 6 * size
    return content[:a] + content[b : b + size] + content[a + size : b] + content[a : a + size] + content[b + size :]


def _crlf(content: bytes, rng: np.random.Generator) -> bytes:
    """The result of a file transfer in text mode."""
    return content.replace(b"\n", b"\r\n")


KINDS: dict[str, Callable[[bytes, np.random.Generator], bytes]] = {
    "cut at 5 %": _cut(0.05),
    "cut at 30 %": _cut(0.3),
    "cut at 60 %": _cut(0.6),
    "cut at 90 %": _cut(0.9),
    "cut at 99 %": _cut(0.99),
    "last byte missing": lambda content, rng: content[:-1],
    "last 2 bytes missing": lambda content, rng: content[:-2],
    "last 12 bytes missing": lambda content, rng: content[:-12],
    "64 bytes zero": _filled(0, 64),
    "64 bytes 0xFF": _filled(255, 64),
    "a quarter zero": lambda content, rng: _filled(0, len(content) // 4)(content, rng),
    "second half zero": lambda content, rng: content[: len(content) // 2] + bytes(len(content) - len(content) // 2),
    "3 bits flipped": _flipped(3),
    "40 bits flipped": _flipped(40),
    "40 bits flipped in all": _flipped(40, first=0.0),
    "a block missing": lambda content, rng: content[: len(content) // 2] + content[len(content) // 2 + 50 :],
    "a block twice": lambda content, rng: content[: len(content) // 2 + 50] + content[len(content) // 2 :],
    "blocks swapped": _swapped,
    "text mode": _crlf,
    "first bytes missing": lambda content, rng: content[4:],
    "empty": lambda content, rng: b"",
    "a web page": lambda content, rng: b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
    "all zero": lambda content, rng: bytes(len(content)),
}


def damaged(num_seeds: int = 1) -> Iterator[Damaged]:
    """Every kind of damage in every format, except where it does not change the bytes."""
    for seed in range(num_seeds):
        for number, (name, (suffix, content)) in enumerate(originals(seed).items()):
            for kind, damage in KINDS.items():
                bad = damage(content, np.random.default_rng((seed, number)))
                if bad != content:
                    yield Damaged(kind, name, bad, content, suffix)
        yield from _damaged_chunks(seed)


def _damaged_chunks(seed: int) -> Iterator[Damaged]:
    """Damage that only a PNG can have: wrong checksums of pixels and comments, and a stream that ends early."""
    image = noisy(seed)
    head = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 128, 96, 8, 2, 0, 0, 0))
    rows = b"".join(b"\0" + row[:, ::-1].tobytes() for row in image)
    stream, end = zlib.compress(rows), chunk(b"IEND", b"")
    whole = head + chunk(b"IDAT", stream) + end
    comment = chunk(b"tEXt", b"a\0bcd")[:-4] + bytes(4)
    for kind, content in {
        "checksum of the pixels": head + chunk(b"IDAT", stream)[:-4] + bytes(4) + end,
        "checksum of a comment": head + comment + chunk(b"IDAT", stream) + end,
        "checksum of the stream": head + chunk(b"IDAT", stream[:-4] + bytes(4)) + end,
        "checksum of the end": whole[:-4] + bytes(4),
        "stream ends early": head + chunk(b"IDAT", stream[: len(stream) // 2]) + end,
        "rows missing": head + chunk(b"IDAT", zlib.compress(rows[: len(rows) // 2])) + end,
    }.items():
        yield Damaged(kind, "png", content, whole, "png")
