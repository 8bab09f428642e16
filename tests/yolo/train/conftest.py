"""Files for whole trainings: a generated data set, a small network and a hyp file with a short warm-up."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from flatout.yolo.demo_data.files import DemoDataConfig, write_demo_data
from flatout.yolo.model.configs import load_config
from flatout.yolo.options import TrainOptions
from tests.yolo.train.small_training import tiny_hyp

BATCH, TRAIN, VAL = 32, 70, 6
"""70 images in batches of 32: the last batch is short. An optimizer step takes two batches."""


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a network with an eighth of yolov7-tiny's channels, and a hyp file with a short warm-up."""
    folder = tmp_path_factory.mktemp("files")
    write_demo_data(folder / "data", DemoDataConfig(images=TRAIN, val=VAL, seed=1))
    config: Any = load_config("yolov7-tiny")
    (folder / "narrow.yaml").write_text(yaml.safe_dump({**config, "nc": 6, "width_multiple": 0.125}))
    hyp = {key: value for key, value in asdict(tiny_hyp(warmup_iters=2)).items() if value is not None}
    (folder / "hyp.yaml").write_text(yaml.safe_dump(hyp))
    return folder


@pytest.fixture
def options(files: Path, tmp_path: Path) -> TrainOptions:
    return options_for(files, tmp_path)


def options_for(files: Path, folder: Path) -> TrainOptions:
    """A training in `folder` that takes seconds."""
    return TrainOptions(
        weights="",
        cfg=str(files / "narrow.yaml"),
        data=str(next((files / "data").glob("*.yaml"))),
        hyp=str(files / "hyp.yaml"),
        epochs=2,
        batch_size=BATCH,
        img_size=(64, 64),
        device="cpu",
        workers=0,
        noautoanchor=True,
        project=str(folder / "runs"),
        log_every=2,
        save_every_steps=1,
    )
