"""The unified tree: blur, sharp and spike of every sequence side by side, as links or copies.

    layout A   <rgb>/{train,test}/<seq>/{blur,blur_gamma,sharp}/     <spikes>/{train,test}/<seq>/spike/
    layout B   <rgb>/{train,test}_GT_blurred/<seq>/, {train,test}_GT/<seq>/     spikes as above
    unified    <output>/{train,test}/<seq>/{blur,sharp,spike}/

What is incomplete is skipped and named. Running it again is harmless.
"""

import logging
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flatout.errors import DataError
from flatout.spike.tree import IMAGE_EXTS, stems_in

logger = logging.getLogger(__name__)

PARTS = ("blur", "sharp", "spike")


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


REASONS = {
    "no_spike_split": "the spike tree has no such split",
    "no_gopro_split": "the RGB tree has no such split",
    "no_gopro_sequence": "the RGB tree has no such sequence",
    "no_blur_or_sharp": "its blurry or sharp frames are missing",
    "no_spike_dir": "its folder 'spike' is missing",
}


def prepare(config: PrepareConfig) -> Prepared:
    """Make the tree; TreeError if a root is missing or a real folder stands where a link should go."""
    for name in ("spike_root", "blur_root"):
        if not getattr(config, name).is_dir():
            raise TreeError(f"--{name} {getattr(config, name)}: no such folder. Give the root of that tree.")
    done = Prepared()
    for split in config.splits:
        for sequence, reason, sources in _sequences(config, split):
            if reason:
                logger.warning("%s: skipped, %s.", "/".join(filter(None, (split, sequence))), REASONS[reason])
                done.skipped.append((split, sequence, reason))
                continue
            assert sequence is not None
            for part, source in sources.items():
                _place(source, config.output / split / sequence / part, link=config.use_symlinks)
            done.created.setdefault(split, {})[sequence] = _count(config.output / split / sequence)
    return done


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
        _place(output / train / name, output / "val" / name, link=True)
    return chosen


def _sequences(config: PrepareConfig, split: str) -> Iterator[tuple[str | None, str, dict[str, Path]]]:
    """(sequence, reason to skip it or "", folders of its parts), by name, as the spike tree has them."""
    spikes = config.spike_root / split
    if not spikes.is_dir():
        yield None, "no_spike_split", {}
        return
    if not (config.blur_root / split).is_dir() and not _regrouped(config, split):
        yield None, "no_gopro_split", {}
        return
    for folder in sorted(path for path in spikes.iterdir() if path.is_dir()):
        yield folder.name, *_parts(config, split, folder)


def _parts(config: PrepareConfig, split: str, spikes: Path) -> tuple[str, dict[str, Path]]:
    if _regrouped(config, split):
        blur, sharp = (config.blur_root / f"{split}{end}" / spikes.name for end in ("_GT_blurred", "_GT"))
        is_known = blur.is_dir() or sharp.is_dir()
    else:
        sequence = config.blur_root / split / spikes.name
        blur, sharp = sequence / config.blur_dir, sequence / "sharp"
        is_known = sequence.is_dir()
    if not is_known:
        return "no_gopro_sequence", {}
    if not (blur.is_dir() and sharp.is_dir()):
        return "no_blur_or_sharp", {}
    if not (spikes / "spike").is_dir():
        return "no_spike_dir", {}
    return "", dict(zip(PARTS, (blur, sharp, spikes / "spike"), strict=True))


def _regrouped(config: PrepareConfig, split: str) -> bool:
    """Layout B."""
    return not (config.blur_root / split).is_dir() and (config.blur_root / f"{split}_GT").is_dir()


def _place(source: Path, target: Path, *, link: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not link:
        if not target.exists():
            shutil.copytree(source, target, symlinks=False)
        return
    if target.is_symlink():
        target.unlink()
    elif target.exists():
        raise TreeError(
            f"{target} is a real folder where a link to {source} should go. Move it away, or leave --use_symlinks out."
        )
    os.symlink(source.resolve(), target)


def _count(sequence: Path) -> Frames:
    blur, sharp = (stems_in(sequence / part, IMAGE_EXTS) for part in ("blur", "sharp"))
    spikes = stems_in(sequence / "spike", (".dat",))
    return Frames(len(blur), len(blur.keys() & sharp.keys() & spikes.keys()))
