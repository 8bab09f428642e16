"""Makes a training set from videos: blurry and sharp frames, and the spikes of a simulated camera.

    video, or folder of frames --plan--> sequences --each in a process of its own--> OUT/{train,test}/<sequence>/
                                                                                         blur/ sharp/ spike/

An exposure is centred on a frame of the video, which is the sharp frame: nothing interpolated is ever a target. A
sequence appears under its name only when it is complete, so that an interrupted simulation continues where it was.

Dimension key:  H W frame   T spike frames   K sub-frames of an exposure
"""

import json
import logging
import math
import random
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flatout.errors import ConfigError, DataError, MissingFileError
from flatout.feed import DecodeError
from flatout.progress import progress
from flatout.safefiles import read_note
from flatout.spike.data.decode import pack
from flatout.spike.data.frames import read_frame
from flatout.spike.data.geometry import parse_geometry, write_geometry
from flatout.spike.data.tree import IMAGE_EXTS, files_by_stem, ordered
from flatout.spike.sensor import Between, Interpolation, LinearLight, SensorConfig, SpikeSensor, sensor_light
from flatout.spike.visuals import write_image
from flatout.yaml_strict import quoted

logger = logging.getLogger(__name__)

VIDEO_EXTS = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".ts")
NOTE = "simulated.json"
"""File with the settings of a set; what lies beside it belongs to the set."""
VERSION = 1
"""Version of the simulation: raised when the same settings give other files."""
BYTE_PIXELS = 8
"""Spike pixels of a byte; rows of whole bytes are cropped fastest."""
FAR_FRAMES = 64
"""Frames of a video that are skipped one by one; beyond, the video is searched."""


