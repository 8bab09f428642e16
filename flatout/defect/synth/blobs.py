"""Shapes of defects on circuit boards: ragged blobs from a pinhole to a bridge between two traces.

A dark one inside copper is a pinhole, at an edge a mouse bite, across a trace an open; a bright one at an edge is a
spur, between traces a short, alone a rest of copper. Which of them it becomes, the pixels under it decide.
"""

import numpy as np

WAVES = 4
"""Bulges around the outline."""
RADIUS_PX = (1.5, 8.0)
LONGEST = 2.5
"""Length over width, at most."""


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


def _trimmed(value: np.ndarray) -> np.ndarray:
    """Without empty borders, the centre still in the middle."""
    middle = len(value) // 2
    rows, columns = (np.flatnonzero(value.any(axis=axis)) for axis in (1, 0))
    up, left = (max(int(abs(found - middle).max()), 1) for found in (rows, columns))
    return value[middle - up : middle + up + 1, middle - left : middle + left + 1]
