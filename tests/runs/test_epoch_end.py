"""The best epoch: the newest of equally good ones, and never one whose score is NaN."""

import pytest

from flatout.runs.ends import BestTracker

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
