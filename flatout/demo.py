"""`flatout demo`: the feed at work on a small data set that it draws itself, in half a minute.

Shows, on this machine: the same batches with any number of workers, a worker killed on the way, a
stream resumed in mid-epoch, where the time went, and a picture of one batch.
"""

import argparse
import hashlib
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console
from rich.progress import track
from rich.table import Table

from flatout.feed import Batch, DecodeError, Feed, FeedConfig, Field, Plan, Rows, SampleSource
from flatout.profiler import clock

SIZE = 320
COLOURS = {"disc": (60, 60, 220), "box": (70, 180, 60), "bar": (220, 120, 40)}


class DrawnShapes(SampleSource):
    """JPEG files of discs, boxes and bars on a noisy ground, flipped and brightened at random."""

    fields = {"image": Field((3, SIZE, SIZE)), "boxes": Rows(5, np.float32, expected=4)}

    def __init__(self, paths: Sequence[Path], boxes: Sequence[np.ndarray]) -> None:
        self.paths = list(paths)
        self.boxes = list(boxes)

    def __len__(self) -> int:
        return len(self.paths)

    def where(self, index: int) -> str:
        return str(self.paths[index])

    def sample(self, index: int, rng: np.random.Generator) -> Mapping[str, ArrayLike]:
        with clock.stage("decode"):
            image = cv2.imread(str(self.paths[index]))
        if image is None:
            raise DecodeError("not a picture that OpenCV can read")
        boxes = self.boxes[index].copy()
        with clock.stage("augment"):
            image = cv2.convertScaleAbs(image, alpha=rng.uniform(0.7, 1.3))
            if rng.random() < 0.5:
                image = image[:, ::-1]
                boxes[:, [1, 3]] = SIZE - boxes[:, [3, 1]]
        return {"image": image[:, :, ::-1].transpose(2, 0, 1), "boxes": boxes}


