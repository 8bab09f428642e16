"""Clips for the feed, cropped and flipped by workers, or as numbers for frames that live on the GPU.

    draw: origin, flips of every clip of a micro-batch -> read: cut, count, turn, straight into the batch's slot

Bytes travel, not floats: frames as uint8, spikes as counts. The device divides and normalises.

Dimension key:  N clips   M clips of a micro-batch   L frames   C channels   h w crop (RGB)   y x crop (spikes)
"""

import logging
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from flatout.errors import ConfigError
from flatout.feed import Field, Out, Substituted, Unreadable, keyed_uniform
from flatout.spike.config import AugmentConfig, DataConfig
from flatout.spike.data.clip_set import ClipSet, SequenceFacts, num_origins, spike_span
from flatout.spike.data.decode import Box
from flatout.spike.data.frames import PARTS, FrameItems, Frames, Shown
from flatout.spike.data.voxels import bin_edges, count_dtype

logger = logging.getLogger(__name__)

NUM_DRAWS = 6
"""Of every clip: row and column of the crop, and the four chances of AugmentConfig."""


class Turn(NamedTuple):
    """What is done to a clip after it is cut, in this order."""

    reverse: bool = False
    hflip: bool = False
    vflip: bool = False
    rot90: bool = False


def turned(pictures: np.ndarray, turn: Turn, *, rows: int) -> np.ndarray:
    """Flips and a quarter turn counter-clockwise over axes `rows` and `rows + 1`; a view. Time is not touched."""
    if turn.hflip:
        pictures = np.flip(pictures, rows + 1)
    if turn.vflip:
        pictures = np.flip(pictures, rows)
    return np.rot90(pictures, axes=(rows, rows + 1)) if turn.rot90 else pictures


def shown_of(config: DataConfig) -> Shown:
    """How the config shows spikes; precomputed voxels are trimmed already."""
    trim = (0, 0) if config.USE_PRECOMPUTED_VOXELS else config.SPIKE_TRIM
    return Shown(config.SPIKE_REPR, config.channels, trim, config.TFP_HALF_WINDOW)


def spike_dtype(clips: ClipSet, shown: Shown) -> np.dtype:
    """The smallest type that holds every channel of every clip."""
    if clips.precomputed:
        return np.dtype(np.float32)
    if shown.kind != "voxel":
        return np.dtype(np.uint8)
    longest = max(each.num_spike_frames for each in clips.frames)
    largest = 255 if any(each.layout.format == "bytes" for each in clips.sequences) else 1
    return count_dtype(longest, shown.channels, largest_value=largest)


class ClipSource:
    """Reads clips: random crops for training, whole frames where `crop` is None."""

    def __init__(
        self, clips: ClipSet, frames: Frames, shown: Shown, *, crop: int | None, augment: AugmentConfig | None = None
    ) -> None:
        self._clips, self._frames, self._shown = clips, frames, shown
        self._files = FrameItems(clips)
        self._crop = crop
        self._dtype = spike_dtype(clips, shown)
        augment = augment or AugmentConfig(HFLIP=0, VFLIP=0, ROT90=0)
        if crop is None and augment.ROT90:
            logger.warning("CROP_SIZE is null: whole frames are not square, so ROT90 is left out.")
        rot90 = augment.ROT90 if crop is not None else 0.0
        self._chances_4 = np.array([augment.REVERSE, augment.HFLIP, augment.VFLIP, rot90])
        largest = max(clips.sequences, key=lambda each: each.rgb_hw)
        if crop is not None:
            self._origins_S2 = np.array([_origins(each, crop) for each in clips.sequences])
        self._sequence_N = np.array([clips.frames[first].sequence for first in clips.windows_NL[:, 0]])
        self.fields = self._fields(largest)

    def __len__(self) -> int:
        return len(self._clips)

    def where(self, index: int) -> str:
        return self._clips.name_of(index)

    def shapes(self, clip: int) -> dict[str, tuple[int, ...]]:
        """Per-clip shapes of the fields whose size follows the sequence's."""
        return {name: self._fields(self._clips.sequence_of(clip))[name].shape for name in (*PARTS, "spikes")}

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        """`clip` int64 [M], `origin` int64 [M, 2] in RGB pixels, `turn` bool [M, 4]."""
        uniform_M6 = keyed_uniform(seed, epoch, positions, NUM_DRAWS)
        turn_M4 = uniform_M6[:, 2:] < self._chances_4
        if self._crop is None:
            return {"clip": indices, "origin": np.zeros((len(indices), 2), np.int64), "turn": turn_M4}
        sequences = self._sequence_N[indices]
        steps_S2 = np.array([each.steps for each in self._clips.sequences])
        origin_M2 = np.floor(uniform_M6[:, :2] * self._origins_S2[sequences]).astype(np.int64) * steps_S2[sequences]
        return {"clip": indices, "origin": origin_M2, "turn": turn_M4}

    @property
    def num_items(self) -> int:
        """Files."""
        return len(self._files)

    def where_item(self, item: int) -> str:
        return self._files.where(item)

    def substitute(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], unreadable: Unreadable) -> Substituted:
        """Other clips in place of those with an unreadable file: a clip is one scene, so that no frame can stand in."""
        is_bad_N = unreadable.is_bad_N[self._files.of_frames(self._clips.windows_NL)].any(1)
        is_bad_M, shown_M = is_bad_N[indices], indices.copy()
        shown_M[is_bad_M] = unreadable.stand_ins(np.flatnonzero(is_bad_M), indices[is_bad_M], is_bad_N)
        draws = self.draw(unreadable.seed, unreadable.epoch, unreadable.positions_M, shown_M)
        return Substituted(shown_M, draws, is_bad_M)

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        for row, index in enumerate(draws["clip"].tolist()):
            turn = Turn(*draws["turn"][row].tolist())
            self._read_clip(index, draws["origin"][row].tolist(), turn, out, row)

    def _read_clip(self, index: int, origin: list[int], turn: Turn, out: Out, row: int) -> None:
        facts = self._clips.sequence_of(index)
        frames = self._clips.windows_NL[index].tolist()
        rgb, spike = boxes_of(facts, origin, self._crop)
        for place, frame in enumerate(reversed(frames) if turn.reverse else frames):
            *pictures, stream = self._files.of_frames(np.array([frame])).tolist()
            for part, file in zip(PARTS, pictures, strict=True):
                image = out.fetch(file, partial(self._frames.image, frame, part))
                if image is not None:
                    cut = image[rgb.top : rgb.bottom, rgb.left : rgb.right]
                    out[part][row, place] = turned(cut, turn, rows=0)
            spikes = out.fetch(stream, partial(self._frames.spikes, frame, spike, self._dtype))
            if spikes is None:
                continue
            channels = turned(spikes, turn, rows=1)
            counts = self._shown.frames_of(self._clips.frames[frame].num_spike_frames)
            out["spikes"][row, place] = channels[::-1] if turn.reverse else channels
            out["spike_frames"][row, place] = counts[::-1] if turn.reverse else counts
        out["score"][row] = self._clips.score_NL[index]

    def _fields(self, facts: SequenceFacts) -> dict[str, Field]:
        length, channels = self._clips.clip_length, self._shown.channels
        rgb, spike = boxes_of(facts, [0, 0], self._crop)
        image = Field((length, rgb.bottom, rgb.right, 3), np.uint8)
        return {
            "blur": image,
            "sharp": image,
            "spikes": Field((length, channels, spike.bottom - spike.top, spike.right - spike.left), self._dtype),
            "spike_frames": Field((length, channels), np.float32),
            "score": Field((length,), np.uint8),
        }


