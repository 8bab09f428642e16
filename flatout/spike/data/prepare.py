"""The unified tree: blur, sharp and spike of every sequence side by side, as links or copies.

    raw trees, X4K1000FPS --> <output>/{train,test}/<seq>/{blur,sharp,spike}/

What is incomplete is skipped and named. Running it again is harmless.
"""

import logging
import math
import os
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.errors import ConfigError, DataError
from flatout.spike.data.decode import map_stream
from flatout.spike.data.frames import read_frame
from flatout.spike.data.stream_layout import Layout, StreamWishes, decide
from flatout.spike.data.tree import IMAGE_EXTS, stems_in

logger = logging.getLogger(__name__)

# Where the parts of a sequence lie in the trees that data sets come as.
#
#     A  GoPro-Spike   <rgb>/{train,test}/<seq>/{blur,blur_gamma,sharp}/     <spikes>/{train,test}/<seq>/spike/
#     B  regrouped     <rgb>/{train,test}_GT_blurred/<seq>/, {train,test}_GT/<seq>/     spikes as A
#     C  S-SDM         <rgb>/{train,test}/{blur_data,sharp_data}/<seq>/      <spikes>/{train,test}/spike_data/<seq>/
#
# X4K1000FPS-Spike keeps one stream per clip, which has to be cut.

PARTS = ("blur", "sharp", "spike")
REASONS = {
    "no_spike_split": "the spike tree has no such split",
    "no_gopro_split": "the RGB tree has no such split",
    "no_gopro_sequence": "the RGB tree has no such sequence",
    "no_blur_or_sharp": "its blurry or sharp frames are missing",
    "no_spike_dir": "its folder 'spike' is missing",
}
"""Why a split or sequence is left out, in the order in which it is looked at."""


class RawTree(NamedTuple):
    """The roots of a data set."""

    rgb: Path
    spikes: Path
    blur_dir: str = "blur"
    """Of layout A: `blur` or `blur_gamma`."""


class Found(NamedTuple):
    """A sequence, or a whole split that cannot be used."""

    sequence: str | None
    reason: str
    """A key of REASONS; empty if all is there."""
    parts: dict[str, Path]
    """Folders by PARTS; empty with a reason."""


class _Where(NamedTuple):
    """Folders of one sequence, whether they exist or not."""

    sequence: Path | None
    """That holds blur and sharp; None where each part has its own tree."""
    blur: Path
    sharp: Path
    spike: Path


def sequences_of(tree: RawTree, split: str) -> Iterator[Found]:
    """By name, as the spike tree has them, each with its folders or with what it lacks."""
    spikes = tree.spikes / split / "spike_data" if _is_grouped(tree, split) else tree.spikes / split
    if not spikes.is_dir():
        yield Found(None, "no_spike_split", {})
        return
    places = _layout(tree, split)
    if places is None:
        yield Found(None, "no_gopro_split", {})
        return
    for folder in sorted(path for path in spikes.iterdir() if path.is_dir()):
        yield _found(folder.name, places(folder))


def _layout(tree: RawTree, split: str) -> Callable[[Path], _Where] | None:
    """From the spike folder of a sequence to the folders of its parts."""
    rgb = tree.rgb / split
    if _is_grouped(tree, split):
        return lambda spikes: _Where(
            None, rgb / "blur_data" / spikes.name, rgb / "sharp_data" / spikes.name, spikes
        )  # fmt: skip
    if rgb.is_dir():
        return lambda spikes: _Where(
            rgb / spikes.name, rgb / spikes.name / tree.blur_dir, rgb / spikes.name / "sharp", spikes / "spike"
        )
    if (tree.rgb / f"{split}_GT").is_dir():
        blurred, sharp = tree.rgb / f"{split}_GT_blurred", tree.rgb / f"{split}_GT"
        return lambda spikes: _Where(None, blurred / spikes.name, sharp / spikes.name, spikes / "spike")
    return None


def _is_grouped(tree: RawTree, split: str) -> bool:
    """Layout C: the parts are above the sequences."""
    return (tree.rgb / split / "blur_data").is_dir()


def _found(name: str, where: _Where) -> Found:
    is_known = where.sequence.is_dir() if where.sequence else where.blur.is_dir() or where.sharp.is_dir()
    if not is_known:
        return Found(name, "no_gopro_sequence", {})
    if not (where.blur.is_dir() and where.sharp.is_dir()):
        return Found(name, "no_blur_or_sharp", {})
    if not where.spike.is_dir():
        return Found(name, "no_spike_dir", {})
    return Found(name, "", dict(zip(PARTS, (where.blur, where.sharp, where.spike), strict=True)))