def draw_picture(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """One BGR picture and its boxes [n, 5]: class, x1, y1, x2, y2 in pixels."""
    ground = rng.integers(90, 200, 3)
    noise = cv2.resize(rng.normal(0, 18, (SIZE // 4, SIZE // 4, 3)).astype(np.float32), (SIZE, SIZE))
    image = np.clip(ground + noise, 0, 255).astype(np.uint8)
    boxes = []
    for _ in range(rng.integers(1, 6)):
        kind = int(rng.integers(len(COLOURS)))
        width, height = rng.integers(24, 90, 2)
        x, y = rng.integers(0, SIZE - width), rng.integers(0, SIZE - height)
        colour = tuple(int(value) for value in np.clip(list(COLOURS.values())[kind] + rng.normal(0, 20, 3), 0, 255))
        if kind == 0:
            cv2.ellipse(image, (x + width // 2, y + height // 2), (width // 2, height // 2), 0, 0, 360, colour, -1)
        else:
            height = height if kind == 1 else height // 3
            cv2.rectangle(image, (x, y), (x + width, y + height), colour, -1)
        boxes.append((kind, x, y, x + width, y + height))
    return image, np.array(boxes, np.float32)


def draw_data_set(folder: Path, num_pictures: int) -> DrawnShapes:
    """Write the pictures as JPEG files, unless they are there already."""
    folder.mkdir(parents=True, exist_ok=True)
    paths, boxes = [], []
    for number in track(range(num_pictures), description="drawing pictures", transient=True):
        image, its_boxes = draw_picture(np.random.default_rng(number))
        paths.append(folder / f"{number:04}.jpg")
        boxes.append(its_boxes)
        if not paths[-1].exists():
            cv2.imwrite(str(paths[-1]), image, [cv2.IMWRITE_JPEG_QUALITY, 90])
    return DrawnShapes(paths, boxes)


def fingerprint(batches: Iterable[Batch]) -> str:
    """Short hash over every byte of some batches."""
    total = hashlib.sha256()
    for batch in batches:
        for array in (batch.indices, *batch.fields.values()):
            total.update(array.tobytes())
    return total.hexdigest()[:12]


def show_worker_counts(source: DrawnShapes, plan: Plan, console: Console) -> str:
    """Epoch 0 with different crews: the same bytes, other speeds. Returns their fingerprint."""
    table = Table("workers", "first batch", "images/s", "data_time", "shared memory", "fingerprint of the epoch")
    prints = set()
    for config in (FeedConfig(workers=0), FeedConfig(workers=1), FeedConfig(workers=2), FeedConfig(workers=4)):
        with Feed(source, plan, config) as feed:
            begin_s = time.perf_counter()
            batches = iter(feed)
            first = next(batches).copy()
            first_ms = 1e3 * (time.perf_counter() - begin_s)
            prints.add(fingerprint([first, *(batch.copy() for batch in batches)]))
            reading = feed.meter.read()
            table.add_row(
                f"{config.workers}",
                f"{first_ms:.0f} ms",
                f"{reading.samples_per_s:.0f}",
                f"{reading.data_time_ms:.0f} ms",
                f"{feed.memory_bytes / 1e6:.0f} MB",
                fingerprint_cell := next(iter(prints)) if len(prints) == 1 else "DIFFERS",
            )
    console.print(table)
    assert len(prints) == 1, "batches depend on the number of workers"
    return fingerprint_cell


def show_killed_worker(source: DrawnShapes, plan: Plan, expected: str, console: Console) -> None:
    """Kill a worker in mid-epoch; the stream goes on unchanged."""
    with Feed(source, plan, FeedConfig(workers=2)) as feed:
        seen = []
        for batch in feed:
            seen.append(batch.copy())
            if batch.step == 1:
                os.kill(feed.worker_pids[0], signal.SIGKILL)
    verdict = "the epoch is the same" if fingerprint(seen) == expected else "THE EPOCH DIFFERS"
    console.print(f"A worker was killed after batch 1 and replaced: {verdict} ({fingerprint(seen)}).")


def show_resume(source: DrawnShapes, plan: Plan, expected: str, console: Console) -> None:
    """Stop after two batches, continue in a new feed with another number of workers."""
    with Feed(source, plan, FeedConfig(workers=2)) as feed:
        seen = [batch.copy() for batch in islice(feed, 2)]
        state = feed.state_dict()
    with Feed(source, plan, FeedConfig(workers=1)) as feed:
        feed.load_state_dict(state)
        seen += [batch.copy() for batch in feed]
    verdict = "the epoch is the same" if fingerprint(seen) == expected else "THE EPOCH DIFFERS"
    console.print(f"Stopped after 2 batches, resumed with another worker count: {verdict} ({fingerprint(seen)}).")


def draw_sheet(batch: Batch, path: Path, *, columns: int = 6, rows: int = 3) -> None:
    """The first pictures of a batch with their boxes, as one picture file."""
    ends = np.cumsum(batch.counts["boxes"])
    tiles = []
    for number in range(columns * rows):
        tile = np.ascontiguousarray(batch["image"][number].transpose(1, 2, 0)[:, :, ::-1])
        for kind, *corners in batch["boxes"][ends[number] - batch.counts["boxes"][number] : ends[number]]:
            x1, y1, x2, y2 = (int(value) for value in corners)
            cv2.rectangle(tile, (x1, y1), (x2, y2), (255, 255, 255), 2)
            name = list(COLOURS)[int(kind)]
            cv2.putText(tile, name, (x1 + 2, max(14, y1 - 5)), cv2.FONT_HERSHEY_SIMPLEX, 0.5, (255, 255, 255), 1)
        tiles.append(cv2.copyMakeBorder(tile, 3, 3, 3, 3, cv2.BORDER_CONSTANT, value=(30, 30, 30)))
    lines = [cv2.hconcat(tiles[row * columns : (row + 1) * columns]) for row in range(rows)]
    sheet = cv2.resize(cv2.vconcat(lines), None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA)
    cv2.imwrite(str(path), sheet)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="flatout demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder to write to (default: %(default)s)")
    parser.add_argument("--pictures", type=int, default=512, help="pictures to draw (default: %(default)s)")
    options = parser.parse_args(argv)
    console = Console()
    source = draw_data_set(options.out / "pictures", options.pictures)
    plan = Plan(num_samples=len(source), batch_size=min(64, len(source)), seed=1)
    console.print(f"{len(source)} JPEG pictures of {SIZE} x {SIZE} in {options.out}, batches of {plan.batch_size}\n")
    expected = show_worker_counts(source, plan, console)
    show_killed_worker(source, plan, expected, console)
    show_resume(source, plan, expected, console)
    with Feed(source, plan) as feed:
        draw_sheet(next(iter(feed)), options.out / "batch.png")
        list(feed)
        console.print(f"\nWhere the time goes ({feed.num_workers} workers, as `auto` chooses here):")
        console.print(feed.meter.read().line(), soft_wrap=True)
    console.print(f"\nOne batch, augmented: {options.out / 'batch.png'}. How it works: docs/feed.md")
    return 0
