"""Does the Loader beat torch's DataLoader on the same dataset: first batch, gaps, memory, throughput, main-process CPU?

Three ways to collate: the default; a custom collate_fn (torch.stack), which gets whole batches on both sides; and a
collate_fn with a join_fn, for which the Loader divides batches among its workers. Items, passes and columns are those
of feed_vs_dataloader.py. Exit code 1 if a promise is broken.
Answer: bench/results/loader_vs_dataloader_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import cv2
import torch

from bench import noise
from bench.feed_vs_dataloader import KINDS, Maker, Setting, compare, hold
from bench.loaders import TorchLoader
from bench.measure import arguments, facts_line, report
from bench.promises import TORCH, Criterion, Held, Ratios, Row, ratios_to_torch, table
from flatout import Loader, cat_rows

LOADER = "Loader"
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default collate": ({}, {}),
    "custom collate": ({"collate_fn": torch.stack}, {"collate_fn": torch.stack}),
    "pair": ({"collate_fn": torch.stack}, {"collate_fn": torch.stack, "join_fn": cat_rows}),
}
"""Way -> options of the DataLoader, options of the Loader."""

FULL = Setting(
    batch_size=384,
    workers=(2, 4),
    pairs={"sleeping": {2: 3, 4: 7}, "real": {2: 3, 4: 3}, "trivial": {2: 5, 4: 5}},
    rounds=4,
    fewest_batches=10,
    still_s=1.5,
)
QUICK = Setting(batch_size=16, workers=(1, 4), rounds=4, fewest_batches=6, still_s=0.3)


class Measured(NamedTuple):
    """One way of collating, measured on both sides."""

    way: str
    rows: list[Row]
    held: Held


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--items", nargs="+", choices=KINDS, default=list(KINDS), help="default: all of them")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all of them")
    options = parser.parse_args()
    setting = QUICK if options.quick else FULL
    begin_s = time.perf_counter()
    print(facts_line(), flush=True)
    repeats = 10 if options.quick else 60
    before = noise.listen(repeats).line()
    print(before, file=sys.stderr, flush=True)
    cv2.setNumThreads(1)  # both sides fork their workers, and OpenCV's threads do not survive a fork
    measured = [measure_way(way, options.items, setting) for way in options.ways]
    after = noise.listen(repeats).line()
    criteria = [criterion for each in measured for criterion in check_promises(each)]
    elapsed = f"measured in {time.perf_counter() - begin_s:.0f} s"
    if options.quick:
        elapsed += "; a quick run shows that the script works, its verdicts mean nothing"
    tables = [line for each in measured for line in ("", f"{each.way}:", *table(each.rows, each.held))]
    text = "\n".join([f"before, {before}", f"after,  {after}", *tables, "", *map(str, criteria), "", elapsed])
    numbers = {
        "noise": [before, after],
        "ways": {each.way: {"rows": list(map(asdict, each.rows)), "held_bytes": each.held} for each in measured},
        "criteria": [asdict(each) | {"passed": each.passed} for each in criteria],
    }
    report("loader_vs_dataloader", text, numbers, options)
    return int(not options.quick and not all(each.passed for each in criteria))


def measure_way(way: str, kinds: Sequence[str], setting: Setting) -> Measured:
    """Measure all items and worker counts with one way of collating."""
    print(f"{way}:", file=sys.stderr, flush=True)
    rows = [
        row
        for kind in kinds
        for workers in setting.workers
        for row in compare(kind, sides(way, kind), workers, setting)
    ]
    return Measured(way, rows, {workers: hold(sides(way, "trivial"), workers, setting) for workers in setting.workers})


def sides(way: str, kind: str) -> dict[str, Maker]:
    """Both loaders over the same items."""
    sample = KINDS[kind]()
    torch_options, loader_options = WAYS[way]
    return {
        TORCH: partial(_make, sample, torch_options),
        LOADER: partial(_make, sample, loader_options | {"loader_class": Loader}),
    }


def _make(sample: Any, options: dict[str, Any], num_samples: int, batch_size: int, num_workers: int) -> TorchLoader:
    return TorchLoader(sample, num_samples=num_samples, batch_size=batch_size, num_workers=num_workers, **options)


def check_promises(measured: Measured) -> list[Criterion]:
    """All promises that these measurements can check."""
    way, rows, held = measured
    ratios = [ratios_to_torch(rows, row) for row in rows if row.side == LOADER]
    found = [Criterion.of_median(_title(way, "throughput", each), each.rate_P, 0.95, at_most=False) for each in ratios]
    if way == "custom collate":
        return found  # one worker makes a whole batch, as in torch: there is no promise about the first batch
    found += [
        Criterion.of_median(_title(way, "first batch", each), each.first_P, 1 / 3, at_most=True)
        for each in ratios
        if each.kind in ("sleeping", "real") and each.num_workers == 4
    ]
    if 4 in held:
        share = held[4][LOADER] / held[4][TORCH]
        found.append(Criterion(promise=f"{way}: shared memory, 4 workers", value=share, limit=1 / 2))
    return found


def _title(way: str, what: str, each: Ratios) -> str:
    return f"{way}: {what}, {each.kind}, {each.num_workers} workers"


if __name__ == "__main__":
    sys.exit(main())
