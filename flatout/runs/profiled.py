"""A training that is looked at for some steps and leaves nothing behind: what `flatout profile` knows of any job.

observe   the training as it is                             -> ledger
limits    on one batch, on kept batches, feed alone         -> what compute, copy and input could do by themselves
trials    on one batch, with a flag switched on             -> what the network's part would take then
wholes    the same and the changed feed alone               -> a flag that changes network and input at once
speed     the training as it is, timed and nothing else     -> what a remedy really gave
"""

import gc
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from flatout.engine import StoppedAfter
from flatout.profiler import (
    ALL,
    KERNELS,
    SPEED,
    EngineObservation,
    Limits,
    Profile,
    Remedy,
    SpeedOfLight,
    Trial,
    Turns,
    WholeTrial,
    measure_machine,
    respelled,
)
from flatout.runs.command import TrainCommand
from flatout.runs.recipe import Seams
from flatout.runs.watched_batches import HeardBatches, OneBatch, Replay

NETWORK = "prepare+forward+loss+assign+backward+graph+optimizer+ema+ahead"
"""Stages of a step that do not belong to its input. Being ahead of the device is waiting for the network, too."""

MANY_EPOCHS = 10_000
"""So that a small data set does not end before enough steps were seen; speed does not depend on it."""

FEWEST = 4
"""Steps of a short run."""

Tell = Callable[[str], None]
"""Hears what is going on: a look takes a while."""

FILES = 8
"""Pictures that tell how fast a core decodes."""


