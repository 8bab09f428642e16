"""Frames and spikes of a clip set as arrays, from files or from a store of decoded frames.

Decoding PNG files dominates the cost: 25 ms per 720p frame, ten of them per clip, against 0.3 ms for a crop of spikes.
So the store keeps frames first, and spikes as packed bytes.

Dimension key:  C channels   h w crop   T spike frames   F bytes of a spike frame
"""

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from flatout.clock import clock
from flatout.errors import DataError
from flatout.feed import DecodeError, Store
from flatout.images import read_image
from flatout.spike.config import DataConfig
from flatout.spike.data.decode import Box, decode
from flatout.spike.data.stream_files import stream_bytes
from flatout.spike.data.stream_layout import Layout, StreamError
from flatout.spike.data.voxels import (
    centre_window,
    crop_counts,
    frames_per_bin,
    texture_from_playback,
    trimmed,
)

if TYPE_CHECKING:
    from flatout.spike.data.clip_set import ClipSet

Part = Literal["blur", "sharp"]
PARTS: tuple[Part, ...] = ("blur", "sharp")
VOXEL_KEY = "spike_voxel"
"""Key of a precomputed voxel in an .npz file."""


class MissingSpikes(DataError, FileNotFoundError):
    """A spike file that existed when the data set was opened is missing."""


class SpikeRepresentation(NamedTuple):
    """The form in which spikes are given to the network."""

    kind: Literal["voxel", "window", "tfp"]
    channels: int
    trim: tuple[int, int] = (0, 0)
    tfp_half: int = 20

    def channels_of(self, stream_TF: np.ndarray, layout: Layout, box: Box, dtype: np.dtype) -> np.ndarray:
        """The channels of a crop of a stream, [C, h, w] of `dtype`."""
        kept = trimmed(layout.frames, self.trim)
        stream_TF = stream_TF[kept]
        if self.kind == "voxel":
            return crop_counts(stream_TF, layout, box, self.channels, dtype)
        if self.kind == "window":
            return decode(stream_TF[centre_window(len(stream_TF), self.channels)], layout, box)
        return texture_from_playback(decode(stream_TF, layout, box), self.channels, self.tfp_half)

    def frames_of(self, num_spike_frames: int) -> np.ndarray:
        """Number of spike frames of each channel, float32 [C]."""
        if self.kind != "voxel":
            return np.ones(self.channels, np.float32)
        return frames_per_bin(num_spike_frames - sum(self.trim), self.channels).astype(np.float32)


def representation_of(config: DataConfig) -> SpikeRepresentation:
    """The spike representation of a config; precomputed voxels are already trimmed."""
    trim = (0, 0) if config.USE_PRECOMPUTED_VOXELS else config.SPIKE_TRIM
    return SpikeRepresentation(config.SPIKE_REPR, config.channels, trim, config.TFP_HALF_WINDOW)


class FrameItems:
    """The files of a clip set as the items of a store: all blurry frames, then sharp ones, then streams."""

    def __init__(self, clips: "ClipSet") -> None:
        self._clips = clips
        self.parameters = "RGB uint8, spike bytes as stored, v1"

    def __len__(self) -> int:
        return 3 * len(self._clips.frames)

    def path(self, index: int) -> str:
        part, frame = divmod(index, len(self._clips.frames))
        return (self._clips.frames[frame].blur, self._clips.frames[frame].sharp, self._clips.frames[frame].spike)[part]

    def where(self, index: int) -> str:
        return self.path(index)

    def of_frames(self, frames: np.ndarray) -> np.ndarray:
        """Item numbers of frames [..., L]: blurry, then sharp, then streams, [..., 3 L]."""
        return np.concatenate([frames + part * len(self._clips.frames) for part in range(3)], axis=-1)

    def decode(self, index: int) -> np.ndarray:
        """Decode a frame [H, W, 3], a stream [T, 1, F], or a precomputed voxel [C, H, W]."""
        part, frame = divmod(index, len(self._clips.frames))
        if part < 2:
            return read_frame(self.path(index))
        if self._clips.precomputed:
            return storable(open_voxel(self.path(index)))
        try:
            return np.array(stream_bytes(self.path(index), self._clips.layout_of(frame)))[:, None]
        except StreamError as error:
            raise DecodeError(str(error)) from error


