"""How many augmented samples per second do two CPU workers make, against the same recipe in torch's DataLoader?

Both sides: JPEG files with a long side of 320 or 640 px, the recipe of hyp.scratch.tiny.yaml (mosaic always, mixup
0.05), 8 boxes per image, batches of 64, alternating passes. The twin is tests/reference/plain_augment.py, once reading
files and once with every image in RAM. Ours is cold (the store is built, then one epoch) and with an existing store;
the latter also by OpenCV alone, as without a C compiler, and by the classic painter.

Also measured: the time of a sample on one core, by the painters and by OpenCV's own calls for warp and colour, which
are a lower bound for everything that calls OpenCV.
Answer: bench/results/augment_cpu_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import cv2
import numpy as np
from torch.utils.data import DataLoader

from bench import noise
from bench.items import draw_jpeg
from bench.loaders import ShuffledBatches, run_pass, use_one_opencv_thread
from bench.measure import arguments, facts_line, report
from bench.promises import Criterion
from flatout.feed import Batch, Feed, FeedConfig, Plan, Store, StoreConfig
from flatout.yolo.augment.draw import AugmentConfig, Color, colors
from flatout.yolo.augment.paint import Painter, PreparedCanvas, compose, warp
from flatout.yolo.augment.samples import ResizedImages
from flatout.yolo.augment.source import PAINTERS, TrainingSource
from flatout.yolo.data.image_set import ImageSet, Labels
from tests.reference.plain_augment import PlainItems, collate

ORIGINAL = {"DataLoader, files": 443.0, "DataLoader, RAM": 925.0}
"""Images per second of YOLOv7's own loader at 320 px on such a machine with 2 workers; measured once, quoted here."""
CONFIG = AugmentConfig(translate=0.1, scale=0.5, mixup=0.05, paste_in=0.0)
BATCH, WORKERS, BOXES = 64, 2, 8
UNCACHED, CACHED, COLD, STORE, OPENCV, CLASSIC = (
    "DataLoader, files",
    "DataLoader, RAM",
    "Feed, cold",
    "Feed, store",
    "Feed, store, OpenCV",
    "Feed, store, classic",
)


