"""A split, opened: which clips there are, and how every file of them is to be read. No pixel is decoded yet.

    folders --pair by name--> runs --windows--> clips        .dat files --content, sizes--> one decision for the split

Everything that would spoil a training is found here, before it begins.

Dimension key:  N clips   L frames of a clip   S sequences   F frames of all sequences
"""

import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.errors import ConfigError, DataError
from flatout.feed import DecodeError
from flatout.spike.config import DataConfig
from flatout.spike.data.frames import read_frame
from flatout.spike.data.layouts import Chosen, stream_layouts, voxel_layouts
from flatout.spike.data.stream_layout import Layout
from flatout.spike.data.tree import VOXEL_EXTS, SequenceFiles, find_sequences, scored_windows, training_windows

logger = logging.getLogger(__name__)

# Which part of the spike picture belongs to a crop of the RGB frame?
#
# Per axis with N RGB and M spike pixels: g = gcd(N, M), b = N / g, a = M / g. A crop whose origin and size are
# multiples of b has an exact partner; the sampler draws only such origins.


class Span(NamedTuple):
    """A stretch of one axis of the spike picture."""

    start: int
    length: int
    is_exact: bool


def step_of(rgb: int, spike: int) -> int:
    """Origins that are multiples of this have an exact partner (b)."""
    return rgb // math.gcd(rgb, spike)


def num_origins(rgb: int, spike: int, size: int) -> int:
    """How many origins the sampler chooses from along an axis."""
    if size > rgb:
        raise ConfigError(
            f"CROP_SIZE={size} is larger than a frame of {rgb} px: use a smaller crop, or null for whole frames."
        )
    return (rgb - size) // step_of(rgb, spike) + 1


