"""Arranges a data set as training expects it: blur, sharp and spike of every sequence side by side, as links or copies.

    raw data sets, X4K1000FPS --> <output>/{train,test}/<seq>/{blur,sharp,spike}/

Incomplete sequences are skipped with a warning. It can safely be run again.

Dimension key:  T spike frames   F bytes of a spike frame
"""

import logging
import math
import os
import random
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.errors import ConfigError, DataError
from flatout.progress import progress
from flatout.spike.data.decode import map_stream
from flatout.spike.data.frames import read_frame
from flatout.spike.data.geometry import find_geometry, geometry_beside, geometry_name, write_geometry
from flatout.spike.data.stream_files import ARRAY_EXTS, STREAM_EXTS, SpikeStream, open_stream
from flatout.spike.data.stream_layout import Layout, StreamSettings, compare_with_frame, decide_layout, grey_at
from flatout.spike.data.tree import IMAGE_EXTS, files_by_stem, ordered
from flatout.spike.visuals import write_image

logger = logging.getLogger(__name__)

EXPOSURES = (33, 65)
"""Spike frames per blurry frame that X4K1000FPS-Spike offers."""


class TreeError(DataError, RuntimeError):
    """A folder is missing, or a file or folder is in the way of a link."""


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Source, destination and settings of a preparation."""

    spike_root: Path
    blur_root: Path
    output: Path
    use_symlinks: bool = False
    blur_dir: str = "blur"
    splits: tuple[str, ...] = ("train", "test")
    exposure: int = EXPOSURES[0]
    """Spike frames per blurry frame, for X4K1000FPS-Spike."""
    spike_hw: tuple[int, int] | None = None
    """Size of spike frames, written beside every sequence; None: from a sidecar, if there is one."""
    flipud: bool | None = None
    """Layout E: whether rows of streams are stored bottom-up; None: they are in packed `.dat` files."""

    def __post_init__(self) -> None:
        if self.exposure not in EXPOSURES:
            raise ConfigError(f"--exposure {self.exposure}: X4K1000FPS-Spike has 33 and 65 spike frames per frame.")


@dataclass(frozen=True)
class FrameCounts:
    """Numbers of frames of one sequence."""

    frames: int
    """Blurry frames."""
    usable: int
    """Blurry frames that have a sharp frame and a spike file of the same name."""


@dataclass
class Prepared:
    """The result of a preparation: prepared sequences, and skipped ones with the reason."""

    created: dict[str, dict[str, FrameCounts]] = field(default_factory=dict)
    skipped: list[tuple[str, str | None, str]] = field(default_factory=list)
    """(split, sequence or None for a whole split, reason)."""
    gain: float = 0.0
    """Layout E, with blurry frames made of streams: brightness of a pixel that fires in every spike frame."""


def prepare(config: PrepareConfig) -> Prepared:
    """Prepare a data set; TreeError if a root is missing, or if a real folder is in the way of a link."""
    for name in ("spike_root", "blur_root"):
        if not getattr(config, name).is_dir():
            raise TreeError(f"--{name} {getattr(config, name)}: no such folder.")
    done = Prepared()
    for split in config.splits:
        if spikes_root(config.spike_root, split).is_dir():
            _cut_streams(config, split, done)
        elif pairs := list(gt_sequences(config.blur_root, config.spike_root, split)):
            _blur_from_spikes(config, split, pairs, done)
        else:
            _place_folders(config, split, done)
    return done


def _place_folders(config: PrepareConfig, split: str, done: Prepared) -> None:
    """Link or copy whole folders, for the layouts A to C."""
    layout = next((each for each in RAW_LAYOUTS if (config.blur_root / each.mark.format(split=split)).is_dir()), None)
    streams = config.spike_root / (layout.streams if layout else "{split}").format(split=split)
    if not streams.is_dir() or layout is None:
        _skip(done, split, None, "no_gopro_split" if streams.is_dir() else "no_spike_split")
        return
    for name in sorted(path.name for path in streams.iterdir() if path.is_dir()):
        names = {"split": split, "name": name, "blur_dir": config.blur_dir}
        blur, sharp = (config.blur_root / each.format(**names) for each in (layout.blur, layout.sharp))
        parts = {"blur": blur, "sharp": sharp, "spike": streams / layout.spike.format(**names)}
        if reason := _missing(parts, config.blur_root / split / name):
            _skip(done, split, name, reason)
            continue
        target = config.output / split / name
        for part, source in parts.items():
            _place(source, target / part, link=config.use_symlinks)
        # Beside the links or copies: the raw data set's own config.yaml is above a folder that may not be linked.
        if shape_hw := config.spike_hw or find_geometry(parts["spike"]):
            write_geometry(target, shape_hw)
        done.created.setdefault(split, {})[name] = _count(target)


def _missing(parts: Mapping[str, Path], sequence: Path) -> str:
    """Why a sequence is skipped, a key of REASONS; empty if it is complete. `sequence`: its folder, in layout A."""
    has_blur, has_sharp, has_spike = (folder.is_dir() for folder in parts.values())
    if not (has_blur or has_sharp or sequence.is_dir()):
        return "no_gopro_sequence"
    if not (has_blur and has_sharp):
        return "no_blur_or_sharp"
    return "" if has_spike else "no_spike_dir"


def _blur_from_spikes(config: PrepareConfig, split: str, pairs: Sequence["GtSequence"], done: Prepared) -> None:
    """Link or copy sharp frames and streams, and write the mean of each stream as its blurry frame; for layout E."""
    gain = done.gain = done.gain or typical_gain(pairs, config)
    logger.info("%s: blurry frames are the means of the streams, times %.2f.", split, gain)
    for each in pairs:
        target = config.output / split / each.name
        for part, source in (("sharp", each.gt), ("spike", each.spike)):
            _place(source, target / part, link=config.use_symlinks)
        with progress(f"{split}/{each.name}", len(each.pairs)) as advance:
            for number, (sharp, stream) in enumerate(each.pairs, 1):
                pair = open_pair(sharp, stream, config)
                if number == 1:
                    _warn_of_orientation(pair)
                write_image(target / "blur" / f"{sharp.stem}.png", mean_of_stream(pair, gain))
                advance(number, number * pair.sharp_HW3.size)
        write_geometry(target, pair.stream.shape[1:])
        done.created.setdefault(split, {})[each.name] = _count(target)


def _cut_streams(config: PrepareConfig, split: str, done: Prepared) -> None:
    """Link or copy frames one by one, numbered in temporal order, and cut a spike file for each; for layout D."""
    for clip in clips_in(config.blur_root, config.spike_root, split, config.exposure):
        frames = frames_of(clip)
        if not frames:
            _skip(done, split, clip.name, "no_blur_or_sharp")
            continue
        layout = layout_of(clip, frames[0])
        target = config.output / split / clip.name
        (target / "spike").mkdir(parents=True, exist_ok=True)
        for frame in frames:
            name = f"{frame.number:06d}"
            for part, source in (("blur", frame.blur), ("sharp", frame.sharp)):
                path = target / part / f"{name}{source.suffix}"
                _place(source, path, link=config.use_symlinks)
            (target / "spike" / f"{name}.dat").write_bytes(cut(clip, frame, layout, config.exposure).tobytes())
        # The geometry differs between the splits of this data set, so it is stored with the spikes.
        write_geometry(target, (layout.height, layout.width))
        num_blurry = len(files_by_stem(clip.blur, IMAGE_EXTS))
        done.created.setdefault(split, {})[clip.name] = FrameCounts(num_blurry, len(frames))


def _skip(done: Prepared, split: str, sequence: str | None, reason: str) -> None:
    logger.warning("%s: skipped, %s.", "/".join(filter(None, (split, sequence))), REASONS[reason])
    done.skipped.append((split, sequence, reason))


def validation_names(names: Sequence[str], *, ratio: float, seed: int) -> list[str]:
    """Choose sequences to validate on: the first ones of a shuffle of the sorted names."""
    shuffled = sorted(names)
    random.Random(seed).shuffle(shuffled)
    return shuffled[: max(1, int(ratio * len(shuffled)))]


def make_validation(output: Path, *, ratio: float, seed: int, train: str = "train") -> list[str]:
    """Link val/<seq> to train/<seq> for a share of the sequences; a training leaves out those it validates on."""
    names = [path.name for path in (output / train).iterdir() if path.is_dir()]
    chosen = validation_names(names, ratio=ratio, seed=seed)
    for name in chosen:
        _place(output / train / name, output / "val" / name, link=True)
    return chosen


def _place(source: Path, target: Path, *, link: bool) -> None:
    """Link or copy a folder or file; an existing copy is kept."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not link:
        if not target.exists():
            (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)
        return
    if target.is_symlink():
        target.unlink()
    elif target.exists():
        raise TreeError(
            f"{target} is a real {'folder' if target.is_dir() else 'file'} where a link to {source} should be. Remove "
            "it, or omit --use_symlinks."
        )
    os.symlink(source.resolve(), target)


