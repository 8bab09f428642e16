"""Bytes of a batch to what the network sees, on the device.

Dimension key:  N clips   L frames   C spike channels   H W frame   h w spike picture
"""

from collections.abc import Mapping

from torch import Tensor

from flatout.spike.config import DataConfig
from flatout.spike.model import Clip
from flatout.spike.normalise import Normalise, gained


class ToClip:
    """Turns the fields of a batch into a clip and its sharp frames; nothing here waits for the device."""

    def __init__(self, config: DataConfig) -> None:
        scale = 1 / 255 if config.SPIKE_REPR == "tfp" else 1.0
        self._normalise = Normalise(config.VOXEL_NORM, mean=config.NORM.MEAN, std=config.NORM.STD, scale=scale)
        self._gain = config.VOXEL_GAIN

    def __call__(self, fields: Mapping[str, Tensor]) -> Clip:
        """From `blur` uint8 [N, L, H, W, 3], `spikes` [N, L, C, h, w] and `spike_frames` [N, L, C]."""
        blur = pictures(fields["blur"])
        spikes = self._normalise(fields["spikes"], fields["spike_frames"])
        return Clip(blur, gained(spikes, blur) if self._gain else spikes)


def pictures(bytes_NLHW3: Tensor) -> Tensor:
    """float32 [N, L, 3, H, W] in 0..1, channels side by side in memory as they came."""
    return bytes_NLHW3.permute(0, 1, 4, 2, 3).float() / 255
