"""Does the Feed beat torch's DataLoader: first batch, gaps, memory, throughput, main-process CPU?

Both sides read the same items (items.py) into shuffled batches of 384 x 3 x 320 x 320 uint8, in
interleaved passes on the same machine (loaders.py). Exit code 1 if a promise is broken.
Answer: bench/results/feed_vs_dataloader_<machine>_<yyyymm>.md (rewrite it with --write).

Dimension key:  P passes
"""

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import NamedTuple

import cv2
import numpy as np

from bench import items, noise
from bench.loaders import FlatoutLoader, Loader, Pass, TorchLoader, held_bytes, run_pass
from bench.measure import arguments, facts_line, report

TORCH, FEED, FEED_READ = "DataLoader", "Feed", "Feed, own read()"
KINDS = {"sleeping": lambda: items.sleeping, "real": items.real_items, "trivial": lambda: items.trivial}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How much is measured."""

    batch_size: int
    workers: tuple[int, ...]
    pairs: dict[str, dict[int, int]]
    """Kind of items -> workers -> passes of each side; 1 where nothing is said."""
    rounds: int
    """Batches of a pass per worker; the first and the last round are not counted as steady."""
    least_batches: int
    still_s: float
    """Shared memory counts as full when it has not changed for so long."""

    def num_batches(self, num_workers: int) -> int:
        return max(self.rounds * num_workers, self.least_batches)


FULL = Setting(
    batch_size=384,
    workers=(1, 2, 4, 8),
    pairs={
        "sleeping": {1: 1, 2: 3, 4: 5, 8: 5},
        "real": {2: 9, 4: 9},
        "trivial": {1: 3, 2: 9, 4: 9, 8: 5},
    },
    rounds=5,
    least_batches=12,
    still_s=1.5,
)
QUICK = Setting(batch_size=16, workers=(1, 4), pairs={}, rounds=4, least_batches=6, still_s=0.3)


@dataclass
class Row:
    """Passes of one side over one kind of items with one number of workers; one entry per pass."""

    kind: str
    side: str
    num_workers: int
    start_s: float
    """From nothing to the first batch, less the time to a first batch of a loader that is up."""
    first_P: list[float]
    gap_P: list[float]
    rate_P: list[float]
    cpu_ms_P: list[float]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--items", nargs="+", choices=KINDS, default=KINDS, help="default: all of them")
    options = parser.parse_args()
    setting = QUICK if options.quick else FULL
    begin_s = time.perf_counter()
    print(facts_line(), flush=True)
    before = noise.listen().line()
    print(before, file=sys.stderr)
    cv2.setNumThreads(1)  # DataLoader forks its workers: there must be no OpenCV threads to lose
    rows = [row for kind in options.items for workers in setting.workers for row in compare(kind, workers, setting)]
    held = {workers: hold(workers, setting) for workers in setting.workers}
    after = noise.listen().line()
    criteria = judge(rows, held)
    elapsed = f"measured in {time.perf_counter() - begin_s:.0f} s"
    text = "\n".join([before, after, "", *table(rows, held), "", *map(str, criteria), "", elapsed])
    numbers = {
        "noise": [before, after],
        "rows": [asdict(row) for row in rows],
        "held_bytes": held,
        "criteria": [asdict(each) | {"passed": each.passed} for each in criteria],
    }
    report("feed_vs_dataloader", text, numbers, options)
    return int(not options.quick and not all(each.passed for each in criteria))


Maker = Callable[[int, int, int], Loader]
"""(samples, batch size, workers) -> loader."""


def sides(kind: str) -> dict[str, Maker]:
    """Who is compared on these items."""
    sample = KINDS[kind]()
    makers: dict[str, Maker] = {
        TORCH: lambda n, b, w: TorchLoader(sample, num_samples=n, batch_size=b, num_workers=w),
        FEED: lambda n, b, w: FlatoutLoader(items.ItemSource(sample, n), num_samples=n, batch_size=b, num_workers=w),
    }
    if kind == "trivial":
        makers[FEED_READ] = lambda n, b, w: FlatoutLoader(
            items.TrivialSource(n), num_samples=n, batch_size=b, num_workers=w
        )
    return makers


def compare(kind: str, workers: int, setting: Setting) -> list[Row]:
    """Start every side, then let them take turns."""
    num_batches = setting.num_batches(workers)
    loaders, rows = {}, {}
    for side, make in sides(kind).items():
        begin_s = time.perf_counter()
        loaders[side] = make(num_batches * setting.batch_size, setting.batch_size, workers)
        built_s = time.perf_counter() - begin_s
        cold = run_pass(loaders[side], workers)
        rows[side] = Row(kind, side, workers, built_s + cold.arrival_K[0], [], [], [], [])
    for turn in range(setting.pairs.get(kind, {}).get(workers, 1)):
        for side in list(loaders)[:: 1 if turn % 2 == 0 else -1]:
            _note(rows[side], run_pass(loaders[side], num_batches), setting.batch_size)
    for side, row in rows.items():
        row.start_s = max(0.0, row.start_s - median(row.first_P))
        loaders[side].close()
    print(f"  {kind}, {workers} workers: done", file=sys.stderr, flush=True)
    return list(rows.values())


def hold(workers: int, setting: Setting) -> dict[str, int]:
    """Shared memory of each side at its fullest, in bytes; the kind of items does not matter."""
    num_batches, batch_size = 2 * workers + 4, setting.batch_size

    def held_by(make: Maker) -> int:
        return held_bytes(
            lambda: make(num_batches * batch_size, batch_size, workers), num_batches, still_s=setting.still_s
        )

    return {side: held_by(make) for side, make in sides("trivial").items()}


def _note(row: Row, run: Pass, batch_size: int) -> None:
    steady_K = run.steady_K(row.num_workers)
    row.first_P.append(float(run.arrival_K[0]))
    row.gap_P.append(float(np.diff(steady_K).max()))
    row.rate_P.append((len(steady_K) - 1) * batch_size / float(steady_K[-1] - steady_K[0]))
    row.cpu_ms_P.append(1e3 * run.main_cpu_s / len(run.arrival_K))


@dataclass(frozen=True)
class Criterion:
    """A promise and what was measured."""

    promise: str
    value: float
    limit: float
    at_most: bool = True
    unit: str = "x"

    @property
    def passed(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def __str__(self) -> str:
        sign = "<=" if self.at_most else ">="
        verdict = "PASS" if self.passed else "FAIL"
        return f"{verdict}  {self.promise:58} {self.value:7.3f}{self.unit} {sign} {self.limit:.3f}{self.unit}"


Held = dict[int, dict[str, int]]


def judge(rows: list[Row], held: Held) -> list[Criterion]:
    """Every promise that these measurements can decide."""
    ratios = [_ratios(rows, row) for row in rows if row.side == FEED]
    found = [
        Criterion(f"first batch, {each.kind} items, 4 workers", each.first, 1 / 3)
        for each in ratios
        if each.kind in ("sleeping", "real") and each.num_workers == 4
    ]
    found += [
        Criterion(f"largest gap, sleeping items, {each.num_workers} workers", each.gap, 1 / 3)
        for each in ratios
        if each.kind == "sleeping" and each.num_workers >= 4
    ]
    found += [
        Criterion(f"shared memory, {workers} workers", held[workers][FEED] / held[workers][TORCH], limit)
        for workers, limit in ((4, 1 / 2), (8, 1 / 4))
        if workers in held
    ]
    found += [
        Criterion(
            f"throughput, {each.kind} items, {each.num_workers} workers, {each.pairs} pairs", each.rate, limit, False
        )
        for kind, limit in (("real", 0.95), ("trivial", 1.5))
        for each in ratios
        if each.kind == kind and each.num_workers in (2, 4)
    ]
    busiest = max((row for row in rows if row.side != TORCH), key=lambda row: median(row.cpu_ms_P))
    name = f"main-process CPU per batch ({busiest.kind}, {busiest.num_workers} workers: the highest)"
    found.append(Criterion(name, median(busiest.cpu_ms_P), 2.0, unit=" ms"))
    return found


class Ratios(NamedTuple):
    """This row / DataLoader: medians over pairs of passes that were measured next to each other."""

    kind: str
    num_workers: int
    pairs: int
    first: float
    gap: float
    rate: float


def _ratios(rows: list[Row], row: Row) -> Ratios:
    base = next(r for r in rows if (r.kind, r.side, r.num_workers) == (row.kind, TORCH, row.num_workers))

    def ratio(mine_P: list[float], theirs_P: list[float]) -> float:
        return median(mine / theirs for mine, theirs in zip(mine_P, theirs_P, strict=True))

    first, gap = ratio(row.first_P, base.first_P), ratio(row.gap_P, base.gap_P)
    return Ratios(row.kind, row.num_workers, len(row.rate_P), first, gap, ratio(row.rate_P, base.rate_P))


def table(rows: list[Row], held: Held) -> list[str]:
    """All medians, one line per side; in brackets the ratio to the DataLoader's line above it."""
    head = ("start-up s", "first batch s", "largest gap s", "samples/s", "main CPU ms", "shared MiB")
    lines = [f"{'items':9}{'workers':>7}  {'side':17}{head[0]:>10}" + "".join(f"{name:>18}" for name in head[1:])]
    for row in rows:
        first, gap, rate = median(row.first_P), median(row.gap_P), median(row.rate_P)
        cells = [f"{first:.3f}", f"{gap:.3f}", f"{rate:.0f}", f"{median(row.cpu_ms_P):.2f}", ""]
        if row.kind == "trivial":  # measured once, for these items: it does not depend on them
            cells[4] = f"{held[row.num_workers][row.side] / 2**20:.0f}"
        if row.side != TORCH:
            ratios = _ratios(rows, row)
            cells[:3] = (
                f"{cells[0]} ({ratios.first:.2f})",
                f"{cells[1]} ({ratios.gap:.2f})",
                f"{cells[2]} ({ratios.rate:.2f})",
            )
            if cells[4]:
                share = held[row.num_workers][row.side] / held[row.num_workers][TORCH]
                cells[4] += f" ({share:.2f})"
        start = f"{row.kind:9}{row.num_workers:7}  {row.side:17}{row.start_s:10.2f}"
        lines.append(start + "".join(f"{cell:>18}" for cell in cells))
    return lines


if __name__ == "__main__":
    sys.exit(main())
