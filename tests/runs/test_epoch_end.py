"""The best epoch: the newest of equally good ones, and never one whose score is NaN; and the rows of an epoch."""

import pytest

from flatout.engine.job import EpochReport
from flatout.runs.ends import BestTracker
from flatout.runs.recipe import Recipe, ValidationResult

NAN = float("nan")


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ([0.4, 0.6, 0.5], 1),
        ([0.4, 0.6, 0.6, 0.5], 2),
        ([0.0, 0.0], 1),
        ([0.5, NAN, 0.4], 0),
        ([NAN, 0.1], 1),
        ([None, None, None], 2),
        ([-30.0, -20.0], 1),
    ],
)
def test_the_newest_of_the_best_is_kept(scores: list[float | None], best: int):
    tracker = BestTracker()
    improved = [epoch for epoch, score in enumerate(scores) if tracker.update(epoch, score)]
    assert (improved[-1], tracker.epoch) == (best, best)


def test_a_score_does_not_replace_the_number_of_the_training_of_the_same_name():
    report = EpochReport({"loss": 1.0, "mae": 0.25}, (0.1,), seconds=1.0, num_samples=1, num_bad=0)
    rows = Recipe.rows(None, 3, report, ValidationResult(0.0, {"mae": 0.5, "r2": 0.75}, None))
    assert rows.row == {"epoch": 3, "loss": 1.0, "mae": 0.25, "lr": 0.1, "val_mae": 0.5, "r2": 0.75}
    assert (rows.scalars["train/mae"], rows.scalars["val/mae"]) == (0.25, 0.5)
