"""How fast is a batch augmented on a GPU: by our kernel from BGR and from 4:2:0 images, and by Kornia?

Ours: tiles of any images of the data set, read where they are stored, to a batch in bfloat16, channels_last; the recipe
of hyp.scratch.tiny.yaml. Kornia: mosaic, affine warp and colours over a batch that is decoded, resized and on the
device already, float32, with boxes, as its documentation shows it. So Kornia does not have to read the images of the
data set; it transforms its boxes in the same call, while ours come from the workers (bench/augment_gpu.py measures the
complete feed). Times are device times. bench/augment_chroma.py measures how far 4:2:0 is from the original images.
Needs a CUDA GPU; --quick shows on a CPU that the script works.
Answer: bench/results/augment_kornia_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import importlib.util
import sys
from collections.abc import Callable
from importlib.metadata import version

import numpy as np
import torch

from bench.augment_gpu import BOXES, CASES, CONFIG, Case, NoiseImages, draw_set, empty_images, parameters
from bench.device_copy import time_on_device
from bench.measure import Timing, arguments, facts_line, measure, report
from flatout.feed.device_store import DeviceStore
from flatout.yolo.augment.gpu.batches import renderer_for
from flatout.yolo.augment.gpu.chroma import Subsampled
from flatout.yolo.augment.gpu.source import ParameterSource

REPEATS = 20


def our_render(case: Case, device: str, *, subsampled: bool) -> Callable[[], object]:
    """The kernel on one drawn batch, from images of the data set."""
    image_set = draw_set(case.num_images, case.size)
    stored = NoiseImages(image_set)
    sizes = image_set.size_wh_N2.astype(np.int64)
    store = DeviceStore(Subsampled(stored, sizes) if subsampled else stored, device)
    host, drawn = parameters(ParameterSource(image_set, CONFIG, size=case.size), case.batch_size, device)
    sources, images = store.sources_of(host["items"], drawn["items"]), {"images": empty_images(case, device)}
    render = renderer_for(device, mixup=True, subsampled=subsampled)
    return lambda: render(sources, drawn, images)


def kornias(case: Case, device: str) -> Callable[[], object]:
    """Kornia's mosaic, affine warp and colours over a batch on the device, with boxes."""
    from kornia.augmentation import AugmentationSequential, ColorJiggle, RandomAffine, RandomMosaic

    chain = AugmentationSequential(
        RandomMosaic((case.size, case.size), p=1.0),
        RandomAffine(0.0, translate=(0.1, 0.1), scale=(0.5, 1.6), p=1.0),
        ColorJiggle(0.4, 0.4, 0.7, 0.015, p=1.0),
        data_keys=["input", "bbox_xyxy"],
    )
    images = torch.rand((case.batch_size, 3, case.size, case.size), device=device)
    boxes = torch.rand((case.batch_size, BOXES, 4), device=device).cumsum(2) * case.size / 4
    return lambda: chain(images, boxes)


def device_time(call: Callable[[], object], device: str) -> Timing:
    """Device time of a call, by events, as in bench/augment_gpu.py."""
    return time_on_device(call, REPEATS) if device == "cuda" else measure(call, warmup=0, repeats=1)


def measure_case(case: Case, device: str) -> tuple[list[str], dict[str, float]]:
    calls = {
        "kernel": our_render(case, device, subsampled=False),
        "kernel, 4:2:0": our_render(case, device, subsampled=True),
    }
    lines = [f"{case.size} px, batch {case.batch_size}"]
    if importlib.util.find_spec("kornia") is not None:
        calls[f"Kornia {version('kornia')}"] = kornias(case, device)
    else:
        lines.append("  Kornia: skipped, it is not installed")
    timings = {name: device_time(call, device) for name, call in calls.items()}
    fastest_s = timings["kernel"].median
    for name, timing in timings.items():
        rate, ratio = case.batch_size / timing.median, timing.median / fastest_s
        lines.append(f"  {name:14} {timing.text()}   {rate:>9,.0f} img/s   {ratio:7.2f} x the kernel's time")
    return lines, {name: case.batch_size / timing.median for name, timing in timings.items()}


def main() -> int:
    options = arguments(__doc__).parse_args()
    if not torch.cuda.is_available() and not options.quick:
        print("This benchmark needs a CUDA GPU; --quick shows that the script works.")
        return 1
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = CASES[:2] if device == "cuda" else [CASES[0]._replace(batch_size=4, num_images=32)]
    print(facts_line(), flush=True)
    lines = [torch.cuda.get_device_name() if device == "cuda" else "CPU, plain torch instead of the kernel"]
    numbers = {}
    for case in cases:
        new_lines, numbers[f"{case.size} px"] = measure_case(case, device)
        print("\n".join(new_lines), flush=True)
        lines += new_lines
    report("augment_kornia", "\n".join(lines), numbers, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
