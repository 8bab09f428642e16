"""How much faster are 25 % and 50 % more workers, and how much memory do they take?

The original guide uses 24, 30 or 36 workers on 40 cores and three GPUs; its table promises +25 % and +50 % speed for
2.5, 3.2 and 3.9 GB. Here one GPU's share of each (8, 10, 12 workers; batch 1, clips of five crops of 256 px) reads
generated 720p data, from PNG files and from the store, without a training: clips per second, and the memory of all
processes of the feed beyond that of this process before (without a store; proportional set size: shared pages count
once). Answer: bench/results/spike_workers_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import tempfile
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from bench.measure import arguments, report
from bench.spike_gpu import write_sequence
from flatout.feed import FeedConfig, Store
from flatout.ranks.world import World
from flatout.spike.config import DataConfig, LoaderConfig
from flatout.spike.data.clip_set import ClipSet, open_clips
from flatout.spike.input import ClipFeed, LoaderPlan, open_store, open_training_feed, training_plan
from flatout.spike.step import plan_steps

GPUS = 3
WAYS = {"old style": (24, 4), "balanced": (30, 4), "aggressive": (36, 6)}
"""Name -> workers of all GPUs, and TRAIN_PREFETCH_FACTOR."""
NUM_FRAMES = 24
FILES = "PNG files"


class GpuShare(NamedTuple):
    """Measurement of one GPU's share of the workers."""

    workers: int
    clips_per_s: float
    memory_bytes: int
    """Memory of the processes and slots of the feed."""


def main() -> None:
    """Measure and report."""
    options = arguments(__doc__).parse_args()
    size_hw, num_frames, seconds = ((72, 128), 12, 0.3) if options.quick else ((720, 1280), NUM_FRAMES, 2.0)
    with tempfile.TemporaryDirectory() as name:
        write_sequence(Path(name) / "train/seq", size_hw, num_frames)
        height, width = size_hw[0] // 2, size_hw[1] // 2
        crop = 64 if options.quick else 256
        data = DataConfig(ROOT=name, CROP_SIZE=crop, SPIKE_H=height, SPIKE_W=width, USE_RAM_CACHE=True)
        clips = open_clips(data, "train", scored=False)
        found: dict[str, dict[str, GpuShare]] = {FILES: {}, "store": {}}
        for way, (total, prefetch) in WAYS.items():
            found[FILES][way] = share_of(clips, data, total, prefetch, None, seconds)
            # The feed closes its store; the next one builds it again.
            store = open_store(clips, data, budget_bytes=1 << 30, workers=2)
            assert store is not None
            found["store"][way] = share_of(clips, data, total, prefetch, store, seconds)
    report("spike_workers", "\n".join(_lines(found)), _numbers(found), options)


def share_of(
    clips: ClipSet, data: DataConfig, total: int, prefetch: int, store: Store | None, seconds: float
) -> GpuShare:
    """Measure the feed of one GPU after its first epoch."""
    loader = LoaderConfig(TOTAL_WORKERS=total, TRAIN_PREFETCH_FACTOR=prefetch)
    plan = LoaderPlan(config=loader, gpus=GPUS, batch=1, val_batch=1, sample_bytes=0, cache_bytes=0)
    workers = FeedConfig(workers=plan.workers.train, slots=plan.slots, epochs=10**6, on_error="substitute")
    steps = plan_steps(len(clips), world=1, batch=1, accumulation=1)
    order = training_plan(clips, 1, steps=steps, seed=1, world=World())
    before = _memory_bytes()
    with open_training_feed(clips, data, workers, order, torch.device("cpu"), store) as feed:
        _take_epoch(feed, 0)
        began, num_clips, epochs = time.perf_counter(), 0, count(1)
        while time.perf_counter() - began < seconds:
            num_clips += _take_epoch(feed, next(epochs))
        rate = num_clips / (time.perf_counter() - began)
        held = _memory_bytes() - before
    return GpuShare(plan.workers.train, rate, held)


def _take_epoch(feed: ClipFeed, epoch: int) -> int:
    return sum(1 for _ in feed.batches.epoch(epoch))


def _memory_bytes() -> int:
    """Proportional set size of this process and its descendants."""
    here = psutil.Process()
    total = 0
    for process in (here, *here.children(recursive=True)):
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


def _lines(found: dict[str, dict[str, GpuShare]]) -> list[str]:
    lines = [f"{'one GPU of three':14}{'workers':>9}" + "".join(f"{kind + ', clips/s':>22}{'':8}" for kind in found)]
    lines[0] += f"{'memory':>12}{'of three GPUs':>16}"
    first = {kind: next(iter(shares.values())) for kind, shares in found.items()}
    for way in WAYS:
        shares = {kind: found[kind][way] for kind in found}
        line = f"{way:14}{shares['store'].workers:9}"
        for kind, share in shares.items():
            line += f"{share.clips_per_s:22.1f}{100 * (share.clips_per_s / first[kind].clips_per_s - 1):+6.0f} %"
        held = shares[FILES].memory_bytes
        lines.append(f"{line}{held / 1e9:9.2f} GB{GPUS * held / 1e9:13.2f} GB")
    return lines


def _numbers(found: dict[str, dict[str, GpuShare]]) -> dict[str, Any]:
    return {kind: {way: share._asdict() for way, share in shares.items()} for kind, shares in found.items()}


if __name__ == "__main__":
    main()
