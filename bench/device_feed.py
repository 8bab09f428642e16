"""Can a batch be rendered on the GPU faster than a network can train on it, from VRAM and from pinned RAM?

Both sides in one run: random crops of decoded images by `DeviceFeed` (examples/gpu_crops.py) against the same crops
made by NumPy in the workers of a `Feed` and copied to the GPU; and the staging of images that did not fit against a
plain pinned copy and one copy per image. Needs a CUDA GPU.

Answer: bench/results/device_feed_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import NamedTuple

import numpy as np
import psutil
import torch
from numpy.typing import ArrayLike

from bench.device_copy import time_on_device
from bench.measure import arguments, facts_line, report
from examples.gpu_crops import Crops, generate_images, render_crops
from flatout import DeviceFeed, DeviceStore, Feed, FeedConfig, Field, Plan, SampleSource

WORKERS = 2


class HostCrops(SampleSource):
    """The other side: the same crops of decoded images in RAM, made by workers."""

    def __init__(self, images: list[np.ndarray], size: int) -> None:
        self.images = images
        self.size = size
        self.fields = {"image": Field((3, size, size))}

    def __len__(self) -> int:
        return len(self.images)

    def sample(self, index: int, rng: np.random.Generator) -> Mapping[str, ArrayLike]:
        image, size = self.images[index], self.size
        y, x = (int(rng.integers(side - size + 1)) for side in image.shape[:2])
        crop = image[y : y + size, x : x + size]
        return {"image": (crop[:, ::-1] if rng.random() < 0.5 else crop).transpose(2, 0, 1)}


class Speed(NamedTuple):
    """Images per second, and the cores that all processes of the feed kept busy."""

    images_per_s: float
    cores: float


def run(
    make: Callable[[Feed], Iterable[object]], feed: Feed, *, warmup: int, num_steps: int, step_s: float = 0
) -> Speed:
    """Take a batch every `step_s`, or as fast as they come, and close the feed; waits for the device at both ends."""
    batches = iter(make(feed))
    list(islice(batches, warmup))
    torch.cuda.synchronize()
    cpu_s, begin_s = _cpu_s(feed), time.perf_counter()
    for step, _ in enumerate(islice(batches, num_steps), start=1):
        time.sleep(max(0.0, begin_s + step * step_s - time.perf_counter()))
    torch.cuda.synchronize()
    elapsed_s = time.perf_counter() - begin_s
    busy_s = _cpu_s(feed) - cpu_s
    feed.close()
    return Speed(num_steps * feed.plan.batch_size / elapsed_s, busy_s / elapsed_s)


def _cpu_s(feed: Feed) -> float:
    """CPU time of this process and of the feed's workers so far."""
    times = (psutil.Process(pid).cpu_times() for pid in (os.getpid(), *feed.worker_pids.values()))
    return sum(each.user + each.system for each in times)


def compare(name: str, size: int, num_images: int, batch_size: int, num_steps: int, wanted: float) -> list[str]:
    """Compare crops rendered on the device with crops made on the host and copied."""
    images = generate_images(num_images, size)
    heights, widths = (np.array([image.shape[axis] for image in images]) for axis in (0, 1))
    store = DeviceStore(images, "cuda")
    order = np.random.default_rng(0).integers(0, num_images, batch_size * (num_steps + 10))
    plan = Plan(num_samples=num_images, batch_size=batch_size, order=order)

    def rendered(feed: Feed) -> Iterable[object]:
        return DeviceFeed(feed, store, render_crops, {"image": ((3, size, size), torch.float16)})

    def new_feed() -> Feed:
        return Feed(Crops(heights, widths, size), plan, FeedConfig(workers=WORKERS, micro_batch=batch_size // 2))

    device = run(rendered, new_feed(), warmup=10, num_steps=num_steps)
    paced = run(rendered, new_feed(), warmup=10, num_steps=num_steps, step_s=0.99 * batch_size / wanted)
    host_config = FeedConfig(workers="auto")
    host = run(
        lambda feed: feed.to_device("cuda"),
        Feed(HostCrops(images, size), plan, host_config),
        warmup=2,
        num_steps=min(num_steps, 30),
    )
    passed = device.images_per_s >= wanted and paced.cores <= 1
    return [
        f"{name}: rendered {device.images_per_s:,.0f} img/s at most ({device.cores:.2f} cores); at a pace of "
        f"{paced.images_per_s:,.0f} img/s {paced.cores:.2f} cores   "
        f"{'PASS' if passed else 'FAIL'} (>= {wanted:,.0f} img/s, <= 1 core)",
        f"{'':{len(name)}}  cropped on the host {host.images_per_s:,.0f} img/s with {host.cores:.1f} cores "
        f"({host_config.num_workers} workers): {device.images_per_s / host.images_per_s:.1f}x",
    ]


def stage(size: int, batch_size: int) -> list[str]:
    """Images that did not fit: staged by one gather, by one copy each, and a plain copy of the same size."""
    images = [np.full((size, size, 3), number % 256, np.uint8) for number in range(batch_size * 4)]
    nbytes = batch_size * images[0].nbytes
    store = DeviceStore(images, "cuda", budget_bytes=nbytes + (1 << 20), batch_items=batch_size)
    numbers = np.random.default_rng(0).permutation(np.arange(store.residence.num_resident, len(store)))[:batch_size]
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    each = list(zip(device.chunk(batch_size), host.chunk(batch_size), strict=True))
    plain = time_on_device(lambda: device.copy_(host, non_blocking=True), 20)
    staged = time_on_device(lambda: store.sources_of(numbers), 20)
    one_each = time_on_device(lambda: [to.copy_(of, non_blocking=True) for to, of in each], 20)
    ratio = plain.median / staged.median
    return [
        f"staging {batch_size} images of {size} px: {nbytes / 1e9 / staged.median:.1f} GB/s, a plain pinned copy "
        f"{nbytes / 1e9 / plain.median:.1f}, one copy per image {nbytes / 1e9 / one_each.median:.1f}",
        f"ratio staging / plain copy {ratio:.2f}   {'PASS' if ratio >= 0.8 else 'FAIL'} (>= 0.80)",
    ]


def main() -> int:
    options = arguments(__doc__).parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA GPU.")
        return 1
    print(facts_line())
    lines = [
        f"GPU {torch.cuda.get_device_name()}",
        *compare("32 px, batch 1024", 32, 50_000, 1024, 400, wanted=200_000),
        *compare("320 px, batch 384", 320, 3_000, 384, 100, wanted=20_000),
        *stage(320, 384),
    ]
    report("device_feed", "\n".join(lines), {"lines": lines}, options)
    return int(any("FAIL" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
