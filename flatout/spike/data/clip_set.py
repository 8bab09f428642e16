"""The clips of a split: which frames form each clip, and how every file is read.

    folders --pair by name--> runs --windows--> clips        .dat files --content, sizes--> one decision for the split

Problems of the data are found here, before a training begins. Of the frames, only one per sequence is decoded.

Dimension key:  N clips   L frames of a clip
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
from flatout.spike.data.layouts import SequenceFrames, stream_layouts, voxel_layouts
from flatout.spike.data.stream_files import STREAM_EXTS
from flatout.spike.data.stream_layout import Layout
from flatout.spike.data.tree import VOXEL_EXTS, SequenceFiles, find_sequences, scored_windows, training_windows

logger = logging.getLogger(__name__)

# The part of a spike frame that corresponds to a crop of the RGB frame
#
# Per axis with N RGB and M spike pixels: g = gcd(N, M), b = N / g, a = M / g. A crop whose origin and size are
# multiples of b corresponds to whole spike pixels; only such origins are drawn.


class SpikeSpan(NamedTuple):
    """A range of pixels along one axis of a spike frame."""

    start: int
    length: int
    is_exact: bool


def exact_step(rgb: int, spike: int) -> int:
    """The step b: origins that are multiples of it correspond to whole spike pixels."""
    return rgb // math.gcd(rgb, spike)


def num_origins(rgb: int, spike: int, size: int, where: str = "") -> int:
    """Number of possible crop origins along an axis; `where` begins the ConfigError if there are none."""
    if size > rgb:
        raise ConfigError(
            f"{where}CROP_SIZE={size} is larger than a side of the frames, which has {rgb} px. Use a smaller one, or "
            "null for whole frames."
        )
    return (rgb - size) // exact_step(rgb, spike) + 1


def spike_span(rgb: int, spike: int, *, origin: int, size: int) -> SpikeSpan:
    """The spike pixels of the RGB pixels origin .. origin + size - 1; the nearest ones if there is no exact range."""
    step = exact_step(rgb, spike)
    if origin % step == 0 and size % step == 0:
        ratio = spike // math.gcd(rgb, spike)
        return SpikeSpan(origin // step * ratio, size // step * ratio, True)
    length = max(1, round(size * spike / rgb))  # round() rounds halves to even, as specified
    return SpikeSpan(min(origin * spike // rgb, spike - length), length, False)


# The clips of a split

MAX_LOST_SHARE = 0.1
"""Share of a split's frames that may be in no clip without a warning."""
HINT = "Prepare the data with: flatout spike prepare --spike_root ... --blur_root ... --output ..."


class NoSamples(DataError, RuntimeError):
    """A split without a single clip."""


class ClipFrame(NamedTuple):
    """The files of one frame."""

    sequence: int
    """Number of its sequence."""
    stem: str
    blur: str
    sharp: str
    spike: str
    """A stream, or a precomputed voxel."""
    num_spike_frames: int
    """Spike frames of the stream; 0 if unknown for a precomputed voxel."""


class SequenceFacts(NamedTuple):
    """What all frames of a sequence share. Its text is part of fingerprints: do not rename it or its fields."""

    name: str
    rgb_hw: tuple[int, int]
    layout: Layout
    """Layout of its spike files, with the number of frames of the first."""

    @property
    def spike_hw(self) -> tuple[int, int]:
        return self.layout.height, self.layout.width

    @property
    def crop_steps(self) -> tuple[int, int]:
        """Steps of exact crop origins along y and x, in RGB pixels."""
        return exact_step(self.rgb_hw[0], self.spike_hw[0]), exact_step(self.rgb_hw[1], self.spike_hw[1])


