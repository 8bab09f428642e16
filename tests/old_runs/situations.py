"""Small trainings whose run folders are kept: one command per job, and its data.

Everything is relative to the folder the command is run in, so that a run folder continues wherever it is unpacked.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

NETWORK = """\
nc: 2
depth_multiple: 1.0
width_multiple: 1.0
anchors:
  - [6,6, 10,14, 14,10]
  - [16,16, 24,30, 30,24]
backbone:
  - [-1, 1, Conv, [8, 3, 2]]
  - [-1, 1, Conv, [8, 3, 2]]
  - [-1, 1, Conv, [8, 3, 2]]
  - [-1, 1, Conv, [8, 3, 2]]
head:
  - [[2, 3], 1, Detect, [nc, anchors]]
"""
SPIKE_KEYS = (
    "DATA.CROP_SIZE=16", "DATA.NUM_VOXEL_BINS=4", "DATA.CLIP_LEN=2", "DATA.USE_RAM_CACHE=false", "TRAIN.EPOCHS=3",
    "TRAIN.BATCH_SIZE=2", "TRAIN.GRADIENT_ACCUMULATION_STEPS=1", "TRAIN.SCHED.WARMUP_STEPS=1", "MODEL.WIDTH=2",
    "MODEL.ENC_BLOCKS=[1,1]", "MODEL.DEC_BLOCKS=[1,1]", "MODEL.SPIKE_BLOCKS=1", "DATALOADER.TRAIN_WORKERS=0",
    "DATALOADER.VAL_WORKERS=0", "LOG.VAL_EVERY_STEPS=null", "LOG.TENSORBOARD=false", "LOG.SAVE_DIR=runs/old",
    "TEST.NUM_WORKERS=0", "TEST.TILE_SIZE=0",
)  # fmt: skip


class Situation(NamedTuple):
    """A training command of one job."""

    prepare: Callable[[Path], None]
    """Writes the data to a folder."""
    command: tuple[str, ...]
    run: str
    """The run folder that the command creates."""
    stop_after: int
    """A step in the middle of an epoch other than the first."""


def _yolo_data(folder: Path) -> None:
    """24 images of 64 x 64 with a light square on a dark background, as BMP: the same bytes from any encoder."""
    rng = np.random.default_rng(7)
    for split, num in (("train", 16), ("val", 8)):
        (folder / "set/images" / split).mkdir(parents=True)
        (folder / "set/labels" / split).mkdir(parents=True)
        for number in range(num):
            left, top, side = (int(value) for value in rng.integers(4, 30, 3))
            image = rng.integers(0, 60, (64, 64, 3)).astype(np.uint8)
            image[top : top + side, left : left + side] += 150
            cv2.imwrite(str(folder / "set/images" / split / f"{number}.bmp"), image)
            box = np.array([left + side / 2, top + side / 2, side, side]) / 64
            (folder / "set/labels" / split / f"{number}.txt").write_text(f"{number % 2} {' '.join(map(str, box))}\n")
    (folder / "set/data.yaml").write_text("train: images/train\nval: images/val\nnames: [even, odd]\n")
    (folder / "network.yaml").write_text(NETWORK)


def _defect_data(folder: Path) -> None:
    from flatout.defect.demo_data import DemoDataConfig, write_demo_data

    write_demo_data(folder / "strips", DemoDataConfig(images=4, valid=1, test=1, shape_hw=(80, 64)))


def _spike_data(folder: Path) -> None:
    from flatout.spike.demo_data import DemoConfig, write_demo_data

    write_demo_data(folder / "clips", DemoConfig(train=2, test=1, frames=6, width=64, height=32, spike_frames=80))


SITUATIONS = {
    "yolo": Situation(
        _yolo_data,
        ("yolo", "train", "--data", "set/data.yaml", "--cfg", "network.yaml", "--weights", "", "--img", "64",
         "--batch", "4", "--epochs", "3", "--device", "cpu", "--workers", "0", "--noautoanchor", "--project", "runs",
         "--name", "old", "--log-to", "none", "--seed", "3"),
        "runs/old",
        stop_after=6,
    ),
    "defect": Situation(
        _defect_data,
        ("defect", "train", "--training_dataset_path", "strips", "--checkpoint_path", "runs", "--base_width", "1",
         "--patch_size", "32", "--min_patches", "2", "2", "--bs", "4", "--epochs", "3", "--gpu_id", "-1",
         "--num_workers", "0", "--log_to", "none"),
        "runs/exp",
        stop_after=9,
    ),
    "spike": Situation(
        _spike_data,
        ("spike", "train", "--config", "clips/demo.yaml", "--device", "cpu", "--log-to", "none",
         *(word for key in SPIKE_KEYS for word in ("--set", key))),
        "runs/old",
        stop_after=7,
    ),
}  # fmt: skip
