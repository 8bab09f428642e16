"""Callbacks and budgets in a training of the defect job."""

import json
from dataclasses import replace
from pathlib import Path

from flatout.defect.train import train
from flatout.engine.callbacks import Callback, End, RunStart, Saved, Scores
from tests.defect.small_runs import small_data, small_options


class RecordingCallback(Callback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def start(self, run: RunStart) -> None:
        self.events.append(f"start {run.job} {run.epoch}")

    def validation(self, scores: Scores) -> None:
        assert scores.scalars["train/loss"] > 0
        self.events.append(f"epoch {scores.epoch}")

    def checkpoint(self, saved: Saved) -> None:
        assert saved.path.is_file()

    def end(self, end: End) -> None:
        self.events.append(f"{end.how} {end.epoch}")


def test_callbacks_are_notified_and_a_training_stops_at_its_budget_and_continues_with_a_larger_one(
    tmp_path: Path,
) -> None:
    options = small_options(small_data(tmp_path / "data"), tmp_path / "runs", epochs=1, use_mask=False)
    recording = RecordingCallback()
    stopped = train(replace(options, budget="0s"), [recording])
    assert not stopped.finished and stopped.why.startswith("The budget of 0s is used up")
    finished = train(replace(options, budget="1h", price=2.0), [recording])
    assert finished.finished and finished.folder == stopped.folder
    assert recording.events == ["start defect 0", "stopped 0", "start defect 0", "epoch 0", "finished 1"]
    assert json.loads((finished.folder / "spent.json").read_text())["cost"] > 0
    assert list(finished.folder.glob("events.out.tfevents.*"))
