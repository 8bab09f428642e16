"""Batches for the profiler: a repeated batch is a full one, and observed batches are counted and unchanged."""

from itertools import islice

import numpy as np
import torch

from flatout import Feed, FeedConfig, Field, Plan, SampleSource
from flatout.feed.device import DeviceBatches
from flatout.runs import profiled as module
from flatout.runs.profiled import KEPT, ObservedBatches, RepeatedBatch, Replay


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


def test_the_kept_batch_is_a_full_one_and_the_input_is_measured(monkeypatch):
    monkeypatch.setattr(module, "MIN_S", 0.0)
    for num_batches in (1, 2, 3, 4):  # one of them ends with the short last batch of an epoch
        source = RepeatedBatch(num_batches, traced=True)
        kept = iter(source.of(batches_of(3)).epoch(0))
        assert [len(next(kept)) for _ in range(5)] == [3] * 5
        assert source.input_ms > 0 and source.kernel_ms == 0


def test_the_kept_batch_is_the_same_in_every_epoch():
    batches = RepeatedBatch().of(batches_of(3))
    first = next(iter(batches.epoch(0)))
    seen = first["x"].clone()
    for epoch in (0, 1, 2):
        assert all(torch.equal(batch["x"], seen) for batch in islice(batches.epoch(epoch), 4))


def test_by_default_the_input_is_not_measured():
    source = RepeatedBatch()
    next(iter(source.of(batches_of(3)).epoch(0)))
    assert source.input_ms is None


def test_sizes_are_reported_and_batches_stay_as_they_are():
    sizes, plain = [], [batch["x"].clone() for batch in batches_of(3).epoch(0)]
    seen = [batch["x"].clone() for batch in ObservedBatches(batches_of(3), sizes.append).epoch(0)]
    assert sizes == [3, 3, 1]
    assert all(torch.equal(one, other) for one, other in zip(plain, seen, strict=True))


def test_observed_batches_pass_on_the_time_spent_waiting_for_the_device():
    class DeviceBound:
        device_wait_s = 1.5

        def epoch(self, epoch, start=0):
            return iter(())

    assert ObservedBatches(DeviceBound(), print).device_wait_s == 1.5
    assert RepeatedBatch().of(DeviceBound()).device_wait_s == 0, "a repeated batch is always ready"


def test_a_replay_repeats_the_first_batches_of_the_first_epoch_in_all_epochs():
    firsts = {tuple(batch["x"].flatten().tolist()) for batch in islice(batches_of(3).epoch(0), KEPT)}
    batches = batches_of(3)
    batches.open_pass = Replay()
    for epoch in (0, 1):
        seen = {tuple(batch["x"].flatten().tolist()) for batch in islice(batches.epoch(epoch), 9)}
        assert seen == firsts