def _count(sequence: Path) -> FrameCounts:
    blur, sharp = (files_by_stem(sequence / part, IMAGE_EXTS) for part in ("blur", "sharp"))
    spikes = files_by_stem(sequence / "spike", STREAM_EXTS)
    return FrameCounts(len(blur), len(blur.keys() & sharp.keys() & spikes.keys()))


# Layouts of raw data sets that have blurry frames, A to C: where the parts of a sequence are

REASONS = {
    "no_spike_split": "there is no such split below --spike_root",
    "no_gopro_split": "there is no such split below --blur_root",
    "no_gopro_sequence": "there is no such sequence below --blur_root",
    "no_blur_or_sharp": "its blurry or sharp frames are missing",
    "no_spike_dir": "its folder 'spike' is missing",
}
"""Why a split or sequence is skipped, in the order in which this is checked."""


class RawLayout(NamedTuple):
    """Folders of a raw data set; those of a split, then those of the parts of a sequence."""

    mark: str
    """The folder below --blur_root by which the layout is recognized."""
    streams: str
    """The folder below --spike_root that has a folder for every sequence."""
    blur: str
    sharp: str
    spike: str
    """Below `streams`."""


RAW_LAYOUTS = (
    # C, S-SDM
    RawLayout(
        "{split}/blur_data", "{split}/spike_data", "{split}/blur_data/{name}", "{split}/sharp_data/{name}", "{name}"
    ),
    # A, GoPro-Spike; there are blur and blur_gamma
    RawLayout("{split}", "{split}", "{split}/{name}/{blur_dir}", "{split}/{name}/sharp", "{name}/spike"),
    # B, the same regrouped
    RawLayout("{split}_GT", "{split}", "{split}_GT_blurred/{name}", "{split}_GT/{name}", "{name}/spike"),
)
"""The first one whose mark exists counts."""


