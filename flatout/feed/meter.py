"""How well is the feed keeping up? Numbers that cannot flatter.

`data_time` is the time the consumer was blocked waiting for a batch, and nothing else; a rate is
counted over wall time, waits included. The honest bound on what a better feed could gain is
data_time / step time.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flatout.profiler.clock import StageTime

WORKER_STAGES = "draw", "read", "hand over"
"""What the feed itself marks in a worker; a source's own marks lie inside "read"."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What happened over an interval of wall time."""

    elapsed_s: float
    batches: int
    samples: int
    nbytes: int
    wait_s: float
    """Time the consumer was blocked."""

    ready_slots: float
    """Complete batches lying ready when the consumer asked, on average."""

    num_slots: int
    num_workers: int
    stages: Mapping[str, StageTime]
    """Time spent in each stage, summed over all workers."""

    @property
    def data_time_ms(self) -> float:
        """Time blocked per batch."""
        return 1e3 * self.wait_s / max(1, self.batches)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.elapsed_s

    @property
    def gain_at_most(self) -> float:
        """How much faster a perfect feed could make this: 0.25 is 25 %."""
        return self.wait_s / max(self.elapsed_s - self.wait_s, 1e-9)

    @property
    def readiness(self) -> float:
        """Share of the time in which the consumer was not kept waiting."""
        return 1 - self.wait_s / self.elapsed_s

    def stage_share(self, name: str) -> float:
        """Share of all workers' time spent in a stage."""
        total_ns = self.stages[name].total_ns
        return total_ns / 1e9 / (self.elapsed_s * max(1, self.num_workers))

    def line(self) -> str:
        """One line for a person: how fast, what the workers spend their time on, what the consumer waits for."""
        shares = {name: f"{name} {self.stage_share(name):.0%}" for name in self.stages}
        inside = ", ".join(text for name, text in shares.items() if name not in WORKER_STAGES)
        stages = ", ".join(shares[name] for name in WORKER_STAGES if name in shares)
        return (
            f"feed {self.samples_per_s:.0f} samples/s {self.nbytes / self.elapsed_s / 1e9:.2f} GB/s | "
            f"{self.num_workers} workers: {stages or 'idle'}{f' (inside read: {inside})' if inside else ''} | "
            f"{self.ready_slots:.1f} of {self.num_slots} slots ready | "
            f"data_time {self.data_time_ms:.1f} ms, at most {self.gain_at_most:.0%} faster with a perfect feed"
        )


class Meter:
    """Counts since it was made or last read."""

    def __init__(self, read_stages: Callable[[], Mapping[str, StageTime]], *, num_slots: int, num_workers: int) -> None:
        self._read_stages = read_stages
        self._num_slots = num_slots
        self._num_workers = num_workers
        self.restart()

    def count(self, *, samples: int, nbytes: int, wait_s: float, ready_slots: int) -> None:
        """One batch was handed out."""
        self._batches += 1
        self._samples += samples
        self._nbytes += nbytes
        self._wait_s += wait_s
        self._ready_slots += ready_slots

    def read(self) -> Reading:
        """Everything since the last reading; the next interval begins now."""
        stages = self._read_stages()
        reading = Reading(
            elapsed_s=max(time.perf_counter() - self._begin_s, 1e-9),
            batches=self._batches,
            samples=self._samples,
            nbytes=self._nbytes,
            wait_s=self._wait_s,
            ready_slots=self._ready_slots / max(1, self._batches),
            num_slots=self._num_slots,
            num_workers=self._num_workers,
            stages={name: _since(self._stages.get(name), time_) for name, time_ in stages.items()},
        )
        self.restart()
        return reading

    def restart(self) -> None:
        """Forget everything counted so far."""
        self._begin_s = time.perf_counter()
        self._stages = self._read_stages()
        self._batches = self._samples = self._nbytes = self._ready_slots = 0
        self._wait_s = 0.0


def sum_stages(tables: list[dict[str, StageTime]]) -> dict[str, StageTime]:
    """Stages of several workers added up."""
    total: dict[str, StageTime] = {}
    for table in tables:
        for name, (runs, total_ns) in table.items():
            before = total.get(name, StageTime(0, 0))
            total[name] = StageTime(before.runs + runs, before.total_ns + total_ns)
    return total


def _since(before: StageTime | None, now: StageTime) -> StageTime:
    return now if before is None else StageTime(now.runs - before.runs, now.total_ns - before.total_ns)
