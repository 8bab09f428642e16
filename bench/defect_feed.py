"""How much does a training sample of the defect job cost, compared with the designs that it replaces?

Answer: bench/results/defect_feed_<machine>_<yyyymm>.md (rewrite it with --write). CPU time and wall time, medians of
five repeats or more; the designs take turns in one process. This run writes the files immediately before: the first
line states how much of them is in the page cache, and T5 also reads them with a cold cache.

T1 CPU time per sample   T2 workers   T3 index and start-up   T4 memory for images, counted once   T5 reads of files
T7 temporary memory. Measurements that need a GPU (T6, T8, T10) are in bench/defect_step.py. If interrupted (Ctrl-C,
SIGINT, SIGTERM), it reports the parts that were completed.
"""

import os
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from bench.cut_short import NOTE, heed_signals
from bench.defect_baselines import PATCH, August, July
from bench.defect_reads import reads_in_groups, reads_of_files
from bench.measure import arguments, report
from bench.page_cache import resident_share, state_line
from flatout.clock import machine
from flatout.defect.data.items import Strips
from flatout.defect.demo_data import STRIP_HW, generate_strip, write_strip
from flatout.defect.input import InputConfig, feed_config
from flatout.defect.patches import Grid
from flatout.defect.source import PatchSource, SampleRecipe
from flatout.defect.synth.config import SynthConfig
from flatout.defect.synth.pool import Kernels
from flatout.feed import Feed, FeedConfig, Plan, Store, StoreConfig
from flatout.feed.source import Out
from flatout.ranks.world import World


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help="measure only these targets, such as 'T2 T4'")
    options = parser.parse_args()
    heed_signals()
    quick = options.quick
    num_images, repeats = (8, 3) if quick else (64, 7)
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        paths = [Path(name) / f"{number:04}.tiff" for number in range(num_images)]
        for number, path in enumerate(paths):
            write_strip(path, generate_strip(number))
        parts: dict[str, Callable[[], list[str]]] = {
            "T1 T7": lambda: sample_costs(paths, repeats, numbers),
            "T2": lambda: scaling(paths, 0.1 if quick else 0.4, 3 if quick else 5, numbers),
            "T3": lambda: start_up(paths[0], 1_000 if quick else 10_000, 3 if quick else 5, numbers),
            "T4": lambda: memory_of_images(_linked(paths, 16 if quick else 518), numbers),
            "T5": lambda: [
                *reads_of_files(paths[: 6 if quick else 32], recipe_for, 2 if quick else 5, numbers),
                reads_in_groups(paths[: 6 if quick else 32], recipe_for, 3 if quick else 8, numbers),
            ],
        }
        chosen = set(options.only.split())
        lines = [f"storage: {state_line(paths)}; written by this run; ours and B keep images decoded in RAM"]
        print(lines[0], flush=True)
        numbers["resident_share"] = resident_share(paths)
        try:
            for targets, part in parts.items():
                if not chosen or chosen & set(targets.split()):
                    part_lines = part()
                    print("\n".join(part_lines), flush=True)
                    lines += part_lines
        except KeyboardInterrupt:
            lines.append(NOTE)
    report("defect_feed", "\n".join(lines), numbers, options)


def _linked(paths: list[Path], num: int) -> list[Path]:
    """`num` hard links to the same files, which a store treats as different images."""
    links = [path.with_name(f"link_{number:04}.tiff") for number, path in zip(range(num), cycle(paths), strict=False)]
    for link, path in zip(links, cycle(paths), strict=False):
        os.link(path, link)
    return links


def recipe_for(num_images: int) -> SampleRecipe:
    return SampleRecipe(Grid.over(STRIP_HW, PATCH), SynthConfig(), Kernels.standard(), num_images=num_images)


