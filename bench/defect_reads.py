"""T5 of bench/defect_feed.py: how often are strips read from files, and how long does that take on a slow disk?"""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from bench.page_cache import drop, resident_share
from flatout.defect.data.items import Strips
from flatout.defect.input import InputConfig, make_plan, store_config
from flatout.defect.source import PatchSource, SampleRecipe
from flatout.feed import Feed, FeedConfig, Plan, Store, StoreConfig
from flatout.ranks.world import World

DELAYS_MS = (0.0, 0.5, 15.0, 50.0)


class SlowStrips(Strips):
    """Strips on a slow disk; counts reads."""

    delay_ms = 0.0
    num_reads = 0

    def decode(self, index: int) -> np.ndarray:
        time.sleep(self.delay_ms / 1e3)
        self.num_reads += 1
        return super().decode(index)


class EpochCost(NamedTuple):
    """Reads and time of one epoch."""

    reads: int
    wall_s: float
    cpu_s: float
    """CPU time of this process, in which everything runs."""


def reads_of_files(
    paths: list[Path], recipe_for: Callable[[int], SampleRecipe], repeats: int, numbers: dict[str, Any]
) -> list[str]:
    """Reads and time of the first and of the second epoch: with a warm page cache and delays, and with a cold one."""
    lines, good = [], {True: "PASS", False: "FAIL"}
    for delay_ms, is_cold in (*((delay_ms, False) for delay_ms in DELAYS_MS), (0.0, True)):
        runs, shares = [], []
        for repeat in range(repeats):
            if is_cold:
                drop(paths)
            shares.append(resident_share(paths))
            runs.append(_two_epochs(paths, recipe_for, delay_ms, f"{delay_ms} ms, {is_cold}, {repeat}"))
        name = "cold" if is_cold else f"{delay_ms}"
        numbers[f"reads_{name}"] = {"epochs": [list(map(list, run)) for run in runs], "resident_share": shares}
        first, second = (
            EpochCost(*(median(values) for values in zip(*(run[which] for run in runs), strict=True)))
            for which in (0, 1)
        )
        as_promised = all([epoch.reads for epoch in run] == [len(paths), 0] for run in runs)
        lines.append(
            f"{good[as_promised]} T5 {delay_ms:4.1f} ms more per read, {100 * median(shares):.0f} % in the page cache: "
            f"{first.reads:.0f} reads in the first epoch ({first.wall_s:.2f} s, CPU {first.cpu_s:.2f} s), "
            f"{second.reads:.0f} in the second ({second.wall_s:.2f} s, CPU {second.cpu_s:.2f} s)"
        )
    return lines


def _two_epochs(
    paths: list[Path], recipe_for: Callable[[int], SampleRecipe], delay_ms: float, label: str
) -> list[EpochCost]:
    slow = SlowStrips(paths)
    slow.delay_ms, slow.num_reads = delay_ms, 0
    slow.parameters = f"{Strips.parameters}, {label}"  # for a separate store
    epochs: list[EpochCost] = []
    began_s, began_cpu_s, reads = time.perf_counter(), time.process_time(), 0
    with Store.open(slow, StoreConfig(workers=2, backend="thread", progress=False)) as store:
        source = PatchSource(recipe_for(len(paths)), store)
        with Feed(source, Plan(num_samples=len(source), batch_size=32), FeedConfig(workers=0)) as feed:
            for _ in range(2):
                for _ in feed:
                    pass
                now_s, now_cpu_s = time.perf_counter(), time.process_time()
                epochs.append(EpochCost(slow.num_reads - reads, now_s - began_s, now_cpu_s - began_cpu_s))
                began_s, began_cpu_s, reads = now_s, now_cpu_s, slow.num_reads
    return epochs


def reads_in_groups(
    paths: list[Path], recipe_for: Callable[[int], SampleRecipe], group: int, numbers: dict[str, Any]
) -> str:
    """Reads if the set does not fit: patches are visited in groups of images, and the cache holds one group."""
    config = InputConfig(total_batch=32, workers=0, epochs=2, group_images=group, cache_size=group)
    slow = SlowStrips(paths)
    recipe = recipe_for(len(paths))
    reads: list[int] = []
    with (
        Store.open(slow, store_config(slow, config)) as store,
        Feed(PatchSource(recipe, store), make_plan(recipe, config, World()), FeedConfig(workers=0, epochs=2)) as feed,
    ):
        for _ in range(2):
            for _ in feed:
                pass
            reads.append(slow.num_reads - sum(reads))
    numbers["reads_in_groups"] = reads
    good = reads[0] == len(paths) and reads[1] <= len(paths)
    return (
        f"{'PASS' if good else 'FAIL'} T5 in groups of {group}, room for {group} of {len(paths)} images: {reads[0]} "
        f"reads in the first epoch, {reads[1]} in the second"
    )
