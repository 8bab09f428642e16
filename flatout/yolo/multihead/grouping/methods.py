"""The four methods of grouping, and their clustering algorithms.

    standard         by name
    geometry         by the shape of boxes: exact k-means of one number per class
    hybrid           by shape and co-occurrence: spectral clustering, optionally balanced
    anticonfusion    confused classes in different heads: greedy colouring

Dimension key:  C classes   H heads   K clusters   N points   D coordinates   n values on a line
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flatout.errors import ConfigError
from flatout.yaml_strict import load_yaml
from flatout.yolo.find_file import shipped_folder
from flatout.yolo.multihead.grouping.statistics import ClassStatistics, Grouping, check_heads, make_grouping, members_of
from flatout.yolo.multihead.head_config import contiguous_heads, head_config_of

# standard: COCO's classes by meaning, those of other data sets in blocks

COCO_HEADS = "coco_320_1b4h_standard.yaml"
"""A shipped file with four heads, their weights, and the names of COCO."""


def group_standard(names: Sequence[str], heads: int) -> Grouping:
    """Four heads by meaning if the names are COCO's; else blocks of consecutive classes, as equal as possible."""
    check_heads(heads, len(names))
    path = shipped_folder("data") / COCO_HEADS
    content = load_yaml(path)
    assert isinstance(content, dict)
    coco = head_config_of(content, where=str(path))
    is_coco = [name.strip().lower() for name in names] == content["names"]
    config = coco if is_coco and coco.num_heads == heads else contiguous_heads(len(names), heads)
    return Grouping(config, ("",) * heads)


# geometry: classes with boxes of similar proportions share a head

TALL, WIDE = 0.75, 1.3
"""Width / height below which a head is tall, and above which it is wide."""


def group_by_geometry(statistics: ClassStatistics, heads: int) -> Grouping:
    """Heads by mean proportion, numbered from tall to wide."""
    check_heads(heads, statistics.num_classes)
    groups = members_of(k_means_on_a_line(statistics.log_ratio_C, heads))
    ratios = [math.exp(statistics.log_ratio_C[classes].mean()) for classes in groups]
    names = [f"{shape_name(ratio)}_Group" for ratio in ratios]
    comments = [f"Avg Ratio: {ratio:.2f}" for ratio in ratios]
    return make_grouping("geometry_kmeans", [classes.tolist() for classes in groups], names, comments)


def shape_name(ratio: float) -> str:
    """Name of a mean width / height."""
    return "Tall (Vertical)" if ratio < TALL else "Wide (Horizontal)" if ratio > WIDE else "Square (Central)"


# hybrid: classes of similar shape that occur together share a head

SHARPNESS = 2.0
"""How fast the similarity of shapes falls with the difference of log ratios."""
VERY_TALL, SLIGHTLY_TALL, SLIGHTLY_WIDE, VERY_WIDE = 0.7, 0.9, 1.1, 1.4
"""Width / height below which a head is tall, and above which it is wide."""


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """How shape and co-occurrence are mixed; the two weights are divided by their sum."""

    alpha: float = 0.5
    """Weight of shape."""
    beta: float = 0.5
    """Weight of co-occurrence."""
    balance: bool = False
    seed: int = 42

    def __post_init__(self) -> None:
        if min(self.alpha, self.beta) < 0 or not 0 < self.alpha + self.beta < math.inf:
            raise ConfigError(
                f"--alpha {self.alpha:g} --beta {self.beta:g}: neither may be negative, and one must be above 0."
            )


def group_by_hybrid(statistics: ClassStatistics, heads: int, config: HybridConfig) -> Grouping:
    """Heads by shape and co-occurrence, numbered from tall to wide."""
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
    names = [f"{finer_shape_name(ratio)}_Group" for ratio in ratios]
    grouping = "hybrid_spectral_balanced" if balanced else "hybrid_spectral"
    return make_grouping(grouping, [classes.tolist() for classes in groups], names, comments)


def finer_shape_name(ratio: float) -> str:
    """Name of a mean width / height, in five steps."""
    if ratio < SLIGHTLY_TALL:
        return "Tall_Vertical" if ratio < VERY_TALL else "Slight_Tall"
    if ratio > SLIGHTLY_WIDE:
        return "Wide_Horizontal" if ratio > VERY_WIDE else "Slight_Wide"
    return "Square_Central"


