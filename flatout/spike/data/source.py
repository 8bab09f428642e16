"""Sources of clips: cropped and flipped by workers, or as parameters for a GPU renderer.

    draw: origin and flips of every clip of a micro-batch -> read: crop, count, flip, written directly into the slot

Batches hold bytes, not floats: frames as uint8, spikes as counts. The device converts and normalises them.

Dimension key:  N clips   M clips of a micro-batch   L frames of a clip   C channels   S sequences
"""

import logging
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from flatout.feed import Field, Out, Substituted, Unreadable, keyed_uniform
from flatout.spike.config import AugmentConfig
from flatout.spike.data.clip_set import ClipSet, SequenceFacts, num_origins, spike_span
from flatout.spike.data.decode import Box
from flatout.spike.data.frames import PARTS, Frames, SpikeRepresentation
from flatout.spike.data.voxels import bin_edges, count_dtype

logger = logging.getLogger(__name__)

NUM_DRAWS = 6
"""Random numbers per clip: row and column of the crop, and one for each of the four keys of AugmentConfig."""


class ClipTransform(NamedTuple):
    """The augmentations of a clip, applied to the crop in this order."""

    reverse: bool = False
    hflip: bool = False
    vflip: bool = False
    rot90: bool = False


def flip_and_rotate(array: np.ndarray, transform: ClipTransform, *, rows: int) -> np.ndarray:
    """Flip, and rotate by 90 degrees counter-clockwise, over axes `rows` and `rows + 1`; a view. Ignores `reverse`."""
    if transform.hflip:
        array = np.flip(array, rows + 1)
    if transform.vflip:
        array = np.flip(array, rows)
    return np.rot90(array, axes=(rows, rows + 1)) if transform.rot90 else array


def spike_dtype(clips: ClipSet, representation: SpikeRepresentation) -> np.dtype:
    """The smallest type that holds every channel of every clip."""
    if clips.precomputed:
        return np.dtype(np.float32)
    if representation.kind != "voxel":
        return np.dtype(np.uint8)
    longest = max(each.num_spike_frames for each in clips.frames)
    largest = 255 if any(each.layout.format == "bytes" for each in clips.sequences) else 1
    return count_dtype(longest, representation.channels, largest_value=largest)


class ClipSource:
    """Source of finished clips: random crops of side `crop`, or whole frames if it is None."""

    def __init__(self, frames: Frames, *, crop: int | None, augment: AugmentConfig | None = None) -> None:
        self.frames, self._crop = frames, crop
        self._clips, self._files, self._representation = frames.clips, frames.files, frames.representation
        self._dtype = spike_dtype(self._clips, self._representation)
        augment = augment or AugmentConfig(HFLIP=0, VFLIP=0, ROT90=0)
        largest = max(self._clips.sequences, key=lambda each: each.rgb_hw)
        if crop is not None:
            self._num_origins_S2 = np.array([_num_origins(each, crop) for each in self._clips.sequences])
        rot90 = augment.ROT90
        if rot90 and (why := _not_square(largest, crop)):
            logger.warning("%s, so ROT90 is not applied.", why)
            rot90 = 0.0
        self._probabilities_4 = np.array([augment.REVERSE, augment.HFLIP, augment.VFLIP, rot90])
        self._sequence_N = np.array([self._clips.frames[first].sequence for first in self._clips.windows_NL[:, 0]])
        self.fields = self._fields(largest)

    def __len__(self) -> int:
        return len(self._clips)

    def where(self, index: int) -> str:
        return self._clips.name_of(index)

    def shapes(self, clip: int) -> dict[str, tuple[int, ...]]:
        """Shapes, for a clip, of the fields whose size depends on the sequence."""
        return {name: self._fields(self._clips.sequence_of(clip))[name].shape for name in (*PARTS, "spikes")}

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        """`clip` int64 [M], `origin` int64 [M, 2] in RGB pixels, `transform` bool [M, 4]."""
        uniform_M6 = keyed_uniform(seed, epoch, positions, NUM_DRAWS)
        transform_M4 = uniform_M6[:, 2:] < self._probabilities_4
        if self._crop is None:
            return {"clip": indices, "origin": np.zeros((len(indices), 2), np.int64), "transform": transform_M4}
        sequences = self._sequence_N[indices]
        steps_S2 = np.array([each.crop_steps for each in self._clips.sequences])
        origin_M2 = np.floor(uniform_M6[:, :2] * self._num_origins_S2[sequences]).astype(np.int64) * steps_S2[sequences]
        return {"clip": indices, "origin": origin_M2, "transform": transform_M4}

    @property
    def num_items(self) -> int:
        """Number of files."""
        return len(self._files)

    def where_item(self, item: int) -> str:
        return self._files.where(item)

    def substitute(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], unreadable: Unreadable) -> Substituted:
        """Replace whole clips that have an unreadable file, because a single frame of another scene would not fit."""
        is_bad_N = unreadable.is_bad_N[self._files.of_frames(self._clips.windows_NL)].any(1)
        is_bad_M, clip_M = is_bad_N[indices], indices.copy()
        clip_M[is_bad_M] = unreadable.substitutes(np.flatnonzero(is_bad_M), indices[is_bad_M], is_bad_N)
        draws = self.draw(unreadable.seed, unreadable.epoch, unreadable.positions_M, clip_M)
        return Substituted(clip_M, draws, is_bad_M)

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        for row, index in enumerate(draws["clip"].tolist()):
            transform = ClipTransform(*draws["transform"][row].tolist())
            self._read_clip(index, draws["origin"][row].tolist(), transform, out, row)

    def _read_clip(self, index: int, origin: list[int], transform: ClipTransform, out: Out, row: int) -> None:
        facts = self._clips.sequence_of(index)
        frames = self._clips.windows_NL[index].tolist()
        rgb, spike = crop_boxes(facts, origin, self._crop)
        for position, frame in enumerate(reversed(frames) if transform.reverse else frames):
            *images, stream = self._files.of_frames(np.array([frame])).tolist()
            for part, file in zip(PARTS, images, strict=True):
                image = out.fetch(file, partial(self.frames.image, frame, part))
                if image is not None:
                    crop = image[rgb.top : rgb.bottom, rgb.left : rgb.right]
                    out[part][row, position] = flip_and_rotate(crop, transform, rows=0)
            spikes = out.fetch(stream, partial(self.frames.spikes, frame, spike, self._dtype))
            if spikes is None:
                continue
            channels = flip_and_rotate(spikes, transform, rows=1)
            counts = self._representation.frames_of(self._clips.frames[frame].num_spike_frames)
            out["spikes"][row, position] = channels[::-1] if transform.reverse else channels
            out["spike_frames"][row, position] = counts[::-1] if transform.reverse else counts
        out["score"][row] = self._clips.score_NL[index]

    def _fields(self, facts: SequenceFacts) -> dict[str, Field]:
        length, channels = self._clips.clip_length, self._representation.channels
        rgb, spike = crop_boxes(facts, [0, 0], self._crop)
        image = Field((length, rgb.bottom, rgb.right, 3), np.uint8)
        return {
            "blur": image,
            "sharp": image,
            "spikes": Field((length, channels, spike.bottom - spike.top, spike.right - spike.left), self._dtype),
            "spike_frames": Field((length, channels), np.float32),
            "score": Field((length,), np.uint8),
        }