class Frames:
    """Reads the frames and spikes of a clip set, from a store if there is one, else from files."""

    def __init__(self, clips: "ClipSet", config: DataConfig, store: Store | None = None) -> None:
        self.clips, self.representation, self._store = clips, representation_of(config), store
        self.files = FrameItems(clips)

    def image(self, frame: int, part: Part) -> np.ndarray:
        """A frame, uint8 RGB [H, W, 3]; may be read-only."""
        number = PARTS.index(part) * len(self.clips.frames) + frame
        # A store records the stage "decode" itself when it has to decode.
        with clock.stage("frames" if self._store is not None else "decode"):
            image = self._store[number] if self._store is not None else read_frame(self.files.path(number))
        expected = self.clips.sequences[self.clips.frames[frame].sequence].rgb_hw
        if image.shape[:2] != expected:
            raise DecodeError(
                f"{self.files.path(number)} has {image.shape[0]} x {image.shape[1]} pixels, but the first frame of "
                f"its sequence has {expected[0]} x {expected[1]}."
            )
        return image

    def spikes(self, frame: int, box: Box, dtype: np.dtype) -> np.ndarray:
        """Channels of a crop [C, h, w]."""
        with clock.stage("spikes"):
            if self.clips.precomputed:
                voxel = self._stored(frame)
                voxel = open_voxel(self.clips.frames[frame].spike) if voxel is None else voxel
                return np.asarray(voxel[:, box.top : box.bottom, box.left : box.right], dtype)
            layout = self.clips.layout_of(frame)
            stream = self._stored(frame)
            stream_TF = self._mapped(frame, layout) if stream is None else stream.reshape(layout.frames, -1)
            return self.representation.channels_of(stream_TF, layout, box, dtype)

    def _stored(self, frame: int) -> np.ndarray | None:
        number = 2 * len(self.clips.frames) + frame
        if self._store is None or not self._store.is_resident(number):
            return None
        return self._store[number]

    def _mapped(self, frame: int, layout: Layout) -> np.ndarray:
        each = self.clips.frames[frame]
        try:
            return stream_bytes(each.spike, layout)
        except FileNotFoundError as error:
            raise MissingSpikes(
                f"{each.spike}: the spike file of sequence {self.clips.sequences[each.sequence].name}, frame "
                f"{each.stem}, has been removed since the data set was opened. Restore it, or start again without the "
                "frame."
            ) from error
        except StreamError as error:
            raise DecodeError(str(error)) from error


def read_frame(path: str) -> np.ndarray:
    """Read a frame as uint8 RGB [H, W, 3]; DecodeError if it is not an image or is incomplete."""
    import cv2

    try:
        image = read_image(path)
    except DecodeError as error:
        raise DecodeError(f"{path} cannot be decoded: {error}.") from None
    return np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2RGB))


def open_voxel(path: str) -> np.ndarray:
    """Open a precomputed voxel [C, H, W], memory-mapped if it is an .npy file."""
    try:
        if path.endswith(".npy"):
            return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        with np.load(path, allow_pickle=False) as arrays:
            return np.asarray(arrays[VOXEL_KEY])
    except (ValueError, KeyError, EOFError) as error:
        raise DecodeError(f"{path} is not a voxel file: {error}.") from error


def storable(voxel: np.ndarray) -> np.ndarray:
    """A voxel in the type in which a store keeps it: uint8 is kept, all other types become float32."""
    return voxel if voxel.dtype == np.uint8 else voxel.astype(np.float32)