def sample_costs(paths: list[Path], repeats: int, numbers: dict[str, Any]) -> list[str]:
    """T1 and T7: CPU and wall time per sample, all designs in turns. B and ours have decoded images in RAM, A reads
    files from the page cache."""
    images = Strips(paths)
    planes = [images[number] for number in range(len(paths))]
    source = PatchSource(recipe_for(len(paths)), ImagesInMemory(planes))
    july, august = July(paths, STRIP_HW), August([np.ascontiguousarray(p.transpose(1, 2, 0)) for p in planes], STRIP_HW)
    rng = np.random.RandomState(0)
    sides: dict[str, tuple[Callable[[int], object], int]] = {
        "A, July": (lambda n: july(int(rng.randint(len(july.index))), rng), 6),
        "B, August, all cached": (lambda n: august(int(rng.randint(len(august))), rng), 400),
        "ours, one at a time": (MicroBatches(source, 1), 400),
        "ours, 16 at a time": (MicroBatches(source, 16), 400),
    }
    ms: dict[str, list[float]] = {side: [] for side in sides}
    wall_ms: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(repeats):
        for side, (make, count) in sides.items():
            began, began_wall = time.process_time(), time.perf_counter()
            for number in range(count // getattr(make, "num", 1)):
                make(number)
            ms[side].append(1e3 * (time.process_time() - began) / count)
            wall_ms[side].append(1e3 * (time.perf_counter() - began_wall) / count)
    peak_kb = {side: _peak_kb(make) / getattr(make, "num", 1) for side, (make, _) in sides.items()}
    middle = {side: median(values) for side, values in ms.items()}
    numbers["sample_ms"], numbers["sample_wall_ms"], numbers["peak_kb"] = ms, wall_ms, peak_kb
    lines = [f"CPU and wall time per sample (medians of {repeats} turns), and the most temporary memory it takes"]
    for side, value in middle.items():
        of_b = median(b / mine for b, mine in zip(ms["B, August, all cached"], ms[side], strict=True))
        of_a = median(a / mine for a, mine in zip(ms["A, July"], ms[side], strict=True))
        lines.append(
            f"  {side:<24} {value:8.3f} ms, wall {median(wall_ms[side]):8.3f} ms  {of_a:7.1f}x A  {of_b:6.2f}x B  "
            f"{peak_kb[side]:9.0f} kB"
        )
    by_one = median(m / b for m, b in zip(ms["ours, one at a time"], ms["B, August, all cached"], strict=True))
    by_16 = median(m / b for m, b in zip(ms["ours, 16 at a time"], ms["B, August, all cached"], strict=True))
    of_a = median(m / a for m, a in zip(ms["ours, 16 at a time"], ms["A, July"], strict=True))
    ours_kb = peak_kb["ours, 16 at a time"]
    lines += [
        f"{verdict(by_one <= 1 / 3)} T1 one at a time: {by_one:.3f} of B (at most 0.333)",
        f"{verdict(by_16 <= 1 / 6)} T1 batched: {by_16:.3f} of B (at most 0.167), 1/{1 / of_a:.0f} of A",
        f"{verdict(ours_kb <= 500)} T7 {ours_kb:.0f} kB per sample (of 500)",
    ]
    return lines


class MicroBatches:
    """Makes `num` samples at a time in preallocated memory, as a worker does."""

    def __init__(self, source: PatchSource, num: int) -> None:
        self.num, self._source = num, source
        self._out = Out(
            {name: np.empty((num, *field.shape), field.dtype) for name, field in source.fields.items()}  # type: ignore[union-attr]
        )

    def __call__(self, number: int) -> None:
        positions = np.arange(number * self.num, (number + 1) * self.num)
        indices = positions * 7 % len(self._source)
        self._source.read(indices, self._source.draw(0, 0, positions, indices), self._out)


class ImagesInMemory:
    """Decoded images in memory."""

    def __init__(self, planes: list[np.ndarray]) -> None:
        self._planes = planes

    def __getitem__(self, index: int) -> np.ndarray:
        return self._planes[index]

    def where(self, index: int) -> str:
        return str(index)


def _peak_kb(make: Callable[[int], object]) -> float:
    make(0)
    tracemalloc.start()
    peaks = []
    for number in range(1, 9):
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        make(number)
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    return max(peaks) / 1e3


def start_up(path: Path, num_files: int, repeats: int, numbers: dict[str, Any]) -> list[str]:
    """T3: time from a list of paths to a recipe; all paths are the same file, so that reading hardly counts."""
    walls_s, cpus_s = [], []
    for _ in range(repeats):
        began, began_cpu = time.perf_counter(), time.process_time()
        recipe = recipe_for(len(Strips([path] * num_files)))
        walls_s.append(time.perf_counter() - began)
        cpus_s.append(time.process_time() - began_cpu)
    seconds = median(walls_s)
    numbers["start_up"] = {"files": num_files, "seconds": walls_s, "cpu_seconds": cpus_s, "patches": len(recipe)}
    july = July([path] * 518, STRIP_HW)
    return [
        f"{verdict(seconds < 1)} T3 {num_files} files, {len(recipe)} patches: {1e3 * seconds:.0f} ms (CPU "
        f"{1e3 * median(cpus_s):.0f} ms), 0 bytes per "
        f"patch (A keeps {len(july.index)} dicts for 518 files)"
    ]


def scaling(paths: list[Path], seconds: float, repeats: int, numbers: dict[str, Any]) -> list[str]:
    """T2: samples per second of the training feed, with 1 worker up to as many as there are cores.

    All feeds stay open and take turns; the workers of the others have filled their slots and sleep.
    """
    lines = [f"finished samples per second (wall, medians of {repeats}), taken by one process that does nothing else"]
    cores = machine.cores().usable
    with ExitStack() as stack:
        store = stack.enter_context(Store.open(Strips(paths), StoreConfig(workers=2, progress=False)))
        source = PatchSource(recipe_for(len(paths)), store)
        for batch in (16, 64):
            feeds = {
                workers: iter(stack.enter_context(_endless_feed(source, batch, workers)))
                for workers in (1, 2, 4, 8)
                if workers <= cores
            }
            rates: dict[int, list[float]] = {workers: [] for workers in feeds}
            cpus_ms: dict[int, list[float]] = {workers: [] for workers in feeds}
            for turn in range(repeats):
                for workers, found in rates.items():
                    began_cpu = _cpu_s()
                    found.append(_rate(feeds[workers], 8 * workers, batch, seconds))
                    made = (8 * workers * batch) + found[-1] * seconds
                    cpus_ms[workers].append(1e3 * (_cpu_s() - began_cpu) / made)
                print(f"batch {batch}, turn {turn}:", *(f"{found[-1]:.0f}/s" for found in rates.values()), flush=True)
            numbers[f"samples_per_s_batch_{batch}"], numbers[f"cpu_ms_batch_{batch}"] = rates, cpus_ms
            lines += _scaling_lines(batch, rates, cpus_ms)
    return lines


def _endless_feed(source: PatchSource, batch: int, workers: int) -> Feed:
    """A feed whose epoch practically never ends, because the start of an epoch is not measured."""
    config = InputConfig(total_batch=batch, workers=workers, epochs=10_000)
    order = np.tile(np.random.default_rng(0).permutation(len(source)), 400)
    plan = Plan(num_samples=len(source), batch_size=batch, order=order)
    return Feed(source, plan, feed_config(config, plan, World()))


def _rate(batches: Iterator[object], unseen: int, batch: int, seconds: float) -> float:
    for _ in range(unseen):  # until workers have started and prefetched batches are consumed
        next(batches)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        next(batches)
        count += batch
    return count / (time.perf_counter() - began)


def _cpu_s() -> float:
    """CPU time of this process and all its workers so far."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def _scaling_lines(batch: int, rates: dict[int, list[float]], cpus_ms: dict[int, list[float]]) -> list[str]:
    lines = []
    for workers, found in rates.items():
        gain = median(mine / alone for mine, alone in zip(found, rates[1], strict=True))
        good = "" if workers == 1 else f"{verdict(gain >= 0.8 * workers)} T2 "
        lines.append(
            f"{good or '  '}batch {batch}, {workers} workers: {median(found):9.0f} /s, CPU of all processes "
            f"{median(cpus_ms[workers]):.3f} ms per sample, {gain:.2f}x one worker"
            + (f" (at least {0.8 * workers:.1f})" if good else "")
        )
    return lines


def memory_of_images(paths: list[Path], numbers: dict[str, Any]) -> list[str]:
    """T4: memory of the store, as PSS summed over all processes, after an epoch with 1, 4 and 8 workers."""
    lines = []
    with Store.open(Strips(paths), StoreConfig(workers=2, progress=False)) as store:
        nbytes = store.statistics().nbytes
        source = PatchSource(recipe_for(len(paths)), store)
        plan = Plan(num_samples=len(source), batch_size=64)
        for workers in (1, 4, 8):
            with Feed(source, plan, FeedConfig(workers=workers)) as feed:
                for _ in feed:
                    pass
                held = store_pss_bytes()
            numbers[f"pss_{workers}"] = {"store_bytes": nbytes, "pss_bytes": held}
            # 1.15 GB for 518 strips, and proportionally less for fewer.
            most = 1.15e9 * len(paths) / 518
            lines.append(
                f"{verdict(0 < held <= most)} T4 {len(paths)} images, {workers} workers: {held / 1e6:.1f} MB over all "
                f"processes, the images are {nbytes / 1e6:.1f} MB (at most {most / 1e6:.0f})"
            )
    return lines


def store_pss_bytes() -> int:
    """Proportional set size of the store's mapping, summed over this process and its descendants."""
    me = psutil.Process()
    total = 0
    for process in (me, *me.children(recursive=True)):
        try:
            text = Path(f"/proc/{process.pid}/smaps").read_text()
        except OSError:
            continue
        inside = False
        for line in text.splitlines():
            if "-" in line.split(" ", 1)[0] and not line.split(" ", 1)[0].endswith(":"):
                inside = "flatout-store" in line
            elif inside and line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def verdict(good: bool) -> str:
    return "PASS" if good else "FAIL"


if __name__ == "__main__":
    main()
