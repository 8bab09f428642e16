"""A training that is looked at for some steps and leaves nothing behind: what `flatout profile` knows of any job.

observe   the training as it is                             -> ledger
limits    on one batch, on kept batches, feed alone         -> what compute, copy and input could do by themselves
trials    on one batch, with a flag switched on             -> what the network's part would take then
wholes    the same and the changed feed alone               -> a flag that changes network and input at once
speed     the training as it is, timed and nothing else     -> what a remedy really gave

Batches of a training as somebody wants them who looks at it: heard of, one again and again, or without their making.

They go in at the seams of a run (`flatout.runs.recipe.Seams`); nothing of the training is replaced.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from flatout.engine import Batches, StoppedAfter
from flatout.feed import DeviceBatch, Feed, FeedRuntime, HostPass, Lease
from flatout.profiler import (
    ALL,
    KERNELS,
    SPEED,
    DeviceTrace,
    EndToEndTrial,
    EngineObservation,
    Limits,
    Phases,
    Profile,
    Remedy,
    SpeedOfLight,
    Trial,
    drain,
    measure_machine,
    respelled,
)
from flatout.runs.command import TrainCommand
from flatout.runs.recipe import Seams

AHEAD = 6
"""Batches that may have been made before anybody asked (four slots, two on the device), and would flatter the input."""
LEAST_S = 0.5
"""Seconds of the input below which its speed is not believed: batches come in bursts."""
TRACED = 2
"""Batches whose kernels are looked at."""
KEPT = 2
"""Slots that a replay holds; every feed has more."""


class ObservedBatches:
    """Batches as they are; `hear` is told of each how many images it has.

    The last one of an epoch may be short, and its step is like no other.
    """

    def __init__(self, batches: Batches, hear: Callable[[int], None]) -> None:
        self._batches, self._hear = batches, hear

    @property
    def device_wait_s(self) -> float:
        return self._batches.device_wait_s

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        for batch in self._batches.epoch(epoch, start):
            self._hear(len(batch))
            yield batch


class RepeatedBatch:
    """One batch again and again: what is left of a step when its input costs nothing.

    Before, the real feed is asked for some batches that nobody uses: what the input could deliver by itself. Two limits
    from one short run; with a flag switched on, the same run is a trial of the network's part of the step alone.
    """

    device_wait_s = 0.0

    def __init__(self, num_batches: int = 0, *, traced: bool = False) -> None:
        """The real feed is asked for `num_batches` or more; `traced`: the kernels that make them are looked at, too."""
        self._num_batches, self._is_traced = num_batches, traced
        self._batches: Batches | None = None
        self._kept: DeviceBatch | None = None
        self.input_ms: float | None = None
        """A batch of the real feed, until it lies complete on the device; None: not asked for."""
        self.kernel_ms = 0.0
        """What its augmentation takes of the device; 0: there is none, or nobody looked."""

    def of(self, batches: Batches) -> Batches:
        """As the seam for batches takes it."""
        self._batches = batches
        return self

    def epoch(self, epoch: int, start: int = 0) -> Iterator[DeviceBatch]:
        if self._kept is None:
            assert self._batches is not None
            self._real = _endless(self._batches, epoch, start)  # a batch is borrowed until its pass goes on, or ends
            self._kept = self._measure(self._real) if self._num_batches else next(self._real)
        while True:
            yield self._kept

    def _measure(self, real: Iterator[DeviceBatch]) -> DeviceBatch:
        """Host-device waits, before the training begins."""
        most = max(len(next(real)) for _ in range(AHEAD))
        drain()
        begin_s, taken, images = time.perf_counter(), 0, 0
        while taken < self._num_batches or time.perf_counter() - begin_s < LEAST_S:
            batch = next(real)
            taken, images, most = taken + 1, images + len(batch), max(most, len(batch))
        drain()  # what was only queued is not done
        # The last batch of an epoch may be short.
        self.input_ms = 1e3 * (time.perf_counter() - begin_s) * most / images
        batch = _of(most, real)
        if self._is_traced and any(tensor.is_cuda for tensor in batch.fields.values()):
            batch = self._trace(real, most)
        return batch

    def _trace(self, real: Iterator[DeviceBatch], most: int) -> DeviceBatch:
        """A whole batch, and what its kernels take."""
        trace = DeviceTrace()
        trace.start()
        images = sum(len(next(real)) for _ in range(TRACED))
        work = trace.stop(TRACED)
        self.kernel_ms = max(0.0, work.busy_ms - work.copy_ms) * TRACED * most / images
        return _of(most, real)


def _of(images: int, batches: Iterator[DeviceBatch]) -> DeviceBatch:
    """The next batch of so many."""
    return next(batch for batch in batches if len(batch) == images)


def _endless(batches: Batches, epoch: int, start: int) -> Iterator[DeviceBatch]:
    while True:
        yield from batches.epoch(epoch, start)
        epoch, start = epoch + 1, 0


class ReplayedPass:
    """The first batches of a pass, in turn, without an end, in the slots they were made in.

    They go the ordinary way to the device, augmentation there included: what is left is copy and compute together.
    """

    def __init__(self, run: HostPass) -> None:
        self.runtime: FeedRuntime = run.runtime
        self._leases: list[Lease] = []
        while len(self._leases) < KEPT and (lease := run.take()) is not None:
            self._leases.append(lease)
        self._number = 0

    def is_ready(self) -> bool:
        return True

    def take(self) -> Lease:
        self._number += 1
        return self._leases[self._number % len(self._leases)]

    def give_back(self, lease: Lease) -> None:
        """It stays."""

    def position_after(self, step: int) -> tuple[int, int]:
        return 0, step + 1


class Replay:
    """Opens one pass for every epoch, as the seam below the copies takes it."""

    def __init__(self) -> None:
        self._pass: ReplayedPass | None = None

    def __call__(self, feed: Feed, epoch: int, start: int) -> HostPass:
        if self._pass is None:
            self._pass = ReplayedPass(feed.open(epoch, start))
        return self._pass


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

    def observe(self, turns: Phases = ALL, seams: Seams | None = None) -> Profile:
        """Train for a while and look; `seams` change what flows."""
        observation = EngineObservation(
            images_per_step=self.images_per_step, num_steps=self.num_steps, phases=turns, title=self.title
        )

        def hear(num_images: int) -> None:
            if observation.is_over:
                raise StoppedAfter("It was looked at long enough.")
            observation.batch_taken(num_images)

        seams = seams or Seams()
        # Pictures for people are drawn once per run; in one of some dozen steps they would be most of it.
        watched = replace(seams, batches=lambda batches: ObservedBatches(seams.batches(batches), hear), plots=False)
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
        source = RepeatedBatch(self.shorter().num_steps)
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
        then = changed.compute(RepeatedBatch())
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

    def wholes(self, tell: Tell) -> list[EndToEndTrial]:
        """Flags that change network and input at once, each part of them tried by itself."""
        found = []
        for what, switch in self.whole_switches().items():
            tell(
                f"Trying {switch.change}: its input by itself, its network on one batch; compiling takes most of it ..."
            )
            found.append(self.whole_trial(what, switch))
        return found

    def whole_trial(self, what: str, switch: Switch) -> EndToEndTrial:
        """The changed feed alone, and the changed network's part of the step on one of its batches."""
        changed = self.shorter().with_switch(switch.options)
        source = RepeatedBatch(changed.num_steps, traced=True)
        then = changed.compute(source)
        assert source.input_ms is not None
        return EndToEndTrial(
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

    def compute(self, source: RepeatedBatch) -> Compute:
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