@dataclass(frozen=True, kw_only=True)
class SimulateConfig:
    """How a training set is simulated."""

    sensor: SensorConfig = field(default_factory=SensorConfig)
    exposure: int = 1
    """Frames of the video that an exposure lasts."""
    stride: int | None = None
    """Frames of the video from one exposure to the next; None: `exposure`, without a pause."""
    interpolate: int = 8
    """Sub-frames per frame of the video."""
    interpolation: Interpolation = "flow"
    hold: int = 7
    """Spike frames per sub-frame. A file has exposure * interpolate * hold spike frames."""
    gamma: float = 1.0
    """Light = (stored value / 255) ** gamma, for blur and spikes; 2.2 averages linear light, 1 as in GoPro's `blur`."""
    size: str = ""
    """Width and height of frames, like 640x360; empty: as in the video, cropped to whole bytes of spikes."""
    spike_scale: int = 2
    """Pixels of a frame per spike pixel, along each axis."""
    sequence_length: int = 100
    """Most frames of a sequence."""
    test_share: float = 0.2
    """Share of the videos, or of the end of each if they are few, that becomes the split `test`."""
    max_frames: int | None = None
    """Frames that are read of each video; None: all."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("exposure", "stride", "interpolate", "hold", "spike_scale", "sequence_length", "max_frames"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: it must be 1 or more.")
        if not self.gamma > 0:
            raise ConfigError(f"--gamma {self.gamma}: it must be above 0.")
        if not 0 <= self.test_share < 1:
            raise ConfigError(f"--test-share {self.test_share}: it must be from 0 to below 1.")
        if self.interpolate == 1 and self.exposure % 2 == 0:
            raise ConfigError(
                f"--exposure {self.exposure} --interpolate 1: without interpolation an exposure must be an odd number "
                "of frames, because the middle one is the sharp frame."
            )
        if self.size:
            parse_geometry(self.size)

    @property
    def spike_frames(self) -> int:
        """Spike frames of a file."""
        return self.exposure * self.interpolate * self.hold

    @property
    def offsets_K(self) -> np.ndarray:
        """Times of the sub-frames of an exposure, in frames of the video from the sharp frame on."""
        num = self.exposure * self.interpolate
        return (np.arange(num) - (num - 1) / 2) / self.interpolate

    @property
    def reach(self) -> int:
        """Frames of the video that an exposure needs on each side of the sharp frame."""
        return math.ceil(float(self.offsets_K[-1]))


class FrameSource(NamedTuple):
    """A video, or a folder of frames."""

    name: str
    path: str
    files: tuple[str, ...]
    """The frames of a folder; empty for a video."""
    num_frames: int


class PlannedSequence(NamedTuple):
    """A sequence of the training set."""

    split: str
    name: str
    source: int
    """Number of its source."""
    first: int
    """Frame of the source that is its first sharp frame."""
    num_frames: int


@dataclass(frozen=True)
class SimulatedSet:
    """The result of a simulation."""

    folder: Path
    yaml: Path
    """A configuration to train with."""
    sequences: dict[str, int]
    """Sequences by split."""
    frames: int
    """Frames of all sequences."""
    written: int
    """Frames that this call has simulated; the others were there."""


def simulate_set(source: str | Path, output: str | Path, config: SimulateConfig, *, workers: int = 1) -> SimulatedSet:
    """Simulate a training set from a video, a folder of frames, or a folder of such; an unfinished one is continued.

    `workers` processes share the sequences; their number does not change a bit of the result. ConfigError if the folder
    holds something else, or a set with other settings.
    """
    source, output = Path(source), Path(output)
    sources = find_sources(source, most=config.max_frames)
    plan = plan_sequences([(each.name, each.num_frames) for each in sources], config)
    if not plan:
        longest = max(sources, key=lambda each: each.num_frames)
        raise DataError(
            f"{source}: an exposure of {config.exposure} needs {2 * config.reach + 1} frames of a video, but the "
            f"longest one, {longest.name}, has {longest.num_frames}. Use a smaller --exposure, or a longer video."
        )
    shapes_hw = [frame_size(_first_shape(each), config, each.path) for each in sources]
    facts = {"sources": [[each.name, each.num_frames] for each in sources], "frames_hw": shapes_hw}
    _claim(output, {"command": "flatout spike simulate", "version": VERSION, **asdict(config), **facts})
    tasks = [
        _Task(sources[each.source], each, config, shapes_hw[each.source], output)
        for each in plan
        if not (output / each.split / each.name).is_dir()
    ]
    written = _run(tasks, workers)
    yaml = output / "train.yaml"
    # Also for a complete set, because its folder may have been moved.
    yaml.write_text(_training_yaml(output, plan, config, shapes_hw), encoding="utf-8")
    splits = {split: sum(each.split == split for each in plan) for split in ("train", "test")}
    return SimulatedSet(output, yaml, splits, sum(each.num_frames for each in plan), written)


# Sources: videos and folders of frames


def find_sources(path: Path, *, most: int | None = None) -> list[FrameSource]:
    """The videos and folders of frames at a path, sorted by name; DataError if there are none.

    `most`: frames of each video that will be read; whether it has more of them is not tried.
    """
    if path.is_file():
        return [_video(path, most)]
    if not path.is_dir():
        raise MissingFileError(f"{path}: no such file or folder. Give a video, or a folder of frames or videos.")
    if frames := _frame_folder(path):
        return [frames]
    found = [
        source
        for each in sorted(path.iterdir())
        if (source := _video(each, most) if each.suffix.lower() in VIDEO_EXTS else _frame_folder(each)) is not None
    ]
    if not found:
        raise DataError(
            f"{path} has no frames ({', '.join(IMAGE_EXTS)}), no videos ({', '.join(VIDEO_EXTS)}), and no folders of "
            "frames. Give a video, or a folder of them."
        )
    names = [each.name for each in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{path}: {twice[0]} exists twice. Sequences are named after their video: rename one.")
    return found


def _frame_folder(path: Path) -> FrameSource | None:
    files = files_by_stem(path, IMAGE_EXTS) if path.is_dir() else {}
    paths = tuple(str(files[stem]) for stem in ordered(files))
    return FrameSource(path.name, str(path), paths, len(paths)) if paths else None


def _video(path: Path, most: int | None) -> FrameSource:
    import cv2

    capture = cv2.VideoCapture(str(path))
    try:
        if not capture.isOpened():
            raise DataError(f"{path} cannot be read as a video. Try another format, or give a folder of frames.")
        stated = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        needed = min(stated, most or stated)
        # Some containers do not store their number of frames, and damaged videos end before it. Frames are skipped in a
        # hundredth of the time that simulating them takes.
        readable = 0
        while (stated <= 0 or readable < needed) and capture.grab():
            readable += 1
    finally:
        capture.release()
    if readable < needed:
        logger.warning(
            "%s: only %d of %d frames can be read, so the others are left out; the video is damaged or incomplete.",
            path, readable, stated,
        )  # fmt: skip
    return FrameSource(path.stem, str(path), (), stated if 0 < needed == readable else readable)


def _frames_from(source: FrameSource, first: int) -> Iterator[np.ndarray]:
    """Frames of a source from the given one on, uint8 RGB [H, W, 3]."""
    import cv2

    if source.files:
        for path in source.files[first:]:
            try:
                yield read_frame(path)
            except DecodeError as error:
                raise DataError(str(error)) from None
        return
    capture = cv2.VideoCapture(source.path)
    try:
        if first > FAR_FRAMES:
            capture.set(cv2.CAP_PROP_POS_FRAMES, first)
        # Not every format can be searched exactly; then frames are skipped from the start.
        if int(capture.get(cv2.CAP_PROP_POS_FRAMES)) != first:
            capture.release()
            capture = cv2.VideoCapture(source.path)
            for _ in range(first):
                capture.grab()
        while True:
            is_read, frame = capture.read()
            if not is_read:
                return
            yield cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)
    finally:
        capture.release()


def _first_shape(source: FrameSource) -> tuple[int, ...]:
    first = next(_frames_from(source, 0), None)
    if first is None:
        raise DataError(
            f"{source.path}: not a single frame can be read. Try another format, or give a folder of frames."
        )
    return first.shape[:2]


def frame_size(shape_hw: Sequence[int], config: SimulateConfig, where: str) -> tuple[int, int]:
    """Height and width of the frames of a set: `config.size`, or the largest part with whole bytes of spikes."""
    scale = config.spike_scale
    if config.size:
        height, width = parse_geometry(config.size)
        if height % scale or width % (scale * BYTE_PIXELS):
            raise ConfigError(
                f"--size {config.size}: the width must be a multiple of {scale * BYTE_PIXELS} and the height of "
                f"{scale}, so that rows of spikes fill whole bytes."
            )
        return height, width
    height, width = shape_hw[0] // scale * scale, shape_hw[1] // (scale * BYTE_PIXELS) * scale * BYTE_PIXELS
    if not (height and width):
        raise DataError(
            f"{where}: frames of {shape_hw[1]}x{shape_hw[0]} are too small. Give a larger size with --size."
        )
    return height, width


def fitted(frame_HW3: np.ndarray, shape_hw: tuple[int, int], *, is_scaled: bool, where: str) -> np.ndarray:
    """The middle of a frame of the source `where`; `is_scaled`: after scaling it as little as covers the size."""
    import cv2

    height, width = shape_hw
    if is_scaled and frame_HW3.shape[:2] != shape_hw:
        factor = max(height / frame_HW3.shape[0], width / frame_HW3.shape[1])
        size = max(width, round(frame_HW3.shape[1] * factor)), max(height, round(frame_HW3.shape[0] * factor))
        method = cv2.INTER_AREA if factor < 1 else cv2.INTER_LINEAR
        frame_HW3 = np.asarray(cv2.resize(frame_HW3, size, interpolation=method))
    if frame_HW3.shape[0] < height or frame_HW3.shape[1] < width:
        raise DataError(
            f"{where}: a frame of {frame_HW3.shape[1]}x{frame_HW3.shape[0]} is smaller than the first one, of which "
            f"{width}x{height} are used. Give a --size, to which all are scaled."
        )
    top, left = (frame_HW3.shape[0] - height) // 2, (frame_HW3.shape[1] - width) // 2
    return np.ascontiguousarray(frame_HW3[top : top + height, left : left + width])


# The plan: which frames of which source become which sequence


def plan_sequences(sources: Sequence[tuple[str, int]], config: SimulateConfig) -> list[PlannedSequence]:
    """The sequences of a set from (name, number of frames) of its sources.

    Whole sources are tested on if there are enough of them for `test_share`; else the end of each.
    """
    num_test = min(round(config.test_share * len(sources)), len(sources) - 1)
    chosen = set(random.Random(config.seed).sample(range(len(sources)), num_test))
    plan: list[PlannedSequence] = []
    for number, (name, num_frames) in enumerate(sources):
        count = num_exposures(num_frames, config)
        num_tested = 0 if chosen else max(0, min(math.ceil(config.test_share * count), count - 1))
        starts = {"test" if number in chosen else "train": range(count - num_tested)}
        if num_tested > 0:
            starts["test"] = range(count - num_tested, count)
        blocks = [(split, each) for split, range_ in starts.items() for each in _blocks(range_, config.sequence_length)]
        for part, (split, block) in enumerate(blocks):
            first = config.reach + block.start * (config.stride or config.exposure)
            plan.append(PlannedSequence(split, f"{name}_{part:03d}", number, first, len(block)))
    return plan


def num_exposures(num_frames: int, config: SimulateConfig) -> int:
    """How many exposures fit into a source."""
    if config.max_frames is not None:
        num_frames = min(num_frames, config.max_frames)
    return max(0, (num_frames - 1 - 2 * config.reach) // (config.stride or config.exposure) + 1)


def _blocks(numbers: range, length: int) -> list[range]:
    """Blocks of equal length, at most `length`."""
    count = -(-len(numbers) // length)
    edges = [len(numbers) * part // count for part in range(count + 1)] if count else []
    return [numbers[begin:end] for begin, end in pairwise(edges)]


# Sequences


class _Task(NamedTuple):
    """A sequence to simulate. Pickled for workers."""

    source: FrameSource
    sequence: PlannedSequence
    config: SimulateConfig
    shape_hw: tuple[int, int]
    output: Path


class Exposed(NamedTuple):
    """What the two cameras recorded during one exposure, and the frame in its middle."""

    blur_HW3: np.ndarray
    sharp_HW3: np.ndarray
    spikes_Thw: np.ndarray


def exposures(frames: Iterator[np.ndarray], sensor: SpikeSensor, config: SimulateConfig) -> Iterator[Exposed]:
    """Expose frame after frame of a video, uint8 RGB [H, W, 3]; the first exposure begins with the first frame.

    Only the frames of one exposure are kept in memory.
    """
    stride, light = config.stride or config.exposure, LinearLight(config.gamma)
    kept: dict[int, np.ndarray] = {}
    pairs: dict[int, Between] = {}
    centre = reach = config.reach
    for number, frame in enumerate(frames):
        if number < centre - reach:
            continue  # between two exposures
        kept[number] = frame
        if number < centre + reach:
            continue
        yield _expose(kept, pairs, centre, sensor, light, config)
        centre += stride
        # The last pair is kept: its flow may be needed again.
        for each in [each for each in kept if each < centre - reach]:
            del kept[each]
            pairs.pop(each, None)


def _expose(
    kept: dict[int, np.ndarray],
    pairs: dict[int, Between],
    centre: int,
    sensor: SpikeSensor,
    light: LinearLight,
    config: SimulateConfig,
) -> Exposed:
    sharp_HW3 = kept[centre]
    shape_hw = (sharp_HW3.shape[0] // config.spike_scale, sharp_HW3.shape[1] // config.spike_scale)
    total_HW3 = np.zeros(sharp_HW3.shape, np.float32)
    spikes = []
    for offset in config.offsets_K.tolist():
        before = centre + math.floor(offset)
        share = offset - math.floor(offset)
        if share and before not in pairs:
            pairs[before] = Between(kept[before], kept[before + 1], config.interpolation)
        light_HW3 = light.light(pairs[before].at(share) if share else kept[before])
        total_HW3 += light_HW3
        spikes.append(sensor.expose(sensor_light(light_HW3, shape_hw), config.hold))
    return Exposed(light.stored(total_HW3 / len(spikes)), sharp_HW3, np.concatenate(spikes))


def _simulate_sequence(task: _Task, on_frame: Callable[[], None] = lambda: None) -> int:
    """Write one sequence, complete or not at all; returns its number of frames."""
    source, sequence, config, shape_hw, output = task
    part = output / f".part-{sequence.split}-{sequence.name}"
    shutil.rmtree(part, ignore_errors=True)
    (part / "spike").mkdir(parents=True)
    # One seed per source and sequence, so that neither order nor workers matter.
    rng = np.random.default_rng((config.seed, zlib.crc32(source.name.encode()), sequence.first))
    sensor = SpikeSensor((shape_hw[0] // config.spike_scale, shape_hw[1] // config.spike_scale), config.sensor, rng)
    frames = (
        fitted(frame, shape_hw, is_scaled=bool(config.size), where=source.path)
        for frame in _frames_from(source, sequence.first - config.reach)
    )
    count = 0
    for exposed in exposures(frames, sensor, config):
        count += 1
        name = f"{count:06d}"
        write_image(part / "blur" / f"{name}.png", exposed.blur_HW3)
        write_image(part / "sharp" / f"{name}.png", exposed.sharp_HW3)
        (part / "spike" / f"{name}.dat").write_bytes(pack(exposed.spikes_Thw).tobytes())
        on_frame()
        if count == sequence.num_frames:
            break
    if count < sequence.num_frames:
        logger.warning(
            "%s: only %d of %d exposures of %s could be read; the video may be damaged or shorter than it says.",
            source.path, count, sequence.num_frames, sequence.name,
        )  # fmt: skip
    if not count:
        shutil.rmtree(part)
        return 0
    write_geometry(part, (shape_hw[0] // config.spike_scale, shape_hw[1] // config.spike_scale))
    (output / sequence.split).mkdir(exist_ok=True)
    part.rename(output / sequence.split / sequence.name)
    return count


def _run(tasks: Sequence[_Task], workers: int) -> int:
    """Simulate sequences in this process or in several; returns the number of frames."""
    total = sum(task.sequence.num_frames for task in tasks)
    frame_bytes = 6 * math.prod(tasks[0].shape_hw) if tasks else 0
    done = 0
    with progress("simulate", total) as advance:

        def on_frame(count: int = 1) -> None:
            nonlocal done
            done += count
            advance(done, done * frame_bytes)

        if min(workers, len(tasks)) <= 1:
            with _one_thread():
                return sum(_simulate_sequence(task, on_frame) for task in tasks)
        # Fresh processes: OpenCV's threads do not survive a fork.
        with ProcessPoolExecutor(min(workers, len(tasks)), get_context("spawn"), _use_one_thread) as pool:
            try:
                for future in as_completed([pool.submit(_simulate_sequence, task) for task in tasks]):
                    on_frame(future.result())
            except BaseException:  # broad, because Ctrl-C too must not wait for all the other sequences
                pool.shutdown(cancel_futures=True)
                raise
    return done


def _use_one_thread() -> None:
    import cv2

    # The optical flow depends on the number of threads; workers share the cores anyway.
    cv2.setNumThreads(1)


@contextmanager
def _one_thread() -> Iterator[None]:
    import cv2

    before = cv2.getNumThreads()
    _use_one_thread()
    try:
        yield
    finally:
        cv2.setNumThreads(before)


# The folder of a set


def _claim(output: Path, note: dict[str, Any]) -> None:
    """Write the note of a set, unless the folder has it; ConfigError if the folder holds anything else."""
    note = json.loads(json.dumps(note))
    path = output / NOTE
    if path.is_file():
        found = read_note(path)
        if not found:
            raise ConfigError(f"{path} is damaged. Remove the folder, and simulate again.")
        changed = sorted(key for key in note.keys() | found.keys() if note.get(key) != found.get(key))
        if changed:
            raise ConfigError(
                f"{output} holds a set that was simulated with another {', '.join(changed)}. Choose another folder, or "
                "remove this one."
            )
        return
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} exists and is not a simulated set. Choose an empty or new folder.")
    output.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(note, indent=1) + "\n")


def _training_yaml(
    root: Path, plan: Sequence[PlannedSequence], config: SimulateConfig, shapes_hw: Sequence[tuple[int, int]]
) -> str:
    """A configuration that trains on the set: a small network, all frames in memory if they are at most 4 GB."""
    smallest = min(min(shape_hw) for shape_hw in shapes_hw)
    grid = 2 * config.spike_scale
    pixels = sum(math.prod(shapes_hw[each.source]) * each.num_frames for each in plan)
    spikes = pixels // config.spike_scale**2 * config.spike_frames // 8
    clip = min(5, *(each.num_frames for each in plan))
    num_clips = sum(each.num_frames - clip + 1 for each in plan if each.split == "train")
    return _YAML.format(
        root=quoted(root),
        runs=quoted(root / "runs/train"),
        crop=min(128, smallest // grid * grid),
        clip=clip,
        batch=min(4, num_clips),
        bins=min(8, config.exposure * config.interpolate),
        cache=min(4.0, round(1.1 * (6 * pixels + spikes) / 2**30 + 0.01, 2)),
    )


_YAML = """\
# A small network for the set in this folder. docs/spike.md explains the keys.
DATA:
  ROOT: {root}
  VAL_SPLIT: test
  CROP_SIZE: {crop}
  CLIP_LEN: {clip}
  NUM_VOXEL_BINS: {bins}
  VOXEL_NORM: rate
  USE_RAM_CACHE: true
  CACHE_SIZE_GB: {cache}
TRAIN:
  TOTAL_STEPS: 2000
  BATCH_SIZE: {batch}
  OPTIM: {{TYPE: adamw, LR: 1e-3, BETAS: [0.9, 0.9], WEIGHT_DECAY: 1e-4}}
  SCHED: {{TYPE: cosine, WARMUP_STEPS: 100}}
MODEL:
  WIDTH: 16
  ENC_BLOCKS: [1, 1, 2]
  DEC_BLOCKS: [1, 1, 1]
LOG:
  SAVE_DIR: {runs}
  VAL_EVERY_STEPS: 200
"""
