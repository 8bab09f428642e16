"""A small data set without faults, written to a folder, and images of many kinds to put into it."""

import struct
import zlib
from pathlib import Path

import cv2
import numpy as np
import yaml


def random_image(width: int = 64, height: int = 48, seed: int = 0) -> np.ndarray:
    """A colourful image, uint8 [H, W, 3]; a different one for every seed."""
    rng = np.random.default_rng(seed)
    return cv2.resize(rng.integers(0, 256, (6, 8, 3), np.uint8), (width, height), interpolation=cv2.INTER_CUBIC)


def encoded(suffix: str, image: np.ndarray, *options: int) -> bytes:
    return cv2.imencode(suffix, image, list(options))[1].tobytes()


def jpeg(width: int = 64, height: int = 48, seed: int = 0) -> bytes:
    return encoded(".jpg", random_image(width, height, seed))


def png(width: int = 64, height: int = 48, seed: int = 0) -> bytes:
    return encoded(".png", random_image(width, height, seed))


def exif(orientation: int) -> bytes:
    """An EXIF block with only the orientation tag."""
    entry = struct.pack("<HHIHxx", 274, 3, 1, orientation)
    return b"II*\0" + struct.pack("<IH", 8, 1) + entry + bytes(4)


def oriented_jpeg(orientation: int, seed: int = 0, width: int = 64, height: int = 48) -> bytes:
    """A JPEG with an EXIF orientation."""
    block = b"Exif\0\0" + exif(orientation)
    plain = jpeg(width, height, seed)
    return plain[:2] + b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block + plain[2:]


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def flat_png(width: int, height: int) -> bytes:
    """A PNG of any size in very few bytes: grey, one bit per pixel."""
    rows = zlib.compress(bytes(((width + 7) // 8 + 1) * height), 9)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


class SmallDataSet:
    """Images of train and val with labels in one folder; every file can be replaced."""

    def __init__(self, folder: Path, num_train: int = 4, num_val: int = 3) -> None:
        self.folder = folder
        self.values: dict[str, object] = {
            "train": str(folder / "images/train"),
            "val": str(folder / "images/val"),
            "nc": 2,
            "names": ["bolt", "nut"],
        }
        for split, count, first in (("train", num_train, 0), ("val", num_val, 100)):
            for number in range(count):
                self.put(split, f"{number}", jpeg(seed=first + number), "0 0.5 0.5 0.4 0.4\n1 0.3 0.3 0.2 0.3\n")

    def put(self, split: str, stem: str, image: bytes | None = None, label: str | bytes | None = None, suffix="jpg"):
        """Write an image, a label file, or both; returns their paths."""
        image_path = self.folder / "images" / split / f"{stem}.{suffix}"
        label_path = self.folder / "labels" / split / f"{stem}.txt"
        for path, content in ((image_path, image), (label_path, label)):
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is not None:
                path.write_bytes(content.encode() if isinstance(content, str) else content)
        return image_path, label_path

    def yaml(self) -> Path:
        """Write `values` as the data YAML; returns its path."""
        path = self.folder / "data.yaml"
        path.write_text(yaml.safe_dump(self.values, sort_keys=False))
        return path
