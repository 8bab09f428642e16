"""Batches on a device equal those on the host, are copied one ahead, and cause no host-device wait."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from flatout.feed import Feed, FeedConfig, Plan
from tests.feed.comparing import Mixed, Vectorised
from tests.reference.plain_feed import plain_batches

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


def plan(**changes: Any) -> Plan:
    usual: dict[str, Any] = {"num_samples": 45, "batch_size": 8, "seed": 3, "last": "short"}
    return Plan(**usual | changes)


def to_host(batch) -> dict[str, np.ndarray]:
    return {name: tensor.cpu().numpy().copy() for name, tensor in batch.fields.items()}


def assert_equal(got: dict[str, np.ndarray], expected) -> None:
    assert got.keys() == expected.fields.keys()
    for name, array in got.items():
        np.testing.assert_array_equal(array, expected[name])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slots", [2, 5])
def test_batches_equal_the_reference(device, slots):
    source = Mixed(45)
    with Feed(source, plan(), FeedConfig(workers=2, slots=slots)) as feed:
        batches = feed.to_device(device)
        for epoch in range(3):
            for batch, expected in zip(batches, plain_batches(source, plan(), epoch), strict=True):
                assert_equal(to_host(batch), expected)
                assert batch.counts["boxes"].tolist() == expected.counts["boxes"].tolist()
                assert batch.indices.tolist() == expected.indices.tolist()
                assert (batch.epoch, batch.step, batch.num_valid) == (epoch, expected.step, expected.num_valid)


@pytest.mark.parametrize("device", DEVICES)
def test_steps_of_different_shape_equal_the_reference(device):
    shaped = plan(shapes=lambda epoch, step: {"image": (1, 16 - step, 3 + step)})
    source = Vectorised(45)
    with Feed(source, shaped, FeedConfig(workers=1)) as feed:
        for batch, expected in zip(feed.to_device(device), plain_batches(source, shaped, 0), strict=True):
            assert_equal(to_host(batch), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stop", [1, 3, 6])
def test_the_state_is_that_of_the_batch_yielded_not_of_the_copy_ahead(device, stop):
    source = Mixed(45)
    with Feed(source, plan(), FeedConfig(workers=1)) as feed:
        batches = feed.to_device(device)
        for number, _ in enumerate(batches, start=1):
            if number == stop:
                break
        state = batches.state_dict()
    assert (state["epoch"], state["next_step"]) == ((0, stop) if stop < 6 else (1, 0))
    with Feed(source, plan(), FeedConfig(workers=0)) as feed:
        batches = feed.to_device(device)
        batches.load_state_dict(state)
        expected = plain_batches(source, plan(), state["epoch"], start=state["next_step"])
        for batch, each in zip(batches, expected, strict=True):
            assert_equal(to_host(batch), each)


@pytest.mark.parametrize("device", DEVICES)
def test_a_pass_left_halfway_does_not_disturb_the_next(device):
    source = Mixed(45)
    with Feed(source, plan(), FeedConfig(workers=2, slots=3)) as feed:
        batches = feed.to_device(device)
        for stop in (1, 2, 4):
            for batch in batches.epoch(0):
                if batch.step == stop:
                    break
        for batch, expected in zip(batches.epoch(1), plain_batches(source, plan(), 1), strict=True):
            assert_equal(to_host(batch), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_an_unreferenced_pass_is_freed_without_a_garbage_collection(device):
    """Otherwise the collector of a forked child, such as a DataLoader's worker, frees events of the parent's GPU."""
    gc.collect()
    gc.disable()
    try:
        with Feed(Mixed(45), plan(), FeedConfig(workers=2, slots=3)) as feed:
            batches = feed.to_device(device)
            running = batches.epoch(0)
            next(running)
            gone = weakref.ref(running), weakref.ref(batches)
            del running, batches
            assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()


@pytest.mark.gpu
@needs_gpu
def test_a_slot_is_pinned_and_a_batch_is_not_overwritten_while_the_device_uses_it():
    source, big = Mixed(400), plan(num_samples=400, batch_size=40)
    with Feed(source, big, FeedConfig(workers=2, slots=3)) as feed:
        sums = []
        for batch in feed.to_device("cuda"):
            torch.cuda._sleep(20_000_000)  # the host runs far ahead of the device
            sums.append(batch["image"].long().sum())
        assert torch.from_numpy(feed._started.ring.slots[0].field("image")).is_pinned()
    expected = [int(batch["image"].astype(np.int64).sum()) for batch in plain_batches(source, big, 0)]
    assert [int(total) for total in sums] == expected


@pytest.mark.gpu
@needs_gpu
def test_twenty_steps_never_wait_for_the_device():
    source, many = Mixed(45), plan(num_samples=45, order=np.arange(45).repeat(10), batch_size=8)
    weight = torch.randn(64, 64, device="cuda")
    # A slot for every batch below: a device that other programs keep busy does not make the host wait.
    with Feed(source, many, FeedConfig(workers=2, slots=32)) as feed:
        batches = iter(feed.to_device("cuda"))

        def train(num_steps: int) -> None:
            for _ in range(num_steps):
                batch = next(batches)
                (batch["image"].float().mean() * weight @ weight).sum().add_(batch["boxes"].sum())

        train(5)  # buffers grow, kernels load
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            train(5)
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profiler:
                train(20)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        names = {event.name for event in profiler.events()}
    assert any("Memcpy HtoD (Pinned" in name for name in names), names
    assert not [name for name in names if "Pageable" in name]
    # The profiler itself waits for the device when it stops; that wait does not count.
    waits = [event.name for event in profiler.events() if "Synchronize" in event.name]
    assert waits in ([], ["cudaDeviceSynchronize"]), waits
