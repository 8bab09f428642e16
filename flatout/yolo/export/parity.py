"""How far a file is from its network, and how far it may be.

Rounding differs between any two programs; a mistake in a graph moves boxes by pixels. The limits lie between the two: a
ten-thousandth of the picture's longer side for boxes, a thousandth for scores and raw outputs. A network that enlarges
rounding errors may be further off: as far as ten times what float32 itself is off float64, in torch.

Dimension key:  B images   N boxes   O = 5 + classes
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from flatout.errors import ParityError

MOST_BOX = 1e-4
"""Of the input's longer side: 0.064 px at 640."""
MOST_SCORE = 1e-3
MOST_RAW = 1e-3
"""Of a raw output, relative where it is beyond 1."""
MOST_ROUNDINGS = 10


class Difference(NamedTuple):
    """Largest differences over all boxes of all pictures."""

    box_px: float = 0.0
    score: float = 0.0
    raw: float = 0.0
    """Only of a file that gives raw maps."""

    def times(self, factor: float) -> "Difference":
        return Difference(*(factor * each for each in self))

    def is_within(self, limit: "Difference") -> bool:
        """False for what is no number, too."""
        return all(each <= most for each, most in zip(self, limit, strict=True))

    def text(self, limit: "Difference") -> str:
        """With what it may be; a limit of 0 px means that raw maps were compared."""
        if not limit.box_px:
            return f"{self.raw:.1e} of a raw output (at most {limit.raw:.2g})"
        return f"{self.box_px:.1e} px, {self.score:.1e} of a score (at most {limit.box_px:.2g} and {limit.score:.2g})"


def limit_of_boxes(side_px: int) -> Difference:
    """What decoded boxes may differ by, on inputs up to this side."""
    return Difference(box_px=MOST_BOX * side_px, score=MOST_SCORE)


LIMIT_OF_RAW = Difference(raw=MOST_RAW)


def of_decoded(found_BNO: np.ndarray, expected_BNO: np.ndarray) -> Difference:
    """Of decoded boxes."""
    if found_BNO.shape != expected_BNO.shape:
        raise ParityError(_other_shape(found_BNO, expected_BNO))
    apart = np.abs(found_BNO - expected_BNO)
    return Difference(box_px=_largest(apart[..., :4]), score=_largest(apart[..., 4:]))


def of_raw(found: np.ndarray, expected: np.ndarray) -> Difference:
    """Of raw maps."""
    if found.shape != expected.shape:
        raise ParityError(_other_shape(found, expected))
    return Difference(raw=_largest(np.abs(found - expected) / np.maximum(np.abs(expected), 1)))


def largest(differences: Iterable[Difference]) -> Difference:
    """Of several comparisons, column by column."""
    rows = np.array(list(differences), dtype=np.float64)
    return Difference(*(float(column) for column in rows.max(0)))


def check_same(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    """ParityError unless two ways to the same numbers from the same boxes agree, but for the last bits."""
    if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-5, atol=1e-4):
        raise ParityError(
            f"{what}: ONNX Runtime gives {_summary(found)}, torch gives {_summary(expected)} from the same boxes, so "
            "nothing was written. Try without --simplify or with another --opset, and report it."
        )


def check_within(difference: Difference, limit: Difference, what: str) -> None:
    """ParityError if a file is too far from its network."""
    if not difference.is_within(limit):
        raise ParityError(
            f"{what}: differs from its network by {difference.text(limit)}, so nothing was written. "
            "Are all weights finite? Try without --simplify or with another --opset, and report it."
        )


def _largest(apart: np.ndarray) -> float:
    return float(apart.max(initial=0))


def _other_shape(found: np.ndarray, expected: np.ndarray) -> str:
    return f"The file gives {list(found.shape)} where the network gives {list(expected.shape)}; nothing was written."


def _summary(values: np.ndarray) -> str:
    return f"{list(values.shape)} with a sum of {float(values.sum()):.7g}"
