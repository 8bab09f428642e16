"""Which part of the spike picture belongs to a crop of the RGB frame?

Per axis with N RGB and M spike pixels: g = gcd(N, M), b = N / g, a = M / g. A crop whose origin and size are multiples
of b has an exact partner; the sampler draws only such origins.
"""

import math
from typing import NamedTuple

from flatout.errors import ConfigError


class Span(NamedTuple):
    """A stretch of one axis of the spike picture."""

    start: int
    length: int
    is_exact: bool


def step_of(rgb: int, spike: int) -> int:
    """Origins that are multiples of this have an exact partner (b)."""
    return rgb // math.gcd(rgb, spike)


def num_origins(rgb: int, spike: int, size: int) -> int:
    """How many origins the sampler chooses from along an axis."""
    if size > rgb:
        raise ConfigError(
            f"CROP_SIZE={size} is larger than a frame of {rgb} px: use a smaller crop, or null for whole frames."
        )
    return (rgb - size) // step_of(rgb, spike) + 1


def spike_span(rgb: int, spike: int, *, origin: int, size: int) -> Span:
    """The spike pixels of RGB pixels origin .. origin + size - 1; nearest if there is no exact answer."""
    step = step_of(rgb, spike)
    if origin % step == 0 and size % step == 0:
        ratio = spike // math.gcd(rgb, spike)
        return Span(origin // step * ratio, size // step * ratio, True)
    length = max(1, round(size * spike / rgb))  # Python rounds halves to even, as the rule says
    return Span(min(origin * spike // rgb, spike - length), length, False)
