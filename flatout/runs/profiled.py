"""Short trainings for `flatout profile`, of any job: measured for some steps in a temporary folder.

    observe            the training as it is                           -> ledger
    limits             on one batch, on replayed batches, feed alone   -> speed of compute, copy and input by themselves
    trials             on one batch, with a flag switched on           -> time of the network's part with that flag
    end_to_end_trials  the same, and the changed feed alone            -> a flag that changes network and input at once
    speed              the training as it is, only timed               -> the actual gain of a remedy

Batches are counted, repeated or replayed through the seams of a run (`flatout.runs.recipe.Seams`); the code of the
training itself is not replaced.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from flatout.engine import Batches, StoppedAfter
from flatout.errors import ConfigError
from flatout.feed import DeviceBatch, Feed, FeedRuntime, HostPass, Lease
from flatout.profiler import (
    ALL_PHASES,
    KERNEL_PHASES,
    SPEED_PHASES,
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
    with_job_flags,
)
from flatout.runs.command import TrainCommand
from flatout.runs.recipe import Seams
from flatout.runs.times import fixed_costs, read_times

# Batches

AHEAD = 6
"""Batches that may be ready before the first request (four slots, two on the device) and would make the input look
faster than it is."""
MIN_S = 0.5
"""Shortest time over which the speed of the input is measured: batches come in bursts."""
TRACED = 2
"""Batches whose kernels are traced."""
KEPT = 2
"""Slots that a replay holds; every feed has more."""


class ObservedBatches:
    """Passes batches through unchanged and calls `on_batch` with the number of images in each.

    The last batch of an epoch may be short, so that its step is not comparable with others.
    """

    def __init__(self, batches: Batches, on_batch: Callable[[int], None]) -> None:
        self._batches, self._on_batch = batches, on_batch

    @property
    def device_wait_s(self) -> float:
        return self._batches.device_wait_s

    @property
    def fill_wait_s(self) -> float:
        return self._batches.fill_wait_s

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        for batch in self._batches.epoch(epoch, start):
            self._on_batch(len(batch))
            yield batch


class RepeatedBatch:
    """Repeats one batch, so that the input of a step costs nothing.

    First, some batches of the real feed are taken and discarded, to measure the speed of the input by itself. One short
    run thus gives two limits; with a flag switched on, it is a trial of the network's part of the step.
    """

    device_wait_s = fill_wait_s = 0.0

    def __init__(self, num_batches: int = 0, *, traced: bool = False) -> None:
        """`num_batches`: fewest batches to take from the real feed first; `traced`: also trace their kernels."""
        self._num_batches, self._is_traced = num_batches, traced
        self._batches: Batches | None = None
        self._kept: DeviceBatch | None = None
        self.input_ms: float | None = None
        """Time of a batch of the real feed, until it is complete on the device; None: not measured."""
        self.kernel_ms = 0.0
        """Device time of its augmentation; 0: there is none, or it was not traced."""

    def of(self, batches: Batches) -> Batches:
        """The function for `Seams.batches`."""
        self._batches = batches
        return self

    def epoch(self, epoch: int, start: int = 0) -> Iterator[DeviceBatch]:
        if self._kept is None:
            assert self._batches is not None
            self._real = _endless(self._batches, epoch, start)  # kept: a batch is valid only until its pass continues
            self._kept = self._measure(self._real) if self._num_batches else next(self._real)
        while True:
            yield self._kept

    def _measure(self, real: Iterator[DeviceBatch]) -> DeviceBatch:
        """Measure the real feed; waits for the device. Returns a full batch."""
        most = max(len(next(real)) for _ in range(AHEAD))
        drain()
        begin_s, taken, images = time.perf_counter(), 0, 0
        while taken < self._num_batches or time.perf_counter() - begin_s < MIN_S:
            batch = next(real)
            taken, images, most = taken + 1, images + len(batch), max(most, len(batch))
        drain()  # waits for queued work
        # The last batch of an epoch may be short.
        self.input_ms = 1e3 * (time.perf_counter() - begin_s) * most / images
        batch = _next_of(most, real)
        if self._is_traced and any(tensor.is_cuda for tensor in batch.fields.values()):
            batch = self._trace(real, most)
        return batch

    def _trace(self, real: Iterator[DeviceBatch], most: int) -> DeviceBatch:
        """Measure the kernels of some batches; returns a full batch."""
        trace = DeviceTrace()
        images = sum(len(next(real)) for _ in range(TRACED))
        work = trace.stop(TRACED)
        self.kernel_ms = max(0.0, work.busy_ms - work.copy_ms) * TRACED * most / images
        return _next_of(most, real)


def _next_of(images: int, batches: Iterator[DeviceBatch]) -> DeviceBatch:
    """The next batch with this many images."""
    return next(batch for batch in batches if len(batch) == images)


def _endless(batches: Batches, epoch: int, start: int) -> Iterator[DeviceBatch]:
    while True:
        yield from batches.epoch(epoch, start)
        epoch, start = epoch + 1, 0


class Replay:
    """Repeats the first batches of the first pass endlessly, from the slots they were made in; for `Seams.open_pass`.

    They take the usual way to the device, including augmentation there: copy and compute without the rest of the input.
    """

    runtime: FeedRuntime

    def __init__(self) -> None:
        self._leases: list[Lease] = []
        self._number = 0

    def __call__(self, feed: Feed, epoch: int, start: int) -> HostPass:
        if not self._leases:
            first = feed.open(epoch, start)
            self.runtime, self._leases = first.runtime, list(islice(iter(first.take, None), KEPT))
        return self

    def is_ready(self) -> bool:
        return True

    def take(self) -> Lease:
        self._number += 1
        return self._leases[self._number % len(self._leases)]

    def give_back(self, lease: Lease) -> None:
        """Does nothing: the slot is kept."""

    def position_after(self, step: int) -> tuple[int, int]:
        return 0, step + 1


# Trainings

NETWORK = "prepare+forward+loss+assign+backward+graph+optimizer+ema+ahead"
"""Stages of a step that do not belong to its input. Being ahead of the device also means waiting for the network."""

MANY_EPOCHS = 10_000
"""Enough for a small data set not to end before all steps were measured; the speed does not depend on it."""

FEWEST = 4
"""Fewest steps of a short run."""

Report = Callable[[str], None]
"""Called with lines about the progress, since profiling takes a while."""

FILES = 8
"""Image files to measure the decoding speed of a core."""


class Switch(NamedTuple):
    """A remedy as a flag of a job's command."""

    change: str
    """The flag as it is typed."""
    options: Mapping[str, Any]
    """The option values, for `with_switch`."""
    covers: Sequence[str] = ()
    """Remedies of the verdict that it includes."""


