"""How long does a whole training step take, and is the GPU busy all the time?

Everything a training does between two validations: mosaics of images in device memory, labels by two workers, OTA loss,
backward, SGD, moving average, log; in the loop of `train.py --fast`, with 8 boxes per image (about 16 per mosaic). Then
the same with the input of `train.py` without new flags: JPEG files decoded and augmented by 16 workers. Busy is the
union of the kernels' intervals in a trace of 20 steps, divided by its length. The numbers of the original code are
quoted: measured once, on the same kind of machine.
Answer: bench/results/train_step_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import argparse
import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.augment_gpu import NoiseImages, draw_set
from bench.measure import arguments, facts_line, report
from bench.promises import Criterion
from flatout.engine.job import IntervalStats
from flatout.engine.loop import Loop, LoopConfig
from flatout.engine.optim import MovingAverage
from flatout.engine.step import DTYPES
from flatout.feed import Feed, FeedConfig, Plan
from flatout.feed.device import DeviceBatches
from flatout.yolo.augment.gpu.input import DeviceInputConfig, training_input
from flatout.yolo.augment.samples import ResizedImages
from flatout.yolo.augment.source import TrainingSource
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.find_file import shipped_folder
from flatout.yolo.hyp import Hyp, load_hyp
from flatout.yolo.model.configs import load_config
from flatout.yolo.model.network import build_network
from flatout.yolo.train import prepare
from flatout.yolo.train.step import DetectionJob, DetectionLoss, StepInputs, YoloSchedule, capacity_for

LOG_EVERY = 20
SETTLED = 3
"""Intervals before the numbers count."""
TRACED = 6
"""Index of the interval that is traced."""


class Case(NamedTuple):
    """A network and its input."""

    name: str
    side_px: int
    batch: int
    original: float | None
    """Milliseconds per step of the original code (OTA)."""
    promised: float | None
    """Milliseconds per step, at most."""

    def __str__(self) -> str:
        return f"{self.name} {self.side_px} px, batch {self.batch}"


CASES = [
    Case("yolov7-tiny", 320, 384, 3191, 60),
    Case("yolov7", 640, 64, 816, 135),
    Case("yolov7", 320, 64, 580, 46),
    Case("yolov7-tiny", 640, 128, 947, None),
    Case("yolov7-tiny", 320, 16, None, None),
]


@dataclass
class Row:
    """One case with one kind of input."""

    case: str
    way: str
    step_ms: float
    slowest_ms: float
    images_per_s: float
    busy: float
    waits: int
    """Calls in the traced steps that make the host wait or copy from pageable memory."""
    launches: float
    """Kernel and graph launches per step."""
    peak_gib: float


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this, such as 'yolov7 640'")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/train_step.py needs a GPU, and this machine has none.")
        return 0
    torch.backends.cudnn.benchmark = True
    print(facts_line(), flush=True)
    cases = CASES[-1:] if options.quick else [case for case in CASES if options.only in str(case)]
    rows = []
    for case in cases:
        rows.append(measure(case, "fast", device_input))
        if case == cases[0]:
            rows.append(measure(case, "CPU input", plain_input))
    criteria = [criterion for case in cases for criterion in criteria_of(case, rows)]
    write(rows, criteria, options)
    return int(not all(each.passed for each in criteria))


@contextmanager
def device_input(case: Case, hyp: Hyp) -> Iterator[DeviceBatches]:
    """Images in device memory, as with --fast."""
    images = draw_set(6000 if case.side_px <= 320 else 2500, case.side_px)
    plan = Plan(num_samples=len(images), batch_size=case.batch, order=np.arange(len(images)).repeat(20))
    with training_input(
        images,
        NoiseImages(images),
        hyp.augment(),
        plan,
        size=case.side_px,
        device="cuda",
        config=DeviceInputConfig(dtype=torch.bfloat16),
    ) as batches:
        yield batches


@contextmanager
def plain_input(case: Case, hyp: Hyp) -> Iterator[DeviceBatches]:
    """JPEG files, decoded and augmented by OpenCV in worker processes, as without new flags."""
    import cv2

    drawn = draw_set(1024, case.side_px)
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        pixels = NoiseImages(drawn)
        for number in range(len(pixels)):
            paths.append(str(Path(folder) / f"{number}.jpg"))
            cv2.imwrite(paths[-1], cv2.GaussianBlur(pixels[number], (0, 0), 3))
        images = ImageSet(tuple(paths), drawn.size_wh_N2, drawn.labels, drawn.names)
        resized = ResizedImages(images, size=case.side_px, augment=True)
        source = TrainingSource(images, resized, hyp.augment(), size=case.side_px)
        plan = Plan(num_samples=len(images), batch_size=case.batch, order=np.arange(len(images)).repeat(100))
        with Feed(source, plan, FeedConfig(workers=16)) as feed:
            yield DeviceBatches(feed, "cuda")


def measure(case: Case, way: str, open_input: Callable[[Case, Hyp], Any], *, ota: bool = True) -> Row:
    """Train for a few hundred steps and measure every interval; one of them is traced."""
    hyp = load_hyp(shipped_folder("data") / "hyp.scratch.tiny.yaml")
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    with open_input(case, hyp) as batches:
        ticks = Ticks()
        loop = make_loop(case, hyp, batches, ticks, ota=ota)
        ticks.loop = loop
        loop.run()
    row = ticks.row(case, way)
    print(
        f"{row.case}, {way}: {row.step_ms:.2f} ms, busy {100 * row.busy:.1f} %, {row.waits} waits, "
        f"{row.launches:.0f} launches",
        flush=True,
    )
    del loop, ticks
    gc.collect()
    torch.cuda.empty_cache()
    return row


def make_loop(
    case: Case,
    hyp: Hyp,
    batches: DeviceBatches,
    tell: Callable[[IntervalStats], None],
    *,
    ota: bool = True,
    num_steps: int = LOG_EVERY * 10,
    log_every: int = LOG_EVERY,
) -> Loop:
    """The training loop of `train.py --fast`."""
    network = build_network(load_config(case.name)).cuda()
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    head = network.head
    config = hyp.loss().scaled(num_layers=head.nl, num_classes=head.nc, image_size_px=case.side_px)
    inputs = StepInputs(dtype=DTYPES["bf16"], channels_last=True, size=case.side_px, grid=32, seed=1)
    return Loop(
        job=DetectionJob(inputs, DetectionLoss(head, config, ota=ota), capacity=capacity_for(24, case.batch)),
        network=network,
        optimizer=prepare.optimizer_for(network, hyp, total_batch=case.batch, adam=False),
        schedule=YoloSchedule(hyp, epochs=100, steps_per_epoch=num_steps, total_batch=case.batch),
        batches=batches,
        config=LoopConfig(epochs=1, steps_per_epoch=num_steps, amp="bf16", log_every=log_every, graphs=True),
        device=torch.device("cuda", 0),
        average=MovingAverage(network),
        on_interval=tell,
    )


class Ticks:
    """Collects intervals, turns waits of the host into errors after SETTLED of them, and traces one."""

    def __init__(self) -> None:
        self.loop: Loop | None = None
        self._ticks: list[IntervalStats] = []
        self._profile: Any = None
        self._trace = Trace(0.0, 0, 0.0)

    def __call__(self, tick: IntervalStats) -> None:
        self._ticks.append(tick)
        if len(self._ticks) == SETTLED:
            torch.cuda.set_sync_debug_mode("error")
        if len(self._ticks) == TRACED:
            torch.cuda.set_sync_debug_mode("default")
            kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self._profile = torch.profiler.profile(activities=kinds)
            self._profile.__enter__()
        elif len(self._ticks) == TRACED + 1:
            self._profile.__exit__(None, None, None)
            self._trace = read_trace(self._profile, LOG_EVERY)
            self._profile = None

    def row(self, case: Case, way: str) -> Row:
        steady = [t for n, t in enumerate(self._ticks) if n >= SETTLED and n not in (TRACED, TRACED + 1)]
        times_ms = [tick.step_ms for tick in steady]
        return Row(
            str(case),
            way,
            median(times_ms),
            max(times_ms),
            case.batch / median(times_ms) * 1e3,
            self._trace.busy,
            self._trace.waits,
            self._trace.launches,
            torch.cuda.max_memory_allocated() / 2**30,
        )


class Trace(NamedTuple):
    """Numbers from a trace of some steps."""

    busy: float
    """Share of the time in which the device was busy."""
    waits: int
    launches: float
    """Per step."""


WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaLaunchKernelExC", "cuLaunchKernelEx")


def read_trace(profile: Any, num_steps: int) -> Trace:
    """Read waits and launches from a profile, and the share of time in which anything ran on the device."""
    spans, waits, launches = [], 0, 0
    for event in profile.events():
        if str(event.device_type).endswith("CUDA"):
            spans.append((event.time_range.start, event.time_range.end))
            waits += "Pageable" in event.name
        else:
            waits += event.name in WAITS
            launches += event.name in LAUNCHES
    # Minus two: the profiler itself waits for the device once when it begins and once when it ends.
    return Trace(union_share(spans), max(0, waits - 2), launches / num_steps)


def union_share(spans: list[tuple[float, float]]) -> float:
    """Share of the time from the first begin to the last end that is covered by at least one span."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    whole = reached - min(begin for begin, _ in spans) if spans else 0.0
    return covered / whole if whole else 0.0


