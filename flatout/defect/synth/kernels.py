"""The shapes that defects have: small tables of values from 0 to 1, made once.

Conventions that are easy to swap: a size is (height, width), a centre is (x, y), a sigma is (x, y).

Dimension key:  Q kernels   h w sides of one   S side of a common square
"""

import re
from collections.abc import Sequence

import numpy as np

from flatout.errors import ConfigError

LABEL_ABOVE = 0.1
"""A pixel belongs to a defect where its kernel exceeds this; amplitude and saturation do not matter."""
STANDARD = ("3x3_s1.3", "3x5_s1.0_1.5")
"""Each with probability 1/2. The narrow sigma of the second lies along its wide axis; kept for comparability."""

_ID = re.compile(r"(\d+)x(\d+)_s(\d+(?:\.\d+)?)(?:_(\d+(?:\.\d+)?))?")


def gaussian_kernel(kernel_id: str) -> np.ndarray:
    """float64 [h, w] of an id `<h>x<w>_s<sigma_x>[_<sigma_y>]`; 1 at the centre, zero outside of its box."""
    found = _ID.fullmatch(kernel_id)
    if not found:
        raise ConfigError(f"kernel {kernel_id!r} is unknown: write <h>x<w>_s<sigma_x>[_<sigma_y>], as in 3x5_s1.0_1.5.")
    height, width = int(found[1]), int(found[2])
    sigma_x, sigma_y = float(found[3]), float(found[4] or found[3])
    if min(height, width) < 1 or min(sigma_x, sigma_y) <= 0:
        raise ConfigError(f"kernel {kernel_id!r}: sides and sigmas must be positive.")
    dy, dx = (np.arange(-(side // 2), side // 2 + 1, dtype=np.float64) for side in (height, width))
    return np.asarray(np.exp(-(dx**2 / (2 * sigma_x**2) + (dy**2 / (2 * sigma_y**2))[:, None])))


def label_of(kernel_hw: np.ndarray) -> np.ndarray:
    """bool [h, w]: pixels that count as defect."""
    return np.asarray(kernel_hw > LABEL_ABOVE)


class Kernels:
    """Kernels by number, in squares of one size whose middle comes to lie on a defect's centre.

    Painting the zeros around a kernel changes nothing; one size for all makes it a few plain array operations.
    """

    def __init__(self, kernels: Sequence[np.ndarray]) -> None:
        if not kernels:
            raise ConfigError("There are no kernels to paint with.")
        self.size_Q2 = np.array([kernel.shape for kernel in kernels], np.int64)
        """Height and width of each."""
        self.reach = int(self.size_Q2.max()) // 2
        """No kernel goes farther than this from its anchor, which is at (h // 2, w // 2)."""
        side = 2 * self.reach + 1
        self.value_QSS = np.zeros((len(kernels), side, side), np.float32)
        self.label_QSS = np.zeros((len(kernels), side, side), np.bool_)
        for number, kernel in enumerate(kernels):
            top, left = (self.reach - length // 2 for length in kernel.shape)
            box = slice(top, top + kernel.shape[0]), slice(left, left + kernel.shape[1])
            self.value_QSS[number][box], self.label_QSS[number][box] = kernel, label_of(kernel)

    @classmethod
    def standard(cls) -> "Kernels":
        return cls([gaussian_kernel(kernel_id) for kernel_id in STANDARD])

    def __len__(self) -> int:
        return len(self.value_QSS)
