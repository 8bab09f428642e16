"""Scores against labels: AUROC, average precision, best F1, over millions of pixels in constant memory.

Scores are counted in bins, per class; every number here follows from the counts. Distinct scores as bins give exact
values. Pixels of whole data sets are binned by the upper half of their float32 pattern, which is monotonic and keeps
0.8 % of the value: equal bins count as ties.

Dimension key:  V bins, rising   N scores
"""

from dataclasses import dataclass

import numpy as np

_DROPPED_BITS = 16
NUM_BINS = (0x3F800000 >> _DROPPED_BITS) + 1
"""Patterns of the numbers from 0 to 1."""


@dataclass(frozen=True)
class Ranking:
    """How many of each class lie in each bin of rising score."""

    positive_V: np.ndarray
    negative_V: np.ndarray
    score_V: np.ndarray
    """Lowest score of each bin."""

    @property
    def auroc(self) -> float | None:
        """Probability that a positive outranks a negative, ties count half; None with one class only."""
        positives, negatives = int(self.positive_V.sum()), int(self.negative_V.sum())
        if not positives or not negatives:
            return None
        below_V = np.cumsum(self.negative_V) - self.negative_V
        wins = (self.positive_V * (below_V + self.negative_V / 2)).sum()
        return float(wins / (positives * negatives))

    @property
    def average_precision(self) -> float | None:
        """Area under precision over recall, by steps; None without positives."""
        hit_V, precision_V = self._curve()
        if hit_V[-1] == 0:
            return None
        gained_V = np.diff(hit_V, prepend=0)
        return float((gained_V * precision_V).sum() / hit_V[-1])

    def best_f1(self) -> tuple[float, float] | None:
        """The best F1 and the score from which on it is reached; None without positives."""
        hit_V, precision_V = self._curve()
        if hit_V[-1] == 0:
            return None
        recall_V = hit_V / hit_V[-1]
        f1_V = 2 * precision_V * recall_V / np.maximum(precision_V + recall_V, 1e-12)
        best = int(np.argmax(f1_V))
        return float(f1_V[best]), float(self.score_V[::-1][best])

    def iou_at(self, threshold: float) -> float | None:
        """Intersection over union of label and score >= threshold, to the width of a bin; None if both are empty."""
        above_V = self.score_V >= threshold
        hits, false = self.positive_V[above_V].sum(), self.negative_V[above_V].sum()
        union = self.positive_V.sum() + false
        return float(hits / union) if union else None

    def _curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Hits and precision with ever lower thresholds, [V] each."""
        hit_V = np.cumsum(self.positive_V[::-1])
        shown_V = hit_V + np.cumsum(self.negative_V[::-1])
        return hit_V, hit_V / np.maximum(shown_V, 1)


def rank(labels_N: np.ndarray, scores_N: np.ndarray) -> Ranking:
    """Exact: every distinct score is a bin."""
    score_V, bin_N = np.unique(np.asarray(scores_N), return_inverse=True)
    is_positive_N = np.asarray(labels_N, np.bool_).reshape(-1)
    positive_V = np.bincount(bin_N.reshape(-1)[is_positive_N], minlength=len(score_V))
    negative_V = np.bincount(bin_N.reshape(-1)[~is_positive_N], minlength=len(score_V))
    return Ranking(positive_V, negative_V, score_V)


class PixelCounts:
    """Probabilities of any number of pixels, counted as they come."""

    def __init__(self) -> None:
        self._count_2V = np.zeros((2, NUM_BINS), np.int64)

    def add(self, is_defect_HW: np.ndarray, probability_HW: np.ndarray) -> None:
        bits_HW = np.ascontiguousarray(probability_HW, np.float32).view(np.uint32) >> _DROPPED_BITS
        bin_N = np.minimum(bits_HW, NUM_BINS - 1).astype(np.int64).reshape(-1)
        both = bin_N + NUM_BINS * is_defect_HW.reshape(-1).astype(np.int64)
        self._count_2V += np.bincount(both, minlength=2 * NUM_BINS).reshape(2, NUM_BINS)

    def ranking(self) -> Ranking:
        score_V = (np.arange(NUM_BINS, dtype=np.uint32) << _DROPPED_BITS).view(np.float32)
        return Ranking(self._count_2V[1], self._count_2V[0], score_V)
