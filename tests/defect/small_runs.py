"""Trainings that take seconds: small strips on disk, a narrow network, the options of the real command."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from flatout.defect.demo_data import DemoDataConfig, write_demo_data
from flatout.defect.options import TrainOptions

SMALL = DemoDataConfig(images=4, valid=1, test=1, shape_hw=(80, 64))


def small_data(root: Path) -> Path:
    write_demo_data(root, SMALL)
    return root


def small_options(data: Path, project: Path, **changes: Any) -> TrainOptions:
    options = TrainOptions(
        training_dataset_path=str(data),
        checkpoint_path=str(project),
        base_width=8,
        patch_size=32,
        min_patches=(2, 2),
        bs=8,
        epochs=3,
        gpu_id=-1,
        num_workers=0,
        log_every=2,
    )
    return replace(options, **changes)
