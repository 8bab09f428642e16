"""The set on disk: pictures, labels, a data YAML, and a note by which a later call knows its own files.

    FOLDER/demo.yaml                      what training is given; written last
    FOLDER/drawn.json                     what was drawn; see flatout/demo_folder.py
    FOLDER/images/{train,val}/0000.jpg    FOLDER/labels/{train,val}/0000.txt

Files that are not in this list are never touched, and a folder with any of them is refused.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import ArrayLike

from flatout.demo_folder import draw_set
from flatout.errors import ConfigError
from flatout.feed import Feed, FeedConfig, Field, Plan, Rows, SampleSource
from flatout.progress import progress
from flatout.yolo.demo_data.scene import SHAPES, Scene, draw_scene

VERSION = 1
"""Of the drawing: raised when the same numbers make other pictures, so that an old set is drawn anew."""
QUALITY = 92
YAML = "demo.yaml"
OURS = re.compile(rf"{re.escape(YAML)}|images/(train|val)/\d+\.jpg|labels/(train|val)/\d+\.txt")
SPLITS = ("train", "val")
MANY = 100
"""Pictures for which starting worker processes pays."""


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
        drawings = Drawings(config)
        workers = "auto" if len(drawings) >= MANY else 0
        plan = Plan(num_samples=len(drawings), batch_size=1, shuffle=False)
        nbytes = 0
        with (
            progress("drawing", len(drawings), shown=show_progress) as advance,
            Feed(drawings, plan, FeedConfig(workers=workers, slots=32, epochs=1)) as feed,
        ):
            for done, picture in enumerate(feed, start=1):
                nbytes += _write_picture(folder / "images", drawings.path(picture.step), picture["image"][0])
                _write_text(folder / "labels" / f"{drawings.path(picture.step)}.txt", label_text(picture["labels"]))
                advance(done, nbytes)

    draw_set(folder, {"job": "yolo", "version": VERSION, **asdict(config)}, OURS, draw)
    _write_text(folder / YAML, yaml_text(folder))  # also of a set that is there: the folder may have been moved
    return folder / YAML


class Drawings(SampleSource):
    """All pictures of a set and their labels: class, centre and size relative to the picture's."""

    def __init__(self, config: DemoDataConfig) -> None:
        self._config = config
        self.fields = {
            "image": Field((config.height, config.width, 3)),
            "labels": Rows(5, np.float64),
        }

    def __len__(self) -> int:
        return self._config.images + self._config.val

    def where(self, index: int) -> str:
        return f"picture {self.path(index)}"

    def path(self, index: int) -> str:
        """Below images and labels, without its ending."""
        split, number = self._place(index)
        return f"{split}/{number:04}"

    def sample(self, index: int, rng: np.random.Generator) -> Mapping[str, ArrayLike]:
        scene = draw_number(self._config, *self._place(index))
        return {"image": scene.image, "labels": label_rows(scene)}

    def _place(self, index: int) -> tuple[str, int]:
        num_train = self._config.images
        return ("train", index) if index < num_train else ("val", index - num_train)


def draw_number(config: DemoDataConfig, split: str, number: int) -> Scene:
    """One picture of the set; depends on no other one."""
    return draw_scene(config.width, config.height, np.random.default_rng([config.seed, SPLITS.index(split), number]))


def label_rows(scene: Scene) -> np.ndarray:
    """[n, 5] per object: class, centre and size relative to the picture's."""
    height, width = scene.image.shape[:2]
    return np.array(
        [
            (
                list(SHAPES).index(name),
                (x1 + x2) / 2 / width,
                (y1 + y2) / 2 / height,
                (x2 - x1) / width,
                (y2 - y1) / height,
            )
            for name, (x1, y1, x2, y2), _ in scene.objects
        ],
        np.float64,
    ).reshape(-1, 5)


def label_text(rows: np.ndarray) -> str:
    """One line per object."""
    return "".join(f"{int(row[0])} " + " ".join(f"{number:.6f}" for number in row[1:]) + "\n" for row in rows)


def yaml_text(folder: Path) -> str:
    """The data YAML. Paths are whole, because relative ones start from the working directory."""
    train, val = (json.dumps(str((folder / "images" / split).resolve())) for split in SPLITS)
    return (
        "# Drawn by `flatout yolo demo-data`.\n"
        f"train: {train}\nval: {val}\nnc: {len(SHAPES)}\nnames: [{', '.join(SHAPES)}]\n"
    )


def _write_picture(folder: Path, name: str, image: np.ndarray) -> int:
    """Returns the bytes written."""
    content = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])[1].tobytes()
    path = folder / f"{name}.jpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return len(content)


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
