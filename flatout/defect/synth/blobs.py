"""Shapes of defects on circuit boards: ragged blobs, cuts, bridges, thorns and pinholes.

Copper is taken away or added, whichever the pixels under a shape leave to do: a blob inside copper is a hole, at its
edge a mouse bite, alone a rest of copper; a cut across a trace is an open, a bridge between two of them a short, and a
thorn at an edge a spur.
"""

from collections.abc import Callable, Mapping

import numpy as np

from flatout.defect.synth.config import BoardShape, Range

WAVES = 4
"""Bulges around the outline."""
RADIUS_PX = (1.5, 8.0)
LONGEST = 2.5
"""Length over width, at most."""
CUT_PX: tuple[Range, Range] = ((6, 24), (2, 6))
BRIDGE_PX: tuple[Range, Range] = ((8, 32), (2, 4))
"""Lengths and widths."""
THORN_PX: tuple[Range, Range] = ((4, 14), (3, 6))
"""Lengths, and widths where it begins."""
PINHOLE_PX: Range = (1.0, 3.0)
"""Radii."""


def blob(rng: np.random.Generator) -> np.ndarray:
    """float32 [h, w], 1 inside, falling to 0 over about a pixel at its outline; sides are odd."""
    low, high = RADIUS_PX
    radius = float(np.exp(rng.uniform(np.log(low), np.log(high))))
    stretch = float(np.sqrt(rng.uniform(1, LONGEST)))
    angle = rng.uniform(0, np.pi)
    weight_W, phase_W = rng.uniform(0, 0.25, WAVES), rng.uniform(0, 2 * np.pi, WAVES)
    reach = int(np.ceil(radius * stretch * (1 + weight_W.sum() / 2))) + 1
    y, x = np.meshgrid(*[np.arange(-reach, reach + 1)] * 2, indexing="ij")
    along = (x * np.cos(angle) + y * np.sin(angle)) / stretch
    across = (-x * np.sin(angle) + y * np.cos(angle)) * stretch
    theta = np.arctan2(across, along)
    bulge = sum(
        weight * np.cos(number * theta + phase)
        for number, (weight, phase) in enumerate(zip(weight_W, phase_W, strict=True), start=1)
    )
    value = np.clip(radius * (1 + bulge / 2) - np.hypot(along, across) + 0.5, 0, 1)
    return _trimmed(np.asarray(value, np.float32))


def bar(rng: np.random.Generator, sizes: tuple[Range, Range]) -> np.ndarray:
    """A ragged stripe in any direction; as `blob` gives it."""
    length, width = (float(rng.uniform(*size)) for size in sizes)
    wave, phase = rng.uniform(0.3, 1.0), rng.uniform(0, 2 * np.pi)
    along, across = _turned(rng.uniform(0, np.pi), reach=length / 2 + width)
    half = width / 2 * (1 + 0.25 * np.sin(wave * along + phase))
    return _filled(np.maximum(np.abs(across) - half, np.abs(along) - length / 2))


def thorn(rng: np.random.Generator, sizes: tuple[Range, Range]) -> np.ndarray:
    """A stripe that narrows to a point; as `blob` gives it."""
    length, width = (float(rng.uniform(*size)) for size in sizes)
    along, across = _turned(rng.uniform(0, 2 * np.pi), reach=length / 2 + width)
    half = width / 2 * np.clip(0.5 - along / length, 0, 1)
    return _filled(np.maximum(np.abs(across) - half, np.abs(along) - length / 2))


def pinhole(rng: np.random.Generator) -> np.ndarray:
    """A small disc; as `blob` gives it."""
    radius = float(rng.uniform(*PINHOLE_PX))
    along, across = _turned(0, reach=radius)
    return _filled(np.hypot(along, across) - radius)


SHAPES: Mapping[BoardShape, Callable[[np.random.Generator], np.ndarray]] = {
    "blob": blob,
    "open": lambda rng: bar(rng, CUT_PX),
    "short": lambda rng: bar(rng, BRIDGE_PX),
    "spur": lambda rng: thorn(rng, THORN_PX),
    "pinhole": pinhole,
}


def _turned(angle: float, *, reach: float) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates along and across a direction, around the middle."""
    side = int(np.ceil(reach)) + 1
    y, x = np.meshgrid(*[np.arange(-side, side + 1)] * 2, indexing="ij")
    return x * np.cos(angle) + y * np.sin(angle), -x * np.sin(angle) + y * np.cos(angle)


def _filled(outside_px: np.ndarray) -> np.ndarray:
    """1 inside, 0 outside, and between them over a pixel."""
    return _trimmed(np.clip(0.5 - outside_px, 0, 1).astype(np.float32))


def _trimmed(value: np.ndarray) -> np.ndarray:
    """Without empty borders, the centre still in the middle."""
    middle = len(value) // 2
    rows, columns = (np.flatnonzero(value.any(axis=axis)) for axis in (1, 0))
    up, left = (max(int(abs(found - middle).max()), 1) for found in (rows, columns))
    return value[middle - up : middle + up + 1, middle - left : middle + left + 1]