# X4K1000FPS-Spike (layout D): one stream per clip, cut into one file per blurry frame.
#
#     <rgb>/{train,val}_blurry_{33,65}/<scene>/<sub>/*.png     <rgb>/{train,val}_fullRGB/<scene>/<sub>/*.png
#     <spikes>/{train,val}_spike_2xds/<scene>/<sub>/spike.dat      packed, half the frames' height and width
#
# A frame `a.png` is the 4a-th of its clip and `a_b.png` the (4a + b + 1)-th; its spikes are the 33 or 65 around that
# one. Frames get numbers in the order of time, so that clips are made of neighbours; a missing frame leaves a gap.
#
# Dimension key:  T spike frames   F bytes of a spike frame

EXPOSURES = (33, 65)
"""Spike frames of a blurry frame."""
STREAM = "spike.dat"
_STEM = re.compile(r"(\d+)(?:_(\d+))?")


class X4kClip(NamedTuple):
    """One clip of the raw tree."""

    name: str
    """scene/sub."""
    blur: Path
    sharp: Path
    stream: Path


class CutFrame(NamedTuple):
    """A blurry frame with its sharp one, its number in time, and the middle of its exposure in spike frames."""

    blur: Path
    sharp: Path
    number: int
    centre: int


def spikes_root(root: Path, split: str) -> Path:
    """Where the streams of a split are; if this folder exists, the tree is of this layout."""
    return root / f"{split}_spike_2xds"


def clips_in(rgb: Path, spikes: Path, split: str, exposure: int) -> Iterator[X4kClip]:
    """Every clip that has a stream, by name; its other folders may be missing."""
    root = spikes_root(spikes, split)
    for stream in sorted(root.rglob(STREAM)):
        name = stream.parent.relative_to(root).as_posix()
        yield X4kClip(name, rgb / f"{split}_blurry_{exposure}" / name, rgb / f"{split}_fullRGB" / name, stream)


def index_of(stem: str) -> int | None:
    """Which spike frame a picture shows; None for other names."""
    if not (match := _STEM.fullmatch(stem)):
        return None
    whole, part = match.groups()
    return 4 * int(whole) + (0 if part is None else int(part) + 1)


def frames_of(clip: X4kClip) -> list[CutFrame]:
    """The blurry frames that have a sharp one, in the order of time."""
    blur, sharp = (stems_in(folder, IMAGE_EXTS) for folder in (clip.blur, clip.sharp))
    centres = {stem: index for stem in blur.keys() & sharp.keys() if (index := index_of(stem)) is not None}
    numbers = numbers_in_time(centres.values())
    found = [CutFrame(blur[stem], sharp[stem], numbers[centre], centre) for stem, centre in centres.items()]
    return sorted(found, key=lambda each: each.centre)


