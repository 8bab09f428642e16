"""F28: a collapse of the scores is reported, and the best weights are kept. Also what else depends on scores."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.errors import ResourceError
from flatout.safefiles import container
from flatout.safefiles.container import read_container
from tests.yolo.train.scripted_recipe import ScriptedEnds, ScriptedRecipe


def trained(scores: list[float], folder: Path, **options: Any) -> tuple[ScriptedEnds, list[bool]]:
    """The ends of one epoch per score, and which of them ended the training. The weight of epoch e is e."""
    with ScriptedEnds(ScriptedRecipe(folder, scores, **options), folder) as ends:
        return ends, [ends(epoch) for epoch in range(len(scores))]


def best_epoch_in(folder: Path) -> float:
    weights: Any = read_container(folder / "weights/best.pt")["weights"]
    return float(weights["state"]["weight"])


def test_a_collapse_is_reported_and_the_best_weights_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    _, stops = trained([0.4, 0.95, 0.0, 0.0], tmp_path)
    warnings = [message for message in caplog.messages if "collapsed" in message]
    assert warnings[0] == (
        "Epoch 2 scored 0.000 after 0.950 in epoch 1: the training may have collapsed. best.pt is kept. If the next "
        "epochs are no better, stop, and train again with a lower learning rate."
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


def test_a_collapse_ends_the_training_if_there_is_a_patience(tmp_path: Path):
    ends, stops = trained([0.5, 0.9, 0.0, 0.0, 0.0], tmp_path, patience=2)
    assert stops == [False, False, False, True, True]
    assert torch.tensor(best_epoch_in(tmp_path)) == 1
    # Once more, with the plots and the class table of a last epoch.
    assert ends.recipe.validated[3:5] == [(3, False), (3, True)]


def test_of_equally_good_epochs_the_newest_is_best_and_starts_the_count_of_patience_again(tmp_path: Path):
    ends, stops = trained([0.6, 0.6, 0.5, 0.6, 0.5, 0.5], tmp_path, patience=2)
    assert best_epoch_in(tmp_path) == ends.epoch_end.best.epoch == 3
    assert stops == [False, False, False, False, False, True]


def test_late_best_weights_are_also_kept_by_epoch_and_nosave_keeps_none_before_the_end(tmp_path: Path):
    with ScriptedEnds(ScriptedRecipe(tmp_path, [0.3, 0.5, 0.4], epochs=300), tmp_path) as ends:
        for epoch in (199, 200, 201):
            ends(epoch)
    assert {path.name for path in (tmp_path / "weights").iterdir()} == {"best.pt", "best_200.pt", "epoch_199.pt"}
    other = tmp_path / "other"
    other.mkdir()
    trained([0.3, 0.5], other, nosave=True)
    assert not list((other / "weights").iterdir())


def test_a_disk_that_is_too_full_for_the_file_of_an_epoch_costs_that_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    write = container.write_container

    def full(path: Path, sections: Any) -> None:
        if path.name.startswith("epoch_"):
            raise ResourceError(f"{path}: no room.")
        write(path, sections)

    monkeypatch.setattr("flatout.runs.background.write_container", full)
    _, stops = trained([0.4], tmp_path)
    assert stops == [False]
    assert f"{tmp_path}/weights/epoch_000.pt: no room. Training goes on." in caplog.messages
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["best.pt"]
