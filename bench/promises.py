"""Tables of what was measured on both sides, and the promises of the Feed that are checked. Pure functions.

Dimension key:  P passes
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, Self

TORCH, FEED, FEED_READ = "DataLoader", "Feed", "Feed, own read()"

Held = Mapping[int, Mapping[str, int]]
"""Workers -> side -> peak bytes of shared memory."""


@dataclass
class Row:
    """Passes of one side over one kind of items with one number of workers; one entry per pass."""

    kind: str
    side: str
    num_workers: int
    start_s: float
    """Seconds to the first batch of a new loader, minus that of a running loader."""
    first_P: list[float]
    """Seconds from requesting a pass to its first batch."""
    gap_P: list[float]
    """Seconds of the longest wait between two batches in steady state."""
    rate_P: list[float]
    """Samples per second in steady state."""
    cpu_ms_P: list[float]
    """CPU time of the main process per batch."""
    workers_cpu_ms_P: list[float]
    """CPU time of all workers together per batch."""


class Ratios(NamedTuple):
    """A row divided by the DataLoader's, pass by pass: the two passes of a pair were measured after each other."""

    kind: str
    num_workers: int
    first_P: list[float]
    gap_P: list[float]
    rate_P: list[float]
    workers_cpu_P: list[float]


def ratios_to_torch(rows: Sequence[Row], row: Row) -> Ratios:
    base = next(r for r in rows if (r.kind, r.side, r.num_workers) == (row.kind, TORCH, row.num_workers))
    names = ("first_P", "gap_P", "rate_P", "workers_cpu_ms_P")
    pairs = (zip(getattr(row, name), getattr(base, name), strict=True) for name in names)
    ratios = ([mine / theirs for mine, theirs in pair] for pair in pairs)
    return Ratios(row.kind, row.num_workers, *ratios)


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """A promise and what was measured."""

    promise: str
    value: float
    limit: float
    at_most: bool = True
    unit: str = "x"
    passes: Sequence[float] = ()
    """The single measurements; `value` is their median."""

    @classmethod
    def of_median(cls, promise: str, passes: Sequence[float], limit: float, *, at_most: bool, unit: str = "x") -> Self:
        return cls(promise=promise, value=median(passes), limit=limit, at_most=at_most, unit=unit, passes=passes)

    @property
    def passed(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def __str__(self) -> str:
        verdict, sign = "PASS" if self.passed else "FAIL", "<=" if self.at_most else ">="
        spread = f"   ({min(self.passes):.2f} to {max(self.passes):.2f})" if self.passes else ""
        return f"{verdict}  {self.promise:52}{self.value:7.3f}{self.unit} {sign} {self.limit:.3f}{self.unit}{spread}"


def check_promises(rows: Sequence[Row], held: Held) -> list[Criterion]:
    """All promises that these measurements can check."""
    ratios = [ratios_to_torch(rows, row) for row in rows if row.side == FEED]
    found = [
        Criterion.of_median(f"first batch, {each.kind} items, 4 workers", each.first_P, 1 / 3, at_most=True)
        for each in ratios
        if each.kind in ("sleeping", "real") and each.num_workers == 4
    ]
    found += [
        Criterion.of_median(
            f"largest gap, {each.kind} items, {each.num_workers} workers", each.gap_P, 1 / 3, at_most=True
        )
        for each in ratios
        # With real items and more workers than cores, the DataLoader's workers drift apart: only checked at 4.
        if (each.kind == "sleeping" and each.num_workers >= 4) or (each.kind == "real" and each.num_workers == 4)
    ]
    found += [
        Criterion(promise=f"shared memory, {workers} workers", value=_share(held, workers, FEED), limit=limit)
        for workers, limit in ((4, 1 / 2), (8, 1 / 4))
        if workers in held
    ]
    for kind, limit in (("real", 0.95), ("trivial", 1.5)):
        for each in (r for r in ratios if r.kind == kind and r.num_workers in (2, 4)):
            name = f"throughput, {kind} items, {each.num_workers} workers, {len(each.rate_P)} pairs"
            found.append(Criterion.of_median(name, each.rate_P, limit, at_most=False))
    worst = max((row for row in rows if row.side != TORCH), key=lambda row: median(row.cpu_ms_P))
    name = f"main CPU per batch (worst: {worst.kind}, {worst.num_workers} workers)"
    return [*found, Criterion.of_median(name, worst.cpu_ms_P, 2.0, at_most=True, unit=" ms")]


def table(rows: Sequence[Row], held: Held) -> list[str]:
    """All medians, one line per side, with the ratio to the DataLoader's line above in parentheses."""
    head = ("start-up s", "first batch s", "largest gap s", "samples/s", "workers' CPU ms", "main CPU ms", "shared MiB")
    lines = [f"{'items':9}{'workers':>7}  {'side':16}" + "".join(f"{name:>16}" for name in head)]
    for row in rows:
        passes = (row.first_P, row.gap_P, row.rate_P, row.workers_cpu_ms_P, row.cpu_ms_P)
        forms = (".2f", ".3f", ".3f", ".0f", ".0f", ".2f")
        cells = [f"{value:{form}}" for value, form in zip((row.start_s, *map(median, passes)), forms, strict=True)]
        # Only measured with trivial items: it does not depend on the items.
        cells.append(f"{held[row.num_workers][row.side] / 2**20:.0f}" if row.kind == "trivial" else "")
        if row.side != TORCH:
            ratios = ratios_to_torch(rows, row)
            for column, ratio_P in enumerate(ratios[2:], start=1):
                cells[column] += f" ({median(ratio_P):.2f})"
            cells[6] += f" ({_share(held, row.num_workers, row.side):.2f})" if cells[6] else ""
        lines.append(f"{row.kind:9}{row.num_workers:7}  {row.side:16}" + "".join(f"{cell:>16}" for cell in cells))
    return lines


def _share(held: Held, num_workers: int, side: str) -> float:
    return held[num_workers][side] / held[num_workers][TORCH]
