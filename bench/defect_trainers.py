"""Two ways to train the defect network, for bench/defect_step.py: as in 2025, and with the loop of flatout.

Both are timed alike: after some warm-up steps, with a device synchronisation at the beginning and at the end.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bench.defect_baselines import August, July
from flatout.defect.model import DefectNet
from flatout.defect.options import TrainOptions
from flatout.defect.step import focal_loss
from flatout.defect.train import DefectRecipe
from flatout.engine.compile import Compiled
from flatout.engine.job import Batches, IntervalStats
from flatout.engine.loop import Loop, LoopConfig
from flatout.engine.step import Precision
from flatout.feed.device import DeviceBatch, DeviceBatches
from flatout.ranks.signals import Interrupts
from flatout.ranks.world import World
from flatout.runs.recipe import Model, RunContext

WORKERS, PREFETCH = 7, 2


class Timed(NamedTuple):
    """Measurement of some training steps."""

    samples_per_s: float
    wait_share: float
    """Share of the time that the host spends waiting for batches."""


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def set_backend_flags(*, searching: bool) -> None:
    """Enable TF32, as a training does; `searching`: let cuDNN benchmark its kernels."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = searching


class RecipeWithoutFiles(DefectRecipe):
    """The recipe of `flatout defect train`, without images."""

    def _make_network(self) -> DefectNet:
        return DefectNet(self.options.network, self.options.base_width)


def built(options: TrainOptions, device: torch.device) -> tuple[DefectRecipe, Model]:
    """The recipe of `flatout defect train` with its network and optimizer, for a run without a folder."""
    recipe = RecipeWithoutFiles(options, World(), device)
    run = RunContext(
        world=recipe.world, device=device, folder=Path(), weights=Path(), continues=False, interrupts=Interrupts(),
        stack=ExitStack(), plots=False,
    )  # fmt: skip
    return recipe, recipe.build(run, None)


def compile_ahead(options: TrainOptions, device: torch.device) -> None:
    """Compile the network, which leaves it in the compiler's cache on disk. For a separate process during preparation:
    compiling keeps one core busy for most of a minute, and hardly uses the GPU."""
    set_backend_flags(searching=False)
    recipe, model = built(options, device)
    network = model.network.train()
    side = options.patch
    images = torch.rand(options.bs, 3, side, side, device=device).contiguous(memory_format=torch.channels_last)
    with Precision(recipe.amp, device).autocast():
        loss = focal_loss(Compiled(network)(images), torch.zeros_like(images[:, :1]), gamma=2.0)
    loss.backward()


class Samples(Dataset):
    """A baseline as a torch Dataset, with NumPy's global generator in every worker, as in the original."""

    def __init__(self, side: July | August, num: int, times: int) -> None:
        """An epoch passes over the samples `times` times, so that no measurement reaches its end."""
        self._side, self._num, self._times = side, num, times

    def __len__(self) -> int:
        return self._num * self._times

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        planes, mask = self._side(index % self._num, np.random.mtrand._rand)
        return torch.from_numpy(planes), torch.from_numpy(mask)


class PlainTrainer:
    """The loop of 2025: pageable batches, torch's default Adam, the loss read back after every step.

    It is faster than the original in three respects: flatout's loss (no one-hot on the host), no deterministic kernels,
    and epochs that are long enough not to restart the workers.
    """

    def __init__(self, side: July | August, num: int, options: TrainOptions, device: torch.device) -> None:
        torch.manual_seed(0)
        self._network = DefectNet(base=options.base_width).to(device).train()
        self._optimizer = torch.optim.Adam(self._network.parameters(), lr=1e-3)
        self._data, self._bs, self._device = Samples(side, num, 100), options.bs, device
        self.loss = 0.0

    def run(self, steps: int) -> Timed:
        """Time steps with a new loader, which has nothing prefetched. The first batch of every worker is not timed; the
        sustained speed is measured."""
        loader = DataLoader(self._data, self._bs, shuffle=True, num_workers=WORKERS, prefetch_factor=PREFETCH)
        return self._timed(iter(loader), WORKERS, steps)

    def run_ready(self, steps: int) -> Timed:
        """Time steps on one batch in host memory: the speed of the loop if input cost nothing."""
        batch = torch.rand(self._bs, 3, 128, 128), torch.zeros(self._bs, 1, 128, 128)
        return self._timed(iter(lambda: batch, None), 3, steps)

    def _timed(self, batches: Iterator[tuple[Tensor, Tensor]], unseen: int, steps: int) -> Timed:
        for _ in range(unseen):
            self._step(next(batches))
        wait_for(self._device)
        began, waited = time.perf_counter(), 0.0
        for _ in range(steps):
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            self._step(batch)
        wait_for(self._device)
        seconds = time.perf_counter() - began
        return Timed(steps * self._bs / seconds, waited / seconds)

    def _step(self, batch: tuple[Tensor, Tensor]) -> None:
        images, masks = (part.to(self._device) for part in batch)
        self._optimizer.zero_grad()
        loss = focal_loss(self._network(images), masks, gamma=2.0)
        loss.backward()
        self._optimizer.step()
        self.loss += loss.item()


