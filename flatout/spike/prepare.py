"""The unified tree: blur, sharp and spike of every sequence side by side, as links or copies.

    raw trees (raw_trees.py, x4k.py) --> <output>/{train,test}/<seq>/{blur,sharp,spike}/

What is incomplete is skipped and named. Running it again is harmless.
"""

import logging
import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flatout.errors import ConfigError, DataError
from flatout.spike import x4k
from flatout.spike.raw_trees import REASONS, RawTree, sequences_of
from flatout.spike.tree import IMAGE_EXTS, stems_in

logger = logging.getLogger(__name__)


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
    exposure: int = x4k.EXPOSURES[0]
    """Spike frames of a blurry frame, for X4K1000FPS-Spike."""

    def __post_init__(self) -> None:
        if self.exposure not in x4k.EXPOSURES:
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
        is_x4k = x4k.spikes_root(config.spike_root, split).is_dir()
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
    for clip in x4k.clips_in(config.blur_root, config.spike_root, split, config.exposure):
        frames = x4k.frames_of(clip)
        if not frames:
            _skip(done, split, clip.name, "no_blur_or_sharp")
            continue
        layout = x4k.layout_of(clip, frames[0])
        target = config.output / split / clip.name
        (target / "spike").mkdir(parents=True, exist_ok=True)
        for frame in frames:
            name = f"{frame.number:06d}"
            for part, source in (("blur", frame.blur), ("sharp", frame.sharp)):
                place = target / part / f"{name}{source.suffix}"
                _place(source, place, link=config.use_symlinks, copy=shutil.copyfile)
            (target / "spike" / f"{name}.dat").write_bytes(x4k.cut(clip, frame, layout, config.exposure).tobytes())
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
