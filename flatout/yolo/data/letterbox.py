"""A picture fitted into the network's input with grey bars: the geometry, and the pixels.

Where boxes go back from the input to the picture is `flatout.yolo.letterbox`.
"""

from typing import NamedTuple

import numpy as np

PADDING = 114
"""Grey of the bars, in all channels."""


class Fit(NamedTuple):
    """How a picture lies in the input; all that labels and pixels need."""

    inner_wh: tuple[int, int]
    """Size of the picture in the input."""
    ratio_wh: tuple[float, float]
    """Input pixels per picture pixel."""
    pad_wh: tuple[float, float]
    """Half of the bars, not rounded: labels use this, so they may be off by half a pixel against the picture."""
    top: int
    bottom: int
    left: int
    right: int

    @property
    def size_hw(self) -> tuple[int, int]:
        """Of the whole."""
        return self.inner_wh[1] + self.top + self.bottom, self.inner_wh[0] + self.left + self.right


def fit(native_hw: tuple[int, int], target_hw: tuple[int, int], *, enlarge: bool = True) -> Fit:
    """Scaled to fit into the target, in its middle. Training enlarges small pictures here, validation does not."""
    ratio, inner_wh = _scaled(native_hw, target_hw, enlarge)
    return _with_bars(inner_wh, (ratio, ratio), target_hw[1] - inner_wh[0], target_hw[0] - inner_wh[1])


def fit_tightly(native_hw: tuple[int, int], target_hw: tuple[int, int], *, stride: int, enlarge: bool = True) -> Fit:
    """As `fit`, with bars only as far as the next multiple of the stride; for prediction on single pictures."""
    ratio, inner_wh = _scaled(native_hw, target_hw, enlarge)
    wide, high = (target_hw[1] - inner_wh[0]) % stride, (target_hw[0] - inner_wh[1]) % stride
    return _with_bars(inner_wh, (ratio, ratio), wide, high)


def fit_stretched(native_hw: tuple[int, int], target_hw: tuple[int, int]) -> Fit:
    """Stretched to the target; no bars."""
    ratio_wh = target_hw[1] / native_hw[1], target_hw[0] / native_hw[0]
    return _with_bars((target_hw[1], target_hw[0]), ratio_wh, 0, 0)


def letterbox(image_HWC: np.ndarray, fitted: Fit) -> np.ndarray:
    """The pixels as `fitted` says, uint8 [H, W, 3]; always a new array."""
    import cv2

    height, width = fitted.size_hw
    out = np.full((height, width, 3), PADDING, np.uint8)
    inner = out[fitted.top : height - fitted.bottom, fitted.left : width - fitted.right]
    if image_HWC.shape[1::-1] == fitted.inner_wh:
        inner[:] = image_HWC
    else:
        inner[:] = cv2.resize(image_HWC, fitted.inner_wh, interpolation=cv2.INTER_LINEAR)
    return out


def _scaled(native_hw: tuple[int, int], target_hw: tuple[int, int], enlarge: bool) -> tuple[float, tuple[int, int]]:
    ratio = min(target_hw[0] / native_hw[0], target_hw[1] / native_hw[1])
    if not enlarge:
        ratio = min(ratio, 1.0)
    # Halves to even, as Python rounds; a line of pixels keeps one.
    return ratio, (max(round(native_hw[1] * ratio), 1), max(round(native_hw[0] * ratio), 1))


def _with_bars(inner_wh: tuple[int, int], ratio_wh: tuple[float, float], wide: int, high: int) -> Fit:
    pad_w, pad_h = wide / 2, high / 2
    # The tenth sends an odd pixel to the bottom and to the right.
    return Fit(
        inner_wh,
        ratio_wh,
        (pad_w, pad_h),
        top=round(pad_h - 0.1),
        bottom=round(pad_h + 0.1),
        left=round(pad_w - 0.1),
        right=round(pad_w + 0.1),
    )
