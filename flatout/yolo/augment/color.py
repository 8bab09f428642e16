"""Changes of colours, and how they are applied to 8-bit hue, saturation and value.

Painters on the CPU get tables, a device the numbers that it makes the same tables of. What of the draws goes into
either is known here alone.

Dimension key:  M samples   3 hue, saturation, value   V the 256 values of a byte
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from flatout.feed import Field, Fields
from flatout.yolo.augment.config import AugmentConfig

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


def colors(draws: Mapping[str, np.ndarray]) -> Color:
    """Tables of M samples: products are truncated and cut off at 255; hue is multiplied too, and goes around."""
    gain_M3 = draws["hsv"]
    product_M3V = np.arange(256) * gain_M3[..., None]
    table_M3V = np.minimum(product_M3V, 255).astype(np.uint8)
    table_M3V[:, 0] = product_M3V[:, 0] % HUES
    offset_M3 = _offsets(product_M3V)
    if "gamma" in draws:
        table_M3V[:, 2], offset_M3[:, 2] = _bent_values(draws), np.nan
    return Color(gain_M3, table_M3V, offset_M3)


def color_fields(config: AugmentConfig) -> Fields:
    """What a device is told of a sample's colours under these settings."""
    fields = {"gain": Field((3,), np.float64)}  # of hue, saturation and value
    return {**fields, "value_table": Field((256,))} if config.gamma else fields


def color_parameters(draws: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """What a device is told of the colours of M samples, by the names of `color_fields`."""
    parameters = {"gain": draws["hsv"]}
    # As a table: a device may round powers otherwise.
    return {**parameters, "value_table": _bent_values(draws)} if "gamma" in draws else parameters


def _bent_values(draws: Mapping[str, np.ndarray]) -> np.ndarray:
    """Tables of values that are bent by an exponent, which leaves 0 and 255 alone, then multiplied; uint8 [M, V]."""
    bent_MV = 255 * (np.arange(256) / 255) ** draws["gamma"][:, None]
    return np.asarray(np.minimum(bent_MV * draws["hsv"][:, 2:], 255).astype(np.uint8))


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
