"""How many augmented samples per second does one GPU make, alone and as a training loop sees them?

The recipe of hyp.scratch.tiny.yaml (mosaic always, mixup 0.05), images of 4:3 and 3:4 with 8 boxes each, written as
bfloat16, channels_last. "Render" is the kernel for a batch that is drawn already; "complete" is `training_input`: two
workers draw and make labels, the batch is copied and rendered, and nothing is done with it. The images are in device
memory, or all in pinned RAM. CPU use is that of this process and its workers at the promised pace.

Also measured: labels with polygons that workers defer and the GPU warps, clips and filters, compared with the same
labels made by the workers in C; the kernel that does it; and plain torch instead of the kernels. See
bench/augment_kornia.py for a comparison with Kornia and for images stored as 4:2:0, and bench/augment_store.py for the
speed of building a store. A part that fails is reported as failed, and the others still count. Needs a CUDA GPU.
Answer: bench/results/augment_gpu_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from bench.device_copy import time_on_device
from bench.device_feed import Speed, run
from bench.measure import arguments, facts_line, report
from bench.promises import Criterion
from flatout.feed import Plan
from flatout.feed.device_store import DeviceStore, free_bytes, free_ram_bytes
from flatout.feed.source import Out, Rows, RowsOut
from flatout.yolo.augment.draw import AugmentConfig
from flatout.yolo.augment.gpu.batches import label_finisher_for, renderer_for
from flatout.yolo.augment.gpu.input import DeviceInputConfig, MemoryBudget, plan_memory, training_input
from flatout.yolo.augment.gpu.labels_torch import DeviceLabels, TorchLabels
from flatout.yolo.augment.gpu.render_torch import TorchRender
from flatout.yolo.augment.gpu.source import TILES, ParameterSource
from flatout.yolo.data.image_set import ImageSet, Labels

CONFIG = AugmentConfig(translate=0.1, scale=0.5, mixup=0.05, paste_in=0.0)
BOXES, POINTS = 8, 24
COCO = 118_287


class Case(NamedTuple):
    """A size, and the promised images per second."""

    size: int
    batch_size: int
    num_images: int
    render: float
    complete: float
    pinned: float | None


CASES = (
    Case(320, 384, 6_000, render=190_000, complete=40_000, pinned=20_000),
    Case(640, 64, 2_500, render=50_000, complete=15_000, pinned=None),
    Case(640, 128, 2_500, render=50_000, complete=15_000, pinned=None),
)


def draw_set(num: int, size: int, *, polygons: bool = False) -> ImageSet:
    """Sizes and labels of images; two in three are landscape, one is portrait."""
    rng = np.random.default_rng(size)
    is_landscape = np.arange(num) % 3 > 0
    sizes = np.where(is_landscape[:, None], [[size, size * 3 // 4]], [[size * 3 // 4, size]]).astype(np.int32)
    total = num * BOXES
    centre, wh = rng.uniform(0.2, 0.8, (total, 2)), rng.uniform(0.05, 0.4, (total, 2))
    boxes = np.concatenate((rng.integers(0, 80, (total, 1)), centre, wh), 1).astype(np.float32)
    points, first_point = np.zeros((0, 2), np.float32), np.zeros(total + 1, np.int64)
    if polygons:
        angle = np.linspace(0, 2 * np.pi, POINTS, endpoint=False)
        ring = np.stack((np.cos(angle), np.sin(angle)), 1) / 2
        points = (centre[:, None] + wh[:, None] * ring).clip(0, 1).reshape(-1, 2).astype(np.float32)
        first_point = np.arange(total + 1) * POINTS
    labels = Labels(boxes, np.arange(num + 1) * BOXES, points, first_point)
    return ImageSet(tuple(map(str, range(num))), sizes, labels, tuple(map(str, range(80))))


class NoiseImages:
    """Images of a data set, filled with noise."""

    def __init__(self, image_set: ImageSet) -> None:
        self._wh_N2 = image_set.size_wh_N2
        self._noise = np.random.default_rng(0).integers(0, 256, 4 << 20, np.uint8)

    def __len__(self) -> int:
        return len(self._wh_N2)

    def __getitem__(self, number: int) -> np.ndarray:
        width, height = self._wh_N2[number].tolist()
        begin = number * 4099 % (len(self._noise) - width * height * 3)
        return self._noise[begin : begin + width * height * 3].reshape(height, width, 3)


def parameters(
    source: ParameterSource, num: int, device: str = "cuda"
) -> tuple[dict[str, np.ndarray], dict[str, torch.Tensor]]:
    """Parameters of a batch: those of fixed shape on the host, all on the device."""
    indices = np.random.default_rng(0).integers(0, len(source), num)
    fields = source.fields.items()
    parts = {name: np.empty((num, *field.shape), field.dtype) for name, field in fields if not isinstance(field, Rows)}
    rows = {name: RowsOut(name, field, num) for name, field in fields if isinstance(field, Rows)}
    source.read(indices, source.draw(0, 0, np.arange(num), indices), Out({**parts, **rows}))
    joined = {name: np.concatenate([each for each in put.taken if each is not None]) for name, put in rows.items()}
    return parts, {name: torch.from_numpy(array).to(device) for name, array in (parts | joined).items()}


def render_rates(case: Case, image_set: ImageSet, store: DeviceStore) -> dict[str, float]:
    """Images per second of the kernel, of the kernel with mixup in every sample, and of torch."""
    images = {"images": empty_images(case)}
    rates = {}
    mixed = AugmentConfig(translate=0.1, scale=0.5, mixup=1.0, degrees=10, paste_in=0.0)
    for name, config, render, repeats in (
        ("kernel", CONFIG, renderer_for("cuda", mixup=True), 30),
        ("kernel, mixup always, rotated", mixed, renderer_for("cuda", mixup=True), 30),
        ("torch", CONFIG, TorchRender(mixup=True), 3),
    ):
        host, device = parameters(ParameterSource(image_set, config, size=case.size), case.batch_size)
        sources = store.sources_of(host["items"], device["items"])
        timing = time_on_device(lambda: render(sources, device, images), repeats)  # noqa: B023
        rates[name] = case.batch_size / timing.median
    return rates


def empty_images(case: Case, device: str = "cuda") -> torch.Tensor:
    shape = (case.batch_size, 3, case.size, case.size)
    return torch.empty(shape, dtype=torch.bfloat16, device=device).to(memory_format=torch.channels_last)


def complete(
    case: Case,
    image_set: ImageSet,
    images: NoiseImages,
    store: DeviceStore,
    *,
    pace: float,
    num_steps: int,
    config: DeviceInputConfig | None = None,
) -> Speed:
    """Batches as a training loop gets them, by default with two workers; at most `pace` images per second."""
    order = np.random.default_rng(1).integers(0, len(image_set), case.batch_size * (num_steps + 12))
    plan = Plan(num_samples=len(image_set), batch_size=case.batch_size, order=order)
    batches = training_input(image_set, images, CONFIG, plan, size=case.size, device="cuda", store=store, config=config)
    step_s = 0.99 * case.batch_size / pace if np.isfinite(pace) else 0
    return run(lambda feed: batches, batches.feed, warmup=10, num_steps=num_steps, step_s=step_s)


def measure_case(case: Case, *, quick: bool) -> tuple[list[str], list[Criterion]]:
    name, num_steps = f"{case.size} px, batch {case.batch_size}", 20 if quick else 100
    image_set = draw_set(case.num_images, case.size)
    images = NoiseImages(image_set)
    store = DeviceStore(images, "cuda")
    rates = render_rates(case, image_set, store)
    fastest = complete(case, image_set, images, store, pace=np.inf, num_steps=num_steps)
    paced = complete(case, image_set, images, store, pace=case.complete, num_steps=num_steps)
    lines = [f"{name}: {store}"]
    lines += [f"  render, {way}: {rate:,.0f} img/s" for way, rate in rates.items()]
    lines.append(f"  complete: {fastest.images_per_s:,.0f} img/s at most ({fastest.cores:.2f} cores)")
    lines.append(f"  at a pace of {paced.images_per_s:,.0f} img/s: {paced.cores:.2f} cores")
    criteria = [
        _rate(f"{name}: render", rates["kernel"], case.render),
        _rate(f"{name}: complete", fastest.images_per_s, case.complete),
        Criterion(promise=f"{name}: cores at the promised pace", value=paced.cores, limit=2, unit=" cores"),
    ]
    if case.size == 320:
        lines += polygon_lines(case, images, store, num_steps // 2)
    del store
    torch.cuda.empty_cache()
    pinned, line = speed_from_host(case, num_steps)
    _, streamed_line = speed_from_host(case, num_steps // 4, pinned_bytes=0)
    lines += [line, streamed_line]
    if case.pinned is not None:
        criteria.append(_rate(f"{name}: complete, from pinned RAM", pinned.images_per_s, case.pinned))
    return lines, criteria


def polygon_lines(case: Case, images: NoiseImages, store: DeviceStore, num_steps: int) -> list[str]:
    """Labels with polygons finished on the GPU, alone and in a training loop, compared with those made by workers."""
    outlined = draw_set(case.num_images, case.size, polygons=True)
    _, params = parameters(ParameterSource(outlined, CONFIG, size=case.size, defer_labels=True), case.batch_size)
    labels, out_wh = DeviceLabels.of(outlined.labels, "cuda"), (case.size, case.size)
    count = torch.zeros(1, dtype=torch.int32, device="cuda")
    lines = []
    for finish in (label_finisher_for("cuda", labels, perspective=False), TorchLabels(labels, perspective=False)):
        # Rows are finished in place, so each repeat gets a copy of them.
        timing = time_on_device(lambda: finish(params["targets"].clone(), params, out_wh, count), 10)  # noqa: B023
        lines.append(f"  polygons of {POINTS} points, {len(params['targets'])} labels, {finish}: {timing.text()}")
    for workers in (2, 8):
        speeds = [
            complete(case, outlined, images, store, pace=np.inf, num_steps=num_steps, config=config)
            for config in (DeviceInputConfig(workers=workers, polygons_on_device=where) for where in (True, False))
        ]
        texts = [f"{speed.images_per_s:,.0f} img/s ({speed.cores:.2f} cores)" for speed in speeds]
        ratio = speeds[0].images_per_s / speeds[1].images_per_s
        lines.append(
            f"  complete, labels with polygons, {workers} workers: {texts[0]} finished on the GPU, {texts[1]} made by "
            f"the workers: {ratio:.2f} x"
        )
    return lines


def speed_from_host(case: Case, num_steps: int, *, pinned_bytes: int | None = None) -> tuple[Speed, str]:
    """As `complete`, with device memory for little more than the images of a batch."""
    batch_items = case.batch_size * TILES
    image_set = draw_set(batch_items + 1000, case.size)
    images = NoiseImages(image_set)
    budget_bytes = int(np.sort(image_set.size_wh_N2.prod(1) * 3 + 1024)[-batch_items:].sum())
    store = DeviceStore(images, "cuda", budget_bytes=budget_bytes, batch_items=batch_items, pinned_bytes=pinned_bytes)
    away = 1 - store.residence.num_resident / len(store)
    where, workers = ("in pinned RAM", 2) if pinned_bytes is None else ("streamed by 8 workers", 8)
    config = DeviceInputConfig(workers=workers)
    speed = complete(case, image_set, images, store, pace=np.inf, num_steps=num_steps, config=config)
    return speed, f"  complete, {away:.0%} {where}: {speed.images_per_s:,.0f} img/s ({speed.cores:.2f} cores)"


def memory_lines() -> list[str]:
    """Memory plans of COCO's 118,287 images, all taken as 4:3."""
    sizes = np.tile([[640, 480]], (COCO, 1))
    budget = MemoryBudget(free_bytes(torch.device("cuda")), free_ram_bytes())
    plans = (
        plan_memory(sizes, size=size, budget=budget, batch_items=128 * TILES, subsampled=subsampled)
        for size in (320, 640)
        for subsampled in (False, True)
    )
    return [f"COCO: {plan}" for plan in plans]