class _Ended(Exception):
    """Enough steps were timed."""


class StopWatch:
    """Called after every log interval of a loop: skips some steps, times some, and ends the run."""

    def __init__(self, loop: Loop, unseen: int, steps: int) -> None:
        self._loop, self._unseen, self._wanted = loop, unseen, steps
        self._first = self._last = loop.steps_here
        self._began: float | None = None
        self.steps, self.seconds, self.waited_s = 0, 0.0, 0.0

    def __call__(self, tick: IntervalStats) -> None:
        now, before = self._loop.steps_here, self._last
        self._last = now
        if self._began is None:
            if now - self._first >= self._unseen:
                wait_for(self._loop.device)
                self._first, self._began = now, time.perf_counter()
            return
        self.waited_s += tick.wait_ms * (now - before) / 1e3
        if now - self._first >= self._wanted:
            wait_for(self._loop.device)
            self.steps, self.seconds = now - self._first, time.perf_counter() - self._began
            raise _Ended


INTERVAL = 20
"""Steps per log interval, as in a training."""


class LoopTrainer:
    """`flatout defect train` with these options, without files: with its input, loop and CUDA graphs."""

    def __init__(self, batches: DeviceBatches, options: TrainOptions, device: torch.device) -> None:
        torch.manual_seed(0)
        recipe, model = built(replace(options, epochs=10_000), device)
        settings, self._bs = recipe.compute_settings(), options.bs
        self._fed, self._ready = batches, RepeatedBatch(next(iter(batches.epoch(0))))
        self.loop = Loop(
            job=recipe.job(model),
            network=model.network,
            optimizer=model.optimizer,
            schedule=recipe.schedule(model, len(batches)),
            batches=batches,
            config=LoopConfig(
                epochs=model.epochs,
                steps_per_epoch=len(batches),
                amp=settings.amp,
                log_every=min(INTERVAL, len(batches)),
                save_every_s=1e9,
                save_every_steps=10**9,
                graphs=settings.graphs,
            ),
            device=device,
            forward=Compiled(model.network) if options.compile == "on" else None,
            on_interval=lambda tick: self._watch(tick),
        )
        self._watch = StopWatch(self.loop, 0, 0)

    def run(self, steps: int, *, unseen: int = INTERVAL) -> Timed:
        """Time steps with the real input."""
        return self._timed(self._fed, steps, unseen)

    def run_ready(self, steps: int, *, unseen: int = INTERVAL) -> Timed:
        """Time steps on one batch that is already on the device: network and optimizer alone."""
        return self._timed(self._ready, steps, unseen)

    def _timed(self, batches: Batches, steps: int, unseen: int) -> Timed:
        self.loop.batches, self._watch = batches, StopWatch(self.loop, unseen, steps)
        with suppress(_Ended):
            self.loop.run()
        watch = self._watch
        return Timed(watch.steps * self._bs / watch.seconds, watch.waited_s / watch.seconds)


class RepeatedBatch:
    """Batches of a loop: always the same one."""

    device_wait_s = fill_wait_s = 0.0

    def __init__(self, batch: DeviceBatch) -> None:
        fields: dict[str, Any] = {name: tensor.clone() for name, tensor in batch.fields.items()}
        self._batch = replace(batch, fields=fields)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[DeviceBatch]:
        while True:
            yield self._batch