# X4K1000FPS-Spike (layout D): one stream per clip, which is cut into one file per blurry frame
#
#     <rgb>/{train,val}_blurry_{33,65}/<scene>/<sub>/*.png     <rgb>/{train,val}_fullRGB/<scene>/<sub>/*.png
#     <spikes>/{train,val}_spike_2xds/<scene>/<sub>/spike.dat      packed, half the frames' height and width
#
# A frame `a.png` is the 4a-th of its clip and `a_b.png` the (4a + b + 1)-th; its spikes are the 33 or 65 spike frames
# around that one. Frames are numbered in temporal order, so that clips consist of neighbours; a missing frame leaves a
# gap in the numbers.

STREAM = "spike.dat"
_STEM = re.compile(r"(\d+)(?:_(\d+))?")


class X4kClip(NamedTuple):
    """One clip of the raw data set."""

    name: str
    """scene/sub."""
    blur: Path
    sharp: Path
    stream: Path


class CutFrame(NamedTuple):
    """A blurry and a sharp frame, their number in temporal order, and the spike frame in the middle of the exposure."""

    blur: Path
    sharp: Path
    number: int
    centre: int


def spikes_root(root: Path, split: str) -> Path:
    """The folder of a split's streams; if it exists, the data set has this layout."""
    return root / f"{split}_spike_2xds"