def numbers_in_time(centres: Iterable[int]) -> dict[int, int]:
    """Neighbours get neighbouring numbers: places are divided by what all their distances have in common."""
    placed = list(centres)
    step = math.gcd(*(place - placed[0] for place in placed)) or 1
    return {place: place // step for place in placed}


def layout_of(clip: X4kClip, frame: CutFrame) -> Layout:
    """The stream's geometry: half of the frame's; StreamError if its size is not made of such frames."""
    height, width, _ = read_frame(str(frame.blur)).shape
    wishes = StreamWishes(format="packed", height=height // 2, width=width // 2)
    return decide(clip.stream.stat().st_size, "bytes", wishes, where=str(clip.stream))


def cut(clip: X4kClip, frame: CutFrame, layout: Layout, exposure: int) -> np.ndarray:
    """The exposure's spike frames as they are stored, uint8 [T, F]; beyond the stream's ends all pixels fire.

    The set's author pads so. DataError if even the middle of the exposure is beyond.
    """
    stream_TF = map_stream(clip.stream, layout)
    if not 0 <= frame.centre < len(stream_TF):
        raise DataError(
            f"{clip.stream}: {len(stream_TF)} spike frames, and {frame.blur} is the {frame.centre}-th of its clip. The "
            "two do not belong together."
        )
    window_TF = np.full((exposure, stream_TF.shape[1]), 0xFF, np.uint8)
    first = frame.centre - exposure // 2
    kept = slice(max(first, 0), min(first + exposure, len(stream_TF)))
    window_TF[kept.start - first : kept.stop - first] = stream_TF[kept]
    return window_TF


class TreeError(DataError, RuntimeError):
    """A folder that is not there, or in the way."""


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Where from, where to, and how."""

    spike_root: Path
    blur_root: Path
    output: Path
    use_symlinks: bool = False
    blur_dir: str = "blur"
    splits: tuple[str, ...] = ("train", "test")
    exposure: int = EXPOSURES[0]
    """Spike frames of a blurry frame, for X4K1000FPS-Spike."""

    def __post_init__(self) -> None:
        if self.exposure not in EXPOSURES:
            raise ConfigError(f"--exposure {self.exposure}: X4K1000FPS-Spike has 33 and 65 spike frames per picture.")


@dataclass(frozen=True)
class Frames:
    """Of one sequence."""

    frames: int
    """Blurry ones."""
    usable: int
    """That have a sharp frame and a spike file of the same name."""


@dataclass
class Prepared:
    """What was made, and what was left out and why."""

    created: dict[str, dict[str, Frames]] = field(default_factory=dict)
    skipped: list[tuple[str, str | None, str]] = field(default_factory=list)
    """(split, sequence or None for a whole split, reason)."""


def prepare(config: PrepareConfig) -> Prepared:
    """Make the tree; TreeError if a root is missing or a real folder stands where a link should go."""
    for name in ("spike_root", "blur_root"):
        if not getattr(config, name).is_dir():
            raise TreeError(f"--{name} {getattr(config, name)}: no such folder. Give the root of that tree.")
    done = Prepared()
    for split in config.splits:
        is_x4k = spikes_root(config.spike_root, split).is_dir()
        (_cut_streams if is_x4k else _place_folders)(config, split, done)
    return done


def _place_folders(config: PrepareConfig, split: str, done: Prepared) -> None:
    """Whole folders, as the raw tree has them."""
    for sequence, reason, parts in sequences_of(RawTree(config.blur_root, config.spike_root, config.blur_dir), split):
        if reason:
            _skip(done, split, sequence, reason)
            continue
        assert sequence is not None
        for part, source in parts.items():
            _place(source, config.output / split / sequence / part, link=config.use_symlinks, copy=shutil.copytree)
        done.created.setdefault(split, {})[sequence] = _count(config.output / split / sequence)


def _cut_streams(config: PrepareConfig, split: str, done: Prepared) -> None:
    """Pictures one by one, under numbers in the order of time, and a spike file cut for each."""
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
                place = target / part / f"{name}{source.suffix}"
                _place(source, place, link=config.use_symlinks, copy=shutil.copyfile)
            (target / "spike" / f"{name}.dat").write_bytes(cut(clip, frame, layout, config.exposure).tobytes())
        # The geometry differs between the splits of this set, so it goes with the spikes.
        (target / "config.yaml").write_text(f"spike_h: {layout.height}\nspike_w: {layout.width}\n")
        num_blurry = len(stems_in(clip.blur, IMAGE_EXTS))
        done.created.setdefault(split, {})[clip.name] = Frames(num_blurry, len(frames))


def _skip(done: Prepared, split: str, sequence: str | None, reason: str) -> None:
    logger.warning("%s: skipped, %s.", "/".join(filter(None, (split, sequence))), REASONS[reason])
    done.skipped.append((split, sequence, reason))


def validation_names(names: Sequence[str], *, ratio: float, seed: int) -> list[str]:
    """Sequences to validate on: the first ones of the sorted names, shuffled."""
    shuffled = sorted(names)
    random.Random(seed).shuffle(shuffled)
    return shuffled[: max(1, int(ratio * len(shuffled)))]


def make_validation(output: Path, *, ratio: float, seed: int, train: str = "train") -> list[str]:
    """Links val/<seq> to train/<seq>; a training that validates on `val` leaves those sequences out."""
    names = [path.name for path in (output / train).iterdir() if path.is_dir()]
    chosen = validation_names(names, ratio=ratio, seed=seed)
    for name in chosen:
        _place(output / train / name, output / "val" / name, link=True, copy=shutil.copytree)
    return chosen


def _place(source: Path, target: Path, *, link: bool, copy: Callable[[Path, Path], object]) -> None:
    """A folder or a file, as a link or a copy; a copy that is there is left alone."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not link:
        if not target.exists():
            copy(source, target)
        return
    if target.is_symlink():
        target.unlink()
    elif target.exists():
        raise TreeError(
            f"{target} is a real {'folder' if target.is_dir() else 'file'} where a link to {source} should go. Move it "
            "away, or leave --use_symlinks out."
        )
    os.symlink(source.resolve(), target)


def _count(sequence: Path) -> Frames:
    blur, sharp = (stems_in(sequence / part, IMAGE_EXTS) for part in ("blur", "sharp"))
    spikes = stems_in(sequence / "spike", (".dat",))
    return Frames(len(blur), len(blur.keys() & sharp.keys() & spikes.keys()))