def crop_boxes(facts: SequenceFacts, origin: list[int], crop: int | None) -> tuple[Box, Box]:
    """The crop as a box in the RGB frame and in the spike frame."""
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


def _not_square(facts: SequenceFacts, crop: int | None) -> str:
    """Why clips cannot be rotated by 90 degrees; empty if they can. All sequences of a set have the same ratios."""
    if crop is None:
        return "CROP_SIZE is null: whole frames are not square"
    _, spike = crop_boxes(facts, [0, 0], crop)
    if spike.bottom != spike.right:
        return (
            f"Spike frames have another aspect ratio than frames: a crop is {spike.right} x {spike.bottom} spike pixels"
        )
    return ""


def _num_origins(facts: SequenceFacts, crop: int) -> tuple[int, int]:
    """Number of possible crop origins along y and x."""
    sizes = list(zip(facts.rgb_hw, facts.spike_hw, facts.crop_steps, strict=True))
    if any(crop % step for _, _, step in sizes):
        logger.warning(
            "%s: CROP_SIZE=%d does not correspond to whole spike pixels (multiples of %d do), so the nearest ones are "
            "used.", facts.name, crop, max(step for _, _, step in sizes),
        )  # fmt: skip
    rows, columns = (num_origins(rgb, spike, crop, f"{facts.name}: ") for rgb, spike, _ in sizes)
    return rows, columns


# For rendering on the GPU: workers only draw parameters. This module must not import torch.


class ClipParameterSource(ClipSource):
    """Source of the parameters from which the device renders clips; draws exactly as `ClipSource` does."""

    def __init__(self, frames: Frames, *, crop: int, augment: AugmentConfig) -> None:
        super().__init__(frames, crop=crop, augment=augment)
        length, channels = frames.clips.clip_length, frames.representation.channels
        self.fields = {
            "items": Field((3 * length,), np.int64),
            "corner": Field((4,), np.int64),
            "spike_hw": Field((2,), np.int64),
            "transform": Field((4,), np.uint8),
            "bin_start": Field((length, channels), np.int64),
            "spike_frames": Field((length, channels), np.float32),
            "score": Field((length,), np.uint8),
        }

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        for row, index in enumerate(draws["clip"].tolist()):
            transform = draws["transform"][row]
            frames = self._clips.windows_NL[index][:: -1 if transform[0] else 1]
            facts = self._clips.sequence_of(index)
            rgb, spike = crop_boxes(facts, draws["origin"][row].tolist(), self._crop)
            out["items"][row] = self._files.of_frames(frames)
            out["corner"][row] = rgb.top, rgb.left, spike.top, spike.left
            out["spike_hw"][row] = facts.spike_hw
            out["transform"][row] = transform
            for position, frame in enumerate(frames.tolist()):
                count = self._clips.frames[frame].num_spike_frames - sum(self._representation.trim)
                edges = bin_edges(count, self._representation.channels)
                order = slice(None, None, -1 if transform[0] else 1)
                out["bin_start"][row, position] = edges[:-1][order] + self._representation.trim[0]
                out["spike_frames"][row, position] = np.diff(edges)[order]
            out["score"][row] = self._clips.score_NL[index]
