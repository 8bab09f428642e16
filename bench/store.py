"""What does decoding once gain, what does it cost, and which items should a store that is too small keep?

Three questions, each with both sides in one run: reading images from a store against decoding their JPEG files;
memory of a store that 1 to 8 worker processes share against a cache in each of them; hit rates of a fixed resident
subset against the items used last, in shuffled epochs. Exit code 1 if a promise is broken.
Answer: bench/results/store_<machine>_<yyyymm>.md (rewrite it with --write).

Dimension key:  T turns   W workers
"""

import logging
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import cv2
import numpy as np

from bench import noise
from bench.items import draw_jpeg
from bench.measure import arguments, facts_line, report
from bench.promises import Criterion
from flatout.feed import DecodeError, Feed, FeedConfig, Field, Items, Plan, SampleSource, Store, StoreConfig
from flatout.feed.plan import shuffled_order

IMAGE_BYTES = 480 * 640 * 3


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How much is measured."""

    num_images: int
    turns: int
    workers: tuple[int, ...]
    items: int
    """Number of items for the hit rates."""
    epochs: int
    shares: tuple[float, ...] = (0.25, 0.5, 0.75, 0.9)


FULL = Setting(num_images=384, turns=9, workers=(1, 2, 4, 8), items=2000, epochs=6)
QUICK = Setting(num_images=16, turns=2, workers=(1, 2), items=200, epochs=3)


class Jpegs:
    """Photographs of 640 x 480 on a disk."""

    parameters = "cv2, BGR"

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = [str(path) for path in paths]

    def __len__(self) -> int:
        return len(self.paths)

    def path(self, index: int) -> str:
        return self.paths[index]

    where = path

    def decode(self, index: int) -> np.ndarray:
        image = cv2.imread(self.paths[index])
        if image is None:
            raise DecodeError("not an image")
        return image


class Kilobytes:
    """Items that cost nothing to decode, for counting hits."""

    parameters = ""

    def __init__(self, num_items: int) -> None:
        self._num_items = num_items

    def __len__(self) -> int:
        return self._num_items

    def path(self, index: int) -> str:
        return "none"

    where = path

    def decode(self, index: int) -> np.ndarray:
        return np.zeros(1024, np.uint8)


class FirstBytes(SampleSource):
    """Reads every byte of an item, and returns one."""

    fields = {"byte": Field(())}

    def __init__(self, store: Store) -> None:
        self._store = store

    def __len__(self) -> int:
        return len(self._store)

    def sample(self, index: int, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
        return {"byte": np.bitwise_xor.reduce(self._store[index], axis=None)}


def main() -> int:
    options = arguments(__doc__).parse_args()
    setting = QUICK if options.quick else FULL
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    cv2.setNumThreads(1)
    begin_s = time.perf_counter()
    print(facts_line(), flush=True)
    before = noise.listen().line()
    print(before, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        jpegs = draw(Path(folder), setting.num_images)
        rates = read_rates(jpegs, Path(folder) / "stores", setting)
        memory = {workers: held(jpegs, Path(folder) / "stores", workers) for workers in setting.workers}
        hits = {share: hit_rates(share, Path(folder) / "stores", setting) for share in setting.shares}
    after = noise.listen().line()
    criteria = check_promises(rates, memory, hits)
    elapsed = f"measured in {time.perf_counter() - begin_s:.0f} s"
    if options.quick:
        elapsed += "; a quick run shows that the script works, its verdicts mean nothing"
    lines = [f"before, {before}", f"after,  {after}", "", *tables(rates, memory, hits), "", *map(str, criteria)]
    numbers = {
        "noise": [before, after],
        "images_per_s_per_core": rates,
        "memory_bytes": memory,
        "hit_rates": hits,
        "criteria": [asdict(each) | {"passed": each.passed} for each in criteria],
    }
    report("store", "\n".join([*lines, "", elapsed]), numbers, options)
    return int(not options.quick and not all(each.passed for each in criteria))


def draw(folder: Path, num_images: int) -> Jpegs:
    paths = [folder / f"{number:04}.jpg" for number in range(num_images)]
    for seed, path in enumerate(paths):
        path.write_bytes(draw_jpeg(seed % 64).tobytes())
    return Jpegs(paths)


def read_rates(jpegs: Jpegs, folder: Path, setting: Setting) -> dict[str, list[float]]:
    """Images per second of one core in each turn: decoded, or copied from a store, in shuffled order."""
    knobs: dict[str, Any] = {"folder": folder, "workers": "auto", "progress": False}
    begin_s = time.perf_counter()
    with Store.open(jpegs, StoreConfig(place="disk", **knobs)):
        built_s = time.perf_counter() - begin_s
    rates = {"build (wall, with start)": [len(jpegs) / built_s]}
    with (
        Store.open(jpegs, StoreConfig(place="off")) as off,
        Store.open(jpegs, StoreConfig(place="ram", **knobs)) as ram,
        Store.open(jpegs, StoreConfig(place="disk", **knobs)) as disk,
    ):
        rates["disk, first touch"] = [read_all(disk, epoch=0)]
        sides = {"decode": off, "ram": ram, "disk": disk}
        rates |= {side: [] for side in sides}
        for turn in range(setting.turns):
            for side in list(sides)[:: 1 if turn % 2 == 0 else -1]:
                rates[side].append(read_all(sides[side], epoch=turn))
    return rates


def read_all(store: Store, epoch: int) -> float:
    """Copy every image once into a batch's place; returns images per second of CPU time."""
    target = np.zeros((480, 640, 3), np.uint8)
    begin_s = time.process_time()
    for index in shuffled_order(len(store), seed=1, epoch=epoch).tolist():
        np.copyto(target, store[index])
    return len(store) / (time.process_time() - begin_s)


