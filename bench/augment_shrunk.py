"""How much faster is a JPEG file decoded at a fraction of its size, and how far are the pixels from YOLOv7's?

Both ways end in an image of the training size, as a store keeps it: decoded at full size and resized, or decoded by
libjpeg at the smallest of its fractions that is not below that size, then resized. CPU time of one core, alternating.
Photographs of $FLATOUT_DATA (coco_mini, bccd: 640 px), and generated ones of 1920 x 1440 and 4032 x 3024, the sizes of
cameras.
Answer: bench/results/augment_shrunk_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np

from bench.items import draw_jpeg
from bench.measure import arguments, facts_line, report
from flatout.images import header_of
from flatout.yolo.augment.samples import ResizedImages
from flatout.yolo.data.image_set import ImageSet, Labels

SIZES = (320, 640)
GENERATED_WH = ((1920, 1440), (4032, 3024))


def enlarged(folder: Path, size_wh: tuple[int, int], num: int) -> list[Path]:
    """Generated images of 640 x 480, enlarged, with the noise of a sensor."""
    paths = [folder / f"{size_wh[0]}_{number}.jpg" for number in range(num)]
    for number, path in enumerate(paths):
        small = cv2.imdecode(draw_jpeg(number), cv2.IMREAD_COLOR)
        assert small is not None  # just encoded
        large = cv2.resize(small, size_wh, interpolation=cv2.INTER_CUBIC).astype(np.int16)
        large += np.random.default_rng(number).normal(0, 3, large.shape[:2]).astype(np.int16)[..., None]
        cv2.imwrite(str(path), large.clip(0, 255).astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, 92])
    return paths


def unlabelled(paths: list[Path]) -> ImageSet:
    sizes = np.array([header_of(path.read_bytes()).size_wh for path in paths], np.int32)
    nothing = Labels(
        np.zeros((0, 5), np.float32), np.zeros(len(paths) + 1, np.int64), np.zeros((0, 2), np.float32), np.zeros(1, int)
    )
    return ImageSet(tuple(map(str, paths)), sizes, nothing, ())


def measure_set(name: str, paths: list[Path], size: int) -> tuple[str, dict[str, float]]:
    """CPU milliseconds per image both ways, and the difference of their pixels."""
    image_set = unlabelled(paths)
    ways = [ResizedImages(image_set, size=size, augment=True, shrunk=shrunk) for shrunk in (False, True)]
    taken_s, counts_V = [0.0, 0.0], np.zeros(256, np.int64)
    for number in range(len(paths)):
        images = []
        for way, items in enumerate(ways):
            items.decode(number)  # warms files and caches for both
            begin_s = time.thread_time()
            images.append(items.decode(number))
            taken_s[way] += time.thread_time() - begin_s
        counts_V += np.bincount(np.abs(images[0].astype(int) - images[1]).ravel(), minlength=256)
    share_V = counts_V.cumsum() / counts_V.sum()
    whole_ms, shrunk_ms = (1e3 * seconds / len(paths) for seconds in taken_s)
    mean, p99 = float((counts_V * np.arange(256)).sum() / counts_V.sum()), int(np.searchsorted(share_V, 0.99))
    times = f"{whole_ms:11.2f}{shrunk_ms:11.2f}{whole_ms / shrunk_ms:8.2f} x"
    return f"{name:12}{len(paths):6}{size:6}{times}{mean:8.2f}{p99:6}", {
        "whole_ms": whole_ms,
        "shrunk_ms": shrunk_ms,
        "mean": mean,
        "p99": p99,
    }


def main() -> int:
    options = arguments(__doc__).parse_args()
    cv2.setNumThreads(1)
    print(facts_line(), flush=True)
    lines = [f"{'set':12}{'files':>6}{'px':>6}{'whole, ms':>11}{'small, ms':>11}{'ratio':>10}{'mean':>8}{'p99':>6}"]
    print(lines[0], flush=True)
    numbers: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        sets = {
            name: sorted(Path(os.environ.get("FLATOUT_DATA", "/nowhere"), name, "images").rglob("*.jpg"))
            for name in ("coco_mini", "bccd")
        }
        sets |= {f"{wh[0]} x {wh[1]}": enlarged(Path(folder), wh, 1 if options.quick else 6) for wh in GENERATED_WH}
        for name, paths in sets.items():
            for size in SIZES if paths else ():
                line, numbers[f"{name} {size}"] = measure_set(name, paths[: 2 if options.quick else 100], size)
                print(line, flush=True)
                lines.append(line)
    report("augment_shrunk", "\n".join(lines), dict(numbers), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