def mean_together(statistics: ClassStatistics, classes: np.ndarray) -> float:
    """Mean number of images with both of two different classes of a head; 0 for a single class."""
    shared = statistics.together_CC[np.ix_(classes, classes)]
    pairs = len(classes) * (len(classes) - 1)
    return float(shared.sum() - np.trace(shared)) / max(pairs, 1)


def mixed_similarity(statistics: ClassStatistics, config: HybridConfig) -> np.ndarray:
    """Weighted mean of both similarities, float64 [C, C], symmetric, 0 to 1, ones on the diagonal."""
    shape, together = shape_similarity(statistics.log_ratio_C), cooccurrence_similarity(statistics.together_CC)
    mixed_CC = (config.alpha * shape + config.beta * together) / (config.alpha + config.beta)
    mixed_CC = (mixed_CC + mixed_CC.T) / 2
    np.fill_diagonal(mixed_CC, 1)
    return np.asarray(mixed_CC)


def shape_similarity(log_ratio_C: np.ndarray) -> np.ndarray:
    """Similarity of mean shapes, float64 [C, C]: 1 for the same shape, falling to 0."""
    return np.asarray(np.exp(-SHARPNESS * (log_ratio_C[:, None] - log_ratio_C) ** 2))


def cooccurrence_similarity(together_CC: np.ndarray) -> np.ndarray:
    """Images with both classes over images with either (Jaccard), float64 [C, C]; ones on the diagonal.

    `together_CC` counts images with both classes; on its diagonal, images with the class.
    """
    count_C = np.diag(together_CC)
    either_CC = count_C[:, None] + count_C - together_CC
    similarity_CC = together_CC / np.maximum(either_CC, 1)
    np.fill_diagonal(similarity_CC, 1)
    return np.asarray(similarity_CC)


# anticonfusion: confused classes go to different heads, with about equally many boxes per head

COCO_PAIRS = (
    ("car", "truck"), ("bicycle", "motorcycle"), ("cat", "dog"), ("sheep", "cow"), ("fork", "knife"),
    ("knife", "spoon"), ("fork", "spoon"), ("wine glass", "cup"), ("apple", "orange"), ("chair", "couch"),
    ("mouse", "remote"), ("cell phone", "remote"), ("microwave", "oven"), ("skis", "snowboard"),
    ("backpack", "handbag"), ("bus", "truck"), ("car", "bus"), ("couch", "bed"), ("horse", "cow"),
)  # fmt: skip
"""Classes that detectors trained on COCO are known to confuse."""


def group_apart(num_boxes_C: np.ndarray, confused_CC: np.ndarray, heads: int) -> Grouping:
    """Heads without confused pairs as far as possible, by greedy colouring; `confused_CC` is symmetric and boolean.

    Classes are assigned by descending number of boxes. Each goes to the head with the fewest boxes among those without
    a class it is confused with; if there is none, to the head with the fewest boxes of all. For ties the lower class
    and the lower head win.
    """
    check_heads(heads, len(num_boxes_C))
    head_C = _assign_heads(num_boxes_C, confused_CC, heads)
    boxes_H = np.bincount(head_C, num_boxes_C, heads).astype(np.int64)
    percent_H = 100 * boxes_H / max(1, boxes_H.sum())
    comments = [f"{boxes} boxes ({percent:.1f} %)" for boxes, percent in zip(boxes_H, percent_H, strict=True)]
    groups = [np.flatnonzero(head_C == head).tolist() for head in range(heads)]
    return make_grouping("anticonfusion", groups, [f"Head {head}" for head in range(heads)], comments)


def _assign_heads(num_boxes_C: np.ndarray, confused_CC: np.ndarray, heads: int) -> np.ndarray:
    """Head of each class, int64 [C]; no head is empty."""
    head_C = np.full(len(num_boxes_C), -1)
    boxes_H = np.zeros(heads, np.int64)
    order_C = np.argsort(-num_boxes_C, kind="stable")
    for rank, number in enumerate(order_C.tolist()):
        free_H = np.ones(heads, bool)
        free_H[head_C[confused_CC[number] & (head_C >= 0)]] = False
        empty_H = np.bincount(head_C[head_C >= 0], minlength=heads) == 0
        # Classes without boxes would all go to one head, but no head may remain without a class.
        if empty_H.sum() == len(order_C) - rank:
            free_H = empty_H
        allowed = np.flatnonzero(free_H) if free_H.any() else np.arange(heads)
        head = int(allowed[boxes_H[allowed].argmin()])
        head_C[number] = head
        boxes_H[head] += num_boxes_C[number]
    return head_C