def held(jpegs: Jpegs, folder: Path, workers: int) -> dict[str, int]:
    """Bytes of decoded images that all processes hold together: in one shared store, or in a cache in each worker."""
    total_bytes = len(jpegs) * (IMAGE_BYTES + 4096)
    base: dict[str, Any] = {"folder": folder, "workers": workers, "progress": False}
    configs = {
        "resident": StoreConfig(**base),
        "lru": StoreConfig(**base, policy="lru", budget_bytes=workers * total_bytes),
    }
    found = {}
    for side, config in configs.items():
        with Store.open(jpegs, config) as store:
            plan = Plan(num_samples=len(jpegs), batch_size=16)
            with Feed(FirstBytes(store), plan, FeedConfig(workers=workers, epochs=3)) as feed:
                pids = [os.getpid(), *feed.worker_pids.values()]
                empty = sum(map(pss_anonymous, pids))
                for _ in range(3):
                    for _ in feed:
                        pass
                grown = sum(map(pss_anonymous, pids)) - empty
                found[side] = sum(map(pss_of_store, pids)) if side == "resident" else grown
    return found


def pss_of_store(pid: int) -> int:
    """Bytes of a store's mappings in a process, each page divided by the number of processes that map it."""
    blocks = Path(f"/proc/{pid}/smaps").read_text().split("\nVmFlags:")
    return 1024 * sum(_field(block, "Pss:") for block in blocks if "memfd:flatout-store " in block)


def pss_anonymous(pid: int) -> int:
    """Bytes of a process's own memory."""
    return 1024 * _field(Path(f"/proc/{pid}/smaps_rollup").read_text(), "Pss_Anon:")


def _field(text: str, name: str) -> int:
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(name))


def hit_rates(share: float, folder: Path, setting: Setting) -> dict[str, float]:
    """Share of the accesses in shuffled epochs after the first that need no decoding."""
    items: Items = Kilobytes(setting.items)
    # Plus room for the index: `share` is the share of the items.
    index_bytes = 4096 * (2 + 80 * setting.items // 4096)
    configs = {
        "resident": StoreConfig(folder=folder, workers=0, budget_bytes=index_bytes + int(share * setting.items) * 1024),
        "lru": StoreConfig(policy="lru", workers=1, budget_bytes=int(share * setting.items) * 1024),
    }
    rates = {}
    for side, config in configs.items():
        with Store.open(items, config) as store:
            for epoch in range(setting.epochs):
                for index in shuffled_order(setting.items, seed=2, epoch=epoch).tolist():
                    store[index]
                if epoch == 0:
                    first = store.statistics()
            last = store.statistics()
            rates[side] = (last.hits - first.hits) / (last.hits + last.misses - first.hits - first.misses)
    return rates


Rates = Mapping[str, Sequence[float]]
Sides = Mapping[float, Mapping[str, float]]


def check_promises(rates: Rates, memory: Mapping[int, Mapping[str, int]], hits: Sides) -> list[Criterion]:
    ratios = {
        side: [mine / theirs for mine, theirs in zip(rates[side], rates["decode"], strict=True)]
        for side in ("ram", "disk")
    }
    found = [
        Criterion.of_median(f"read from {side} / decode, one core", ratio_T, 5, at_most=False)
        for side, ratio_T in ratios.items()
    ]
    alone = memory[min(memory)]["resident"]
    found += [
        Criterion(promise=f"store memory, {workers} workers / 1 worker", value=sides["resident"] / alone, limit=1.05)
        for workers, sides in memory.items()
    ]
    found += [
        Criterion(promise=f"resident hit rate, budget {share:.0%}", value=sides["resident"], limit=share, at_most=False)
        for share, sides in hits.items()
    ]
    return found


def tables(rates: Rates, memory: Mapping[int, Mapping[str, int]], hits: Sides) -> list[str]:
    decode = median(rates["decode"])
    lines = [f"{'reading 640 x 480 x 3':24}{'img/s/core':>12}{'/ decode':>10}"]
    lines += [f"{side:24}{median(rate_T):12.0f}{median(rate_T) / decode:10.2f}" for side, rate_T in rates.items()]
    lines += ["", f"{'memory, all processes':24}{'one store MB':>14}{'a cache each MB':>17}"]
    lines += [
        f"{f'{workers} workers':24}{sides['resident'] / 1e6:14.1f}{sides['lru'] / 1e6:17.1f}"
        for workers, sides in memory.items()
    ]
    lines += ["", f"{'hit rate, shuffled':24}{'resident':>12}{'lru':>10}{'ratio':>8}"]
    lines += [
        f"{f'budget {share:.0%}':24}{sides['resident']:12.1%}{sides['lru']:10.1%}"
        f"{sides['resident'] / max(sides['lru'], 1e-9):8.1f}"
        for share, sides in hits.items()
    ]
    return lines


if __name__ == "__main__":
    sys.exit(main())
