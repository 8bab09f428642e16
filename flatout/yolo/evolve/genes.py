"""How hyper-parameters mutate, and which row is the parent of the next. Pure: numbers and a generator in, numbers out.

YOLOv7's table, matched by key: there the gains are matched by position to a file that has one key more.

Dimension key:  G genes   N rows
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

PARENTS = 5
"""The best so many rows may have children."""
SHARE = 0.8
"""Of genes that change, on average."""
SPREAD = 0.2
FACTORS = (0.3, 3.0)
DECIMALS = 5


class Gene(NamedTuple):
    """How much a value moves, and within what limits. Gain 0: it keeps its value."""

    gain: float
    low: float
    high: float


GENES = {
    "lr0": Gene(1, 1e-5, 0.1),
    "lrf": Gene(1, 0.01, 1),
    "momentum": Gene(0.3, 0.6, 0.98),
    "weight_decay": Gene(1, 0, 0.001),
    "warmup_epochs": Gene(1, 0, 5),
    "warmup_momentum": Gene(1, 0, 0.95),
    "warmup_bias_lr": Gene(1, 0, 0.2),
    "box": Gene(1, 0.02, 0.2),
    "cls": Gene(1, 0.2, 4),
    "cls_pw": Gene(1, 0.5, 2),
    "obj": Gene(1, 0.2, 4),
    "obj_pw": Gene(1, 0.5, 2),
    "iou_t": Gene(0, 0.1, 0.7),
    "anchor_t": Gene(1, 2, 8),
    "fl_gamma": Gene(0, 0, 2),
    "hsv_h": Gene(1, 0, 0.1),
    "hsv_s": Gene(1, 0, 0.9),
    "hsv_v": Gene(1, 0, 0.9),
    "degrees": Gene(1, 0, 45),
    "translate": Gene(1, 0, 0.9),
    "scale": Gene(1, 0, 0.9),
    "shear": Gene(1, 0, 10),
    "perspective": Gene(0, 0, 0.001),
    "flipud": Gene(1, 0, 1),
    "fliplr": Gene(0, 0, 1),
    "mosaic": Gene(1, 0, 1),
    "mixup": Gene(1, 0, 1),
    "copy_paste": Gene(1, 0, 1),
    "paste_in": Gene(1, 0, 1),
    "anchors": Gene(2, 2, 10),
}


def mutated(values: Mapping[str, float], rng: np.random.Generator) -> dict[str, float]:
    """A child: those of the values that are genes, changed and within their limits; the others as they are."""
    names = [name for name in values if name in GENES]
    value_G, (gain_G, low_G, high_G) = np.array([values[name] for name in names]), np.array([GENES[n] for n in names]).T
    child_G = np.clip(value_G * _factors(gain_G, rng), low_G, high_G).round(DECIMALS)
    return {**values, **dict(zip(names, child_G.tolist(), strict=True))}


def choose_parent(fitness_N: np.ndarray, rng: np.random.Generator) -> int:
    """A row among the best, the fitter the likelier; the last of them never, unless all are alike."""
    # Stable: of rows that are alike the earlier one counts as better, on every machine.
    best = np.argsort(-fitness_N, kind="stable")[:PARENTS]
    weight = fitness_N[best] - fitness_N[best].min()
    share = weight / weight.sum() if weight.sum() > 0 else np.full(len(best), 1 / len(best))
    return int(rng.choice(best, p=share))


def _factors(gain_G: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """What values are multiplied by; never 1 for all of them: such a child would be its parent."""
    while True:
        mask_G = rng.random(len(gain_G)) < SHARE
        factor_G = np.clip(1 + gain_G * mask_G * rng.standard_normal(len(gain_G)) * rng.random() * SPREAD, *FACTORS)
        if not np.all(factor_G == 1):
            return np.asarray(factor_G)
