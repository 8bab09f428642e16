"""Classes whose boxes have like proportions share a head: k-means on one number per class, solved exactly.

On a line the groups of k-means are neighbours, so the best of all groupings can be found by dynamic programming; no
seed, no restarts.

Dimension key:  C classes   n values   K groups
"""

import math

import numpy as np

from flatout.yolo.grouping.box_statistics import ClassStatistics
from flatout.yolo.grouping.groups import Grouping, check_heads, make_grouping, members_of

TALL, WIDE = 0.75, 1.3
"""Width / height below which a head counts as tall, above which as wide."""


def group_by_geometry(statistics: ClassStatistics, heads: int) -> Grouping:
    """Heads numbered by rising proportion."""
    check_heads(heads, statistics.num_classes)
    groups = members_of(k_means_on_a_line(statistics.log_ratio_C, heads))
    ratios = [math.exp(statistics.log_ratio_C[classes].mean()) for classes in groups]
    names = [f"{shape_name(ratio)}_Group" for ratio in ratios]
    comments = [f"Avg Ratio: {ratio:.2f}" for ratio in ratios]
    return make_grouping("geometry_kmeans", [classes.tolist() for classes in groups], names, comments)


def shape_name(ratio: float) -> str:
    """Of a mean width / height."""
    return "Tall (Vertical)" if ratio < TALL else "Wide (Horizontal)" if ratio > WIDE else "Square (Central)"


def k_means_on_a_line(value_n: np.ndarray, num_groups: int) -> np.ndarray:
    """Group of each value, int64 [n], numbered by rising mean: no other grouping has a smaller sum of squares.

    Every group has a value. Of several best ones: the one whose last groups begin earliest.
    """
    order_n = np.argsort(value_n, kind="stable")
    begins_K = _best_begins(value_n[order_n], num_groups)
    label_n = np.empty(len(value_n), np.int64)
    label_n[order_n] = np.searchsorted(begins_K, np.arange(len(value_n)), side="right") - 1
    return label_n


def _best_begins(value_n: np.ndarray, num_groups: int) -> np.ndarray:
    """Where each group begins among rising values, int64 [K]."""
    cost = _spreads(value_n)
    num_values = len(value_n)
    # least[j]: of the first j values in as many groups as rounds so far.
    least = np.concatenate(([np.inf], cost[0]))
    begin_Kn = np.zeros((num_groups, num_values + 1), np.int64)
    for group in range(1, num_groups):
        total = least[:-1, None] + cost  # [begin of the last group, its last value]
        begin_Kn[group, 1:] = total.argmin(0)
        least = np.concatenate(([np.inf], total.min(0)))
    begins, end = [], num_values
    for group in reversed(range(num_groups)):
        end = int(begin_Kn[group, end])
        begins.append(end)
    return np.array(begins[::-1])


def _spreads(value_n: np.ndarray) -> np.ndarray:
    """Sum of squares about the mean of the values i to j, float64 [i, j]; infinite where j < i."""
    # About their mean, so that sums of squares lose no digits.
    centred_n = value_n - value_n.mean()
    sum_n = np.concatenate(([0.0], np.cumsum(centred_n)))
    square_n = np.concatenate(([0.0], np.cumsum(centred_n**2)))
    first, last = np.indices((len(value_n), len(value_n)))
    count = np.maximum(last - first + 1, 1)
    spread = square_n[last + 1] - square_n[first] - (sum_n[last + 1] - sum_n[first]) ** 2 / count
    return np.where(last >= first, np.maximum(spread, 0), np.inf)
