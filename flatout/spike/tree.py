"""Sequences on disk: which folders are sequences, and which frames they hold, by name."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from flatout.spike.clips import ordered, usable_runs

IMAGE_EXTS = (".png", ".jpg", ".jpeg", ".bmp")
VOXEL_EXTS = (".npy", ".npz")
MOST_LEVELS = 4
"""A sequence may be nested: scene/sub."""


class SequenceFiles(NamedTuple):
    """The files of one sequence by stem."""

    name: str
    folder: Path
    blur: dict[str, Path]
    sharp: dict[str, Path]
    spike: dict[str, Path]
    """Streams, or precomputed voxels."""

    def runs(self) -> list[list[str]]:
        """Runs of neighbouring frames that have all three parts."""
        return usable_runs(self.blur, self.sharp, self.spike)

    def first_missing(self) -> str:
        """What keeps the first incomplete frame from being used; empty if all are complete."""
        for stem in ordered(self.blur):
            for part, files in (("sharp frame", self.sharp), ("spike file", self.spike)):
                if stem not in files:
                    return f"{self.name}: frame {stem} has no {part}"
        return ""


def find_sequences(
    split: Path, *, spike_dir: str, image_exts: Sequence[str] = IMAGE_EXTS, spike_exts: Sequence[str] = (".dat",)
) -> list[SequenceFiles]:
    """Every folder below the split that holds `blur`, `sharp` and the spike folder, by name."""
    return [
        SequenceFiles(
            folder.relative_to(split).as_posix(),
            folder,
            stems_in(folder / "blur", image_exts),
            stems_in(folder / "sharp", image_exts),
            stems_in(folder / spike_dir, spike_exts),
        )
        for folder in sorted(_sequence_folders(split, spike_dir, MOST_LEVELS))
    ]


def stems_in(folder: Path, endings: Sequence[str]) -> dict[str, Path]:
    """Files by name without ending; of equal names the one whose ending is listed first."""
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
