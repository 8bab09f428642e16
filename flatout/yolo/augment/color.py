"""Colour gains, and how they are applied to 8-bit hue, saturation and value.

Dimension key:  M samples   3 hue, saturation, value   V the 256 values of a byte
"""

from typing import NamedTuple

import numpy as np

LEAST_MARGIN = 6e-5
"""float32 arithmetic on 0..255 is off by less."""
HUES = 180
"""Hue is counted in steps of two degrees."""


class Color(NamedTuple):
    """The change of one sample's colours (or of M samples, with one more axis in front)."""

    gain_3: np.ndarray
    table_3V: np.ndarray
    """uint8: what every value becomes."""
    offset_3: np.ndarray
    """float64: round(gain * x + offset) is the table as well, NaN where it is not; hue then has still to go around."""


def colors(gain_M3: np.ndarray) -> Color:
    """Tables of M samples: products are truncated and cut off at 255; hue is multiplied too, and goes around."""
    product_M3V = np.arange(256) * gain_M3[..., None]
    table_M3V = np.minimum(product_M3V, 255).astype(np.uint8)
    table_M3V[:, 0] = product_M3V[:, 0] % HUES
    return Color(gain_M3, table_M3V, _offsets(product_M3V))


def _offsets(product_M3V: np.ndarray) -> np.ndarray:
    """What takes every product down to its whole part when it is rounded, also after float32 arithmetic.

    For one gain in thirty, some product is too near to the next whole number.
    """
    # Beyond 255 everything is cut off, so it does not matter where it falls; there is no hue above 179.
    matters_M3V = (product_M3V < 255) & (np.arange(256) < [[HUES], [256], [256]])
    fraction_M3V = product_M3V - np.floor(product_M3V)
    largest_M3 = np.multiply(fraction_M3V, matters_M3V, out=fraction_M3V).max(2)
    usable_M3 = largest_M3 < 1 - 2 * LEAST_MARGIN
    usable_M3[:, 0] &= product_M3V[:, 0, HUES - 1] < 255
    return np.where(usable_M3, -largest_M3 / 2, np.nan)
