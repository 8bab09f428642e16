"""One table per step that sums to the wall clock.

Pure: a measurement in, rows out. Every lane (main thread, device, workers) accounts for the whole step: what no
stage covers has a row of its own, `unexplained` on the host, `idle` on a device or a worker.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flatout.clock import label_of
from flatout.profiler.measurement import Lane, Measurement


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
