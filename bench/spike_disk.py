"""How much disk space does GoPro-Spike take as streams and as voxels, and how much memory as decoded frames?

One file of each kind is written by the production code, for streams of 56, 88 and 104 spike frames, and its size is
multiplied by the number of such frames in the sequences of the data set (tests/golden/spike/clip_index.json). Sizes of
the PNG files are not known here. The table of the original guide states 50 GB for spikes and 100 GB for images; the
early code stored 32 float bins at the size of the frames.
Answer: bench/results/spike_disk_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import arguments, report
from bench.spike_clips import write_frames
from flatout.spike.config import DataConfig
from flatout.spike.data.precompute import write_voxels

ROOT = Path(__file__).parents[1]
RGB_HW, SPIKE_HW = (720, 1280), (360, 640)
BINS, EARLY_BINS = 5, 32
KINDS = {
    "streams, as they come": "stream",
    "uint8 counts, 5 bins (flatout spike cache)": "counts",
    "float32 voxels, 5 bins at spike resolution": "float",
    "float32 voxels, 32 bins at 720 x 1280 (early code)": "early",
}
DECODED = "decoded blur and sharp frames, in memory"


def main() -> None:
    """Write the files, and report their sizes."""
    options = arguments(__doc__).parse_args()
    splits = json.loads((ROOT / "tests/golden/spike/clip_index.json").read_text())["gopro"]
    totals: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as name:
        lengths = sorted({each["spike_frames"] for split in ("train", "test") for each in splits[split]})
        sizes = {length: file_sizes(Path(name) / str(length), length) for length in lengths}
    for split in ("train", "test"):
        sequences = splits[split]
        totals[split] = {
            label: sum(each["frames"] * sizes[each["spike_frames"]][kind] for each in sequences)
            for label, kind in KINDS.items()
        }
        totals[split][DECODED] = sum(each["frames"] for each in sequences) * 2 * 3 * RGB_HW[0] * RGB_HW[1]
    counted = {split: splits["clips_L1"][split] for split in totals}
    lines = [f"{'GoPro-Spike':54}" + "".join(f"{f'{split}, {counted[split]} frames':>22}" for split in totals)]
    lines += [
        f"{label:54}" + "".join(f"{totals[split][label] / 1e9:19.2f} GB" for split in totals)
        for label in totals["train"]
    ]
    report("spike_disk", "\n".join(lines), _numbers(totals, sizes), options)


def file_sizes(root: Path, num_spike_frames: int) -> dict[str, int]:
    """Bytes of one frame's file of each kind."""
    folder = root / "train/seq"
    write_frames(folder, *RGB_HW, [1])
    stream = folder / "spike/000001.dat"
    spikes = np.random.default_rng(1).integers(0, 256, num_spike_frames * SPIKE_HW[0] * SPIKE_HW[1] // 8, np.uint8)
    stream.write_bytes(spikes.tobytes())
    (counts,) = write_voxels(DataConfig(ROOT=str(root), NUM_VOXEL_BINS=BINS), "train")
    np.save(root / "float.npy", np.zeros((BINS, *SPIKE_HW), np.float32))
    np.save(root / "early.npy", np.zeros((EARLY_BINS, *RGB_HW), np.float32))
    paths = {"stream": stream, "counts": counts, "float": root / "float.npy", "early": root / "early.npy"}
    return {kind: path.stat().st_size for kind, path in paths.items()}


def _numbers(totals: dict[str, dict[str, int]], sizes: dict[int, dict[str, int]]) -> dict[str, Any]:
    return {"bytes": totals, "bytes_per_frame": {str(length): each for length, each in sizes.items()}}


if __name__ == "__main__":
    main()
