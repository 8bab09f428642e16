"""What does the voxel of a training crop cost if it is made from the packed stream, compared with earlier methods?

One GoPro-Spike file (88 x 360 x 640, bit-packed) in the page cache, one core: the voxel of a random 128 x 128 crop cut
before unpacking; the whole frame unpacked; per-pixel index arrays, as SpikeCV decodes; a crop of a precomputed float32
voxel of 32 x 720 x 1280, memory-mapped and read whole. CPU time, in rounds that are spread over time; the median round
counts. Other programs can double even CPU time: run it alone. Exit code 1 if the crop takes more than 0.5 ms.
Answer: bench/results/spike_crop_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from bench.measure import Timing, arguments, facts_line, report, summarize
from flatout.spike.data.decode import Box, decode, map_stream, whole_frame
from flatout.spike.data.stream_layout import Layout
from flatout.spike.data.voxels import crop_counts
from tests.reference.spike_decode import decode_by_index

LAYOUT = Layout("packed", 88, 360, 640, True)
BINS = 5
CROP = 128
PROMISED_MS = 0.5


def cpu_times(work: Callable[[], object], repeats: int) -> Timing:
    """Like `bench.measure.measure`, but in CPU time of this process."""
    work()
    durations = []
    for _ in range(repeats):
        begin = time.process_time_ns()
        work()
        durations.append((time.process_time_ns() - begin) / 1e9)
    return summarize(durations)


def in_rounds(ways: Mapping[str, tuple[Callable[[], object], int, int]], rounds: int) -> dict[str, list[Timing]]:
    """Measure every way in every round; returns the rounds of each way, sorted by their medians."""
    found: dict[str, list[Timing]] = {name: [] for name in ways}
    for _ in range(rounds):
        time.sleep(0.2)
        for name, (work, count, _) in ways.items():
            found[name].append(cpu_times(work, count))
    return {name: sorted(timings) for name, timings in found.items()}


class Files:
    """A stream, and the float voxel that the early code stored instead."""

    def __init__(self, folder: Path, *, float_shape: tuple[int, int, int]) -> None:
        rng = np.random.default_rng(1)
        self._rng = rng
        self.stream = folder / "000001.dat"
        self.stream.write_bytes(rng.integers(0, 256, LAYOUT.nbytes, np.uint8).tobytes())
        self.voxel = folder / "000001.npy"
        np.save(self.voxel, rng.random(float_shape, np.float32))

    def box(self) -> Box:
        top, left = self._rng.integers(0, 360 - CROP), self._rng.integers(0, 640 - CROP)
        return Box(int(top), int(left), CROP, CROP)

    def crop(self) -> np.ndarray:
        return crop_counts(map_stream(self.stream, LAYOUT), LAYOUT, self.box(), BINS)

    def frame(self) -> np.ndarray:
        return crop_counts(map_stream(self.stream, LAYOUT), LAYOUT, whole_frame(LAYOUT), BINS)

    def by_index(self) -> np.ndarray:
        return decode_by_index(self.stream.read_bytes(), 360, 640)

    def float_crop(self) -> np.ndarray:
        box = self.box()
        voxel = np.load(self.voxel, mmap_mode="r")
        return np.array(voxel[:, 2 * box.top : 2 * box.bottom, 2 * box.left : 2 * box.right])

    def float_whole(self) -> np.ndarray:
        return np.asarray(np.load(self.voxel))


def main() -> int:
    """Measure, report, and check the promise; returns the exit code."""
    options = arguments(__doc__).parse_args()
    repeats, rounds = (5, 1) if options.quick else (30, 40)
    with tempfile.TemporaryDirectory() as folder:
        files = Files(Path(folder), float_shape=(4, 72, 128) if options.quick else (32, 720, 1280))
        assert np.array_equal(decode(map_stream(files.stream, LAYOUT), LAYOUT), files.by_index())
        ways: dict[str, tuple[Callable[[], object], int, int]] = {
            "crop cut before unpacking": (files.crop, repeats, 88 * CROP * CROP // 8),
            "whole frame unpacked": (files.frame, max(3, repeats // 10), LAYOUT.nbytes),
            "index arrays (as SpikeCV), whole frame": (files.by_index, 3, LAYOUT.nbytes),
            "precomputed float voxel, crop mapped": (
                (files.float_crop),
                max(3, repeats // 10),
                32 * 4 * 4 * CROP * CROP,
            ),
            "precomputed float voxel, read whole": (files.float_whole, 3, files.voxel.stat().st_size),
        }
        sorted_rounds = in_rounds(ways, rounds)
        times = {name: (sorted_rounds[name][rounds // 2], nbytes) for name, (_, _, nbytes) in ways.items()}
        best_ms = {name: 1e3 * timings[0].median for name, timings in sorted_rounds.items()}
    lines = [
        f"{'one frame of spikes, one core':40} CPU time, middle of {rounds} rounds           best round   bytes read"
    ]
    lines += [
        f"{name:40} {timing.text():36} {best_ms[name]:8.2f} ms {nbytes / 1e6:8.2f} MB"
        for name, (timing, nbytes) in times.items()
    ]
    ms = 1e3 * times["crop cut before unpacking"][0].median
    verdict = "kept" if ms <= PROMISED_MS else "BROKEN"
    lines.append(f"promise: a crop of {CROP} x {CROP} x 88 in at most {PROMISED_MS} ms: {verdict}")
    if options.quick:
        print(facts_line())
    numbers = {name: {"cpu_ms": 1e3 * timing.median, "bytes": nbytes} for name, (timing, nbytes) in times.items()}
    report("spike_crop", "\n".join(lines), {"ways": numbers}, options)
    return 0 if ms <= PROMISED_MS or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
