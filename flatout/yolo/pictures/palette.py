"""One colour per class, the same in every picture of a run. BGR, as OpenCV wants them."""

import colorsys

Colour = tuple[int, int, int]

INK: Colour = (51, 41, 36)
"""Of text and axes: not quite black."""
FAINT: Colour = (232, 228, 224)
"""Of grids."""
MUTED: Colour = (140, 130, 122)
"""Of what is there but not looked at first."""
PAPER: Colour = (255, 255, 255)
ACCENT: Colour = (166, 84, 20)
"""Of the one curve that counts."""
WARM: Colour = (40, 112, 224)
"""Of what stands against the accent."""

_GOLDEN = 0.61803398875
_SHADES = ((0.78, 0.95), (0.60, 0.86), (0.88, 0.74))
"""Saturation and value; neighbours differ in these as well."""


def colour_of(number: int) -> Colour:
    """Of a class; neighbours lie far apart on the colour circle."""
    saturation, value = _SHADES[number % len(_SHADES)]
    red, green, blue = colorsys.hsv_to_rgb((0.02 + number * _GOLDEN) % 1, saturation, value)
    return round(255 * blue), round(255 * green), round(255 * red)


def ink_on(colour: Colour) -> Colour:
    """Black or white, whichever can be read on a colour."""
    blue, green, red = colour
    return (0, 0, 0) if 0.114 * blue + 0.587 * green + 0.299 * red > 140 else (255, 255, 255)
