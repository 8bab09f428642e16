"""The set on disk: pictures, labels, a data YAML, and a note by which a later call knows its own files.

    FOLDER/demo.yaml                      what training is given; written last
    FOLDER/drawn.json                     what was drawn; see flatout/engine/drawn_set.py
    FOLDER/images/{train,val}/0000.jpg    FOLDER/labels/{train,val}/0000.txt

Files that are not in this list are never touched, and a folder with any of them is refused.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import cv2
import numpy as np

from flatout.engine.drawn_set import draw_set
from flatout.errors import ConfigError
from flatout.feed.progress import progress
from flatout.yolo.demo_data.scene import Scene, draw_scene
from flatout.yolo.demo_data.shapes import SHAPES

VERSION = 1
"""Of the drawing: raised when the same numbers make other pictures, so that an old set is drawn anew."""
QUALITY = 92
YAML = "demo.yaml"
OURS = re.compile(rf"{re.escape(YAML)}|images/(train|val)/\d+\.jpg|labels/(train|val)/\d+\.txt")
SPLITS = ("train", "val")


@dataclass(frozen=True, kw_only=True)
class DemoDataConfig:
    """What is drawn."""

    images: int = 480
    """For training."""
    val: int = 120
    """For validation; drawn from other random numbers."""
    seed: int = 0
    width: int = 320
    height: int = 240

    def __post_init__(self) -> None:
        for name, least in (("images", 1), ("val", 1), ("seed", 0), ("width", 96), ("height", 96)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} is too small: use {least} or more.")


def write_demo_data(folder: Path, config: DemoDataConfig, *, show_progress: bool = False) -> Path:
    """Draw the set, unless it is there already; returns the data YAML."""

    def draw() -> None:
        numbers = [("train", number) for number in range(config.images)] + [("val", n) for n in range(config.val)]
        with progress("drawing", len(numbers), shown=show_progress) as advance, ThreadPoolExecutor() as threads:
            nbytes = 0
            for done, size in enumerate(threads.map(partial(_draw_picture, folder, config), numbers), start=1):
                nbytes += size
                advance(done, nbytes)

    draw_set(folder, {"job": "yolo", "version": VERSION, **asdict(config)}, OURS, draw)
    _write_text(folder / YAML, yaml_text(folder))  # also of a set that is there: the folder may have been moved
    return folder / YAML


def draw_number(config: DemoDataConfig, split: str, number: int) -> Scene:
    """One picture of the set; depends on no other one."""
    return draw_scene(config.width, config.height, np.random.default_rng([config.seed, SPLITS.index(split), number]))


def label_text(scene: Scene) -> str:
    """One line per object: class, centre and size relative to the picture's."""
    height, width = scene.image.shape[:2]
    lines = []
    for name, (x1, y1, x2, y2), _ in scene.objects:
        numbers = ((x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height)
        lines.append(f"{list(SHAPES).index(name)} " + " ".join(f"{number:.6f}" for number in numbers) + "\n")
    return "".join(lines)


def yaml_text(folder: Path) -> str:
    """The data YAML. Paths are whole, because relative ones start from the working directory."""
    train, val = (json.dumps(str((folder / "images" / split).resolve())) for split in SPLITS)
    return (
        "# Drawn by `flatout yolo demo-data`.\n"
        f"train: {train}\nval: {val}\nnc: {len(SHAPES)}\nnames: [{', '.join(SHAPES)}]\n"
    )


def _draw_picture(folder: Path, config: DemoDataConfig, which: tuple[str, int]) -> int:
    """Draw and write one; returns the bytes of the picture."""
    split, number = which
    scene = draw_number(config, split, number)
    content = cv2.imencode(".jpg", scene.image, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])[1].tobytes()
    image = folder / "images" / split / f"{number:04}.jpg"
    image.parent.mkdir(parents=True, exist_ok=True)
    image.write_bytes(content)
    _write_text(folder / "labels" / split / f"{number:04}.txt", label_text(scene))
    return len(content)


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
