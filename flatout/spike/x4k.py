"""X4K1000FPS-Spike (layout D): one stream per clip, cut into one file per blurry frame.

    <rgb>/{train,val}_blurry_{33,65}/<scene>/<sub>/*.png     <rgb>/{train,val}_fullRGB/<scene>/<sub>/*.png
    <spikes>/{train,val}_spike_2xds/<scene>/<sub>/spike.dat      packed, half the frames' height and width

A frame `a.png` is the 4a-th of its clip and `a_b.png` the (4a + b + 1)-th; its spikes are the 33 or 65 around that one.
Frames get numbers in the order of time, so that clips are made of neighbours; a missing frame leaves a gap.

Dimension key:  T spike frames   F bytes of a spike frame
"""

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.errors import DataError
from flatout.spike.frames import read_image
from flatout.spike.streams.decode import map_stream
from flatout.spike.streams.layout import Layout, StreamWishes, decide
from flatout.spike.tree import IMAGE_EXTS, stems_in

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
    height, width, _ = read_image(str(frame.blur)).shape
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
