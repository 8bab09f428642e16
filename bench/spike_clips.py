"""How many training clips does one core load: from files, from the store, and with voxels that were written before?

A clip is 5 frames of 720 x 1280 (blur and sharp, PNG) with 5 streams of 88 x 360 x 640, cut to 256 px and 5 bins. All
files are in the page cache, so this is computing, not disk. CPU time per clip in one process, both sides in one run.
Answer: bench/results/spike_clips_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.measure import Timing, arguments, report
from bench.spike_crop import cpu_times
from flatout.feed import Out
from flatout.spike.clip_feed import open_store, training_source
from flatout.spike.config import DataConfig
from flatout.spike.data import open_clips
from flatout.spike.pictures import write_picture
from flatout.spike.precompute import write_voxels
from flatout.spike.source import ClipSource

FRAMES = 6


def write_frames(folder: Path, height: int, width: int, numbers: Iterable[int]) -> None:
    """Of one sequence: smooth, noisy pictures, about as large as photographs once compressed, and random spikes."""
    (folder / "spike").mkdir(parents=True, exist_ok=True)
    y, x = np.mgrid[0:height, 0:width]
    for number in numbers:
        rng = np.random.default_rng((1, number))
        base = 127 + 100 * np.sin((x + 9 * number) / 40)[..., None] * np.cos(y / 30)[..., None]
        picture = np.clip(base + rng.normal(0, 2, (height, width, 3)), 0, 255).astype(np.uint8)
        for part in ("blur", "sharp"):
            write_picture(folder / part / f"{number:06d}.png", picture)
        stream = rng.integers(0, 256, 88 * height * width // 32, np.uint8)
        (folder / "spike" / f"{number:06d}.dat").write_bytes(stream.tobytes())


def reading(source: ClipSource) -> Callable[[], None]:
    """Read one clip into a slot, another one each time."""
    out = {name: np.zeros((1, *field.shape), field.dtype) for name, field in source.fields.items()}
    turn = iter(range(10**9))

    def work() -> None:
        number = next(turn)
        index = np.array([number % len(source)])
        source.read(index, source.draw(1, 0, np.array([number]), index), Out(out))

    return work


def main() -> int:
    """Measure and report."""
    options = arguments(__doc__).parse_args()
    height, width, repeats = (72, 128, 3) if options.quick else (720, 1280, 15)
    with tempfile.TemporaryDirectory() as folder:
        write_frames(Path(folder) / "train/seq", height, width, range(FRAMES))
        crop = 64 if options.quick else 256
        config = DataConfig(ROOT=folder, CROP_SIZE=crop, SPIKE_H=height // 2, SPIKE_W=width // 2, USE_RAM_CACHE=True)
        clips = open_clips(config, "train", scored=False)
        list(write_voxels(config, "train"))
        written = replace(config, USE_PRECOMPUTED_VOXELS=True)
        store = open_store(clips, config, budget_bytes=2**30, workers=1)
        assert store is not None
        with store:
            ways = {
                "files: PNG, streams live": training_source(clips, config),
                "files: PNG, uint8 voxels": training_source(open_clips(written, "train", scored=False), written),
                "store: decoded once, streams live": training_source(clips, config, store),
            }
            times: dict[str, Timing] = {name: cpu_times(reading(source), repeats) for name, source in ways.items()}
    first = next(iter(times.values())).median
    lines = [f"{'one clip, one core':36} CPU time                              clips/s    ratio"]
    lines += [
        f"{name:36} {timing.text():36} {1 / timing.median:8.1f} {first / timing.median:8.1f}"
        for name, timing in times.items()
    ]
    report("spike_clips", "\n".join(lines), {"cpu_ms": {name: 1e3 * t.median for name, t in times.items()}}, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