def criteria_of(case: Case, rows: list[Row]) -> list[Criterion]:
    """The promised time, a busy GPU, and a host that never waits."""
    row = next(row for row in rows if row.case == str(case) and row.way == "fast")
    if case.promised is None:
        return []
    return [
        Criterion(promise=f"{case}", value=row.step_ms, limit=case.promised, unit=" ms"),
        Criterion(promise=f"{case}, idle share", value=1 - row.busy, limit=0.05, unit=""),
        Criterion(promise=f"{case}, waits in 20 steps", value=row.waits, limit=0, unit=""),
    ]


def write(rows: list[Row], criteria: list[Criterion], options: argparse.Namespace) -> None:
    lines = [
        f"{'case':32}{'input':>11}{'ms':>9}{'slowest':>9}{'img/s':>9}{'busy':>8}{'waits':>7}{'launches':>10}"
        f"{'GiB':>6}{'original':>10}{'ratio':>8}"
    ]
    originals = {str(case): case.original for case in CASES}
    for row in rows:
        original = originals[row.case]
        against = f"{original:10.0f}{original / row.step_ms:7.1f}x" if original else ""
        lines.append(
            f"{row.case:32}{row.way:>11}{row.step_ms:9.2f}{row.slowest_ms:9.2f}{row.images_per_s:9.0f}"
            f"{100 * row.busy:7.1f}%{row.waits:7d}{row.launches:10.0f}{row.peak_gib:6.1f}{against}"
        )
    device = torch.cuda.get_device_name()
    numbers = {
        "device": device,
        "rows": list(map(asdict, rows)),
        "criteria": [asdict(each) | {"passed": each.passed} for each in criteria],
    }
    report("train_step", "\n".join([device, "", *lines, "", *map(str, criteria)]), numbers, options)


if __name__ == "__main__":
    raise SystemExit(main())
