"""The demo data set on disk: images, labels, a data YAML, and a note by which a later call recognizes its own files.

    FOLDER/demo.yaml                      the data YAML for training; written last
    FOLDER/drawn.json                     what was generated; see flatout/demo_folder.py
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
from flatout.yolo.demo_data.scene import SHAPES, Scene, generate_scene

VERSION = 1
"""Version of the generator: raised when the same numbers give different images, so that an old set is replaced."""
QUALITY = 92
YAML = "demo.yaml"
OURS = re.compile(rf"{re.escape(YAML)}|images/(train|val)/\d+\.jpg|labels/(train|val)/\d+\.txt")
SPLITS = ("train", "val")
MANY = 100
"""From this many images on, worker processes are worth starting."""


MIN_SIDE_PX = 96


@dataclass(frozen=True, kw_only=True)
class DemoDataConfig:
    """Number, seed and size of the images."""

    images: int = 480
    """Images for training."""
    val: int = 120
    """Images for validation; generated from other random numbers."""
    seed: int = 0
    width: int = 320
    height: int = 240

    def __post_init__(self) -> None:
        for name, minimum in (("images", 1), ("val", 1), ("seed", 0)):
            if getattr(self, name) < minimum:
                raise ConfigError(f"--{name} {getattr(self, name)} is too small: use {minimum} or more.")
        if min(self.width, self.height) < MIN_SIDE_PX:
            raise ConfigError(f"--size {self.width}x{self.height}: both sides must be {MIN_SIDE_PX} or more.")


def write_demo_data(folder: Path, config: DemoDataConfig, *, show_progress: bool = False) -> Path:
    """Generate the set, unless it is there already; returns the path of the data YAML."""

    def generate() -> None:
        scenes = DemoScenes(config)
        workers = "auto" if len(scenes) >= MANY else 0
        plan = Plan(num_samples=len(scenes), batch_size=1, shuffle=False)
        nbytes = 0
        with (
            progress("generating", len(scenes), shown=show_progress) as advance,
            Feed(scenes, plan, FeedConfig(workers=workers, slots=32, epochs=1)) as feed,
        ):
            for done, batch in enumerate(feed, start=1):
                name = scenes.path(batch.step)
                jpeg = cv2.imencode(".jpg", batch["image"][0], [cv2.IMWRITE_JPEG_QUALITY, QUALITY])[1]
                nbytes += _write(folder / "images" / f"{name}.jpg", jpeg.tobytes())
                _write(folder / "labels" / f"{name}.txt", label_text(batch["labels"]).encode())
                advance(done, nbytes)

    draw_set(folder, {"job": "yolo", "version": VERSION, **asdict(config)}, OURS, generate)
    _write(folder / YAML, yaml_text(folder).encode())  # even if the set is there: the folder may have been moved
    return folder / YAML


class DemoScenes(SampleSource):
    """All images of a set and their labels: class, centre and size relative to the image."""

    def __init__(self, config: DemoDataConfig) -> None:
        self._config = config
        self.fields = {
            "image": Field((config.height, config.width, 3)),
            "labels": Rows(5, np.float64),
        }

    def __len__(self) -> int:
        return self._config.images + self._config.val

    def where(self, index: int) -> str:
        return f"image {self.path(index)}"

    def path(self, index: int) -> str:
        """Path below the folders of images and labels, without suffix."""
        split, number = self._split_and_number(index)
        return f"{split}/{number:04}"

    def sample(self, index: int, rng: np.random.Generator) -> Mapping[str, ArrayLike]:
        scene = generate_numbered_scene(self._config, *self._split_and_number(index))
        return {"image": scene.image, "labels": label_rows(scene)}

    def _split_and_number(self, index: int) -> tuple[str, int]:
        num_train = self._config.images
        return ("train", index) if index < num_train else ("val", index - num_train)


def generate_numbered_scene(config: DemoDataConfig, split: str, number: int) -> Scene:
    """Generate one scene of the set; it does not depend on the others."""
    return generate_scene(
        config.width, config.height, np.random.default_rng([config.seed, SPLITS.index(split), number])
    )


def label_rows(scene: Scene) -> np.ndarray:
    """Class, centre and size relative to the image of each object, float64 [n, 5]."""
    height, width = scene.image.shape[:2]
    number_n1 = np.array([list(SHAPES).index(each.name) for each in scene.objects], np.float64).reshape(-1, 1)
    box_n4 = np.array([each.box for each in scene.objects], np.float64).reshape(-1, 4)
    low_n2, high_n2, size_wh = box_n4[:, :2], box_n4[:, 2:], (width, height)
    return np.concatenate((number_n1, (low_n2 + high_n2) / 2 / size_wh, (high_n2 - low_n2) / size_wh), 1)


def label_text(rows: np.ndarray) -> str:
    """One line per object."""
    return "".join(f"{int(row[0])} " + " ".join(f"{number:.6f}" for number in row[1:]) + "\n" for row in rows)


def yaml_text(folder: Path) -> str:
    """The data YAML. Paths are absolute, because relative ones start from the working directory."""
    train, val = (json.dumps(str((folder / "images" / split).resolve())) for split in SPLITS)
    return (
        "# Generated by `flatout yolo demo-data`.\n"
        f"train: {train}\nval: {val}\nnc: {len(SHAPES)}\nnames: [{', '.join(SHAPES)}]\n"
    )


def _write(path: Path, content: bytes) -> int:
    """Write a file; returns its size in bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.write_bytes(content)
