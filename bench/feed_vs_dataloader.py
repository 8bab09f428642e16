"""Does the Feed beat torch's DataLoader: first batch, gaps, memory, throughput, main-process CPU?

Both sides read the same items (items.py) into shuffled batches of 384 x 3 x 320 x 320 uint8, in
interleaved passes on the same machine (loaders.py). Exit code 1 if a promise is broken (promises.py).
Answer: bench/results/feed_vs_dataloader_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median

import cv2
import numpy as np

from bench import items, noise
from bench.loaders import FlatoutLoader, Loader, Pass, TorchLoader, held_bytes, run_pass
from bench.measure import arguments, facts_line, report
from bench.promises import FEED, FEED_READ, TORCH, Row, check_promises, table

KINDS: dict[str, Callable[[], items.Sample]] = {
    "sleeping": lambda: items.sleeping,
    "real": items.real_items,
    "trivial": lambda: items.trivial,
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How much is measured."""

    batch_size: int
    workers: tuple[int, ...]
    pairs: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """Kind of items -> workers -> passes of each side; 1 by default."""
    rounds: int
    """Batches of a pass per worker; the first and the last round do not count as steady state."""
    fewest_batches: int
    """Minimum number of batches in a pass."""
    still_s: float
    """Seconds without a change after which shared memory counts as full."""

    def num_batches(self, num_workers: int) -> int:
        return max(self.rounds * num_workers, self.fewest_batches)


FULL = Setting(
    batch_size=384,
    workers=(1, 2, 4, 8),
    pairs={
        "sleeping": {1: 1, 2: 3, 4: 3, 8: 3},
        "real": {1: 1, 2: 9, 4: 9, 8: 1},
        "trivial": {1: 3, 2: 9, 4: 9, 8: 5},
    },
    rounds=5,
    fewest_batches=10,
    still_s=1.5,
)
QUICK = Setting(batch_size=16, workers=(1, 4), rounds=4, fewest_batches=6, still_s=0.3)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--items", nargs="+", choices=KINDS, default=list(KINDS), help="default: all of them")
    options = parser.parse_args()
    setting = QUICK if options.quick else FULL
    begin_s = time.perf_counter()
    print(facts_line(), flush=True)
    repeats = 10 if options.quick else 60
    before = noise.listen(repeats).line()
    print(before, file=sys.stderr, flush=True)
    cv2.setNumThreads(1)  # DataLoader forks its workers, and OpenCV's threads do not survive a fork
    rows = [
        row
        for kind in options.items
        for workers in setting.workers
        for row in compare(kind, sides(kind), workers, setting)
    ]
    held = {workers: hold(sides("trivial"), workers, setting) for workers in setting.workers}
    after = noise.listen(repeats).line()
    criteria = check_promises(rows, held)
    elapsed = f"measured in {time.perf_counter() - begin_s:.0f} s"
    if options.quick:
        elapsed += "; a quick run shows that the script works, its verdicts mean nothing"
    text = "\n".join(
        [f"before, {before}", f"after,  {after}", "", *table(rows, held), "", *map(str, criteria), "", elapsed]
    )
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
    """The loaders that are compared on these items."""
    sample = KINDS[kind]()
    makers: dict[str, Maker] = {
        TORCH: lambda n, b, w: TorchLoader(sample, num_samples=n, batch_size=b, num_workers=w),
        FEED: lambda n, b, w: FlatoutLoader(items.ItemSource(sample, n), batch_size=b, num_workers=w),
    }
    if kind == "trivial":
        makers[FEED_READ] = lambda n, b, w: FlatoutLoader(items.TrivialSource(n), batch_size=b, num_workers=w)
    return makers


def compare(kind: str, makers: Mapping[str, Maker], workers: int, setting: Setting) -> list[Row]:
    """Start every side, then measure them alternately."""
    num_batches = setting.num_batches(workers)
    loaders: dict[str, Loader] = {}
    rows: dict[str, Row] = {}
    for side, make in makers.items():
        begin_s = time.perf_counter()
        loaders[side] = make(num_batches * setting.batch_size, setting.batch_size, workers)
        made_s = time.perf_counter() - begin_s
        cold = run_pass(loaders[side], workers)
        rows[side] = Row(kind, side, workers, made_s + cold.arrival_K[0], [], [], [], [], [])
    for turn in range(setting.pairs.get(kind, {}).get(workers, 1)):
        for side in list(loaders)[:: 1 if turn % 2 == 0 else -1]:
            _record(rows[side], run_pass(loaders[side], num_batches), setting.batch_size)
    for side, row in rows.items():
        row.start_s = max(0.0, row.start_s - median(row.first_P))
        loaders[side].close()
    print(f"  {kind} items, {workers} workers: done", file=sys.stderr, flush=True)
    return list(rows.values())


def _record(row: Row, measured: Pass, batch_size: int) -> None:
    steady_K = measured.steady_K(row.num_workers)
    row.first_P.append(float(measured.arrival_K[0]))
    row.gap_P.append(float(np.diff(steady_K).max()))
    row.rate_P.append((len(steady_K) - 1) * batch_size / float(steady_K[-1] - steady_K[0]))
    row.cpu_ms_P.append(1e3 * measured.main_cpu_s / len(measured.arrival_K))
    row.workers_cpu_ms_P.append(1e3 * measured.workers_cpu_s / len(measured.arrival_K))


def hold(makers: Mapping[str, Maker], workers: int, setting: Setting) -> dict[str, int]:
    """Peak shared memory of each side, in bytes."""
    num_batches, batch_size = 2 * workers + 4, setting.batch_size

    def held_by(make: Maker) -> int:
        num_samples = num_batches * batch_size
        return held_bytes(lambda: make(num_samples, batch_size, workers), num_batches, still_s=setting.still_s)

    return {side: held_by(make) for side, make in makers.items()}


if __name__ == "__main__":
    sys.exit(main())
