"""How far is an image that is stored as 4:2:0 from the original, in levels of 0 to 255?

Photographs of $FLATOUT_DATA (coco_mini and bccd), resized for training at 320 and 640 px, are converted by
`flatout.yolo.augment.gpu.chroma` and back; every value of every channel counts. The bytes of an image are reported both
ways, too.
Answer: bench/results/augment_chroma_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch

from bench.measure import arguments, facts_line, report
from flatout.images import read_image
from flatout.yolo.augment.gpu.chroma import subsample
from flatout.yolo.augment.gpu.render_torch import to_bgr
from flatout.yolo.data.letterbox import resize_long_side

NAMES = ("coco_mini", "bccd")
SIZES = (320, 640)


def back_to_bgr(kept: np.ndarray, hw: tuple[int, int]) -> np.ndarray:
    """The pixels that a renderer reads, uint8 [h, w, 3]."""
    rows = torch.from_numpy(kept[..., 0])
    height = len(rows) * 2 // 3
    colour = rows[height:].repeat_interleave(2, 0)
    cb, cr = (colour[:, first::2].repeat_interleave(2, 1) for first in (0, 1))
    return to_bgr(rows[:height], cb, cr).to(torch.uint8).numpy()[: hw[0], : hw[1]]


def measure_set(folder: Path, size: int, *, most: int) -> tuple[str, dict[str, float]]:
    """Errors over the photographs of a data set at one size."""
    paths = sorted(folder.rglob("*.jpg"))[:most]
    counts_V, whole_bytes, kept_bytes = np.zeros(256, np.int64), 0, 0
    for path in paths:
        image = resize_long_side(read_image(str(path)), size, augment=True).image
        kept = subsample(image)
        difference = np.abs(back_to_bgr(kept, image.shape[:2]).astype(int) - image)
        counts_V += np.bincount(difference.ravel(), minlength=256)
        whole_bytes, kept_bytes = whole_bytes + image.nbytes, kept_bytes + kept.nbytes
    share_V = counts_V.cumsum() / counts_V.sum()
    numbers = {
        "mean": float((counts_V * np.arange(256)).sum() / counts_V.sum()),
        "p99": float(np.searchsorted(share_V, 0.99)),
        "within 1": float(share_V[1]),
        "within 3": float(share_V[3]),
        "bytes": whole_bytes / len(paths),
        "bytes as 4:2:0": kept_bytes / len(paths),
    }
    cells = [numbers["mean"], numbers["p99"], numbers["within 1"], numbers["within 3"]]
    line = (
        f"{folder.parent.name:10}{len(paths):6}{size:6}{cells[0]:8.2f}{cells[1]:6.0f}{cells[2]:10.1%}{cells[3]:10.1%}"
    )
    return f"{line}{numbers['bytes']:12,.0f}{numbers['bytes as 4:2:0']:12,.0f}", numbers


def main() -> int:
    options = arguments(__doc__).parse_args()
    folders = [Path(os.environ.get("FLATOUT_DATA", ""), name, "images") for name in NAMES]
    found = [folder for folder in folders if folder.is_dir()]
    if not found:
        print("Set FLATOUT_DATA to a folder with coco_mini or bccd.")
        return 1
    print(facts_line(), flush=True)
    head = f"{'set':10}{'files':>6}{'px':>6}{'mean':>8}{'p99':>6}{'within 1':>10}{'within 3':>10}"
    lines = [f"{head}{'BGR bytes':>12}{'4:2:0':>12}"]
    numbers = {}
    for folder in found:
        for size in SIZES:
            line, numbers[f"{folder.parent.name} {size}"] = measure_set(folder, size, most=4 if options.quick else 400)
            lines.append(line)
    report("augment_chroma", "\n".join(lines), numbers, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
