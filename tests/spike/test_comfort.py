"""Callbacks and budgets in a training of the spike job."""

from pathlib import Path

from flatout.engine.callbacks import Callback, End, RunStart, Scores
from flatout.spike.train import TrainOptions, train
from tests.spike.test_train import config_for


class RecordingCallback(Callback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def start(self, run: RunStart) -> None:
        self.events.append(f"start {run.job} {run.epoch}")

    def validation(self, scores: Scores) -> None:
        assert scores.scalars["epoch/avg_loss"] > 0 and scores.at > scores.epoch
        self.events.append(f"epoch {scores.epoch}")

    def end(self, end: End) -> None:
        self.events.append(f"{end.how} {end.epoch}")


def test_callbacks_are_notified_and_a_training_stops_at_its_budget_and_continues_with_a_larger_one(
    demo: Path, tmp_path: Path
) -> None:
    config = config_for(demo, tmp_path / "run", "TRAIN.EPOCHS=1")
    recording = RecordingCallback()
    stopped = train(config, TrainOptions(device="cpu", budget="0s"), [recording])
    assert not stopped.finished and stopped.why.startswith("The budget of 0s is used up")
    finished = train(config, TrainOptions(device="cpu", budget="1h"), [recording])
    assert finished.finished and finished.folder == stopped.folder
    assert recording.events == ["start spike 0", "stopped 0", "start spike 0", "epoch 0", "finished 1"]
