r"""A simulated spike camera: light in, spikes out; and the moments between two frames of a video.

    frames of a video --optical flow--> sub-frames --linear light--> mean: blur
                                                   \-half size, grey--> every pixel adds light / threshold to its charge
                                                                        once per spike frame, and fires when it is full

Pure functions and one small state, the charge. The same arguments and seed give the same bits, if OpenCV uses one
thread (its optical flow depends on the number of threads).

Dimension key:  H W frame   h w spike frame   T spike frames
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from flatout.errors import ConfigError

Reset = Literal["subtract", "zero"]
Interpolation = Literal["flow", "blend"]
SMALL_WIDTH = 640
"""Up to this width of a frame, optical flow is computed at half its resolution."""
GREY_RGB = np.array([0.299, 0.587, 0.114], np.float32)


@dataclass(frozen=True, kw_only=True)
class SensorConfig:
    """The pixels of a spike camera."""

    threshold: float = 2.0
    """Light that makes a pixel fire, in units of full scale per spike frame: white fires at a rate of 1 / threshold."""
    reset: Reset = "subtract"
    """What firing does to the charge: `subtract` the threshold, which loses nothing, or set it to `zero`."""
    noise: float = 0.0
    """Shot noise: relative standard deviation of the light of one spike, 1 / sqrt(photons per spike)."""
    mismatch: float = 0.0
    """Fixed-pattern noise: relative standard deviation of the threshold from pixel to pixel."""
    dark: float = 0.0
    """Dark current: light that a pixel sees in the dark, in units of full scale."""

    def __post_init__(self) -> None:
        if not self.threshold > 0:
            raise ConfigError(f"--threshold {self.threshold}: it must be above 0.")
        for name in ("noise", "mismatch", "dark"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)}: it must be from 0 to below 1.")


class SpikeSensor:
    """The pixels of a simulated spike camera; their charge lasts from one exposure to the next."""

    def __init__(self, shape_hw: tuple[int, int], config: SensorConfig, rng: np.random.Generator) -> None:
        self._config, self._rng = config, rng
        # Pixels are at any point between two spikes when a recording begins.
        self._charge_hw = rng.random(shape_hw, np.float32)
        spread_hw = config.mismatch * rng.standard_normal(shape_hw, np.float32) if config.mismatch else np.float32(0)
        self._per_light_hw = np.float32(1 / config.threshold) / np.maximum(1 + spread_hw, np.float32(0.1))

    def expose(self, light_hw: np.ndarray, num_frames: int) -> np.ndarray:
        """Spikes of `num_frames` spike frames of constant light (float32, 1 is full scale), bool [T, h, w].

        A pixel fires at most once per spike frame; a brighter one stays full, as a saturated pixel does.
        """
        charge_hw = self._charge_hw
        gain_hw = (light_hw.astype(np.float32) + np.float32(self._config.dark)) * self._per_light_hw
        scale_hw = np.float32(self._config.noise) * np.sqrt(gain_hw) if self._config.noise else None
        spikes_Thw = np.empty((num_frames, *light_hw.shape), bool)
        for fired_hw in spikes_Thw:
            charge_hw += gain_hw
            if scale_hw is not None:
                charge_hw += scale_hw * self._rng.standard_normal(charge_hw.shape, np.float32)
            np.greater_equal(charge_hw, 1, out=fired_hw)
            if self._config.reset == "subtract":
                np.subtract(charge_hw, fired_hw, out=charge_hw)
            else:
                charge_hw[fired_hw] = 0
            np.clip(charge_hw, 0, 1, out=charge_hw)
        return spikes_Thw


class LinearLight:
    """Conversion between stored values (uint8) and light (float32 in 0..1) = (value / 255) ** gamma."""

    def __init__(self, gamma: float) -> None:
        self._gamma = gamma
        self._table_256 = (np.arange(256, dtype=np.float64) / 255) ** gamma

    def light(self, frame: np.ndarray) -> np.ndarray:
        import cv2

        return np.asarray(cv2.LUT(frame, self._table_256.astype(np.float32)))

    def stored(self, light: np.ndarray) -> np.ndarray:
        return np.asarray(np.rint(255 * np.clip(light, 0, 1) ** (1 / self._gamma)), np.uint8)


def sensor_light(light_HW3: np.ndarray, shape_hw: tuple[int, int]) -> np.ndarray:
    """What the spike camera sees of a colour image: grey, averaged over the area of each of its pixels."""
    import cv2

    small = cv2.resize(light_HW3, (shape_hw[1], shape_hw[0]), interpolation=cv2.INTER_AREA)
    return np.asarray(small @ GREY_RGB)


class Between:
    """The moments between two neighbouring frames of a video, uint8 RGB [H, W, 3] each.

    With `flow`, both frames are moved along the optical flow between them, and blended; with `blend`, only blended.
    """

    def __init__(self, before_HW3: np.ndarray, after_HW3: np.ndarray, method: Interpolation) -> None:
        self._frames, self._method = (before_HW3, after_HW3), method

    def at(self, share: float) -> np.ndarray:
        """The frame at a share of the time from the first frame (0) to the second (1), uint8 RGB [H, W, 3]."""
        import cv2

        before, after = self._frames
        if share in (0, 1):
            return after if share else before
        if self._method == "flow":
            forth_HW2, back_HW2 = self._flows
            before, after = _moved(before, forth_HW2, share), _moved(after, back_HW2, 1 - share)
        return np.asarray(cv2.addWeighted(before, 1 - share, after, share, 0))

    @cached_property
    def _flows(self) -> tuple[np.ndarray, np.ndarray]:
        """Optical flow from the first frame to the second, and back."""
        import cv2

        before, after = (cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY) for frame in self._frames)
        # The flow of OpenCV needs a few pixels; smaller frames are for tests and icons.
        if min(before.shape) < 16:
            zero = np.zeros((*before.shape, 2), np.float32)
            return zero, zero
        flow = cv2.DISOpticalFlow.create(cv2.DISOPTICAL_FLOW_PRESET_FAST)
        # Flow at half resolution for small frames, at a quarter for large ones, where a pixel is less of the scene.
        flow.setFinestScale(1 if before.shape[1] <= SMALL_WIDTH else 2)
        return flow.calc(before, after, None), flow.calc(after, before, None)  # type: ignore[call-overload]


def _moved(frame_HW3: np.ndarray, flow_HW2: np.ndarray, share: float) -> np.ndarray:
    """A frame moved along a share of its flow; what enters at the border repeats the border."""
    import cv2

    from_HW2 = cv2.addWeighted(_pixel_grid(flow_HW2.shape[0], flow_HW2.shape[1]), 1, flow_HW2, -share, 0)
    # Stubs of OpenCV want the second map as an array; None means that the first holds x and y.
    return np.asarray(cv2.remap(frame_HW3, from_HW2, None, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE))  # type: ignore[call-overload]


@lru_cache(maxsize=2)
def _pixel_grid(height: int, width: int) -> np.ndarray:
    """x and y of every pixel, float32 [H, W, 2]."""
    x_HW, y_HW = np.meshgrid(np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32))
    return np.stack([x_HW, y_HW], axis=-1)
