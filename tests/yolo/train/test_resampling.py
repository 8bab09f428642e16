"""`--image-weights`: what an epoch is drawn by follows from the last validation, and is saved with the training."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import nn

from flatout.engine.job import EpochReport
from flatout.engine.records import Records
from flatout.yolo.train.epoch_end import EpochEnd, EpochEndConfig
from flatout.yolo.train.weight_files import WeightFiles

REPORT = EpochReport({"box": 0.1, "obj": 0.1, "cls": 0.1, "total": 0.3}, (0.01,), 1.0, 8, 0)
MAPS = [0.25, 0.75]


def end_of_epochs(folder: Path, heard: list[Any]) -> EpochEnd:
    def validate(judged: nn.Module, last: bool) -> Any:
        return SimpleNamespace(evaluation=SimpleNamespace(fitness=0.5, maps=np.array(MAPS)), scores=(0.0,) * 7)

    return EpochEnd(
        EpochEndConfig(epochs=4),
        average=nn.Linear(1, 1),
        validate=validate,
        records=Records(folder),
        files=WeightFiles(folder, {}),
        about={},
        run={},
        resample=lambda maps, epoch: heard.append((maps, epoch)),
    )


def test_a_continued_training_draws_by_the_same_scores(tmp_path: Path) -> None:
    first: list[Any] = []
    end = end_of_epochs(tmp_path, first)
    end(0, REPORT, num_targets=1, width_px=32)
    assert first == [(MAPS, 1)]
    continued: list[Any] = []
    end_of_epochs(tmp_path, continued).load_state_dict(end.state_dict())
    assert continued == first


def test_nothing_is_drawn_after_the_last_epoch(tmp_path: Path) -> None:
    heard: list[Any] = []
    end_of_epochs(tmp_path, heard)(3, REPORT, num_targets=1, width_px=32)
    assert heard == []
