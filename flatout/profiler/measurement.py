"""The numbers of a measurement, and the ledger that is computed from them.

A `Measurement` holds plain numbers and is all that the ledger and the verdict depend on. A recorder, a watch or a
benchmark takes it; profile.json keeps it, so that a verdict can be computed again later, and on another machine.

`make_ledger` (pure) turns it into one table per step that adds up to the wall clock. Every lane (main thread, device,
workers) accounts for the whole step: time that no stage covers has a row of its own, `unexplained` on the host, `idle`
on a device or a worker.

Dimension key:  S steps
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flatout.clock import label_of
from flatout.profiler.observe.speed_of_light import SpeedOfLight

UNEXPLAINED = "unexplained"
IDLE = "idle"
WAIT = "feed.wait"
"""Stage in which the main thread is blocked until the next batch is complete."""


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Average time per step of the stages that run in one place. Stages do not overlap."""

    place: str
    """Where it runs: "host" (the main thread), "device", "copy" (the device's copy engine) or "workers"."""

    stage_ms: Mapping[str, float]
    """Stage -> self time per step, in milliseconds; summed over all workers where the place is "workers"."""

    stage_runs: Mapping[str, float] = field(default_factory=dict)
    """Stage -> runs per step."""

    width: int = 1
    """Number of workers, else 1. A lane has width x wall time to account for."""

    rest: str = UNEXPLAINED
    """Name of the time outside of all stages; on a device or a worker it is idle time."""


@dataclass(frozen=True, kw_only=True)
class WaitSite:
    """A code line at which the host waits for the device (without a device: reads a number out of a tensor)."""

    where: str
    """file:line."""

    per_step: float
    text: str = ""
    """The source line."""


@dataclass(frozen=True, kw_only=True)
class WaitBetween:
    """A code line at which the host waits between steps; removing the wait makes no step faster."""

    where: str
    """file:line."""

    stage: str
    """The stage that ran at the time, such as "validate"."""

    times: int
    """Number of waits while waits were counted, all steps together."""

    text: str = ""


@dataclass(frozen=True, kw_only=True)
class HotLine:
    """A code line, and the time per step for which the sampler found it running."""

    where: str
    ms: float
    stage: str | None = None
    text: str = ""
    function: str = ""
    in_worker: bool = False
    runs: float = 0.0
    """Runs per step, counted in a few steps that were not timed; 0: not counted."""

    in_graph: bool = False
    """Its function returned tensors that backward() goes through."""

    writes: bool = False
    """Its function, or one that it calls, writes to a file, a log or the terminal."""

    samples: int = 0
    """How often it was seen running; 0: unknown."""

    @property
    def owner(self) -> tuple[str, str]:
        """File and name of the function that it belongs to."""
        return self.where.rpartition(":")[0], self.function

    @property
    def source(self) -> str:
        """file:line and the source line."""
        return f"{self.where}  {self.text}".rstrip()


@dataclass(frozen=True, kw_only=True)
class NetworkRun:
    """Forward and backward of a copy of the network by themselves, on a batch of the observed loop."""

    ms: float
    images: float
    threads: int
    """Threads that torch computed with."""

    without: str = ""
    """A slow setting that the loop uses and this run does not (see observe/network_runs.py); empty: all as in the
    loop."""

    detail: str = ""
    """What exactly that setting is about."""