@dataclass(frozen=True)
class ClipSet:
    """The clips of a split. Pickled for workers."""

    where: str
    """Folder of the split."""
    sequences: list[SequenceFacts]
    frames: list[ClipFrame]
    windows_NL: np.ndarray
    """Frame numbers of each clip, int64."""
    score_NL: np.ndarray
    """Whether each frame is scored in an evaluation, bool."""
    precomputed: bool
    """Whether spikes are precomputed voxels."""

    def __len__(self) -> int:
        return len(self.windows_NL)

    @property
    def clip_length(self) -> int:
        return int(self.windows_NL.shape[1])

    def layout_of(self, frame: int) -> Layout:
        """The layout of the stream of a frame."""
        each = self.frames[frame]
        return replace(self.sequences[each.sequence].layout, frames=each.num_spike_frames)

    def sequence_of(self, clip: int) -> SequenceFacts:
        return self.sequences[self.frames[int(self.windows_NL[clip, 0])].sequence]

    def name_of(self, clip: int) -> str:
        first, last = (self.frames[int(self.windows_NL[clip, end])] for end in (0, -1))
        return f"{self.where}/{self.sequences[first.sequence].name} frames {first.stem} to {last.stem}"

    def fingerprint(self) -> str:
        """A digest that changes when a frame is added or removed, or when its stream is read in another way."""
        facts = [[(each.stem, each.num_spike_frames, each.sequence) for each in self.frames]]
        digest = hashlib.sha256(json.dumps([facts, [str(each) for each in self.sequences]]).encode())
        digest.update(np.ascontiguousarray(self.windows_NL).tobytes())
        return digest.hexdigest()


def open_clips(config: DataConfig, split: str, *, scored: bool, without: Sequence[str] = ()) -> ClipSet:
    """The clips of a split; `scored`: for an evaluation, else for training. `without` names sequences to leave out."""
    root = Path(config.ROOT) / split
    if not root.is_dir():
        raise NoSamples(f"{root}: no such folder (DATA.ROOT={config.ROOT}). {HINT}")
    return clips_of(config, root, [each for each in sequence_files(config, split) if each.name not in without], scored)


def clips_of(config: DataConfig, root: Path, sequences: Sequence[SequenceFiles], scored: bool) -> ClipSet:
    """The clips of these sequences; NoSamples if there are none."""
    windows = {each.name: list(_windows(each, config, scored)) for each in sequences}
    for name in (name for name, found in windows.items() if not found):
        logger.warning("%s/%s: no clip, because no %d consecutive frames are complete.", root, name, config.CLIP_LEN)
    kept = [each for each in sequences if windows[each.name]]
    if not kept:
        raise NoSamples(_nothing(root, sequences, config))
    chosen = [SequenceFrames(each, _stems(windows[each.name])) for each in kept]
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
    """The sequences of a split, with streams or precomputed voxels as configured."""
    pre = config.USE_PRECOMPUTED_VOXELS
    return find_sequences(
        Path(config.ROOT) / split,
        spike_dir=config.VOXEL_CACHE_DIRNAME if pre else config.SPIKE_DIR,
        image_exts=config.IMAGE_EXTS,
        spike_exts=VOXEL_EXTS if pre else STREAM_EXTS,
    )


def validation_split(config: DataConfig) -> str | None:
    """The first of VAL_SPLIT, `val`, `test` that exists and is not TRAIN_SPLIT, with a warning if it is another.

    None, with a warning, if there is none.
    """
    for name in dict.fromkeys((config.VAL_SPLIT, "val", "test")):
        if name != config.TRAIN_SPLIT and (Path(config.ROOT) / name).is_dir():
            if name != config.VAL_SPLIT:
                why = "is the training split" if config.VAL_SPLIT == config.TRAIN_SPLIT else "does not exist"
                logger.warning("DATA.VAL_SPLIT=%s %s: %s is used for validation.", config.VAL_SPLIT, why, name)
            return name
    logger.warning("There is no split to validate on, so there is no validation.")
    return None


def shared_sequences(config: DataConfig, split: str) -> list[str]:
    """Training sequences whose files are also in a validation split, usually through links."""
    val = {os.path.realpath(each.folder / "blur") for each in sequence_files(config, split)}
    return [
        each.name
        for each in sequence_files(config, config.TRAIN_SPLIT)
        if os.path.realpath(each.folder / "blur") in val
    ]