def clips_in(rgb: Path, spikes: Path, split: str, exposure: int) -> Iterator[X4kClip]:
    """Every clip that has a stream, sorted by name; its other folders may be missing."""
    root = spikes_root(spikes, split)
    for stream in sorted(root.rglob(STREAM)):
        name = stream.parent.relative_to(root).as_posix()
        yield X4kClip(name, rgb / f"{split}_blurry_{exposure}" / name, rgb / f"{split}_fullRGB" / name, stream)


def index_of(stem: str) -> int | None:
    """The spike frame at the middle of a frame with this stem; None for other names."""
    if not (match := _STEM.fullmatch(stem)):
        return None
    whole, part = match.groups()
    return 4 * int(whole) + (0 if part is None else int(part) + 1)


def frames_of(clip: X4kClip) -> list[CutFrame]:
    """The blurry frames that have a sharp one, in temporal order."""
    blur, sharp = (files_by_stem(folder, IMAGE_EXTS) for folder in (clip.blur, clip.sharp))
    centres = {stem: index for stem in blur.keys() & sharp.keys() if (index := index_of(stem)) is not None}
    numbers = numbers_in_time(centres.values())
    found = [CutFrame(blur[stem], sharp[stem], numbers[centre], centre) for stem, centre in centres.items()]
    return sorted(found, key=lambda each: each.centre)