class Switch(NamedTuple):
    """How a job's command applies a remedy."""

    change: str
    """As it is typed."""
    options: Mapping[str, Any]
    """As `with_switch` takes it."""
    covers: Sequence[str] = ()
    """Remedies of the verdict that are part of it."""


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
class ProfiledTraining:
    """What a job's training command would run, for `num_steps` timed steps. Jobs say what flags could help them."""

    num_steps: int
    command: TrainCommand
    options: Any

    @classmethod
    def from_flags(cls, command: TrainCommand, flags: Sequence[str], *, num_steps: int) -> Self:
        """Flags as the training command takes them."""
        return cls(num_steps, command, command.parse(flags, f"flatout profile {command.job}")[0])

    @property
    def title(self) -> str:
        return f"{self.command.job}, batch {self.images_per_step}"

    @property
    def images_per_step(self) -> int:
        return self.command.images_per_step(self.options)

    def with_switch(self, switch: Mapping[str, Any]) -> Self:
        """The same training with a remedy applied."""
        return replace(self, options=replace(self.options, **switch))

    def network_switches(self) -> Mapping[str, Switch]:
        """Remedy in words -> a flag that changes what the network costs, and is not on yet."""
        return {}

    def whole_switches(self) -> Mapping[str, Switch]:
        """Remedy in words -> a flag that changes network and input at once, and is not on yet."""
        return {}

    def own_switch(self, switch: Mapping[str, Any]) -> Switch | None:
        """What a remedy of the verdict is called by this job; None: it has no such flag, or it is on already."""
        return None

    def own_flags(self) -> Mapping[str, str]:
        """How this job spells other flags of the verdict; see `respelled`."""
        return {}

    def decoding(self) -> Decoding | None:
        """How it decodes its files; None: it reads none."""
        return None

    def brief(self, folder: Path, num_steps: int) -> Any:
        """Options for so many steps in a folder, without validation and without saving more than it must."""
        return replace(
            self.options,
            project=str(folder),
            name="run",
            epochs=MANY_EPOCHS,
            stop_after=num_steps,
            fresh=True,
            resume=False,
            mirror="",  # what is looked at for a moment is no run to keep
            patience=0,
            log_every=num_steps,
            log_to=("none",),
            no_preflight=True,
        )

    def observe(self, turns: Turns = ALL, seams: Seams | None = None) -> Profile:
        """Train for a while and look; `seams` change what flows."""
        observation = EngineObservation(
            images_per_step=self.images_per_step, num_steps=self.num_steps, turns=turns, title=self.title
        )

        def hear(num_images: int) -> None:
            if observation.is_over:
                raise StoppedAfter("It was looked at long enough.")
            observation.batch_taken(num_images)

        seams = seams or Seams()
        # Pictures for people are drawn once per run; in one of some dozen steps they would be most of it.
        watched = replace(seams, batches=lambda batches: HeardBatches(seams.batches(batches), hear), pictures=False)
        with tempfile.TemporaryDirectory(prefix="flatout-profile-") as folder, observation.observing():
            # At most so many: steps with a short batch do not count.
            self.command.train(self.brief(Path(folder), 2 * observation.total_steps), seams=watched)
        _free_memory()
        profile = observation.profile
        profile.reword = self.in_own_words
        return profile

    def speed(self) -> float:
        """Images per second, and nothing else."""
        return self.observe(SPEED).ledger.images_per_s

    def limits(self) -> Limits:
        """What network, copy and input could do, each by itself."""
        source = OneBatch(self.shorter().num_steps)
        compute = self.shorter().compute(source)
        copied = self.shorter().observe(SPEED, Seams(open_pass=Replay()))
        return Limits(
            compute_ms=compute.step_ms,
            device_ms=compute.device_ms,
            transfer_ms=_step_ms(copied),
            input_ms=source.input_ms,
        )

    def trials(self, now: Limits, tell: Tell) -> list[Trial]:
        """Flags that change what the network costs, each tried on one batch; `now` is what it costs without."""
        assert now.compute_ms is not None and now.input_ms is not None
        compute, switches, found = Compute(now.compute_ms, now.device_ms), self.network_switches(), list[Trial]()
        # On a CPU the two share its cores: there a faster network leaves more of them to the input.
        if switches and now.device_ms is not None and now.input_ms > now.compute_ms:
            tell("Flags that change the network's part are not tried: the input by itself takes longer than that.")
            return found
        for what, switch in switches.items():
            tell(f"Trying {switch.change}: the network's part of the step on one batch ...")
            found.append(self.trial(what, switch, compute))
        return found

    def trial(self, what: str, switch: Switch, now: Compute) -> Trial:
        """The network's part of the step alone, with a flag switched on."""
        changed = self.shorter().with_switch(switch.options)
        then = changed.compute(OneBatch())
        return Trial(
            what=what,
            change=switch.change,
            stage=NETWORK,
            then_ms=then.step_ms / now.step_ms,
            is_share=True,
            device_share=then.device_ms / now.device_ms if then.device_ms and now.device_ms else None,
            images=self._images_if_changed(changed),
            switch=switch.options,
        )

    def wholes(self, tell: Tell) -> list[WholeTrial]:
        """Flags that change network and input at once, each part of them tried by itself."""
        found = []
        for what, switch in self.whole_switches().items():
            tell(
                f"Trying {switch.change}: its input by itself, its network on one batch; compiling takes most of it ..."
            )
            found.append(self.whole_trial(what, switch))
        return found

    def whole_trial(self, what: str, switch: Switch) -> WholeTrial:
        """The changed feed alone, and the changed network's part of the step on one of its batches."""
        changed = self.shorter().with_switch(switch.options)
        source = OneBatch(changed.num_steps, traced=True)
        then = changed.compute(source)
        assert source.input_ms is not None
        return WholeTrial(
            what=what,
            change=switch.change,
            compute_ms=then.step_ms,
            device_ms=then.device_ms or 0.0,
            input_ms=source.input_ms,
            beside_ms=source.kernel_ms,
            covers=switch.covers,
            images=self._images_if_changed(changed),
            switch=switch.options,
        )

    def _images_if_changed(self, changed: Self) -> float | None:
        return None if changed.images_per_step == self.images_per_step else changed.images_per_step

    def compute(self, source: OneBatch) -> Compute:
        """A step on one batch, less its wait for data."""
        profile = self.observe(KERNELS, Seams(batches=source.of))
        wait_ms = profile.ledger.ms("host", "feed.wait")
        return Compute(max(0.0, _step_ms(profile) - wait_ms), profile.measurement.device_busy_ms)

    def speed_of_light(self) -> SpeedOfLight:
        """What this machine can do at all, with this job's files."""
        return measure_machine(*(self.decoding() or ()))

    def in_own_words(self, remedy: Remedy) -> Remedy:
        """A remedy under the names of this job's flags; what it has no flag for is left to people."""
        tried = (*self.network_switches().values(), *self.whole_switches().values())
        if any(remedy.switch == own.options for own in tried):
            return remedy
        own = self.own_switch(remedy.switch) if remedy.switch else None
        if own is None:
            return replace(respelled(remedy, self.own_flags()), switch={})
        return replace(remedy, change=own.change, switch=own.options)

    def shorter(self) -> Self:
        return replace(self, num_steps=max(FEWEST, self.num_steps // 2))


def _step_ms(profile: Profile) -> float:
    """The step in the middle: in a run this short, one that was held up would count for too much."""
    return float(np.median(profile.measurement.wall_ms))


def _free_memory() -> None:
    """Of a training that is over: the next one decides by what is free where it keeps its pictures."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
