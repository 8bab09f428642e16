"""When ranks agree on stopping. The other rank is simulated; real ones are in tests/yolo/train."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flatout.engine.job import IntervalStats, StepSettings
from flatout.engine.loop import RANK_CHECK_STEPS, Loop, LoopConfig, StoppedAfter
from flatout.engine.optim import make_optimizer
from flatout.errors import Interrupted
from flatout.ranks.signals import Interrupts
from flatout.ranks.world import World

STEPS = 100


class AgreeingWorld(World):
    """A world whose other rank always agrees."""

    def all_reduce_max(self, numbers: np.ndarray) -> np.ndarray:
        return numbers

    def broadcast(self, value: Any) -> Any:
        return value

    def wait_for_all(self) -> None:
        pass


class FakeParallel(nn.Linear):
    """A network with the part of DistributedDataParallel that the loop uses."""

    def no_sync(self) -> Any:
        return nullcontext()


class Batch:
    indices = np.arange(1)

    def __len__(self) -> int:
        return 1


class ConstantJob:
    """A job, and its batches, which are all the same."""

    item_names = ("loss",)
    paddings: Mapping[str, Any] = {}
    device_wait_s = fill_wait_s = 0.0

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        return (Batch() for _ in range(start, STEPS))

    def phase(self, epoch: int) -> object:
        return None

    def inputs(self, batch: Batch, epoch: int, step: int) -> dict[str, Tensor]:
        return {"x": torch.ones(1, 1)}

    def step(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        loss = network(inputs["x"]).square().sum()
        return loss, loss.detach().reshape(1)


def of_two_ranks(window: int, interrupts: Interrupts | None = None, **settings: Any) -> Loop:
    """A loop on one of two ranks; steps that end an accumulation window: 0, `window`, 2 * `window`, ..."""
    network, job = FakeParallel(1, 1), ConstantJob()
    return Loop(
        job=job,
        network=network,
        optimizer=make_optimizer("sgd", [list(network.parameters())], lr=0.1, momentum=0.9, decays=(0.0,)),
        schedule=lambda epoch, step: StepSettings((0.1,), None, step_optimizer=step % window == 0),
        batches=job,
        config=LoopConfig(epochs=1, steps_per_epoch=STEPS, **settings),
        device=torch.device("cpu"),
        interrupts=interrupts or Interrupts(),
        world=AgreeingWorld(size=2),
    )


@pytest.mark.parametrize("window", [1, 2, 3, 4, 8])
def test_a_signal_is_noticed_whatever_the_length_of_a_window(window: int) -> None:
    interrupts = Interrupts()
    interrupts.requested = "SIGTERM"
    loop = of_two_ranks(window, interrupts)
    with pytest.raises(Interrupted):
        loop.run()
    assert loop.step <= RANK_CHECK_STEPS + window


@pytest.mark.parametrize(("window", "requested", "stopped"), [(1, 1, 1), (1, 3, 3), (4, 2, 5), (1, 25, 25)])
def test_a_number_of_steps_is_obeyed_without_an_exchange_between_ranks(
    window: int, requested: int, stopped: int
) -> None:
    loop = of_two_ranks(window, stop_after=requested)
    why = ", as requested" if stopped == requested else f": {requested} were requested, but a training stops only after"
    with pytest.raises(StoppedAfter, match=f"^Stopped after {stopped} step{'s' * (stopped > 1)}{why}"):
        loop.run()


class HeldBack(ConstantJob):
    """Every batch takes a while, half of it because the device is behind."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        for batch in super().epoch(epoch, start):
            time.sleep(0.01)
            type(self).device_wait_s += 0.005
            yield batch


def test_waiting_for_a_device_that_is_behind_is_no_wait_for_data() -> None:
    network, job, intervals = nn.Linear(1, 1), HeldBack(), list[IntervalStats]()
    Loop(
        job=job,
        network=network,
        optimizer=make_optimizer("sgd", [list(network.parameters())], lr=0.1, momentum=0.9, decays=(0.0,)),
        schedule=lambda epoch, step: StepSettings((0.1,), None, step_optimizer=True),
        batches=job,
        config=LoopConfig(epochs=1, steps_per_epoch=10, log_every=10),
        device=torch.device("cpu"),
        on_interval=intervals.append,
    ).run()
    # A sleep may take longer than requested, never shorter.
    assert sum(stats.wait_ms for stats in intervals) >= 5
    assert all(stats.step_ms - stats.wait_ms >= 5 for stats in intervals if stats.wait_ms)


def test_a_compiled_step_that_cannot_be_captured_is_not_compared_with_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise plain steps would be called compiled."""
    caplog.set_level(logging.INFO)
    for name, value in {"WARMUP_STEPS": 0, "MIN_INTERVALS": 1, "COST_S": 0.0, "COST_PER_LAYER_S": 0.0}.items():
        monkeypatch.setattr(f"flatout.engine.compile.{name}", value)
    compiled, used = nn.Linear(1, 1), list[nn.Module]()
    monkeypatch.setattr("flatout.engine.compile.Compiled", lambda network: compiled)

    class Captured(ConstantJob):
        def step(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            used.append(network)
            if network is compiled:
                loop._training_step.graphs.simplify()  # as after a capture that failed
            return super().step(network, inputs)

    network, job = nn.Linear(1, 1), Captured()
    loop = Loop(
        job=job,
        network=network,
        optimizer=make_optimizer("sgd", [list(network.parameters())], lr=0.1, momentum=0.9, decays=(0.0,)),
        schedule=lambda epoch, step: StepSettings((0.1,), None, step_optimizer=True),
        batches=job,
        config=LoopConfig(epochs=1, steps_per_epoch=50, log_every=5, compile_auto=True),
        device=torch.device("cpu"),
    )
    loop.run()
    assert used.count(compiled) == 1 and used[-1] is network
    assert not [text for text in caplog.messages if "ms compiled" in text]
