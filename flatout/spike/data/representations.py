"""Images from spikes: raw, texture from playback (TFP), texture from intervals (TFI), voxels.

Pure functions of spikes [T, H, W] of 0 and 1; no files, no torch. Values are spikes per spike frame, from 0 to 1: a
pixel that fires in every spike frame has 1. Times the camera's threshold (its gain), they are brightness.

    raw    the spikes themselves                                    noise, no blur
    TFP    spikes in a window / spike frames of the window          little noise in a long window, blur of its length
    TFI    1 / distance between the spikes before and after         little blur, coarse steps where it is bright
    voxel  TFP of the parts into which a stream is divided          what a network gets, as counts or rates

TFP and TFI: L. Zhu et al., A retina-inspired sampling method for visual texture reconstruction, ICME 2019.

Dimension key:  T spike frames   B bins   H W spike frame
"""

import numpy as np

from flatout.errors import ConfigError
from flatout.spike.data.voxels import centre_window, frames_per_bin, voxel_counts


def window_around(num_frames: int, centre: int, window: int) -> slice:
    """`window` spike frames around a centre, fewer at the ends of a stream; the centre is always inside.

    An even window has one frame more before the centre than after it.
    """
    if not 0 <= centre < num_frames:
        raise ConfigError(f"spike frame {centre} is outside a stream of {num_frames}: use 0 to {num_frames - 1}.")
    if window < 1:
        raise ConfigError(f"a window of {window} spike frames: it must be 1 or more.")
    first = centre - window // 2
    return slice(max(first, 0), min(first + window, num_frames))


def raw(spikes_THW: np.ndarray, length: int | None = None) -> np.ndarray:
    """The middle `length` spike frames as they are, uint8 [length, H, W]; all of them without a length."""
    return spikes_THW if length is None else spikes_THW[centre_window(len(spikes_THW), length)]


def tfp(spikes_THW: np.ndarray, centre: int, window: int) -> np.ndarray:
    """Texture from playback, float32 [H, W]: the share of the frames around `centre` in which a pixel fired."""
    frames = spikes_THW[window_around(len(spikes_THW), centre, window)]
    return np.asarray(np.add.reduce(frames, axis=0, dtype=np.float32) / np.float32(len(frames)))


def tfi(spikes_THW: np.ndarray, centre: int, window: int) -> np.ndarray:
    """Texture from intervals, float32 [H, W]: 1 / (first spike after `centre` - last spike until `centre`).

    Only the frames of the window are searched. A spike that is not found is taken to be just outside of it: a pixel
    without any gets 1 / (spike frames of the window + 1), the most that agrees with what was seen.
    """
    kept = window_around(len(spikes_THW), centre, window)
    before_THW = spikes_THW[kept.start : centre + 1][::-1]
    after_THW = spikes_THW[centre + 1 : kept.stop]
    return np.asarray(np.float32(1) / (_steps_to_first(before_THW) + _steps_to_first(after_THW) + np.float32(1)))


def _steps_to_first(spikes_THW: np.ndarray) -> np.ndarray:
    """Frames before the first spike of each pixel, float32 [H, W]; all of them if there is none."""
    if not len(spikes_THW):
        return np.zeros(spikes_THW.shape[1:], np.float32)
    first = spikes_THW.argmax(axis=0)
    has_none = (first == 0) & (spikes_THW[0] == 0)
    return np.where(has_none, len(spikes_THW), first).astype(np.float32)


def voxel(spikes_THW: np.ndarray, num_bins: int) -> np.ndarray:
    """Spikes per spike frame in each of `num_bins` parts of a stream, float32 [B, H, W]; 0 in a part without frames.

    Spike frame t of T belongs to bin t * B // T. This is what a network gets with `VOXEL_NORM: rate`.
    """
    if num_bins < 1:
        raise ConfigError(f"{num_bins} voxel bins: there must be 1 or more.")
    counts = voxel_counts(spikes_THW, num_bins, np.dtype(np.float32))
    frames_B = np.maximum(frames_per_bin(len(spikes_THW), num_bins), 1).astype(np.float32)
    return np.asarray(counts / frames_B[:, None, None])
