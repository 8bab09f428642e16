"""What was measured, as plain numbers: the only thing the ledger and the verdict look at.

Taken by a recorder, a watch or a benchmark; kept in profile.json, so that a verdict can be given again later, and on
another machine, from the same numbers.

Dimension key:  S steps   K stages of a lane

One table per step that sums to the wall clock.

Pure: a measurement in, rows out. Every lane (main thread, device, workers) accounts for the whole step: what no
stage covers has a row of its own, `unexplained` on the host, `idle` on a device or a worker.
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
"""The main thread is blocked until the next batch is complete."""


@dataclass(frozen=True, kw_only=True)
class Lane:
    """What one place spent its time on, per step on average. Stages do not overlap."""

    place: str
    """Where it runs: "host" (the main thread), "device", "copy" (the device's copy engine) or "workers"."""

    stage_ms: Mapping[str, float]
    """Self time per step; of all workers together where the place is "workers"."""

    stage_runs: Mapping[str, float] = field(default_factory=dict)
    width: int = 1
    """How many work side by side: workers, else 1. A lane has width x wall time to account for."""

    rest: str = UNEXPLAINED
    """What the time outside of all stages is called: a device or a worker without work is idle."""


@dataclass(frozen=True, kw_only=True)
class WaitSite:
    """A place where the host waits for the device (or, without one, reads a number out of a tensor)."""

    where: str
    """file:line."""

    per_step: float
    text: str = ""
    """The source line."""


@dataclass(frozen=True, kw_only=True)
class WaitBetween:
    """A place where the host waits between steps: no step gets faster without it."""

    where: str
    """file:line."""

    stage: str
    """What ran then: "validate"."""

    times: int
    """In all steps in which waits were counted."""

    text: str = ""


@dataclass(frozen=True, kw_only=True)
class HotLine:
    """A line of code, and the time per step that samples found it running."""

    where: str
    ms: float
    stage: str | None = None
    text: str = ""
    function: str = ""
    in_worker: bool = False


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Milliseconds per step if only one thing counted, from short runs that leave the others out."""

    compute_ms: float | None = None
    """Training on one batch that already lies on the device."""

    device_ms: float | None = None
    """Kernel time of such a step; None: no device."""

    transfer_ms: float | None = None
    """Training on real batches that are kept in host memory: compute and copy."""

    input_ms: float | None = None
    """Taking batches from the feed and doing nothing with them."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Steps of one training, and the machine they ran on."""

    wall_ms: Sequence[float]
    """[S], one number per step."""

    images: float
    """Per step."""

    lanes: Sequence[Lane]
    main_cpu_ms: float = 0.0
    """CPU time of the main process per step, all its threads."""

    worker_cpu_ms: float | None = None
    """CPU time of all workers per step; None: not known."""

    worker_blocked_ms: float | None = None
    """Time per step that all workers were at work without running or queueing for a core: they waited for a disk, a
    network or a lock. None: not known."""

    num_workers: int = 0
    usable_cores: float = 1.0
    others_cores: float | None = None
    """Cores that other processes kept busy meanwhile; None: not known."""

    num_threads: int | None = None
    """Threads that torch computes with on the CPU; None: not known."""

    has_device: bool = False
    device_busy_ms: float | None = None
    """Time per step in which at least one kernel ran; None: not traced."""

    launches: float | None = None
    """Kernels launched per step; None: not traced."""

    launch_us: float | None = None
    """What one launch costs the host on this machine."""

    waits: Sequence[WaitSite] = ()
    """Inside of steps."""

    waits_between: Sequence[WaitBetween] = ()
    lines: Sequence[HotLine] = ()
    limits: Limits = Limits()
    light: SpeedOfLight | None = None
    """None: not measured."""

    machine: Mapping[str, str] = field(default_factory=dict)
    title: str = ""

    def __post_init__(self) -> None:
        times_ms = [*self.wall_ms, *(ms for lane in self.lanes for ms in lane.stage_ms.values())]
        if not (len(self.wall_ms) and min(self.wall_ms) > 0 and self.images > 0 and self.usable_cores > 0):
            raise ValueError("a measurement has steps that took time, images in them, and cores they ran on")
        if not all(map(math.isfinite, times_ms)):
            raise ValueError("a measurement has finite times only")

    def lane(self, place: str) -> Lane | None:
        """The lane of that place, None if it was not measured."""
        return next((lane for lane in self.lanes if lane.place == place), None)


@dataclass(frozen=True)
class Row:
    """One stage of one lane, per step."""

    place: str
    stage: str
    ms: float
    """Wall time; for workers the average of one worker, so that a lane's rows sum to the step."""

    share: float
    """Of the step's wall time."""

    us_per_image: float
    """Time of one core, so that a worker stage's cost does not depend on the number of workers."""

    runs: float
    """How often per step; 0: not counted."""

    @property
    def label(self) -> str:
        return label_of(self.stage)


@dataclass(frozen=True)
class Ledger:
    """Where an average step went."""

    step_ms: float
    p10_ms: float
    p90_ms: float
    num_steps: int
    images: float
    rows: Sequence[Row]

    @property
    def images_per_s(self) -> float:
        return 1e3 * self.images / self.step_ms

    @property
    def spread(self) -> float:
        """Half of the range from p10 to p90, relative to the step."""
        return (self.p90_ms - self.p10_ms) / 2 / self.step_ms

    def lane(self, place: str) -> list[Row]:
        """Rows of one place; their `ms` add up to `step_ms`."""
        return [row for row in self.rows if row.place == place]

    @property
    def places(self) -> list[str]:
        return list(dict.fromkeys(row.place for row in self.rows))

    def ms(self, place: str, stage: str) -> float:
        """Time of one stage, 0 where it did not appear."""
        return sum(row.ms for row in self.rows if row.place == place and row.stage == stage)


def make_ledger(measurement: Measurement) -> Ledger:
    """Rows in order of time per lane, what no stage covers last."""
    walls_S = np.asarray(measurement.wall_ms, np.float64)
    # The mean, not the median: only means add up, and a rare long step is part of the time a run takes.
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
