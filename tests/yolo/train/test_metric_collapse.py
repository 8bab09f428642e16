"""F28: scores that collapse are told loudly, and the best weights stay."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flatout.engine.checkpoint.container import read_container
from flatout.engine.job import EpochReport
from flatout.engine.records import Records
from flatout.yolo.train.epoch_end import EpochEnd, EpochEndConfig
from flatout.yolo.train.weight_files import WeightFiles

REPORT = EpochReport(
    items={"box": 0.1, "obj": 0.1, "cls": 0.1, "total": 0.3}, lrs=(0.01,), seconds=1.0, num_samples=8, num_bad=0
)


def trained(scores: list[float], folder: Path, **knobs: Any) -> tuple[EpochEnd, list[bool]]:
    """The ends of as many epochs; the weight of epoch e is e. Says also which of them ended the training."""
    network = nn.Linear(1, 1, bias=False)
    script = iter(scores)

    def validate(judged: nn.Module, last: bool) -> Any:
        # The last one only draws pictures.
        return SimpleNamespace(evaluation=SimpleNamespace(fitness=0.0 if last else next(script)), scores=(0.0,) * 7)

    with Records(folder) as records:
        end = EpochEnd(
            EpochEndConfig(epochs=300, **knobs), average=network, validate=validate, records=records,
            files=WeightFiles(folder, {}), about={}, run={},
        )  # fmt: skip
        stops = []
        for epoch in range(len(scores)):
            nn.init.constant_(network.weight, epoch)
            stops.append(end(epoch, REPORT, num_targets=1, width_px=32))
            end.flush()
    return end, stops


def best_epoch_in(folder: Path) -> float:
    weights: Any = read_container(folder / "best.pt")["weights"]
    return float(weights["state"]["weight"])


def test_a_collapse_is_told_and_the_best_weights_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    _, stops = trained([0.4, 0.95, 0.0, 0.0], tmp_path)
    warnings = [message for message in caplog.messages if "collapsed" in message]
    assert warnings[0] == (
        "Epoch 2 scored 0.000 after 0.950 in epoch 1: the training may have collapsed. best.pt is kept."
    )
    assert best_epoch_in(tmp_path) == 1
    assert not any(stops)


def test_ups_and_downs_are_no_collapse(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    trained([0.4, 0.6, 0.5, 0.35, 0.62], tmp_path)
    assert not [message for message in caplog.messages if "collapsed" in message]
    assert best_epoch_in(tmp_path) == 4


def test_a_training_that_has_not_begun_to_learn_cannot_collapse(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    trained([0.01, 0.0, 0.05, 0.0], tmp_path)
    assert not [message for message in caplog.messages if "collapsed" in message]


def test_a_collapse_ends_the_training_where_patience_was_asked_for(tmp_path: Path):
    _, stops = trained([0.5, 0.9, 0.0, 0.0, 0.0], tmp_path, patience=2)
    assert stops == [False, False, False, True, True]
    assert torch.tensor(best_epoch_in(tmp_path)) == 1