def numbers_in_time(centres: Iterable[int]) -> dict[int, int]:
    """Consecutive numbers for neighbours: centres are divided by the greatest common divisor of their distances."""
    known = list(centres)
    step = math.gcd(*(centre - known[0] for centre in known)) or 1
    return {centre: centre // step for centre in known}


def layout_of(clip: X4kClip, frame: CutFrame) -> Layout:
    """Layout of the stream: half the height and width of the frame; StreamError if the file's size does not fit."""
    height, width, _ = read_frame(str(frame.blur)).shape
    settings = StreamSettings(format="packed", height=height // 2, width=width // 2)
    return decide_layout(clip.stream.stat().st_size, "bytes", settings, where=str(clip.stream))


def cut(clip: X4kClip, frame: CutFrame, layout: Layout, exposure: int) -> np.ndarray:
    """The spike frames of an exposure as they are stored, uint8 [T, F]; beyond the ends of the stream all pixels fire.

    This is how the author of the data set pads. Raises DataError if the middle of the exposure is beyond the ends.
    """
    stream_TF = map_stream(clip.stream, layout)
    if not 0 <= frame.centre < len(stream_TF):
        raise DataError(
            f"{clip.stream}: it has {len(stream_TF)} spike frames, but {frame.blur} is the {frame.centre}-th of its "
            "clip. The two files do not belong together."
        )
    window_TF = np.full((exposure, stream_TF.shape[1]), 0xFF, np.uint8)
    first = frame.centre - exposure // 2
    kept = slice(max(first, 0), min(first + exposure, len(stream_TF)))
    window_TF[kept.start - first : kept.stop - first] = stream_TF[kept]
    return window_TF


# Spike-Zoo (layout E): sharp frames and streams, but no blurry frames
#
#     <rgb>/{train,test}/gt/*.png               <spikes>/{train,test}/spike/*.dat           one sequence
#     <rgb>/{train,test}/<seq>/gt/*.png         <spikes>/{train,test}/<seq>/spike/*.dat     one per folder
#
# The blurry frame that the network starts from is what a slow camera would have seen: the mean of the whole stream.

GT_DIR, GT_SPIKE_DIR = "gt", "spike"
GAIN_FILES = 16
"""Streams, spread over a split, from which the brightness per spike is taken."""


class GtSequence(NamedTuple):
    """Sharp frames and streams of the same names."""

    name: str
    gt: Path
    spike: Path
    pairs: list[tuple[Path, Path]]
    """A sharp frame and a stream of the same name each; at least one."""


class GtPair(NamedTuple):
    """A sharp frame, and the stream around it."""

    sharp_HW3: np.ndarray
    stream: SpikeStream


def gt_sequences(rgb: Path, spikes: Path, split: str) -> Iterator[GtSequence]:
    """The sequences of a split in layout E that have at least one pair, by name; none for other layouts."""
    folders = [rgb / split, *sorted(path for path in (rgb / split).glob("*") if path.is_dir())]
    for folder in folders:
        spike = spikes / folder.relative_to(rgb) / GT_SPIKE_DIR
        sharp, streams = files_by_stem(folder / GT_DIR, IMAGE_EXTS), files_by_stem(spike, STREAM_EXTS)
        if stems := ordered(sharp.keys() & streams.keys()):
            pairs = [(sharp[stem], streams[stem]) for stem in stems]
            yield GtSequence("all" if folder == rgb / split else folder.name, folder / GT_DIR, spike, pairs)


def open_pair(sharp: Path, stream: Path, config: PrepareConfig) -> GtPair:
    """A sharp frame and its stream; without a size or a sidecar, spike frames have the size of the sharp frame."""
    sharp_HW3 = read_frame(str(sharp))
    shape_hw = config.spike_hw or geometry_beside(stream) or (sharp_HW3.shape[0], sharp_HW3.shape[1])
    geometry = "" if stream.suffix.lower() in ARRAY_EXTS else geometry_name(shape_hw)
    return GtPair(sharp_HW3, open_stream(stream, geometry=geometry, flipud=config.flipud))


def _warn_of_orientation(pair: GtPair) -> None:
    """Warn if a stream does not look like its sharp frame: the blurry frame is made of it, so both would be turned."""
    flipud, rate_HW = pair.stream.layout.flipud, pair.stream[:].mean(axis=0)
    grey_HW = grey_at(pair.sharp_HW3, (rate_HW.shape[0], rate_HW.shape[1]))
    if problem := compare_with_frame(rate_HW, grey_HW, flipud=flipud).problem_of_prepare:
        logger.warning("%s: %s", pair.stream.path, problem)


def typical_gain(sequences: Sequence[GtSequence], config: PrepareConfig) -> float:
    """Brightness of a pixel that fires in every spike frame: the median over some pairs."""
    pairs = [pair for each in sequences for pair in each.pairs]
    gains = []
    for number in np.unique(np.linspace(0, len(pairs) - 1, GAIN_FILES).astype(int)).tolist():
        sharp_HW3, stream = open_pair(pairs[number][0], pairs[number][1], config)
        gains.append(float(sharp_HW3.mean()) / 255 / max(float(stream[:].mean()), 1e-6))
    return float(np.median(gains))


def mean_of_stream(pair: GtPair, gain: float) -> np.ndarray:
    """The mean of a stream as a grey image of the size of the sharp frame, uint8 RGB [H, W, 3]."""
    import cv2

    height, width, _ = pair.sharp_HW3.shape
    grey = np.clip(pair.stream[:].mean(axis=0, dtype=np.float32) * np.float32(255 * gain), 0, 255)
    if grey.shape != (height, width):
        grey = np.asarray(cv2.resize(grey, (width, height), interpolation=cv2.INTER_LINEAR))
    return np.repeat(np.rint(grey).astype(np.uint8)[..., None], 3, axis=2)
