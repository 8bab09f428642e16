"""A training by flatout's engine that is looked at for some steps and leaves nothing behind; what all jobs share.

observe   the training as it is                             -> ledger
limits    on one batch, on kept batches, feed alone         -> what compute, copy and input could do by themselves
trials    on one batch, with a flag switched on             -> what the network's part would take then
"""

import gc
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from flatout.profile_cli.one_batch import one_batch
from flatout.profile_cli.replayed import replayed_batches
from flatout.profiler.engine_steps import EngineObservation
from flatout.profiler.measurement import Limits
from flatout.profiler.outcome import Profile
from flatout.profiler.speed_of_light import SpeedOfLight, measure_machine
from flatout.profiler.verdict import Remedy, Trial

NETWORK = "prepare+forward+loss+assign+backward+graph+optimizer+ema+ahead"
"""Stages of a step that do not belong to its input. Being ahead of the device is waiting for the network, too."""

MANY_EPOCHS = 10_000
"""So that a small data set does not end before enough steps were seen; speed does not depend on it."""

FEWEST = 4
"""Steps of a short run."""

FILES = 8
"""Pictures that tell how fast a core decodes."""


class Switch(NamedTuple):
    """How a job's command applies a remedy."""

    change: str
    """As it is typed."""
    options: Mapping[str, Any]
    """As `with_switch` takes it."""


class Compute(NamedTuple):
    """A step whose batch is ready."""

    step_ms: float
    device_ms: float | None
    """Kernels; None: no device."""


class Decoding(NamedTuple):
    """How a job decodes, and some of its files."""

    decode: Callable[[Any], np.ndarray]
    """File -> picture [H, W, ...]."""
    files: Sequence[Any]


@dataclass(frozen=True)
class EngineTraining(ABC):
    """What a job's training command would run, for `num_steps` timed steps."""

    num_steps: int

    @property
    @abstractmethod
    def title(self) -> str: ...

    @property
    @abstractmethod
    def images_per_step(self) -> int: ...

    @abstractmethod
    def with_switch(self, switch: Mapping[str, Any]) -> Self:
        """The same training with a remedy applied."""

    @abstractmethod
    def network_switches(self) -> Mapping[str, Switch]:
        """Remedy in words -> a flag that changes what the network costs, and is not on yet."""

    @abstractmethod
    def own_switch(self, switch: Mapping[str, Any]) -> Switch | None:
        """What a remedy of the verdict is called by this job; None: it has no such flag, or it is on already."""

    @abstractmethod
    def decoding(self) -> Decoding: ...

    @abstractmethod
    def run(self, folder: Path, num_steps: int) -> None:
        """Train for so many steps in a folder, without validation and without saving more than it must."""

    def observe(self) -> Profile:
        """Train for a while and look."""
        observation = EngineObservation(
            images_per_step=self.images_per_step, num_steps=self.num_steps, title=self.title
        )
        with tempfile.TemporaryDirectory(prefix="flatout-profile-") as folder, observation.observing():
            self.run(Path(folder), observation.total_steps)
        _free_memory()
        profile = observation.profile
        profile.reword = self.in_own_words
        return profile

    def limits(self) -> Limits:
        """What network, copy and input could do, each by itself."""
        with one_batch(max(FEWEST, self.num_steps // 2)) as source:
            compute = self._shorter().compute()
        with replayed_batches():
            copied = self._shorter().observe()
        return Limits(
            compute_ms=compute.step_ms,
            device_ms=compute.device_ms,
            transfer_ms=copied.ledger.step_ms,
            input_ms=source.input_ms,
        )

    def trials(self, now: Limits) -> list[Trial]:
        """Flags that change what the network costs, each tried on one batch; `now` is what it costs without."""
        assert now.compute_ms is not None
        compute = Compute(now.compute_ms, now.device_ms)
        return [self.trial(what, switch, compute) for what, switch in self.network_switches().items()]

    def trial(self, what: str, switch: Switch, now: Compute) -> Trial:
        """The network's part of the step alone, with a flag switched on."""
        changed = self._shorter().with_switch(switch.options)
        with one_batch(FEWEST):
            then = changed.compute()
        return Trial(
            what=what,
            change=switch.change,
            stage=NETWORK,
            then_ms=then.step_ms / now.step_ms,
            is_share=True,
            device_share=then.device_ms / now.device_ms if then.device_ms and now.device_ms else None,
            images=changed.images_per_step if changed.images_per_step != self.images_per_step else None,
            switch=switch.options,
        )

    def compute(self) -> Compute:
        """A step as it is, less its wait for data."""
        profile = self.observe()
        ledger = profile.ledger
        return Compute(ledger.step_ms - ledger.ms("host", "feed.wait"), profile.measurement.device_busy_ms)

    def speed_of_light(self) -> SpeedOfLight:
        """What this machine can do at all, with this job's files."""
        return measure_machine(*self.decoding())

    def in_own_words(self, remedy: Remedy) -> Remedy:
        """A remedy under the names of this job's flags; what it has no flag for is left to people."""
        if not remedy.switch or any(remedy.switch == own.options for own in self.network_switches().values()):
            return remedy
        own = self.own_switch(remedy.switch)
        return replace(remedy, switch={}) if own is None else replace(remedy, change=own.change, switch=own.options)

    def _shorter(self) -> Self:
        return replace(self, num_steps=max(FEWEST, self.num_steps // 2))


def _free_memory() -> None:
    """Of a training that is over: the next one decides by what is free where it keeps its pictures."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
