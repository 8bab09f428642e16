"""What the six kinds of objects look like: a pattern of two colours, a rim, and light from above.

A pattern takes points in the shape's frame and a number of repeats, and gives 0 or 1 (smooth between): which of the two
colours a pixel has. Colours are BGR, 0 to 255.

Dimension key:  H, W rows and columns of a patch
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from flatout.yolo.demo_data.shapes import Points

Pattern = Callable[[Points, float], np.ndarray]


class Surface(NamedTuple):
    """How a kind of object is painted."""

    pattern: Pattern
    repeats: tuple[float, float]
    hues: tuple[tuple[int, int, int], ...]
    """Main colours to choose from. Every kind has its own: a short training shall get somewhere."""
    relief: float
    """How strongly the light falls off: 1 for a ball, little for what is flat."""


def spokes(points: Points, repeats: float) -> np.ndarray:
    return _smooth_step(np.sin(np.arctan2(points.y, points.x) * round(repeats)))


def stripes(points: Points, repeats: float) -> np.ndarray:
    return _smooth_step(np.sin(points.y * repeats * math.pi))


def slanted(points: Points, repeats: float) -> np.ndarray:
    return _smooth_step(np.sin((points.x + points.y) * repeats * math.pi))


def checks(points: Points, repeats: float) -> np.ndarray:
    return _smooth_step(np.sin(points.x * repeats * math.pi) * np.sin(points.y * repeats * math.pi))


def dots(points: Points, repeats: float) -> np.ndarray:
    return _smooth_step(np.cos(points.x * repeats * math.pi) * np.cos(points.y * repeats * math.pi) - 0.45)


def echoes(points: Points, repeats: float) -> np.ndarray:
    return _smooth_step(np.sin(points.radius * repeats * math.pi))


RED, CORAL, PINK, VIOLET = (52, 58, 212), (92, 122, 246), (180, 112, 240), (176, 72, 122)
ORANGE, YELLOW, LIME, GREEN = (40, 132, 242), (62, 208, 250), (70, 200, 150), (88, 150, 52)
TEAL, SKY, BLUE, INK = (168, 170, 30), (228, 176, 70), (196, 92, 36), (58, 42, 34)
IVORY = (222, 238, 244)

SURFACES: dict[str, Surface] = {
    "ring": Surface(spokes, (5, 9), (RED, CORAL), 0.35),
    "cross": Surface(slanted, (3.0, 5.0), (GREEN, LIME), 0.2),
    "star": Surface(echoes, (3.0, 4.0), (YELLOW, ORANGE), 0.3),
    "triangle": Surface(dots, (3.0, 4.5), (VIOLET, PINK), 0.2),
    "ball": Surface(stripes, (1.4, 2.4), (BLUE, SKY), 1.0),
    "box": Surface(checks, (2.0, 3.2), (INK, TEAL), 0.25),
}


def paint(name: str, points: Points, distance: np.ndarray, lit: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Colours of a patch, float32 [H, W, 3]; `lit` [H, W] is -1 (away from the light) to 1 (towards it)."""
    surface = SURFACES[name]
    main = _varied(surface.hues[rng.integers(len(surface.hues))], rng)
    second = _varied(IVORY, rng) if rng.random() < 0.75 else 255 - 0.5 * (255 - main)
    share = surface.pattern(points, rng.uniform(*surface.repeats))[..., None]
    colours = main * share + second * (1 - share)
    # A rim of the main colour, darkened: the outline stays visible on any ground.
    rim = np.clip((distance + 0.13) / 0.04, 0, 1)[..., None]
    colours = colours * (1 - rim) + main * 0.55 * rim
    light = 1 + surface.relief * (0.42 * lit + 0.5 * np.maximum(lit - 0.55, 0) ** 2)
    return np.asarray(np.clip(colours * light[..., None], 0, 255), np.float32)


def _varied(colour: tuple[int, int, int], rng: np.random.Generator) -> np.ndarray:
    """A little lighter or darker, a little off in hue; float32 [3]."""
    varied = np.array(colour) * rng.uniform(0.8, 1.15) + rng.normal(0, 9, 3)
    return np.asarray(np.clip(varied, 0, 255), np.float32)


def _smooth_step(wave: np.ndarray) -> np.ndarray:
    return np.clip(wave * 4 + 0.5, 0, 1)
