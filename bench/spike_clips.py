"""How many training clips does one core load: from files, from the store, and with earlier methods?

A clip is 5 frames of 720 x 1280 (blur and sharp, PNG) with 5 streams of 88 x 360 x 640, cropped to 256 px, with 5 bins.
Earlier methods: streams decoded whole with index arrays, as in SpikeCV, and voxels written as float32, with 5 bins at
spike resolution (crops memory-mapped) or with 32 bins at 720 x 1280 (read whole), as in the early code. All files are
in the page cache, so this measures computation and not the disk; the bytes that a clip reads are listed beside it. CPU
time per clip in one process, all ways in rounds; the median round counts.
Answer: bench/results/spike_clips_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.measure import arguments, report
from bench.spike_crop import in_rounds
from flatout.feed import Out
from flatout.spike.config import DataConfig
from flatout.spike.data.clip_set import ClipSet, open_clips
from flatout.spike.data.decode import Box
from flatout.spike.data.frames import Frames
from flatout.spike.data.precompute import write_voxels
from flatout.spike.data.source import ClipSource
from flatout.spike.data.voxels import frames_per_bin
from flatout.spike.input import open_store, training_source
from flatout.spike.visuals import write_image
from tests.reference.spike_decode import decode_by_index

FRAMES = 6
LIVE, STORE = "PNG, streams live", "store: decoded once, streams live"


def write_frames(folder: Path, height: int, width: int, numbers: Iterable[int]) -> None:
    """Write frames of one sequence: smooth, noisy images that compress like photographs, and random spikes."""
    (folder / "spike").mkdir(parents=True, exist_ok=True)
    y, x = np.mgrid[0:height, 0:width]
    for number in numbers:
        rng = np.random.default_rng((1, number))
        base = 127 + 100 * np.sin((x + 9 * number) / 40)[..., None] * np.cos(y / 30)[..., None]
        image = np.clip(base + rng.normal(0, 2, (height, width, 3)), 0, 255).astype(np.uint8)
        for part in ("blur", "sharp"):
            write_image(folder / part / f"{number:06d}.png", image)
        stream = rng.integers(0, 256, 88 * height * width // 32, np.uint8)
        (folder / "spike" / f"{number:06d}.dat").write_bytes(stream.tobytes())


def reading(source: ClipSource) -> Callable[[], None]:
    """A function that reads one clip into a slot, another one with each call."""
    out = {name: np.zeros((1, *field.shape), field.dtype) for name, field in source.fields.items()}
    numbers = iter(range(10**9))

    def work() -> None:
        number = next(numbers)
        index = np.array([number % len(source)])
        source.read(index, source.draw(1, 0, np.array([number]), index), Out(out))

    return work


class SpikeCvFrames(Frames):
    """Decodes every stream whole with index arrays, then counts and crops."""

    def __init__(self, clips: ClipSet, config: DataConfig) -> None:
        super().__init__(clips, config)
        self._paths, self._layout = [each.spike for each in clips.frames], clips.layout_of(0)
        self._first_B = np.cumsum([0, *frames_per_bin(self._layout.frames, config.channels)[:-1]])

    def spikes(self, frame: int, box: Box, dtype: np.dtype) -> np.ndarray:
        spikes = decode_by_index(Path(self._paths[frame]).read_bytes(), self._layout.height, self._layout.width)
        counts = np.add.reduceat(spikes, self._first_B, axis=0, dtype=dtype)
        return counts[:, box.top : box.bottom, box.left : box.right]


class EarlyCodeFrames(Frames):
    """Reads voxels of 32 bins at the resolution of the frames, every file whole. The result is every second pixel of
    the first bins, because its values do not matter here."""

    def __init__(self, clips: ClipSet, config: DataConfig, folder: Path) -> None:
        super().__init__(clips, config)
        self._paths, self._channels = [folder / f"{each.stem}.npy" for each in clips.frames], config.channels

    def spikes(self, frame: int, box: Box, dtype: np.dtype) -> np.ndarray:
        voxel = np.load(self._paths[frame])
        return np.asarray(voxel[: self._channels, 2 * box.top : 2 * box.bottom : 2, 2 * box.left : 2 * box.right : 2])


def write_floats(sequence: Path, size_hw: tuple[int, int]) -> None:
    """Write the voxels of `flatout spike cache` as float32, and large ones as in the early code."""
    (sequence / "float").mkdir()
    (sequence / "early").mkdir()
    for path in sorted((sequence / "spike_vox").iterdir()):
        if path.suffix == ".npy":
            np.save(sequence / "float" / path.name, np.load(path).astype(np.float32))
            np.save(sequence / "early" / path.name, np.ones((32, *size_hw), np.float32))
        else:
            (sequence / "float" / path.name).write_bytes(path.read_bytes())


def main() -> int:
    """Measure and report."""
    options = arguments(__doc__).parse_args()
    height, width, rounds = (72, 128, 1) if options.quick else (720, 1280, 7)
    with tempfile.TemporaryDirectory() as folder:
        sequence = Path(folder) / "train/seq"
        write_frames(sequence, height, width, range(FRAMES))
        crop = 64 if options.quick else 256
        config = DataConfig(ROOT=folder, CROP_SIZE=crop, SPIKE_H=height // 2, SPIKE_W=width // 2, USE_RAM_CACHE=True)
        clips = open_clips(config, "train", scored=False)
        list(write_voxels(config, "train"))
        write_floats(sequence, (height, width))
        written = replace(config, USE_PRECOMPUTED_VOXELS=True)
        floats = replace(written, VOXEL_CACHE_DIRNAME="float")
        store = open_store(clips, config, budget_bytes=2**30, workers=1)
        assert store is not None
        image_bytes = _mean_bytes(sequence / "blur") + _mean_bytes(sequence / "sharp")
        spike_pixels = (crop // 2) ** 2
        with store:
            by_index, early = SpikeCvFrames(clips, config), EarlyCodeFrames(clips, config, sequence / "early")
            _compare(by_index, Frames(clips, config), crop // 2)
            sources: dict[str, tuple[ClipSource, float]] = {
                LIVE: (training_source(clips, config), 11 * spike_pixels),
                "PNG, streams whole, as SpikeCV": (_over(by_index, config), _mean_bytes(sequence / "spike")),
                "PNG, float32 voxels, 5 bins, mapped": (_written(floats), 20 * spike_pixels),
                "PNG, float32 voxels, 32 bins, whole": (_over(early, config), _mean_bytes(sequence / "early")),
                "PNG, uint8 voxels, 5 bins, mapped": (_written(written), 5 * spike_pixels),
                STORE: (training_source(clips, config, store), -image_bytes),
            }
            work = {
                name: (reading(source), 3, int(5 * (image_bytes + nbytes)))
                for name, (source, nbytes) in sources.items()
            }
            times = {name: timings[rounds // 2] for name, timings in in_rounds(work, rounds).items()}
    lines = [f"{'one clip, one core':36} CPU time                              clips/s    ratio   read from files"]
    lines += [
        f"{name:36} {timing.text():36} {1 / timing.median:8.1f} {times[LIVE].median / timing.median:8.2f}"
        f"{work[name][2] / 1e6:12.1f} MB"
        for name, timing in times.items()
    ]
    numbers = {name: {"cpu_ms": 1e3 * timing.median, "bytes": work[name][2]} for name, timing in times.items()}
    report("spike_clips", "\n".join(lines), {"ways": numbers}, options)
    return 0


def _compare(one: Frames, other: Frames, size: int) -> None:
    """AssertionError unless both ways give the same spikes."""
    box = Box(2, 4, size, size)
    assert np.array_equal(one.spikes(0, box, np.dtype(np.uint8)), other.spikes(0, box, np.dtype(np.uint8)))


def _over(frames: Frames, config: DataConfig) -> ClipSource:
    return ClipSource(frames, crop=config.CROP_SIZE, augment=config.AUGMENT)


def _written(config: DataConfig) -> ClipSource:
    return training_source(open_clips(config, "train", scored=False), config)


def _mean_bytes(folder: Path) -> float:
    sizes = [path.stat().st_size for path in folder.iterdir()]
    return sum(sizes) / len(sizes)


if __name__ == "__main__":
    sys.exit(main())
