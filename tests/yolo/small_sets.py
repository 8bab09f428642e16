"""A small image set in files, with images of many shapes and labels, for tests of validation."""

from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np

from flatout.yolo.data.image_set import ImageSet
from tests.yolo.augment.scenes import busy_set, image_set_of


def files_of(folder: Path, num_images: int = 11, *, seed: int = 4, largest: int = 120) -> ImageSet:
    """Write PNG files named 000.png, 001.png, ... with 0 to 6 labels of two classes each."""
    images, labels = busy_set(num_images, seed=seed, largest=largest)
    folder.mkdir(parents=True, exist_ok=True)
    paths = tuple(str(folder / f"{number:03}.png") for number in range(num_images))
    for path, image in zip(paths, images, strict=True):
        cv2.imwrite(path, image)
    return replace(image_set_of(images, labels), paths=paths)


def label_files_of(image_set: ImageSet, folder: Path) -> None:
    """Write the labels of an image set as text files."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(image_set.paths):
        rows = np.unique(image_set.labels.of(number), axis=0)
        lines = [" ".join(f"{value:.9g}" for value in row) for row in rows]
        (folder / f"{Path(path).stem}.txt").write_text("\n".join(lines))
