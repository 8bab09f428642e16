"""Voxels: how often each pixel fired in each bin of the exposure; and other spike representations.

Spike frame t of T belongs to bin t * B // T, and a bin holds the count. All results are whole numbers; the device
converts them to the input of the network (step.py).

Dimension key:  T spike frames   B bins   C channels   H W spike frame   F bytes of a spike frame
"""

from itertools import pairwise

import numpy as np

from flatout.errors import ConfigError, DataError
from flatout.spike.data.decode import Box, StoredRows, oriented
from flatout.spike.data.stream_layout import Layout


def bin_edges(num_frames: int, num_bins: int) -> np.ndarray:
    """Edges of the bins, int64 [B + 1]: bin b holds the frames edges[b] .. edges[b + 1] - 1."""
    return -(-np.arange(num_bins + 1) * num_frames // num_bins)


def frames_per_bin(num_frames: int, num_bins: int) -> np.ndarray:
    """Number of frames of each bin, int64 [B]; some are 0 if there are fewer frames than bins."""
    return np.diff(bin_edges(num_frames, num_bins))


def voxel_counts(spikes_THW: np.ndarray | StoredRows, num_bins: int, dtype: np.dtype | None = None) -> np.ndarray:
    """Spike counts per bin [B, H, W], of `dtype` or of the type that `count_dtype` chooses."""
    num_frames, height, width = spikes_THW.shape
    dtype = dtype or count_dtype(num_frames, num_bins)
    counts = np.zeros((num_bins, height, width), dtype)
    for bin_, (begin, end) in enumerate(pairwise(bin_edges(num_frames, num_bins).tolist())):
        if begin < end:
            np.add.reduce(spikes_THW[begin:end], axis=0, dtype=dtype, out=counts[bin_])
    return counts


def crop_counts(
    stream_TF: np.ndarray, layout: Layout, box: Box, num_bins: int, dtype: np.dtype | None = None
) -> np.ndarray:
    """Counts of a crop [B, h, w], directly from the bytes of a stream; bench/spike_crop.py measures the speed."""
    rows = StoredRows(stream_TF, layout, box)
    return oriented(voxel_counts(rows, num_bins, dtype), rows.skip, layout, box)


def count_dtype(num_frames: int, num_bins: int, *, largest_value: int = 1) -> np.dtype:
    """The smallest type that holds any count: uint8, or float32 for very long bins or values other than 0 and 1."""
    largest = largest_value * int(frames_per_bin(num_frames, num_bins).max())
    return np.dtype(np.uint8 if largest <= 255 else np.float32)


def centre_window(num_frames: int, length: int) -> slice:
    """The middle `length` frames of a stream."""
    begin = num_frames // 2 - length // 2
    if begin < 0 or begin + length > num_frames:
        raise DataError(f"a window of {length} spike frames does not fit into a stream of {num_frames}.")
    return slice(begin, begin + length)


def tfp_centres(num_frames: int, num_channels: int, half: int) -> list[int]:
    """Middle frame of the window of each channel, at least `half` frames away from the ends."""
    if num_frames <= 2 * half:
        raise DataError(
            f"TFP averages {half} spike frames on each side of its centre and needs more than {2 * half}, but there "
            f"are {num_frames}. Lower DATA.TFP_HALF_WINDOW, or use longer streams."
        )
    if num_channels == 1:
        return [num_frames // 2]
    edges = [num_frames * channel // num_channels for channel in range(num_channels + 1)]
    middles = ((low + high) // 2 for low, high in pairwise(edges))
    return [min(max(middle, half), num_frames - half) for middle in middles]


def texture_from_playback(spikes_THW: np.ndarray, num_channels: int, half: int) -> np.ndarray:
    """Short exposures, uint8 [C, H, W]: 255 times the mean of the frames around each centre, rounded down."""
    centres = tfp_centres(len(spikes_THW), num_channels, half)
    exposures = (spikes_THW[centre - half : centre + half + 1] for centre in centres)
    return np.stack([np.floor(frames.mean(axis=0) * 255).astype(np.uint8) for frames in exposures])


def trimmed(num_frames: int, trim: tuple[int, int]) -> slice:
    """The frames that remain when `trim` frames are dropped at the beginning and at the end."""
    if num_frames - sum(trim) < 1:
        raise ConfigError(f"SPIKE_TRIM={list(trim)} leaves nothing of {num_frames} spike frames: use smaller numbers.")
    return slice(trim[0], num_frames - trim[1])
