"""Do the anchors fit the boxes, and which ones would?

Dimension key:  T boxes   A anchors
"""

from typing import NamedTuple

import numpy as np

LEAST_PX = 2.0
"""Boxes below this in both directions are left out: nothing can be learned from them."""


class AnchorFit(NamedTuple):
    """How well anchors suit boxes at one training size."""

    best_recall: float
    """Share of boxes that at least one anchor suits: what can be found at most."""
    above_threshold: float
    """Anchors per box that suit."""
    fitness: float
    """Mean of the best ratio over the boxes, where it suits; 1 would be perfect."""
    num_boxes: int
    num_tiny: int
    """Boxes narrower or lower than 3 px."""


def boxes_at_size(size_wh_T2: np.ndarray, box_wh_T2: np.ndarray, img_size: int) -> np.ndarray:
    """Width and height of boxes in pixels of pictures whose long side is `img_size`, float64 [T, 2].

    `size_wh_T2` is the size of each box's picture, `box_wh_T2` its width and height divided by that.
    """
    scaled_T2: np.ndarray = img_size * size_wh_T2 / size_wh_T2.max(1, keepdims=True)
    box_px_T2: np.ndarray = scaled_T2 * box_wh_T2
    return box_px_T2


def fit_of(anchor_wh_A2: np.ndarray, box_wh_px_T2: np.ndarray, *, threshold: float = 4.0) -> AnchorFit:
    """`threshold` is the largest factor between a side of a box and of its anchor, the hyper-parameter anchor_t."""
    used_T2 = usable(box_wh_px_T2)
    num_tiny = int((box_wh_px_T2 < 3).any(1).sum())
    if not len(used_T2):
        return AnchorFit(0.0, 0.0, 0.0, 0, num_tiny)
    likeness_TA = _likeness(anchor_wh_A2, used_T2)
    best_T = likeness_TA.max(1)
    suits_TA = likeness_TA > 1 / threshold
    return AnchorFit(
        best_recall=float((best_T > 1 / threshold).mean()),
        above_threshold=float(suits_TA.sum(1).mean()),
        fitness=float((best_T * (best_T > 1 / threshold)).mean()),
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
    """Anchors for boxes, float64 [A, 2] by area: k-means, then random changes that are kept where they help."""
    used_T2 = usable(box_wh_px_T2)
    if len(used_T2) < num_anchors:
        raise ValueError(f"{len(used_T2)} boxes of 2 px or more are too few for {num_anchors} anchors.")
    best_A2 = k_means(used_T2, num_anchors, rng)
    best = fit_of(best_A2, used_T2, threshold=threshold).fitness
    for _ in range(generations):
        changed_A2 = (best_A2 * _changes(best_A2.shape, rng)).clip(min=LEAST_PX)
        fitness = fit_of(changed_A2, used_T2, threshold=threshold).fitness
        if fitness > best:
            best, best_A2 = fitness, changed_A2
    return best_A2[np.argsort(best_A2.prod(1))]


def k_means(box_wh_T2: np.ndarray, num_anchors: int, rng: np.random.Generator, *, rounds: int = 30) -> np.ndarray:
    """Centres of box sizes, each direction in units of its spread; float64 [A, 2]."""
    spread_2 = box_wh_T2.std(0)
    spread_2[spread_2 == 0] = 1
    point_T2 = box_wh_T2 / spread_2
    centre_A2 = point_T2[rng.choice(len(point_T2), num_anchors, replace=False)]
    for _ in range(rounds):
        nearest_T = ((point_T2[:, None] - centre_A2) ** 2).sum(2).argmin(1)
        count_A = np.bincount(nearest_T, minlength=num_anchors)
        sum_A2 = np.stack([np.bincount(nearest_T, point_T2[:, axis], num_anchors) for axis in (0, 1)], 1)
        # A centre that nobody is near to stays where it is.
        centre_A2 = np.where(count_A[:, None] > 0, sum_A2 / np.maximum(count_A, 1)[:, None], centre_A2)
    anchor_A2: np.ndarray = centre_A2 * spread_2
    return anchor_A2


def usable(box_wh_px_T2: np.ndarray) -> np.ndarray:
    """Boxes that are at least 2 px wide or high."""
    return box_wh_px_T2[np.any(box_wh_px_T2 >= LEAST_PX, axis=1)]


def _likeness(anchor_wh_A2: np.ndarray, box_wh_px_T2: np.ndarray) -> np.ndarray:
    """[T, A]: 1 for equal, else the worse of both sides' ratios, smaller to larger."""
    # Anchors that were never set are 0 wide and high: like nothing.
    ratio_TA2 = box_wh_px_T2[:, None] / np.maximum(anchor_wh_A2, 1e-9)
    likeness_TA: np.ndarray = np.minimum(ratio_TA2, 1 / ratio_TA2.clip(min=1e-9)).min(2)
    return likeness_TA


def _changes(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Factors near 1, at least one of which is not 1."""
    while True:
        factors = 1 + (rng.random(shape) < 0.9) * rng.random() * 0.1 * rng.standard_normal(shape)
        if (factors != 1).any():
            return factors.clip(0.3, 3.0)