def open_training(config: DataConfig) -> tuple[ClipSet, ClipSet | None]:
    """The clips to train on and to validate on; sequences in both are only validated on."""
    split = validation_split(config)
    if split is None:
        return open_clips(config, config.TRAIN_SPLIT, scored=False), None
    shared = shared_sequences(config, split)
    if shared:
        logger.info(
            "%d sequences are in %s too, and are left out of training: %s.", len(shared), split, ", ".join(shared)
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
    config: DataConfig, chosen: Sequence[SequenceFrames]
) -> tuple[list[SequenceFacts], list[ClipFrame], dict[tuple[str, str], int]]:
    """Facts of all sequences, all frames, and the number of each frame by sequence and stem."""
    layouts = (voxel_layouts if config.USE_PRECOMPUTED_VOXELS else stream_layouts)(config, chosen)
    facts: list[SequenceFacts] = []
    frames: list[ClipFrame] = []
    numbers: dict[tuple[str, str], int] = {}
    for files, stems in chosen:
        facts.append(SequenceFacts(files.name, _size_hw(files, stems), layouts[files.spike[stems[0]]]))
        for stem in stems:
            layout = layouts[files.spike[stem]]
            _check_geometry(facts[-1], layout, files.spike[stem])
            numbers[files.name, stem] = len(frames)
            blur, sharp, spike = (str(part[stem]) for part in (files.blur, files.sharp, files.spike))
            frames.append(ClipFrame(len(facts) - 1, stem, blur, sharp, spike, layout.frames))
    return facts, frames, numbers


def _size_hw(files: SequenceFiles, stems: Sequence[str]) -> tuple[int, int]:
    """Size of the frames of a sequence, from the first that can be read."""
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
            f"{path}: spike frames of {layout.height} x {layout.width} in a sequence whose first file has "
            f"{facts.spike_hw[0]} x {facts.spike_hw[1]}. Remove the file, or set SPIKE_H and SPIKE_W."
        )


def _check_ratios(facts: Sequence[SequenceFacts], root: Path) -> None:
    """DataError unless all sequences have the same ratio of RGB to spike pixels; only then can crops share a batch."""

    def ratio(each: SequenceFacts) -> tuple[float, float]:
        return each.rgb_hw[0] / each.spike_hw[0], each.rgb_hw[1] / each.spike_hw[1]

    first_of: dict[tuple[float, float], SequenceFacts] = {}
    for each in facts:
        first_of.setdefault(ratio(each), each)
    if len(first_of) > 1:
        listed = ", ".join(
            f"{each.name} (RGB {each.rgb_hw[0]} x {each.rgb_hw[1]}, spikes {each.spike_hw[0]} x {each.spike_hw[1]})"
            for each in list(first_of.values())[:8]
        )
        raise DataError(
            f"{root}: sequences with different ratios of RGB to spike pixels cannot share a batch: {listed}. "
            "Train on them separately."
        )


def _warn_of_lost_frames(root: Path, sequences: Sequence[SequenceFiles], num_used: int) -> None:
    """Warn if more than a tenth of the frames are in no clip, for example because files were not copied."""
    total = sum(len(each.blur) for each in sequences)
    if total - num_used > MAX_LOST_SHARE * total:
        missing = next(filter(None, (each.first_missing() for each in sequences)), "runs of frames are too short")
        logger.warning("%s: %d of %d frames are in no clip: %s. %s", root, total - num_used, total, missing, HINT)


def _nothing(root: Path, sequences: Sequence[SequenceFiles], config: DataConfig) -> str:
    missing = next(filter(None, (each.first_missing() for each in sequences)), "")
    names = ", ".join(each.name for each in sequences[:5]) or "none"
    return (
        f"No valid samples found in {root}: {len(sequences)} sequences ({names}), none with {config.CLIP_LEN} "
        f"consecutive complete frames (CLIP_LEN). {missing + '. ' if missing else ''}{HINT}"
    )