def known_pairs(names: Sequence[str]) -> np.ndarray:
    """Which classes are known to be confused, by their names in COCO; bool [C, C], symmetric."""
    number = {name.strip().lower(): index for index, name in enumerate(names)}
    confused_CC = np.zeros((len(names), len(names)), bool)
    for one, other in COCO_PAIRS:
        if one in number and other in number:
            confused_CC[number[one], number[other]] = confused_CC[number[other], number[one]] = True
    return confused_CC


def confused_pairs(fraction_CC: np.ndarray, *, least: float) -> np.ndarray:
    """Pairs of which at least the fraction `least` of one class is detected as the other; bool [C, C], symmetric.

    `fraction_CC` has the predicted class as its row and fractions of the true class in its columns.
    """
    confused_CC: np.ndarray = np.maximum(fraction_CC, fraction_CC.T) >= least
    np.fill_diagonal(confused_CC, False)
    return confused_CC


def num_confused_together(confused_CC: np.ndarray, grouping: Grouping) -> int:
    """Number of confused pairs that share a head."""
    head_C = np.array(grouping.config.head_C)
    return int((confused_CC & (head_C[:, None] == head_C)).sum()) // 2


# Exact k-means on a line
#
# The groups of k-means on a line are intervals, so the optimal grouping can be found by dynamic programming, without
# seeds or restarts.


def k_means_on_a_line(value_n: np.ndarray, num_groups: int) -> np.ndarray:
    """Group of each value, int64 [n], numbered by rising mean, with the smallest possible sum of squares.

    No group is empty. Of several optimal groupings it is the one whose last groups begin earliest.
    """
    order_n = np.argsort(value_n, kind="stable")
    begins_K = _best_starts(value_n[order_n], num_groups)
    label_n = np.empty(len(value_n), np.int64)
    label_n[order_n] = np.searchsorted(begins_K, np.arange(len(value_n)), side="right") - 1
    return label_n


def _best_starts(value_n: np.ndarray, num_groups: int) -> np.ndarray:
    """Index of the first value of each group among sorted values, int64 [K]."""
    cost = _interval_costs(value_n)
    num_values = len(value_n)
    # least[j]: the smallest cost of the first j values in as many groups as iterations so far.
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


def _interval_costs(value_n: np.ndarray) -> np.ndarray:
    """Sum of squares about the mean of the values i to j, float64 [i, j]; infinite if j < i."""
    # Centred first, so that the sums of squares lose no digits.
    centred_n = value_n - value_n.mean()
    sum_n = np.concatenate(([0.0], np.cumsum(centred_n)))
    square_n = np.concatenate(([0.0], np.cumsum(centred_n**2)))
    first, last = np.indices((len(value_n), len(value_n)))
    count = np.maximum(last - first + 1, 1)
    spread = square_n[last + 1] - square_n[first] - (sum_n[last + 1] - sum_n[first]) ** 2 / count
    return np.where(last >= first, np.maximum(spread, 0), np.inf)


# k-means with seeded restarts, of which the one with the smallest sum of squares is kept

RESTARTS = 200
"""On 24 random problems of 20 to 200 classes in 3 to 8 heads the sum of squares was up to 14 % above the smallest known
one with 10 starts, 0.2 % with 100, 0.14 % with 200, which take about a second."""
MAX_ROUNDS = 300


def k_means(point_ND: np.ndarray, num_clusters: int, *, seed: int, restarts: int = RESTARTS) -> np.ndarray:
    """Cluster of each point, int64 [N], numbered in the order of their first points; no cluster is empty."""
    rng = np.random.default_rng(seed)
    runs = [_run(point_ND, _first_centres(point_ND, num_clusters, rng)) for _ in range(restarts)]
    _, label_N = min(runs, key=lambda run: run[0])
    return in_order_of_occurrence(label_N)