@dataclass(frozen=True, kw_only=True)
class IdleSplit:
    """Why the device was idle, in milliseconds per traced step."""

    host_ms: float
    """Nothing was queued: the host was busy with something else, or waited for data."""

    gap_ms: float
    """Work was queued and did not run yet: launch latency, and gaps between kernels."""

    transfer_ms: float
    """A copy between host and device ran, and no kernel."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Measured milliseconds per step of parts of a training, from short runs without the others; None: not measured."""

    compute_ms: float | None = None
    """Training on one batch that is already on the device."""

    device_ms: float | None = None
    """Kernel time of such a step; None: no device."""

    transfer_ms: float | None = None
    """Training on real batches that are kept in host memory: compute and copy."""

    input_ms: float | None = None
    """Taking batches from the feed without using them."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Timed steps of one training, and the machine they ran on."""

    wall_ms: Sequence[float]
    """[S], wall time of each step."""

    images: float
    """Images per step."""

    lanes: Sequence[Lane]
    main_cpu_ms: float = 0.0
    """CPU time of the main process per step, all of its threads."""

    main_queued_ms: float = 0.0
    """Time per step in which the main thread could have run and had no core."""

    worker_cpu_ms: float | None = None
    """CPU time of all workers per step; None: unknown."""

    worker_blocked_ms: float | None = None
    """Time per step that all workers spent in a stage without running or queueing for a core, that is, waiting for a
    disk, a network, a lock or a sleep; without workers, the same of the main thread while it makes batches. None:
    unknown."""

    worker_start_ms: float = 0.0
    """Time per step of all workers for the first samples after their start, as far as these take longer than later
    ones: opening files, importing modules."""

    num_workers: int = 0
    usable_cores: float = 1.0
    others_cores: float | None = None
    """Cores that other processes kept busy meanwhile; None: unknown."""

    num_threads: int | None = None
    """Threads that torch computes with on the CPU; None: unknown."""

    has_device: bool = False
    device_busy_ms: float | None = None
    """Time per step in which at least one kernel ran; None: not traced."""

    launches: float | None = None
    """Kernels launched per step; None: not traced."""

    launch_us: float | None = None
    """Host time of one kernel launch on this machine."""

    waits: Sequence[WaitSite] = ()
    """Waits inside steps."""

    waits_between: Sequence[WaitBetween] = ()
    lines: Sequence[HotLine] = ()
    network_runs: Sequence[NetworkRun] = ()
    """The network by itself, first as in the loop, then with other batch sizes and settings; empty: not tried."""

    idle_split: IdleSplit | None = None
    """Why the device was idle; None: not traced."""

    limits: Limits = Limits()
    light: SpeedOfLight | None = None
    """Hardware limits of the machine; None: not measured."""

    fixed_s: Mapping[str, float] = field(default_factory=dict)
    """What the profiled run cost besides its steps, in seconds by label; empty: not recorded."""

    machine: Mapping[str, str] = field(default_factory=dict)
    title: str = ""

    def __post_init__(self) -> None:
        times_ms = [*self.wall_ms, *(ms for lane in self.lanes for ms in lane.stage_ms.values())]
        if not (len(self.wall_ms) and min(self.wall_ms) > 0 and self.images > 0 and self.usable_cores > 0):
            raise ValueError(
                "a measurement needs at least one step, and step times, images and cores above 0, not "
                f"{len(self.wall_ms)} steps of {min(self.wall_ms, default=0)} ms or more, {self.images} images and "
                f"{self.usable_cores} cores"
            )
        if not all(map(math.isfinite, times_ms)):
            raise ValueError("a measurement needs finite times")

    def lane(self, place: str) -> Lane | None:
        """The lane of that place, or None if it was not measured."""
        return next((lane for lane in self.lanes if lane.place == place), None)


@dataclass(frozen=True)
class Row:
    """One stage of one lane, per step."""

    place: str
    stage: str
    ms: float
    """Wall time; of workers the average of one, so that the rows of a lane add up to the step."""

    share: float
    """Fraction of the step's wall time."""

    us_per_image: float
    """Time of one core, so that the cost of a worker stage does not depend on the number of workers."""

    runs: float
    """Runs per step; 0: not counted."""

    @property
    def label(self) -> str:
        return label_of(self.stage)


@dataclass(frozen=True)
class Ledger:
    """Where the time of an average step went, as rows per place."""

    step_ms: float
    p10_ms: float
    p90_ms: float
    num_steps: int
    images: float
    rows: Sequence[Row]

    @property
    def images_per_s(self) -> float:
        return 1e3 * self.images / self.step_ms

    def lane(self, place: str) -> list[Row]:
        """Rows of one place; their `ms` add up to `step_ms`."""
        return [row for row in self.rows if row.place == place]

    @property
    def places(self) -> list[str]:
        return list(dict.fromkeys(row.place for row in self.rows))

    def ms(self, place: str, stage: str) -> float:
        """Time of one stage per step; 0 if it did not run."""
        return sum(row.ms for row in self.rows if row.place == place and row.stage == stage)


def make_ledger(measurement: Measurement) -> Ledger:
    """Ledger of a measurement: rows of each lane by descending time, uncovered time last."""
    walls_S = np.asarray(measurement.wall_ms, np.float64)
    # Mean, not median: only means add up, and rare long steps are part of the time that a run takes.
    step_ms = float(walls_S.mean())
    rows = [row for lane in measurement.lanes for row in _rows_of(lane, step_ms, measurement.images)]
    p10_ms, p90_ms = np.quantile(walls_S, (0.1, 0.9))
    return Ledger(step_ms, float(p10_ms), float(p90_ms), len(walls_S), measurement.images, rows)


def _rows_of(lane: Lane, step_ms: float, images: float) -> list[Row]:
    ordered = sorted(lane.stage_ms, key=lambda stage: -lane.stage_ms[stage])
    rows = [_row(lane, stage, lane.stage_ms[stage], step_ms, images) for stage in ordered if lane.stage_ms[stage] > 0]
    rest_ms = lane.width * step_ms - sum(lane.stage_ms.values())
    return [*rows, _row(lane, lane.rest, rest_ms, step_ms, images)]


def _row(lane: Lane, stage: str, lane_ms: float, step_ms: float, images: float) -> Row:
    ms = lane_ms / lane.width
    return Row(lane.place, stage, ms, ms / step_ms, 1e3 * lane_ms / images, lane.stage_runs.get(stage, 0.0))
