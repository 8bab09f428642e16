"""Finds sequences on disk, and the frames of each that form a clip.

Dimension key:  L frames of a clip
"""

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

# Windows of frames: pure functions of names. Frames are paired by name, windows never span a gap, and an evaluation
# scores every frame once.


class ScoredWindow(NamedTuple):
    """A clip of an evaluation."""

    first: int
    """Position of its first frame in the run."""
    score_L: tuple[bool, ...]
    """Whether each frame is scored: those that no earlier window scores."""


def ordered(stems: Collection[str]) -> list[str]:
    """Stems sorted by number if all are numbers, else as text."""
    return sorted(stems, key=lambda stem: (int(stem), stem)) if _are_numbers(stems) else sorted(stems)


def usable_runs(blur: Collection[str], sharp: Collection[str], spike: Collection[str]) -> list[list[str]]:
    """Maximal runs of consecutive frames that have all three parts; numbers in a run increase by one."""
    numbered = _are_numbers(blur)
    complete = set(sharp) & set(spike)
    runs: list[list[str]] = []
    before: str | None = None
    for stem in ordered(blur):
        if stem in complete:
            if before is None or (numbered and int(stem) != int(before) + 1):
                runs.append([])
            runs[-1].append(stem)
        before = stem if stem in complete else None
    return runs


def training_windows(run_length: int, clip_length: int) -> range:
    """Positions in a run at which a training clip may begin."""
    return range(max(0, run_length - clip_length + 1))


def scored_windows(run_length: int, clip_length: int) -> list[ScoredWindow]:
    """Clips side by side; frames left over at the end are scored by a clip that is shifted back."""
    last = run_length - clip_length
    firsts = [*range(0, last, clip_length), last] if last >= 0 else []
    return [
        ScoredWindow(first, tuple(first + offset >= number * clip_length for offset in range(clip_length)))
        for number, first in enumerate(firsts)
    ]


def _are_numbers(stems: Collection[str]) -> bool:
    return all(stem.isascii() and stem.isdigit() for stem in stems)


# Sequences on disk

IMAGE_EXTS = (".png", ".jpg", ".jpeg", ".bmp")
VOXEL_EXTS = (".npy", ".npz")
MAX_DEPTH = 4
"""Levels of folders below a split that are searched; a sequence may be nested, as in scene/sub."""


class SequenceFiles(NamedTuple):
    """The files of one sequence, by stem."""

    name: str
    folder: Path
    blur: dict[str, Path]
    sharp: dict[str, Path]
    spike: dict[str, Path]
    """Streams, or precomputed voxels."""

    def runs(self) -> list[list[str]]:
        """Runs of consecutive frames that have all three parts."""
        return usable_runs(self.blur, self.sharp, self.spike)

    def first_missing(self) -> str:
        """Description of what the first incomplete frame lacks; empty if all frames are complete."""
        for stem in ordered(self.blur):
            for part, files in (("sharp frame", self.sharp), ("spike file", self.spike)):
                if stem not in files:
                    return f"{self.name}: frame {stem} has no {part}"
        return ""


def find_sequences(
    split: Path, *, spike_dir: str, image_exts: Sequence[str] = IMAGE_EXTS, spike_exts: Sequence[str] = (".dat",)
) -> list[SequenceFiles]:
    """Every folder below the split that holds `blur`, `sharp` and the spike folder, sorted by name."""
    return [
        SequenceFiles(
            folder.relative_to(split).as_posix(),
            folder,
            files_by_stem(folder / "blur", image_exts),
            files_by_stem(folder / "sharp", image_exts),
            files_by_stem(folder / spike_dir, spike_exts),
        )
        for folder in sorted(_sequence_folders(split, spike_dir, MAX_DEPTH))
    ]


def files_by_stem(folder: Path, endings: Sequence[str]) -> dict[str, Path]:
    """Files with these endings by stem; of equal stems, the file whose ending is listed first."""
    rank = {ending.lower(): number for number, ending in enumerate(endings)}
    found: dict[str, Path] = {}
    for entry in sorted(os.listdir(folder)) if folder.is_dir() else ():
        stem, ending = os.path.splitext(entry)
        if ending.lower() in rank:
            known = found.get(stem)
            if known is None or rank[ending.lower()] < rank[known.suffix.lower()]:
                found[stem] = folder / entry
    return found


def _sequence_folders(folder: Path, spike_dir: str, levels: int) -> Iterator[Path]:
    for below in sorted(path for path in folder.iterdir() if path.is_dir()):
        if all((below / part).is_dir() for part in ("blur", "sharp", spike_dir)):
            yield below
        elif levels > 1:
            yield from _sequence_folders(below, spike_dir, levels - 1)