def in_order_of_occurrence(label_N: np.ndarray) -> np.ndarray:
    """The clusters renumbered: point 0 is in cluster 0, the next new cluster is 1, and so on."""
    _, first, inverse_N = np.unique(label_N, return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return number[inverse_N.ravel()]


def sum_of_squares(point_ND: np.ndarray, label_N: np.ndarray) -> float:
    """The objective of k-means: squared distances to the mean of the own cluster."""
    clusters = [point_ND[label_N == label] for label in np.unique(label_N)]
    return float(sum(((own - own.mean(0)) ** 2).sum() for own in clusters))


def _run(point_ND: np.ndarray, centre_KD: np.ndarray) -> tuple[float, np.ndarray]:
    label_N = np.full(len(point_ND), -1)
    for _ in range(MAX_ROUNDS):
        distance_NK = _squared_distances(point_ND, centre_KD)
        nearest_N = _nearest_clusters(distance_NK)
        if np.array_equal(nearest_N, label_N):
            break
        label_N = nearest_N
        centre_KD = np.stack([point_ND[label_N == cluster].mean(0) for cluster in range(len(centre_KD))])
    return sum_of_squares(point_ND, label_N), label_N


def _first_centres(point_ND: np.ndarray, num_clusters: int, rng: np.random.Generator) -> np.ndarray:
    """Points drawn with probabilities proportional to the squared distance to the nearest chosen one (k-means++)."""
    chosen = [int(rng.integers(len(point_ND)))]
    for _ in range(num_clusters - 1):
        distance_N = _squared_distances(point_ND, point_ND[chosen]).min(1)
        # Points equal to chosen ones have probability 0, unless all are.
        chance_N = distance_N if distance_N.sum() > 0 else np.ones(len(point_ND))
        chosen.append(int(rng.choice(len(point_ND), p=chance_N / chance_N.sum())))
    return point_ND[chosen]


def _nearest_clusters(distance_NK: np.ndarray) -> np.ndarray:
    """The nearest cluster of each point; an empty cluster gets the point that is farthest from its own."""
    label_N: np.ndarray = distance_NK.argmin(1)
    for cluster in range(distance_NK.shape[1]):
        if not (label_N == cluster).any():
            own_N = distance_NK[np.arange(len(label_N)), label_N]
            # Not from a cluster that would become empty.
            alone_N = np.bincount(label_N, minlength=distance_NK.shape[1])[label_N] == 1
            label_N[np.where(alone_N, -1.0, own_N).argmax()] = cluster
    return label_N


def _squared_distances(point_ND: np.ndarray, centre_KD: np.ndarray) -> np.ndarray:
    return np.asarray(((point_ND[:, None] - centre_KD) ** 2).sum(2))


# Spectral clustering: k-means on the leading eigenvectors of the normalised Laplacian of a similarity

MIN_DEGREE = 1e-12


def spectral_clusters(similarity_CC: np.ndarray, num_clusters: int, *, seed: int) -> np.ndarray:
    """Cluster of each class, int64 [C]; the similarity must be symmetric and not negative, its diagonal is ignored."""
    return k_means(spectral_embedding(similarity_CC, num_clusters), num_clusters, seed=seed)


def spectral_embedding(similarity_CC: np.ndarray, num_clusters: int) -> np.ndarray:
    """Coordinates in which similar classes are close, float64 [C, K]; the signs of columns are arbitrary."""
    others_CC = similarity_CC * (1 - np.eye(len(similarity_CC)))
    scale_C = 1 / np.sqrt(np.maximum(others_CC.sum(1), MIN_DEGREE))
    # The largest eigenvalues of D^-1/2 A D^-1/2 are the smallest of I - D^-1/2 A D^-1/2, the Laplacian.
    _, vector_CC = np.linalg.eigh(others_CC * scale_C[:, None] * scale_C)
    return np.asarray(vector_CC[:, ::-1][:, :num_clusters] * scale_C[:, None])


# Balancing: classes move from clusters that are too large to clusters that are too small

MAX_MOVES = 100
TOLERANCE = 5
"""A head may have this many classes more or less than the mean."""


def balanced(label_C: np.ndarray, similarity_CC: np.ndarray, num_clusters: int) -> np.ndarray:
    """The labels after balancing, int64 [C]; it stops when no cluster is too large, or none is too small.

    Each move takes, from the largest cluster, the class that is on average most similar to the smallest cluster. For
    ties the lower cluster number and the lower class win.
    """
    label_C = label_C.copy()
    mean_size = len(label_C) / num_clusters
    for _ in range(MAX_MOVES):
        size_K = np.bincount(label_C, minlength=num_clusters)
        # argmax and argmin return the first of equal values, as the rule for ties requires.
        largest, smallest = int(size_K.argmax()), int(size_K.argmin())
        if size_K[largest] <= mean_size + TOLERANCE or size_K[smallest] >= mean_size - TOLERANCE:
            break
        movable = np.flatnonzero(label_C == largest)
        similarity = similarity_CC[np.ix_(movable, np.flatnonzero(label_C == smallest))].mean(1)
        label_C[movable[similarity.argmax()]] = smallest
    return label_C