def write_files(folder: Path, num_files: int, size: int) -> ImageSet:
    """Write JPEG files of size x 3/4 size; returns them with boxes."""
    rng = np.random.default_rng(size)
    paths, jpegs = [], [draw_jpeg(number) for number in range(min(num_files, 64))]
    for number in range(num_files):
        image = cv2.imdecode(jpegs[number % len(jpegs)], cv2.IMREAD_COLOR)
        assert image is not None  # just encoded
        image = cv2.resize(image, (size, size * 3 // 4), interpolation=cv2.INTER_AREA)
        paths.append(str(folder / f"{number:05}.jpg"))
        cv2.imwrite(paths[-1], image, [cv2.IMWRITE_JPEG_QUALITY, 90])
    boxes = np.concatenate(
        (
            rng.integers(0, 80, (num_files * BOXES, 1)),
            rng.uniform(0.2, 0.8, (num_files * BOXES, 2)),
            rng.uniform(0.05, 0.4, (num_files * BOXES, 2)),
        ),
        axis=1,
    ).astype(np.float32)
    first_N, no_points = np.arange(num_files + 1) * BOXES, np.zeros(num_files * BOXES + 1, np.int64)
    labels = Labels(boxes, first_N, np.zeros((0, 2), np.float32), no_points)
    sizes = np.tile(np.array([[size, size * 3 // 4]], np.int32), (num_files, 1))
    return ImageSet(tuple(paths), sizes, labels, tuple(map(str, range(80))))


class TorchSide:
    """The plain recipe in torch's DataLoader, set up as its documentation suggests."""

    def __init__(self, image_set: ImageSet, size: int, *, cached: bool) -> None:
        images = ResizedImages(image_set, size=size, augment=True)
        kept = [images[index] for index in range(len(images))] if cached else None
        boxes = [image_set.labels.of(index).copy() for index in range(len(image_set))]
        load: Callable[[int], np.ndarray] = kept.__getitem__ if kept else _Reader(image_set.paths, size)
        items = PlainItems(load, boxes, vars(CONFIG), size)
        self._batches = ShuffledBatches(len(items), BATCH)
        self._loader: Any = DataLoader(
            items,  # type: ignore[arg-type]
            batch_sampler=self._batches,
            num_workers=WORKERS,
            persistent_workers=True,
            collate_fn=collate,
            worker_init_fn=use_one_opencv_thread,
        )

    def batches(self, num_batches: int) -> Iterator[Any]:
        self._batches.num_batches = num_batches
        return iter(self._loader)

    def first_byte(self, batch: Any) -> int:
        return int(batch[0][0, 0, 0, 0])

    def close(self) -> None:
        self._loader = None


class _Reader:
    """Decodes and resizes in the usual way."""

    def __init__(self, paths: tuple[str, ...], size: int) -> None:
        self._paths = paths
        self._size = size

    def __call__(self, index: int) -> np.ndarray:
        image = cv2.imread(self._paths[index])
        assert image is not None  # written above
        ratio = self._size / max(image.shape[:2])
        if ratio != 1:
            image = cv2.resize(image, (int(image.shape[1] * ratio), int(image.shape[0] * ratio)))
        return np.asarray(image)


class FeedSide:
    """flatout's feed with a store."""

    def __init__(self, image_set: ImageSet, size: int, *, painter: Any = "fast") -> None:
        images = ResizedImages(image_set, size=size, augment=True)
        self.store = Store.open(images, StoreConfig(place="ram", workers=WORKERS, progress=False))
        source = TrainingSource(image_set, self.store, CONFIG, size=size, painter=painter)
        plan = Plan(num_samples=len(source), batch_size=BATCH)
        # epochs=1: a pass does not prefetch the next one, in the time of the other side. Tasks of half a batch, because
        # labels are computed for all samples of a task at once.
        self._feed = Feed(source, plan, FeedConfig(workers=WORKERS, epochs=1, micro_batch=BATCH // WORKERS))
        self._num_steps, self._epoch = len(source) // BATCH, 0

    def batches(self, num_batches: int) -> Iterator[Batch]:
        self._epoch += 1
        return self._feed.epoch(self._epoch, start=self._num_steps - num_batches)

    def first_byte(self, batch: Batch) -> int:
        return int(batch["images"][0, 0, 0, 0])

    def close(self) -> None:
        self._feed.close()
        self.store.close()


def cold_rate(image_set: ImageSet, size: int) -> float:
    """Images per second from a cold start: start, build the store, one epoch."""
    begin_s = time.perf_counter()
    side = FeedSide(image_set, size)
    num_images = sum(len(batch) for batch in side.batches(len(image_set) // BATCH))
    elapsed_s = time.perf_counter() - begin_s
    side.close()
    return num_images / elapsed_s


def compare(size: int, *, num_files: int, passes: int) -> dict[str, list[float]]:
    """Images per second of every side, one number per pass; the sides alternate."""
    with tempfile.TemporaryDirectory() as folder:
        image_set = write_files(Path(folder), num_files, size)
        sides: dict[str, Any] = {
            UNCACHED: TorchSide(image_set, size, cached=False),
            CACHED: TorchSide(image_set, size, cached=True),
            CLASSIC: FeedSide(image_set, size, painter="classic"),
            OPENCV: FeedSide(image_set, size, painter="opencv"),
            STORE: FeedSide(image_set, size),
        }
        rates: dict[str, list[float]] = {name: [] for name in (*sides, COLD)}
        num_batches = num_files // BATCH
        for side in sides.values():
            run_pass(side, WORKERS)  # starts the workers
        for number in range(passes):
            for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
                run = run_pass(sides[name], num_batches)
                rates[name].append(num_batches * BATCH / float(run.arrival_K[-1]))
            rates[COLD].append(cold_rate(image_set, size))
        for side in sides.values():
            side.close()
    return rates


def core_times(size: int, *, repeats: int) -> list[str]:
    """CPU time of one mosaic of four on one core, in milliseconds, median of `repeats`: paint, colour, deliver."""
    rng = np.random.default_rng(size)
    small = rng.integers(0, 256, (4, size // 4, size // 3, 3), np.uint8)
    tiles = [cv2.resize(each, (size, size * 3 // 4)) for each in small]
    origin_K2 = np.array([(0, size // 4), (size, size // 4), (0, size), (size, size)])
    matrix_33 = np.array([[1.05, 0, -0.55 * size], [0, 1.05, -0.55 * size], [0, 0, 1]])
    prepared = PreparedCanvas(tiles, origin_K2, (2 * size, 2 * size), [], matrix_33, (size, size), True, False)
    color = Color(*(each[0] for each in colors({"hsv": np.array([[1.01, 1.3, 0.8]])})))
    canvas, out_CHW = compose(tiles, origin_K2, prepared.canvas_wh), np.empty((3, size, size), np.uint8)
    image = warp(canvas, matrix_33, prepared.out_wh, perspective=False)
    hsv, flip_2 = cv2.cvtColor(image, cv2.COLOR_BGR2HSV), np.array([False, True])

    def opencv_alone() -> None:
        warp(canvas, matrix_33, prepared.out_wh, perspective=False, out=image)
        cv2.cvtColor(image, cv2.COLOR_BGR2HSV, dst=hsv)
        cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR, dst=image)

    def by(painter: Painter) -> Callable[[], None]:
        return lambda: painter.finish(painter.paint(prepared), color, flip_2, out_CHW)

    ways = {"warpAffine and two cvtColor, nothing else": opencv_alone}
    ways |= {f"painter {name}": by(make()) for name, make in PAINTERS.items()}
    lines = [f"{size} px, one core, ms per image:"]
    for name, way in ways.items():
        times = []
        for _ in range(repeats):
            begin_s = time.thread_time()
            way()
            times.append(1e3 * (time.thread_time() - begin_s))
        lines.append(f"  {name:44}{median(times):8.3f}")
    return lines


def criteria_of(rates: dict[int, dict[str, list[float]]]) -> list[Criterion]:
    """The promises at 320 px, relative to the twin and to the quoted rates of the original."""
    promises = [(STORE, CACHED, 2.0), (STORE, UNCACHED, 4.0), (COLD, UNCACHED, 1.3)]
    of_size = rates[320]
    found = []
    for ours, theirs, limit in promises:
        quoted = [rate / ORIGINAL[theirs] for rate in of_size[ours]]
        found.append(Criterion.of_median(f"320 px: {ours} / original, quoted", quoted, limit, at_most=False))
        found.append(
            Criterion.of_median(f"320 px: {ours} / {theirs}", _ratios(of_size, ours, theirs), limit, at_most=False)
        )
    return found


def _ratios(of_size: dict[str, list[float]], ours: str, theirs: str) -> list[float]:
    return [mine / other for mine, other in zip(of_size[ours], of_size[theirs], strict=True)]


def table(rates: dict[int, dict[str, list[float]]]) -> list[str]:
    lines = [f"{'px':4}  {'side':22}{'images/s':>10}{'p10':>8}{'p90':>8}{'x files':>9}{'x RAM':>8}"]
    for size, of_size in rates.items():
        for name, passes in of_size.items():
            low, high = np.quantile(passes, (0.1, 0.9))
            to_files, to_ram = (median(_ratios(of_size, name, base)) for base in (UNCACHED, CACHED))
            lines.append(f"{size:4}  {name:22}{median(passes):10.0f}{low:8.0f}{high:8.0f}{to_files:9.2f}{to_ram:8.2f}")
    return lines


def main() -> int:
    options = arguments(__doc__).parse_args()
    print(facts_line(), flush=True)
    repeats = 10 if options.quick else 60
    before = noise.listen(repeats).line()
    cv2.setNumThreads(1)  # DataLoader forks its workers, which OpenCV threads would not survive
    quantities = {320: (256, 2), 640: (128, 1)} if options.quick else {320: (1024, 7), 640: (384, 5)}
    rates = {size: compare(size, num_files=n, passes=p) for size, (n, p) in quantities.items()}
    costs = [line for size in quantities for line in core_times(size, repeats=20 if options.quick else 200)]
    after = noise.listen(repeats).line()
    criteria = criteria_of(rates)
    text = "\n".join([f"before, {before}", f"after,  {after}", "", *table(rates), "", *costs, "", *map(str, criteria)])
    numbers = {"noise": [before, after], "rates": rates, "costs": costs, "criteria": [str(each) for each in criteria]}
    report("augment_cpu", text, numbers, options)
    return int(not options.quick and not all(each.passed for each in criteria))


if __name__ == "__main__":
    sys.exit(main())
