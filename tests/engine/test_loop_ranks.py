"""When ranks ask each other whether to stop. The other rank is pretended: real ones are in tests/yolo/train."""

import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flatout.engine.job import IntervalStats, StepSettings
from flatout.engine.loop import ASK_RANKS_EVERY, Loop, LoopConfig, StoppedAfter
from flatout.engine.optim import make_optimizer
from flatout.errors import Interrupted
from flatout.ranks.signals import Interrupts
from flatout.ranks.world import World

STEPS = 100


class Twin(World):
    """A world whose other rank always agrees."""

    def all_reduce_max(self, numbers: np.ndarray) -> np.ndarray:
        return numbers

    def broadcast(self, value: Any) -> Any:
        return value

    def wait_for_all(self) -> None:
        pass


class Shared(nn.Linear):
    """What DistributedDataParallel adds to a network, as far as the loop knows it."""

    def no_sync(self) -> Any:
        return nullcontext()


class Batch:
    indices = np.arange(1)

    def __len__(self) -> int:
        return 1


class Same:
    """Batches, and the job that trains on them."""

    item_names = ("loss",)
    paddings: Mapping[str, Any] = {}
    device_wait_s = 0.0

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        return (Batch() for _ in range(start, STEPS))

    def phase(self, epoch: int) -> object:
        return None

    def inputs(self, batch: Batch, epoch: int, step: int) -> dict[str, Tensor]:
        return {"x": torch.ones(1, 1)}

    def step(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        loss = network(inputs["x"]).square().sum()
        return loss, loss.detach().reshape(1)


def of_two_ranks(window: int, interrupts: Interrupts | None = None, **knobs: Any) -> Loop:
    """Steps that end a window: 0, `window`, 2 * `window`, ..."""
    network, job = Shared(1, 1), Same()
    return Loop(
        job=job,
        network=network,
        optimizer=make_optimizer("sgd", [list(network.parameters())], lr=0.1, momentum=0.9, decays=(0.0,)),
        schedule=lambda epoch, step: StepSettings((0.1,), None, steps=step % window == 0),
        batches=job,
        config=LoopConfig(epochs=1, steps_per_epoch=STEPS, **knobs),
        device=torch.device("cpu"),
        interrupts=interrupts,
        world=Twin(size=2),
    )


@pytest.mark.parametrize("window", [1, 2, 3, 4, 8])
def test_a_signal_is_heard_whatever_the_length_of_a_window(window: int) -> None:
    interrupts = Interrupts()
    interrupts.requested = "SIGTERM"
    loop = of_two_ranks(window, interrupts)
    with pytest.raises(Interrupted):
        loop.run()
    assert loop.step <= ASK_RANKS_EVERY + window


@pytest.mark.parametrize(("window", "wanted", "stopped"), [(1, 1, 1), (1, 3, 3), (4, 2, 5), (1, 25, 25)])
def test_a_number_of_steps_is_obeyed_without_asking_first(window: int, wanted: int, stopped: int) -> None:
    loop = of_two_ranks(window, stop_after=wanted)
    why = ", as asked" if stopped == wanted else f": {wanted} asked for, but a training stops only where an optimizer"
    with pytest.raises(StoppedAfter, match=f"^Stopped after {stopped} step{'s' * (stopped > 1)}{why}"):
        loop.run()


class HeldBack(Same):
    """Every batch is asked for in vain for a while, half of it because the device is behind."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        for batch in super().epoch(epoch, start):
            time.sleep(0.01)
            type(self).device_wait_s += 0.005
            yield batch


def test_waiting_for_a_device_that_is_behind_is_no_wait_for_data() -> None:
    network, job, ticks = nn.Linear(1, 1), HeldBack(), list[IntervalStats]()
    Loop(
        job=job,
        network=network,
        optimizer=make_optimizer("sgd", [list(network.parameters())], lr=0.1, momentum=0.9, decays=(0.0,)),
        schedule=lambda epoch, step: StepSettings((0.1,), None, steps=True),
        batches=job,
        config=LoopConfig(epochs=1, steps_per_epoch=10, log_every=10),
        device=torch.device("cpu"),
        tell=ticks.append,
    ).run()
    # A sleep may take longer than asked for, never shorter.
    assert sum(tick.wait_ms for tick in ticks) >= 5
    assert all(tick.step_ms - tick.wait_ms >= 5 for tick in ticks if tick.wait_ms)
