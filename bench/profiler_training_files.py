"""Files for the trainings of bench/profiler_trainings.py: JPEG images of 320 x 240, labels, and a small network."""

import os
from pathlib import Path

import cv2
import numpy as np

CLASSES, BOXES, DISTINCT = 80, 8, 64

SMALL_NETWORK = """nc: 80
depth_multiple: 1.0
width_multiple: 1.0
anchors:
  - [10,13,  16,30,  33,23]
  - [30,61,  62,45,  59,119]
  - [116,90,  156,198,  373,326]
backbone:
  - [-1, 1, Conv, [32, 3, 2]]
  - [-1, 1, Conv, [64, 3, 2]]
  - [-1, 1, Conv, [64, 3, 1]]
  - [-1, 1, Conv, [128, 3, 2]]
  - [-1, 1, Conv, [128, 3, 1]]
  - [-1, 1, Conv, [256, 3, 2]]
  - [-1, 1, Conv, [256, 3, 1]]
  - [-1, 1, Conv, [512, 3, 2]]
head:
  - [[4, 6, 7], 1, IDetect, [nc, anchors]]
"""
"""Eight convolutions: compiling them takes seconds, not the minute that the 58 of yolov7-tiny take."""


def write_images(folder: Path, num: int) -> Path:
    """Write a data set of few distinct images under many names; returns its YAML."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (DISTINCT, 15, 20, 3), dtype=np.uint8)
    for split, num_split in (("train", num), ("val", DISTINCT)):
        images, labels = (folder / kind / split for kind in ("images", "labels"))
        images.mkdir(parents=True)
        labels.mkdir(parents=True)
        for number in range(num_split):
            image, label = images / f"{number}.jpg", labels / f"{number}.txt"
            if number < DISTINCT:
                cv2.imwrite(str(image), cv2.resize(coarse[number], (320, 240)))
                label.write_text(_boxes(rng))
            else:
                os.link(images / f"{number % DISTINCT}.jpg", image)
                os.link(labels / f"{number % DISTINCT}.txt", label)
    yaml = folder / "data.yaml"
    places = f"train: {folder / 'images' / 'train'}\nval: {folder / 'images' / 'val'}\n"
    yaml.write_text(f"{places}nc: {CLASSES}\nnames: {[f'c{number}' for number in range(CLASSES)]}\n")
    return yaml


def _boxes(rng: np.random.Generator) -> str:
    box_B4 = np.concatenate((rng.uniform(0.3, 0.7, (BOXES, 2)), rng.uniform(0.05, 0.4, (BOXES, 2))), 1)
    return "".join(f"{rng.integers(CLASSES)} {' '.join(f'{x:.4f}' for x in row)}\n" for row in box_B4)


def write_small_network(folder: Path) -> Path:
    path = folder / "small.yaml"
    path.write_text(SMALL_NETWORK)
    return path