def _rate(promise: str, value: float, limit: float) -> Criterion:
    return Criterion(promise=promise, value=value / 1e3, limit=limit / 1e3, at_most=False, unit=" k img/s")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=np.inf, help="start no further part after this time")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA GPU.")
        return 1
    print(facts_line(), flush=True)
    begin_s = time.perf_counter()
    parts: list[Callable[[], tuple[list[str], list[Criterion]]]] = [
        lambda: ([f"GPU {torch.cuda.get_device_name()}", *memory_lines()], []),
        *(partial(measure_case, case, quick=options.quick) for case in CASES),
    ]
    lines, criteria, failed = [], [], 0
    for part in parts:
        if time.perf_counter() - begin_s > options.seconds:
            lines.append("a part was skipped: no time was left")
            continue
        try:
            new_lines, found = part()
        except Exception as error:  # any: the results of the other parts must not be lost
            new_lines, found, failed = [f"FAILED: {type(error).__name__}: {error}"], [], failed + 1
        print("\n".join(new_lines), f"\n({time.perf_counter() - begin_s:.0f} s)", flush=True)
        lines += new_lines
        criteria += found
    text = "\n".join([*lines, "", *map(str, criteria)])
    report("augment_gpu", text, {"lines": lines, "criteria": [str(each) for each in criteria]}, options)
    return int(failed > 0 or (not options.quick and not all(each.passed for each in criteria)))


if __name__ == "__main__":
    sys.exit(main())
