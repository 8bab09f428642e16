"""Classes that look alike and occur together share a head: shape and co-occurrence, mixed and clustered.

Dimension key:  C classes
"""

import math
from dataclasses import dataclass

import numpy as np

from flatout.errors import ConfigError
from flatout.yolo.grouping.balance import balanced
from flatout.yolo.grouping.box_statistics import ClassStatistics
from flatout.yolo.grouping.groups import Grouping, check_heads, make_grouping, members_of
from flatout.yolo.grouping.spectral import spectral_clusters

SHARPNESS = 2.0
"""How fast likeness of shape falls with the difference of log ratios."""
TALL, SLIGHTLY_TALL, SLIGHTLY_WIDE, WIDE = 0.7, 0.9, 1.1, 1.4
"""Width / height below which a head counts as tall, and above which as wide."""


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """How shape and co-occurrence are mixed; the two weights are divided by their sum."""

    alpha: float = 0.5
    """Of shape."""
    beta: float = 0.5
    """Of co-occurrence."""
    balance: bool = False
    seed: int = 42

    def __post_init__(self) -> None:
        if min(self.alpha, self.beta) < 0 or not 0 < self.alpha + self.beta < math.inf:
            raise ConfigError(
                f"--alpha {self.alpha:g} --beta {self.beta:g}: neither may be negative, and one must be more than 0."
            )


def group_by_hybrid(statistics: ClassStatistics, heads: int, config: HybridConfig) -> Grouping:
    """Heads numbered by rising mean proportion."""
    check_heads(heads, statistics.num_classes)
    similarity_CC = mixed_similarity(statistics, config)
    label_C = spectral_clusters(similarity_CC, heads, seed=config.seed)
    if config.balance:
        label_C = balanced(label_C, similarity_CC, heads)
    return grouping_of_clusters(label_C, statistics, balanced=config.balance)


def grouping_of_clusters(label_C: np.ndarray, statistics: ClassStatistics, *, balanced: bool) -> Grouping:
    """Clusters as heads, with names and comments by shape and co-occurrence."""
    groups = sorted(members_of(label_C), key=lambda classes: float(statistics.log_ratio_C[classes].mean()))
    ratios = [math.exp(statistics.log_ratio_C[classes].mean()) for classes in groups]
    comments = [
        f"Ratio: {ratio:.2f}, Avg Co-occur: {mean_together(statistics, classes):.1f}"
        for ratio, classes in zip(ratios, groups, strict=True)
    ]
    names = [f"{shape_name(ratio)}_Group" for ratio in ratios]
    grouping = "hybrid_spectral_balanced" if balanced else "hybrid_spectral"
    return make_grouping(grouping, [classes.tolist() for classes in groups], names, comments)


def shape_name(ratio: float) -> str:
    """Of a mean width / height."""
    if ratio < SLIGHTLY_TALL:
        return "Tall_Vertical" if ratio < TALL else "Slight_Tall"
    if ratio > SLIGHTLY_WIDE:
        return "Wide_Horizontal" if ratio > WIDE else "Slight_Wide"
    return "Square_Central"


def mean_together(statistics: ClassStatistics, classes: np.ndarray) -> float:
    """Pictures that two different classes of a head share, on average; 0 for a single class."""
    shared = statistics.together_CC[np.ix_(classes, classes)]
    pairs = len(classes) * (len(classes) - 1)
    return float(shared.sum() - np.trace(shared)) / max(pairs, 1)


def mixed_similarity(statistics: ClassStatistics, config: HybridConfig) -> np.ndarray:
    """float64 [C, C], symmetric, 0 to 1, ones on the diagonal."""
    shape, together = shape_similarity(statistics.log_ratio_C), cooccurrence_similarity(statistics.together_CC)
    mixed_CC = (config.alpha * shape + config.beta * together) / (config.alpha + config.beta)
    mixed_CC = (mixed_CC + mixed_CC.T) / 2
    np.fill_diagonal(mixed_CC, 1)
    return np.asarray(mixed_CC)


def shape_similarity(log_ratio_C: np.ndarray) -> np.ndarray:
    """float64 [C, C], from 1 for the same mean shape towards 0."""
    similarity_CC: np.ndarray = np.exp(-SHARPNESS * (log_ratio_C[:, None] - log_ratio_C) ** 2)
    return similarity_CC


def cooccurrence_similarity(together_CC: np.ndarray) -> np.ndarray:
    """Pictures with both classes over pictures with either (Jaccard), float64 [C, C]; ones on the diagonal."""
    count_C = np.diag(together_CC)
    either_CC = count_C[:, None] + count_C - together_CC
    similarity_CC = together_CC / np.maximum(either_CC, 1)
    np.fill_diagonal(similarity_CC, 1)
    return np.asarray(similarity_CC)