class Compute(NamedTuple):
    """Times of a step whose batch is ready."""

    step_ms: float
    device_ms: float | None
    """Time of its kernels; None: no device."""


class Decoding(NamedTuple):
    """The decoder of a job, and some of its files."""

    decode: Callable[[Any], np.ndarray]
    """File -> image [H, W, ...]."""
    files: Sequence[Any]


@dataclass(frozen=True)
class ProfiledTraining:
    """The training of a job's command, profiled for `num_steps` steps. Jobs override it to list flags that may help."""

    num_steps: int
    command: TrainCommand
    options: Any

    @classmethod
    def from_flags(cls, command: TrainCommand, flags: Sequence[str], *, num_steps: int) -> Self:
        """From the flags of the training command; ConfigError if they resume a run."""
        options = command.parse(flags, f"flatout profile {command.job}")[0]
        if options.resume:
            raise ConfigError(
                "--resume has no use here: a profile is that of a new, short training. Give the flags of the run "
                f"instead, or profile it while it continues: flatout {command.job} train --resume RUN --profile"
            )
        return cls(num_steps, command, options)

    @property
    def title(self) -> str:
        return f"{self.command.job}, batch {self.images_per_step}"

    @property
    def images_per_step(self) -> int:
        return self.command.images_per_step(self.options)

    def with_switch(self, switch: Mapping[str, Any]) -> Self:
        """The same training with a remedy applied, given as option values."""
        return replace(self, options=replace(self.options, **switch))

    def network_switches(self) -> Mapping[str, Switch]:
        """Flags that change the time of the network and are not on yet, by the description of the remedy."""
        return {}

    def end_to_end_switches(self) -> Mapping[str, Switch]:
        """Flags that change network and input at once and are not on yet, by the description of the remedy."""
        return {}

    def own_switch(self, switch: Mapping[str, Any]) -> Switch | None:
        """This job's flag for a remedy of the verdict; None: it has no such flag, or it is on already."""
        return None

    def own_flags(self) -> Mapping[str, str]:
        """This job's spelling of other flags of the verdict; see `with_job_flags`."""
        return {}

    def decoding(self) -> Decoding | None:
        """Its decoder and some files; None: it reads no files."""
        return None

    def brief(self, folder: Path, num_steps: int) -> Any:
        """Options for a run of this many steps in a folder, without validation and with as few saves as possible."""
        return replace(self.briefly(folder, num_steps), epochs=MANY_EPOCHS)

    def briefly(self, folder: Path, num_steps: int) -> Any:
        """As `brief`, by the options that every job has."""
        return replace(
            self.options,
            project=str(folder),
            name="run",
            stop_after=num_steps,
            fresh=True,
            resume=False,
            mirror="",  # a profiled run is not kept
            patience=0,
            log_every=num_steps,
            log_to=("none",),
            no_preflight=True,
        )

    def observe(self, phases: Phases = ALL_PHASES, seams: Seams | None = None) -> Profile:
        """Profile a short training, optionally with other batches (`seams`)."""
        observation = EngineObservation(
            images_per_step=self.images_per_step, num_steps=self.num_steps, phases=phases, title=self.title
        )

        def on_batch(num_images: int) -> None:
            if observation.is_over:
                raise StoppedAfter("All steps of the profile are measured.")
            observation.batch_taken(num_images)

        seams = seams or Seams()
        # Plots are made once per run; in a run of some dozen steps they would take most of the time.
        counted = replace(seams, batches=lambda batches: ObservedBatches(seams.batches(batches), on_batch), plots=False)
        with tempfile.TemporaryDirectory(prefix="flatout-profile-") as folder, observation.observing():
            # Twice as many steps at most, since steps with a short batch do not count.
            result = self.command.train(self.brief(Path(folder), 2 * observation.total_steps), seams=counted)
            fixed_s = {} if result is None else fixed_costs(read_times(result.folder))
        _free_memory()
        profile = observation.profile
        profile.fixed_s = fixed_s
        profile.reword = self.with_own_flags
        return profile

    def speed(self) -> float:
        """Measured images per second."""
        return self.observe(SPEED_PHASES).ledger.images_per_s

    def limits(self) -> Limits:
        """The speed of network, copy and input, each by itself."""
        source = RepeatedBatch(self.shorter().num_steps)
        compute = self.shorter().compute(source)
        copied = self.shorter().observe(SPEED_PHASES, Seams(open_pass=Replay()))
        return Limits(
            compute_ms=compute.step_ms,
            device_ms=compute.device_ms,
            transfer_ms=_step_ms(copied),
            input_ms=source.input_ms,
        )

    def trials(self, now: Limits, report: Report) -> list[Trial]:
        """Try each flag that changes the time of the network on one batch; `now` are the limits without flags."""
        assert now.compute_ms is not None and now.input_ms is not None
        compute, switches, found = Compute(now.compute_ms, now.device_ms), self.network_switches(), list[Trial]()
        # Not on a CPU, where network and input share the cores: a faster network leaves more of them to the input.
        if switches and now.device_ms is not None and now.input_ms > now.compute_ms:
            report("Flags for a faster network are not tried: the input alone takes longer than the network.")
            return found
        for what, switch in switches.items():
            report(f"Trying {switch.change}: the network's part of the step on one batch ...")
            found.append(self.trial(what, switch, compute))
        return found

    def trial(self, what: str, switch: Switch, now: Compute) -> Trial:
        """Measure the network's part of the step with a flag switched on."""
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

    def end_to_end_trials(self, report: Report) -> list[EndToEndTrial]:
        """Try each flag that changes network and input at once; both parts are measured by themselves."""
        found = []
        for what, switch in self.end_to_end_switches().items():
            report(f"Trying {switch.change}: the input alone, then the network on one batch; mostly compiling ...")
            found.append(self.end_to_end_trial(what, switch))
        return found

    def end_to_end_trial(self, what: str, switch: Switch) -> EndToEndTrial:
        """Measure the changed feed alone, and the changed network's part of the step on one of its batches."""
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
            input_device_ms=source.kernel_ms,
            covers=switch.covers,
            images=self._images_if_changed(changed),
            switch=switch.options,
        )

    def _images_if_changed(self, changed: Self) -> float | None:
        return None if changed.images_per_step == self.images_per_step else changed.images_per_step

    def compute(self, source: RepeatedBatch) -> Compute:
        """Measure a step on one batch, without its wait for data."""
        profile = self.observe(KERNEL_PHASES, Seams(batches=source.of))
        wait_ms = profile.ledger.ms("host", "feed.wait")
        return Compute(max(0.0, _step_ms(profile) - wait_ms), profile.measurement.device_busy_ms)

    def speed_of_light(self) -> SpeedOfLight:
        """The best possible speeds of this machine, with this job's files."""
        return measure_machine(*(self.decoding() or ()))

    def with_own_flags(self, remedy: Remedy) -> Remedy:
        """A remedy with the flags of this job; without a flag, it is left to the user to apply."""
        tried = (*self.network_switches().values(), *self.end_to_end_switches().values())
        if any(remedy.switch == own.options for own in tried):
            return remedy
        own = self.own_switch(remedy.switch) if remedy.switch else None
        if own is None:
            return replace(with_job_flags(remedy, self.own_flags()), switch={})
        return replace(remedy, change=own.change, switch=own.options)

    def shorter(self) -> Self:
        return replace(self, num_steps=max(FEWEST, self.num_steps // 2))


def _step_ms(profile: Profile) -> float:
    """The median step: in such a short run, one delayed step would distort the mean."""
    return float(np.median(profile.measurement.wall_ms))


def _free_memory() -> None:
    """Free the memory of the last training: the next one decides by the free memory where to keep its images."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
