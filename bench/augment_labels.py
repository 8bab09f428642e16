"""How many samples can one core draw and label, with boxes and with polygons, where images stay on the GPU?

The work of a `--device-augment` worker: the draws of a task of 192 samples, their layout, and their labels through the
warp; 8 labels per image, mosaic always, mixup 0.05, 320 px. Polygons have 24 points; their boxes are computed by
polygons.c or by NumPy, to the same bits, or deferred to the GPU, as with `--device-augment`. CPU time of one thread,
alternating.
Answer: bench/results/augment_labels_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import sys
import time
from collections.abc import Callable
from unittest.mock import patch

import numpy as np

from bench import noise
from bench.augment_gpu import CONFIG, POINTS, draw_set
from bench.measure import arguments, facts_line, report, summarize
from flatout.feed.source import Out, Rows, RowsOut
from flatout.yolo.augment import labels
from flatout.yolo.augment.gpu.source import ParameterSource
from flatout.yolo.augment.labels import compiled_boxes

SAMPLES, IMAGES, SIZE = 192, 6000, 320


def task_of(source: ParameterSource) -> Callable[[int], None]:
    """One task of a worker in a given epoch, into arrays that are reused."""
    indices = np.random.default_rng(0).integers(0, IMAGES, SAMPLES)
    fields = source.fields.items()
    parts = {
        name: np.empty((SAMPLES, *field.shape), field.dtype) for name, field in fields if not isinstance(field, Rows)
    }

    def task(epoch: int) -> None:
        rows = {name: RowsOut(name, field, SAMPLES) for name, field in fields if isinstance(field, Rows)}
        source.read(indices, source.draw(0, epoch, np.arange(SAMPLES), indices), Out({**parts, **rows}))

    return task


def by_numpy(task: Callable[[int], None]) -> Callable[[int], None]:
    def slower(epoch: int) -> None:
        with patch("flatout.yolo.augment.labels.boxes_of_polygons", labels.boxes_by_numpy):
            task(epoch)

    return slower


def main() -> int:
    options = arguments(__doc__).parse_args()
    print(facts_line(), flush=True)
    lines = [noise.listen().line()]
    plain, outlined = (draw_set(IMAGES, SIZE, polygons=each) for each in (False, True))
    outlines = task_of(ParameterSource(outlined, CONFIG, size=SIZE))
    tasks = {
        "boxes": task_of(ParameterSource(plain, CONFIG, size=SIZE)),
        f"polygons of {POINTS} points, left to the GPU": task_of(
            ParameterSource(outlined, CONFIG, size=SIZE, defer_labels=True)
        ),
        f"polygons of {POINTS} points, NumPy": by_numpy(outlines),
    }
    if compiled_boxes() is not None:
        tasks[f"polygons of {POINTS} points, C"] = outlines
    taken: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(3 + (3 if options.quick else 40)):
        for name, task in tasks.items():
            begin_s = time.thread_time()
            task(turn)
            if turn >= 3:
                taken[name].append(time.thread_time() - begin_s)
    slowest_s = summarize(taken[f"polygons of {POINTS} points, NumPy"]).median
    for name, durations in taken.items():
        timing = summarize(durations)
        rate, ratio = SAMPLES / timing.median, slowest_s / timing.median
        lines.append(f"{name:38} {timing.text():38} {rate:8,.0f} samples/s of a core   {ratio:5.2f} x NumPy's polygons")
    report("augment_labels", "\n".join(lines), taken, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
