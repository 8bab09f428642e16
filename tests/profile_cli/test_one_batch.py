"""Runs on one batch keep a whole one, whatever comes last; sizes are heard wherever batches come from."""

import numpy as np
import torch

from flatout import Feed, FeedConfig, Field, Plan, SampleSource
from flatout.feed.device import DeviceBatches
from flatout.profile_cli import one_batch as module
from flatout.profile_cli.heard_batches import heard_batches
from flatout.profile_cli.one_batch import one_batch


class Numbers(SampleSource):
    fields = {"x": Field((2,), np.float32)}

    def __len__(self):
        return 7

    def where(self, index):
        return f"number {index}"

    def sample(self, index, rng):
        return {"x": np.full(2, index, np.float32)}


def batches_of(size):
    feed = Feed(Numbers(), Plan(num_samples=7, batch_size=size, last="short"), FeedConfig(workers=0))
    return DeviceBatches(feed, torch.device("cpu"))


def test_the_kept_batch_is_a_whole_one_and_the_input_is_measured(monkeypatch):
    monkeypatch.setattr(module, "LEAST_S", 0.0)
    for asked in (1, 2, 3, 4):  # one of them ends with the epoch's short batch of one
        with one_batch(asked, traced=True) as source:
            kept = iter(batches_of(3).epoch(0))
            assert [len(next(kept)) for _ in range(5)] == [3] * 5
        assert source.input_ms > 0 and source.kernel_ms == 0


def test_without_a_question_nothing_is_measured():
    with one_batch() as source:
        next(iter(batches_of(3).epoch(0)))
    assert source.input_ms is None


def test_sizes_are_heard_and_nothing_is_left_behind():
    real, heard = DeviceBatches.epoch, []
    with heard_batches(heard.append):
        assert sum(len(batch) for batch in batches_of(3).epoch(0)) == 7
    assert heard == [3, 3, 1]
    assert DeviceBatches.epoch is real
