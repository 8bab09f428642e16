"""How well anchors fit the boxes of a data set, and a search for better ones.

Dimension key:  T boxes   A anchors
"""

from typing import NamedTuple

import numpy as np

MIN_BOX_PX = 2.0
"""Boxes smaller than this in both directions are ignored: nothing can be learned from them."""


class AnchorFit(NamedTuple):
    """How well a set of anchors fits the boxes at one training size."""

    best_recall: float
    """Share of boxes that match at least one anchor: the highest recall that is possible."""
    above_threshold: float
    """Mean number of anchors that match a box."""
    fitness: float
    """Mean over the boxes of the best size ratio, counting 0 where no anchor matches; 1 is perfect."""
    num_boxes: int
    """Boxes that were compared: those of at least 2 px."""
    num_tiny: int
    """Boxes with a side below 3 px."""


def boxes_at_size(size_wh_T2: np.ndarray, box_wh_T2: np.ndarray, img_size: int) -> np.ndarray:
    """Width and height of boxes in pixels, in images scaled to a long side of `img_size`; float64 [T, 2].

    `size_wh_T2` is the size of the image of each box, `box_wh_T2` the size of the box relative to its image.
    """
    scaled_T2: np.ndarray = img_size * size_wh_T2 / size_wh_T2.max(1, keepdims=True)
    return np.asarray(scaled_T2 * box_wh_T2)


def fit_of(anchor_wh_A2: np.ndarray, box_wh_px_T2: np.ndarray, *, threshold: float = 4.0) -> AnchorFit:
    """Compare anchors with boxes, both in pixels.

    A box matches an anchor if neither side differs by more than the factor `threshold` (hyper-parameter anchor_t).
    """
    used_T2 = usable(box_wh_px_T2)
    num_tiny = int((box_wh_px_T2 < 3).any(1).sum())
    if not len(used_T2):
        return AnchorFit(0.0, 0.0, 0.0, 0, num_tiny)
    ratio_TA = _shape_ratio(anchor_wh_A2, used_T2)
    matches_TA = ratio_TA > 1 / threshold
    return AnchorFit(
        best_recall=float(matches_TA.any(1).mean()),
        above_threshold=float(matches_TA.sum(1).mean()),
        fitness=_fitness(ratio_TA, threshold),
        num_boxes=len(used_T2),
        num_tiny=num_tiny,
    )


def search_anchors(
    box_wh_px_T2: np.ndarray,
    num_anchors: int,
    rng: np.random.Generator,
    *,
    threshold: float = 4.0,
    generations: int = 1000,
) -> np.ndarray:
    """Find anchors by k-means and then by random mutations that raise the fitness; float64 [A, 2], sorted by area.

    Raises ValueError if there are fewer usable boxes than anchors.
    """
    used_T2 = usable(box_wh_px_T2)
    if len(used_T2) < num_anchors:
        raise ValueError(f"{len(used_T2)} boxes of at least 2 px are too few for {num_anchors} anchors.")
    best_A2 = k_means(used_T2, num_anchors, rng)
    best = _fitness(_shape_ratio(best_A2, used_T2), threshold)
    for _ in range(generations):
        changed_A2 = (best_A2 * _mutation_factors(best_A2.shape, rng)).clip(min=MIN_BOX_PX)
        fitness = _fitness(_shape_ratio(changed_A2, used_T2), threshold)
        if fitness > best:
            best, best_A2 = fitness, changed_A2
    return best_A2[np.argsort(best_A2.prod(1))]


def k_means(box_wh_T2: np.ndarray, num_anchors: int, rng: np.random.Generator, *, rounds: int = 30) -> np.ndarray:
    """Centres of k-means over the box sizes, float64 [A, 2], in the units of the boxes.

    For distances, each axis is divided by its standard deviation.
    """
    spread_2 = box_wh_T2.std(0)
    spread_2[spread_2 == 0] = 1
    point_T2 = box_wh_T2 / spread_2
    centre_A2 = point_T2[rng.choice(len(point_T2), num_anchors, replace=False)]
    for _ in range(rounds):
        nearest_T = ((point_T2[:, None] - centre_A2) ** 2).sum(2).argmin(1)
        count_A = np.bincount(nearest_T, minlength=num_anchors)
        sum_A2 = np.stack([np.bincount(nearest_T, point_T2[:, axis], num_anchors) for axis in (0, 1)], 1)
        # A centre without boxes stays where it is.
        centre_A2 = np.where(count_A[:, None] > 0, sum_A2 / np.maximum(count_A, 1)[:, None], centre_A2)
    return np.asarray(centre_A2 * spread_2)


def usable(box_wh_px_T2: np.ndarray) -> np.ndarray:
    """The boxes that are at least 2 px wide or 2 px high."""
    return box_wh_px_T2[np.any(box_wh_px_T2 >= MIN_BOX_PX, axis=1)]


def _shape_ratio(anchor_wh_A2: np.ndarray, box_wh_px_T2: np.ndarray) -> np.ndarray:
    """Size ratio of every box and anchor, smaller side to larger, of the axis that fits worse; [T, A], 1 if equal."""
    # Axis by axis: NumPy takes several times as long for the minimum over an axis of length 2.
    worse_AT: np.ndarray = np.minimum(*(_ratio(anchor_wh_A2[:, axis], box_wh_px_T2[:, axis]) for axis in (0, 1)))
    return worse_AT.T


def _ratio(anchor_A: np.ndarray, box_T: np.ndarray) -> np.ndarray:
    """Smaller to larger of every anchor's and box's width, or height; [A, T]."""
    # Anchors that were never set have size 0 and must match no box.
    ratio_AT: np.ndarray = box_T / np.maximum(anchor_A, 1e-9)[:, None]
    return np.asarray(np.minimum(ratio_AT, 1 / ratio_AT.clip(min=1e-9)))


def _fitness(ratio_TA: np.ndarray, threshold: float) -> float:
    best_T = ratio_TA.max(1)
    return float((best_T * (best_T > 1 / threshold)).mean())


def _mutation_factors(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Random factors near 1, at least one of them different from 1."""
    while True:
        factors = 1 + (rng.random(shape) < 0.9) * rng.random() * 0.1 * rng.standard_normal(shape)
        if (factors != 1).any():
            return factors.clip(0.3, 3.0)
