"""How fast do JPEG files become a store of decoded images, by the CPU and by the GPU's decoder?

Files of 640 x 480, about as costly as photographs, from the start to the last image where training reads it: decoded
and resized by 80 % of the cores into a store in RAM, then copied to the device; or by nvJPEG (torchvision) on the
device and back to RAM, then copied. The difference of the pixels is reported, too. Without a GPU: the CPU alone.
Answer: bench/results/augment_store_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bench.augment_gpu import draw_set
from bench.items import draw_jpeg
from bench.measure import arguments, facts_line, report
from flatout.feed import Store, StoreConfig
from flatout.feed.device_store import DeviceStore
from flatout.yolo.augment.gpu.jpeg import Decode, DeviceDecoded, nvjpeg
from flatout.yolo.augment.samples import ResizedImages
from flatout.yolo.data.image_set import ImageSet

SIZES = (320, 640)
NUM_GENERATED = 32


def write_files(folder: Path, num_files: int) -> ImageSet:
    """JPEG files of 640 x 480: a few generated ones under many names."""
    paths = [str(folder / f"{number:05}.jpg") for number in range(num_files)]
    for number, path in enumerate(paths):
        if number < NUM_GENERATED:
            Path(path).write_bytes(draw_jpeg(number).tobytes())
        else:
            os.link(paths[number % NUM_GENERATED], path)
    base = draw_set(num_files, 640)
    return ImageSet(tuple(paths), np.tile(np.array([[640, 480]], np.int32), (num_files, 1)), base.labels, base.names)


def seconds(call: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin_s


def measure_size(
    image_set: ImageSet, size: int, device: str, decode: Decode | None
) -> tuple[list[str], dict[str, float]]:
    """Both ways to a store of images of one size."""
    opened: list[Store] = []

    def by_cpu() -> None:
        images = ResizedImages(image_set, size=size, augment=True)
        opened.append(Store.open(images, StoreConfig(place="ram", progress=False)))
        DeviceStore(opened[0], device)

    cpu_s = seconds(by_cpu)
    with opened[0] as store:
        rates = {"CPU": len(image_set) / cpu_s}
        lines = [f"{size} px, CPU: {rates['CPU']:,.0f} img/s"]
        if decode is None:
            return [*lines, f"{size} px, nvJPEG: skipped, it needs a CUDA GPU and torchvision with nvJPEG"], rates
        made: list[DeviceDecoded] = []

        def by_gpu() -> None:
            made.append(DeviceDecoded(image_set, decode, size=size))
            DeviceStore(made[0], device)

        rates["nvJPEG"] = len(image_set) / seconds(by_gpu)
        difference = np.concatenate([np.abs(made[0][k].astype(int) - store[k]).ravel() for k in range(NUM_GENERATED)])
    rates |= {"mean levels apart": float(difference.mean()), "p99 levels apart": float(np.quantile(difference, 0.99))}
    share, ratio = made[0].num_on_device / len(image_set), rates["nvJPEG"] / rates["CPU"]
    lines.append(f"{size} px, nvJPEG ({share:.0%} of the files): {rates['nvJPEG']:,.0f} img/s, {ratio:.1f} x")
    apart = f"mean {rates['mean levels apart']:.2f} levels, p99 {rates['p99 levels apart']:.0f}"
    return [*lines, f"  apart from the CPU's pixels: {apart}"], rates


def main() -> int:
    options = arguments(__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_files = 500 if options.quick else 4000
    print(facts_line(), flush=True)
    lines = [f"{torch.cuda.get_device_name() if device == 'cuda' else 'no GPU'}; {num_files} JPEG files of 640 x 480"]
    print(lines[0], flush=True)
    numbers = {}
    decode = nvjpeg(device)
    with tempfile.TemporaryDirectory() as folder:
        image_set = write_files(Path(folder), num_files)
        for size in SIZES:
            new_lines, numbers[f"{size} px"] = measure_size(image_set, size, device, decode)
            print("\n".join(new_lines), flush=True)
            lines += new_lines
    report("augment_store", "\n".join(lines), numbers, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