def spike_span(rgb: int, spike: int, *, origin: int, size: int) -> Span:
    """The spike pixels of RGB pixels origin .. origin + size - 1; nearest if there is no exact answer."""
    step = step_of(rgb, spike)
    if origin % step == 0 and size % step == 0:
        ratio = spike // math.gcd(rgb, spike)
        return Span(origin // step * ratio, size // step * ratio, True)
    length = max(1, round(size * spike / rgb))  # Python rounds halves to even, as the rule says
    return Span(min(origin * spike // rgb, spike - length), length, False)


MOST_LOST = 0.1
"""Share of a split's frames that may be in no clip without a word."""
HINT = "Make the tree with: flatout spike prepare --spike_root ... --blur_root ... --output ..."


class NoSamples(DataError, RuntimeError):
    """A split without a single clip."""


class Frame(NamedTuple):
    """One frame with its stream."""

    sequence: int
    stem: str
    blur: str
    sharp: str
    spike: str
    """A stream, or a precomputed voxel."""
    num_spike_frames: int
    """Of the stream; 0 if a precomputed voxel does not tell."""


class SequenceFacts(NamedTuple):
    """What all frames of a sequence have in common."""

    name: str
    rgb_hw: tuple[int, int]
    layout: Layout
    """Its number of frames is that of the first file."""

    @property
    def spike_hw(self) -> tuple[int, int]:
        return self.layout.height, self.layout.width

    @property
    def steps(self) -> tuple[int, int]:
        return step_of(self.rgb_hw[0], self.spike_hw[0]), step_of(self.rgb_hw[1], self.spike_hw[1])


@dataclass(frozen=True)
class ClipSet:
    """The clips of a split. Plain and picklable: workers get it."""

    where: str
    sequences: list[SequenceFacts]
    frames: list[Frame]
    windows_NL: np.ndarray
    """Frame numbers, int64."""
    score_NL: np.ndarray
    """Frames that count in a validation, bool."""
    precomputed: bool

    def __len__(self) -> int:
        return len(self.windows_NL)

    @property
    def clip_length(self) -> int:
        return int(self.windows_NL.shape[1])

    def layout_of(self, frame: int) -> Layout:
        """How the stream of a frame is read."""
        each = self.frames[frame]
        return replace(self.sequences[each.sequence].layout, frames=each.num_spike_frames)

    def sequence_of(self, clip: int) -> SequenceFacts:
        return self.sequences[self.frames[int(self.windows_NL[clip, 0])].sequence]

    def name_of(self, clip: int) -> str:
        first, last = (self.frames[int(self.windows_NL[clip, end])] for end in (0, -1))
        return f"{self.where}/{self.sequences[first.sequence].name} frames {first.stem} to {last.stem}"

    def fingerprint(self) -> str:
        """Changes when a frame comes or goes, or its stream is read in another way."""
        facts = [[(each.stem, each.num_spike_frames, each.sequence) for each in self.frames]]
        digest = hashlib.sha256(json.dumps([facts, [str(each) for each in self.sequences]]).encode())
        digest.update(np.ascontiguousarray(self.windows_NL).tobytes())
        return digest.hexdigest()


def open_clips(config: DataConfig, split: str, *, scored: bool, without: Sequence[str] = ()) -> ClipSet:
    """The clips of a split; `scored`: of a validation. `without` names sequences to leave out."""
    root = Path(config.ROOT) / split
    if not root.is_dir():
        raise NoSamples(f"{root}: no such split (DATA.ROOT={config.ROOT}). {HINT}")
    return clips_of(config, root, [each for each in sequence_files(config, split) if each.name not in without], scored)


def clips_of(config: DataConfig, root: Path, sequences: Sequence[SequenceFiles], scored: bool) -> ClipSet:
    """The clips of these sequences; NoSamples if there is none."""
    windows = {each.name: list(_windows(each, config, scored)) for each in sequences}
    for name in (name for name, found in windows.items() if not found):
        logger.warning("%s/%s: no %d neighbouring whole frames, so no clip.", root, name, config.CLIP_LEN)
    kept = [each for each in sequences if windows[each.name]]
    if not kept:
        raise NoSamples(_nothing(root, sequences, config))
    chosen = [Chosen(each, _stems(windows[each.name])) for each in kept]
    facts, frames, numbers = _frames(config, chosen)
    _check_ratios(facts, root)
    _warn_of_lost_frames(root, sequences, len(frames))
    all_windows = [(each.name, window) for each in kept for window in windows[each.name]]
    return ClipSet(
        str(root),
        facts,
        frames,
        np.array([[numbers[name, stem] for stem in window.stems] for name, window in all_windows]),
        np.array([window.score_L for _, window in all_windows], bool),
        config.USE_PRECOMPUTED_VOXELS,
    )


def sequence_files(config: DataConfig, split: str) -> list[SequenceFiles]:
    """The sequences of a split with the kind of spike files that the config asks for."""
    pre = config.USE_PRECOMPUTED_VOXELS
    return find_sequences(
        Path(config.ROOT) / split,
        spike_dir=config.VOXEL_CACHE_DIRNAME if pre else config.SPIKE_DIR,
        image_exts=config.IMAGE_EXTS,
        spike_exts=VOXEL_EXTS if pre else (".dat",),
    )


def validation_split(config: DataConfig) -> str | None:
    """The split to validate on: as named, else `val`, else `test`, else none."""
    for name in dict.fromkeys((config.VAL_SPLIT, "val", "test")):
        if name != config.TRAIN_SPLIT and (Path(config.ROOT) / name).is_dir():
            if name != config.VAL_SPLIT:
                logger.warning("DATA.VAL_SPLIT=%s does not exist: validating on %s.", config.VAL_SPLIT, name)
            return name
    logger.warning("There is no split to validate on: the training goes without.")
    return None


def shared_sequences(config: DataConfig, split: str) -> list[str]:
    """Training sequences that are the same files as some of a validation split: links into it, usually."""
    val = {os.path.realpath(each.folder / "blur") for each in sequence_files(config, split)}
    return [
        each.name
        for each in sequence_files(config, config.TRAIN_SPLIT)
        if os.path.realpath(each.folder / "blur") in val
    ]


def open_training(config: DataConfig) -> tuple[ClipSet, ClipSet | None]:
    """The clips to train and to validate on; what is validated on is not trained on."""
    split = validation_split(config)
    if split is None:
        return open_clips(config, config.TRAIN_SPLIT, scored=False), None
    shared = shared_sequences(config, split)
    if shared:
        logger.info(
            "%d sequences of %s are validated on and left out of training: %s.", len(shared), split, ", ".join(shared)
        )
    return open_clips(config, config.TRAIN_SPLIT, scored=False, without=shared), open_clips(config, split, scored=True)


class _Window(NamedTuple):
    stems: list[str]
    score_L: tuple[bool, ...]


def _windows(files: SequenceFiles, config: DataConfig, scored: bool) -> Iterator[_Window]:
    """The clips of a sequence, in order."""
    length = config.CLIP_LEN
    for run in files.runs():
        if scored and config.VAL_CLIP_STRIDE == "clip":
            for first, score_L in scored_windows(len(run), length):
                yield _Window(run[first : first + length], score_L)
        else:
            for first in training_windows(len(run), length):
                yield _Window(run[first : first + length], (True,) * length)


def _stems(windows: Sequence[_Window]) -> list[str]:
    return list(dict.fromkeys(stem for window in windows for stem in window.stems))


def _frames(
    config: DataConfig, chosen: Sequence[Chosen]
) -> tuple[list[SequenceFacts], list[Frame], dict[tuple[str, str], int]]:
    """Facts of all sequences, their frames, and the number of each frame by sequence and stem."""
    layouts = (voxel_layouts if config.USE_PRECOMPUTED_VOXELS else stream_layouts)(config, chosen)
    facts: list[SequenceFacts] = []
    frames: list[Frame] = []
    numbers: dict[tuple[str, str], int] = {}
    for files, stems in chosen:
        facts.append(SequenceFacts(files.name, _size_hw(files, stems), layouts[files.spike[stems[0]]]))
        for stem in stems:
            layout = layouts[files.spike[stem]]
            _check_geometry(facts[-1], layout, files.spike[stem])
            numbers[files.name, stem] = len(frames)
            blur, sharp, spike = (str(part[stem]) for part in (files.blur, files.sharp, files.spike))
            frames.append(Frame(len(facts) - 1, stem, blur, sharp, spike, layout.frames))
    return facts, frames, numbers


def _size_hw(files: SequenceFiles, stems: Sequence[str]) -> tuple[int, int]:
    """Size of the frames of a sequence, by the first that can be read."""
    errors: list[Exception] = []
    for stem in stems:
        try:
            height, width, _ = read_frame(str(files.blur[stem])).shape
        except (OSError, DecodeError) as error:
            errors.append(error)
        else:
            return height, width
    raise DataError(f"{files.folder}: none of {len(stems)} blurry frames can be read; the first: {errors[0]}")


def _check_geometry(facts: SequenceFacts, layout: Layout, path: Path) -> None:
    if (layout.height, layout.width) != facts.spike_hw:
        raise DataError(
            f"{path}: {layout.height} x {layout.width} spikes in a sequence whose first file has "
            f"{facts.spike_hw[0]} x {facts.spike_hw[1]}. Move the file away, or set SPIKE_H and SPIKE_W."
        )


def _check_ratios(facts: Sequence[SequenceFacts], root: Path) -> None:
    """Crops of sequences of different size may share a batch if a spike pixel covers as many RGB pixels in all."""

    def ratio(each: SequenceFacts) -> tuple[float, float]:
        return each.rgb_hw[0] / each.spike_hw[0], each.rgb_hw[1] / each.spike_hw[1]

    if any(ratio(each) != ratio(facts[0]) for each in facts):
        listed = ", ".join(
            f"{each.name} (RGB {each.rgb_hw[0]} x {each.rgb_hw[1]}, spikes {each.spike_hw[0]} x {each.spike_hw[1]})"
            for each in facts[:8]
        )
        raise DataError(
            f"{root}: sequences with different ratios of RGB to spike pixels cannot share a batch: {listed}. "
            "Train them apart."
        )


def _warn_of_lost_frames(root: Path, sequences: Sequence[SequenceFiles], num_used: int) -> None:
    """Say so where more than a tenth of the frames are in no clip: half of a sequence may have been left behind."""
    total = sum(len(each.blur) for each in sequences)
    if total - num_used > MOST_LOST * total:
        missing = next(filter(None, (each.first_missing() for each in sequences)), "runs of frames are too short")
        logger.warning("%s: %d of %d frames are in no clip: %s. %s", root, total - num_used, total, missing, HINT)


def _nothing(root: Path, sequences: Sequence[SequenceFiles], config: DataConfig) -> str:
    missing = next(filter(None, (each.first_missing() for each in sequences)), "")
    names = ", ".join(each.name for each in sequences[:5]) or "none"
    return (
        f"No valid samples found in {root}: {len(sequences)} sequences ({names}), none with {config.CLIP_LEN} "
        f"neighbouring whole frames (CLIP_LEN). {missing + '. ' if missing else ''}{HINT}"
    )
