"""Is a stream the right way up, and of the right size? Its light must look like the blurry frame.

A pixel fires in proportion to its brightness, so the sum of all spikes is a picture of the exposure. Turned or flipped,
or cut into rows of a wrong length, it is not.

Dimension key:  H W spike picture
"""

from typing import NamedTuple

import numpy as np

LEAST_R = 0.5
LEAST_LEAD = 0.05
TURNS = ("identity", "flipud", "fliplr", "rot180")


class Orientation(NamedTuple):
    """Correlations of the spike rate with the blurry frame, as decoded and turned."""

    r: dict[str, float]
    mean_rate: float
    mean_blur: float

    @property
    def gain(self) -> float:
        """Brightness per spike: the camera's threshold in units of full scale."""
        return self.mean_blur / self.mean_rate if self.mean_rate else float("inf")

    @property
    def problem(self) -> str:
        """What is wrong, in a sentence; empty if the stream fits the frame."""
        others = {turn: value for turn, value in self.r.items() if turn != "identity"}
        best = max(others, key=lambda turn: others[turn])
        if not self.r["identity"] >= LEAST_R:
            better = f" {best} fits better ({others[best]:.2f})." if others[best] >= LEAST_R else ""
            return (
                f"spikes do not look like their frame (correlation {self.r['identity']:.2f}, expected 0.9 or more): "
                f"wrong SPIKE_H, SPIKE_W, SPIKE_FORMAT or SPIKE_FLIPUD, or frames and streams do not belong "
                f"together.{better}"
            )
        if self.r["identity"] < others[best] + LEAST_LEAD:
            return (
                f"turned by {best} the spikes fit their frame as well ({others[best]:.2f}) as they are "
                f"({self.r['identity']:.2f}): look at SPIKE_FLIPUD, or choose a frame with more structure."
            )
        return ""


def compare(rate_HW: np.ndarray, blur_HW: np.ndarray) -> Orientation:
    """`rate_HW`: mean of the spikes; `blur_HW`: the grey frame in 0..1 at the same size."""
    turned = (rate_HW, rate_HW[::-1], rate_HW[:, ::-1], rate_HW[::-1, ::-1])
    r = {turn: _pearson(picture, blur_HW) for turn, picture in zip(TURNS, turned, strict=True)}
    return Orientation(r, float(rate_HW.mean()), float(blur_HW.mean()))


def grey_at(frame_HW3: np.ndarray, shape_hw: tuple[int, int]) -> np.ndarray:
    """A frame, uint8 RGB, as grey in 0..1, shrunk by area."""
    import cv2

    grey = cv2.cvtColor(np.ascontiguousarray(frame_HW3), cv2.COLOR_RGB2GRAY).astype(np.float64) / 255
    return np.asarray(cv2.resize(grey, (shape_hw[1], shape_hw[0]), interpolation=cv2.INTER_AREA))


def _pearson(a: np.ndarray, b: np.ndarray) -> float:
    x, y = (np.asarray(each, np.float64).ravel() - np.mean(each) for each in (a, b))
    norm = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / norm if norm else 0.0