def boxes_of(facts: SequenceFacts, origin: list[int], crop: int | None) -> tuple[Box, Box]:
    """The crop in the frame and in the spike picture."""
    if crop is None:
        return Box(0, 0, *facts.rgb_hw), Box(0, 0, *facts.spike_hw)
    spans = [
        spike_span(rgb, spike, origin=start, size=crop)
        for rgb, spike, start in zip(facts.rgb_hw, facts.spike_hw, origin, strict=True)
    ]
    return (
        Box(origin[0], origin[1], crop, crop),
        Box(spans[0].start, spans[1].start, spans[0].length, spans[1].length),
    )


def _origins(facts: SequenceFacts, crop: int) -> tuple[int, int]:
    """How many origins there are to choose from, per axis."""
    sizes = list(zip(facts.rgb_hw, facts.spike_hw, facts.steps, strict=True))
    if any(crop % step for _, _, step in sizes):
        logger.warning(
            "%s: CROP_SIZE=%d has no exact partner in the spike picture (multiples of %d have): the nearest pixels are "
            "taken.", facts.name, crop, max(step for _, _, step in sizes),
        )  # fmt: skip
    try:
        rows, columns = (num_origins(rgb, spike, crop) for rgb, spike, _ in sizes)
    except ConfigError as error:
        raise ConfigError(f"{facts.name}: {error}") from None
    return rows, columns


# What workers do when frames live on the GPU: draw, and say which frames, where, and turned how. No torch.
#
# Dimension key:  L frames   C bins


class NumbersSource:
    """What the device needs to know of a clip; draws exactly as the source of whole clips does."""

    def __init__(self, clips: ClipSet, whole: ClipSource, shown: Shown, *, crop: int) -> None:
        self._clips, self._whole, self._shown, self._crop = clips, whole, shown, crop
        self._files = FrameItems(clips)
        length, channels = clips.clip_length, shown.channels
        self.fields = {
            "items": Field((3 * length,), np.int64),
            "corner": Field((4,), np.int64),
            "spike_hw": Field((2,), np.int64),
            "turn": Field((4,), np.uint8),
            "bin_start": Field((length, channels), np.int64),
            "spike_frames": Field((length, channels), np.float32),
            "score": Field((length,), np.uint8),
        }

    def __len__(self) -> int:
        return len(self._clips)

    def where(self, index: int) -> str:
        return self._clips.name_of(index)

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        return self._whole.draw(seed, epoch, positions, indices)

    @property
    def num_items(self) -> int:
        return self._whole.num_items

    def where_item(self, item: int) -> str:
        return self._whole.where_item(item)

    def substitute(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], unreadable: Unreadable) -> Substituted:
        return self._whole.substitute(indices, draws, unreadable)

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        for row, index in enumerate(draws["clip"].tolist()):
            turn = draws["turn"][row]
            frames = self._clips.windows_NL[index][:: -1 if turn[0] else 1]
            facts = self._clips.sequence_of(index)
            rgb, spike = boxes_of(facts, draws["origin"][row].tolist(), self._crop)
            out["items"][row] = self._files.of_frames(frames)
            out["corner"][row] = rgb.top, rgb.left, spike.top, spike.left
            out["spike_hw"][row] = facts.spike_hw
            out["turn"][row] = turn
            for place, frame in enumerate(frames.tolist()):
                count = self._clips.frames[frame].num_spike_frames - sum(self._shown.trim)
                edges = bin_edges(count, self._shown.channels)
                order = slice(None, None, -1 if turn[0] else 1)
                out["bin_start"][row, place] = edges[:-1][order] + self._shown.trim[0]
                out["spike_frames"][row, place] = np.diff(edges)[order]
            out["score"][row] = self._clips.score_NL[index]
