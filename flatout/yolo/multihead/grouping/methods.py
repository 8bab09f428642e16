"""Classes whose boxes have like proportions share a head: k-means on one number per class, solved exactly.

On a line the groups of k-means are neighbours, so the best of all groupings can be found by dynamic programming; no
seed, no restarts.

Dimension key:  C classes   n values   K groups

k-means with several seeded starts; the one with the smallest sum of squares counts.

Dimension key:  N points   D coordinates   K clusters
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

RESTARTS = 200
"""On 24 drawn problems of 20 to 200 classes in 3 to 8 heads the sum of squares was up to 14 % above the smallest known
one with 10 starts, 0.2 % with 100, 0.14 % with 200; those take about a second."""
MOST_ROUNDS = 300


def k_means(point_ND: np.ndarray, num_clusters: int, *, seed: int, restarts: int = RESTARTS) -> np.ndarray:
    """Cluster of each point, int64 [N], numbered in the order in which clusters first occur; none is empty."""
    rng = np.random.default_rng(seed)
    runs = [_run(point_ND, _first_centres(point_ND, num_clusters, rng)) for _ in range(restarts)]
    _, label_N = min(runs, key=lambda run: run[0])
    return in_order_of_occurrence(label_N)


def in_order_of_occurrence(label_N: np.ndarray) -> np.ndarray:
    """The same clusters with other numbers: point 0 is in cluster 0, the next new cluster is 1, and so on."""
    _, first, inverse_N = np.unique(label_N, return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return number[inverse_N.ravel()]


def sum_of_squares(point_ND: np.ndarray, label_N: np.ndarray) -> float:
    """What k-means makes small: squared distances to the mean of the own cluster."""
    clusters = [point_ND[label_N == label] for label in np.unique(label_N)]
    return float(sum(((own - own.mean(0)) ** 2).sum() for own in clusters))


def _run(point_ND: np.ndarray, centre_KD: np.ndarray) -> tuple[float, np.ndarray]:
    label_N = np.full(len(point_ND), -1)
    for _ in range(MOST_ROUNDS):
        distance_NK = _squared_distances(point_ND, centre_KD)
        nearest_N = _without_empty(distance_NK)
        if np.array_equal(nearest_N, label_N):
            break
        label_N = nearest_N
        centre_KD = np.stack([point_ND[label_N == cluster].mean(0) for cluster in range(len(centre_KD))])
    return sum_of_squares(point_ND, label_N), label_N


def _first_centres(point_ND: np.ndarray, num_clusters: int, rng: np.random.Generator) -> np.ndarray:
    """Points, each drawn with the squared distance to the nearest so far as its chance (k-means++)."""
    chosen = [int(rng.integers(len(point_ND)))]
    for _ in range(num_clusters - 1):
        distance_N = _squared_distances(point_ND, point_ND[chosen]).min(1)
        # Points that lie on top of chosen ones have no chance, unless all do.
        chance_N = distance_N if distance_N.sum() > 0 else np.ones(len(point_ND))
        chosen.append(int(rng.choice(len(point_ND), p=chance_N / chance_N.sum())))
    return point_ND[chosen]


def _without_empty(distance_NK: np.ndarray) -> np.ndarray:
    """The nearest cluster of each point; an empty one gets the point that is farthest from its own."""
    label_N: np.ndarray = distance_NK.argmin(1)
    for cluster in range(distance_NK.shape[1]):
        if not (label_N == cluster).any():
            own_N = distance_NK[np.arange(len(label_N)), label_N]
            # Not from a cluster that would be empty then.
            alone_N = np.bincount(label_N, minlength=distance_NK.shape[1])[label_N] == 1
            label_N[np.where(alone_N, -1.0, own_N).argmax()] = cluster
    return label_N


def _squared_distances(point_ND: np.ndarray, centre_KD: np.ndarray) -> np.ndarray:
    distance_NK: np.ndarray = ((point_ND[:, None] - centre_KD) ** 2).sum(2)
    return distance_NK


# Spectral clustering: k-means on the leading eigenvectors of the normalised Laplacian of a similarity.
#
# Dimension key:  C classes   K clusters

LEAST_DEGREE = 1e-12


def spectral_clusters(similarity_CC: np.ndarray, num_clusters: int, *, seed: int) -> np.ndarray:
    """Cluster of each class, int64 [C]; the similarity is symmetric and not negative, its diagonal does not count."""
    return k_means(spectral_embedding(similarity_CC, num_clusters), num_clusters, seed=seed)


def spectral_embedding(similarity_CC: np.ndarray, num_clusters: int) -> np.ndarray:
    """Coordinates in which like classes are near each other, float64 [C, K]; signs of columns have no meaning."""
    others_CC = similarity_CC * (1 - np.eye(len(similarity_CC)))
    scale_C = 1 / np.sqrt(np.maximum(others_CC.sum(1), LEAST_DEGREE))
    # The largest of D^-1/2 A D^-1/2 are the smallest of I - D^-1/2 A D^-1/2, the Laplacian.
    _, vector_CC = np.linalg.eigh(others_CC * scale_C[:, None] * scale_C)
    embedding_CK: np.ndarray = vector_CC[:, ::-1][:, :num_clusters] * scale_C[:, None]
    return embedding_CK


# Heads of similar size: classes move from clusters that are too large to clusters that are too small.
#
# Dimension key:  C classes   K clusters

MOST_MOVES = 100
TOLERANCE = 5
"""A head may have so many classes more or less than an equal share."""


def balanced(label_C: np.ndarray, similarity_CC: np.ndarray, num_clusters: int) -> np.ndarray:
    """The labels after balancing, int64 [C]; ends as soon as no cluster is too large, or none is too small.

    A move takes, from the largest of the clusters that are too large, the class that is on average most similar to the
    smallest of those that are too small. Ties: the lower cluster number, the lower class.
    """
    label_C = label_C.copy()
    share = len(label_C) / num_clusters
    for _ in range(MOST_MOVES):
        size_K = np.bincount(label_C, minlength=num_clusters)
        # argmax and argmin take the first of equals, which is what the rule for ties asks for.
        largest, smallest = int(size_K.argmax()), int(size_K.argmin())
        if size_K[largest] <= share + TOLERANCE or size_K[smallest] >= share - TOLERANCE:
            break
        movable = np.flatnonzero(label_C == largest)
        likeness = similarity_CC[np.ix_(movable, np.flatnonzero(label_C == smallest))].mean(1)
        label_C[movable[likeness.argmax()]] = smallest
    return label_C


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


# Without looking at boxes: COCO's classes by kind of thing, those of other data sets in blocks.

COCO_HEADS = "coco_320_1b4h_standard.yaml"
"""Shipped: four heads with weights of their own, and the names of COCO."""


def group_standard(names: Sequence[str], heads: int) -> Grouping:
    """Four heads by meaning where the names are COCO's; else blocks of neighbours, as equal as they can be."""
    check_heads(heads, len(names))
    path = shipped_folder("data") / COCO_HEADS
    content = load_yaml(path)
    assert isinstance(content, dict)
    coco = head_config_of(content, where=str(path))
    is_coco = [name.strip().lower() for name in names] == content["names"]
    config = coco if is_coco and coco.num_heads == heads else contiguous_heads(len(names), heads)
    return Grouping(config, ("",) * heads)


# Classes that are mistaken for each other go to different heads, and heads get about equally many boxes.
#
# A greedy colouring: the classes with the most boxes choose first.
#
# Dimension key:  C classes   H heads

COCO_PAIRS = (
    ("car", "truck"), ("bicycle", "motorcycle"), ("cat", "dog"), ("sheep", "cow"), ("fork", "knife"),
    ("knife", "spoon"), ("fork", "spoon"), ("wine glass", "cup"), ("apple", "orange"), ("chair", "couch"),
    ("mouse", "remote"), ("cell phone", "remote"), ("microwave", "oven"), ("skis", "snowboard"),
    ("backpack", "handbag"), ("bus", "truck"), ("car", "bus"), ("couch", "bed"), ("horse", "cow"),
)  # fmt: skip
"""What detectors trained on COCO are known to mix up."""


def group_apart(num_boxes_C: np.ndarray, confused_CC: np.ndarray, heads: int) -> Grouping:
    """Heads numbered in the order in which they are first needed; `confused_CC` is symmetric and boolean.

    Each class goes to the head with the fewest boxes among those without a class it is confused with; if there is none,
    to the head with the fewest of all. Ties: the lower class, the lower head.
    """
    check_heads(heads, len(num_boxes_C))
    head_C = _coloured(num_boxes_C, confused_CC, heads)
    boxes_H = np.bincount(head_C, num_boxes_C, heads).astype(np.int64)
    shares_H = 100 * boxes_H / max(1, boxes_H.sum())
    comments = [f"{boxes} boxes ({share:.1f} %)" for boxes, share in zip(boxes_H, shares_H, strict=True)]
    groups = [np.flatnonzero(head_C == head).tolist() for head in range(heads)]
    return make_grouping("anticonfusion", groups, [f"Head {head}" for head in range(heads)], comments)


def _coloured(num_boxes_C: np.ndarray, confused_CC: np.ndarray, heads: int) -> np.ndarray:
    """Head of each class, int64 [C]; none is empty."""
    head_C = np.full(len(num_boxes_C), -1)
    boxes_H = np.zeros(heads, np.int64)
    order_C = np.argsort(-num_boxes_C, kind="stable")
    for place, number in enumerate(order_C.tolist()):
        free_H = np.ones(heads, bool)
        free_H[head_C[confused_CC[number] & (head_C >= 0)]] = False
        empty_H = np.bincount(head_C[head_C >= 0], minlength=heads) == 0
        # Classes without boxes would all go to one head; no head may stay without a class.
        if empty_H.sum() == len(order_C) - place:
            free_H = empty_H
        allowed = np.flatnonzero(free_H) if free_H.any() else np.arange(heads)
        head = int(allowed[boxes_H[allowed].argmin()])
        head_C[number] = head
        boxes_H[head] += num_boxes_C[number]
    return head_C


def known_pairs(names: Sequence[str]) -> np.ndarray:
    """Which classes are known to be mixed up, by their names in COCO; bool [C, C], symmetric."""
    number = {name.strip().lower(): place for place, name in enumerate(names)}
    confused_CC = np.zeros((len(names), len(names)), bool)
    for one, other in COCO_PAIRS:
        if one in number and other in number:
            confused_CC[number[one], number[other]] = confused_CC[number[other], number[one]] = True
    return confused_CC


def confused_pairs(share_CC: np.ndarray, *, least: float) -> np.ndarray:
    """Pairs of which at least this share is taken for the other, either way round; bool [C, C], symmetric.

    `share_CC` has the predicted class as its row and shares of the true class in its columns.
    """
    confused_CC: np.ndarray = np.maximum(share_CC, share_CC.T) >= least
    np.fill_diagonal(confused_CC, False)
    return confused_CC


def kept_together(confused_CC: np.ndarray, grouping: Grouping) -> int:
    """How many confused pairs share a head after all."""
    head_C = np.array(grouping.config.head_C)
    return int((confused_CC & (head_C[:, None] == head_C)).sum()) // 2


# Classes that look alike and occur together share a head: shape and co-occurrence, mixed and clustered.
#
# Dimension key:  C classes

SHARPNESS = 2.0
"""How fast likeness of shape falls with the difference of log ratios."""
VERY_TALL, SLIGHTLY_TALL, SLIGHTLY_WIDE, VERY_WIDE = 0.7, 0.9, 1.1, 1.4
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
    names = [f"{finer_shape_name(ratio)}_Group" for ratio in ratios]
    grouping = "hybrid_spectral_balanced" if balanced else "hybrid_spectral"
    return make_grouping(grouping, [classes.tolist() for classes in groups], names, comments)


def finer_shape_name(ratio: float) -> str:
    """Of a mean width / height."""
    if ratio < SLIGHTLY_TALL:
        return "Tall_Vertical" if ratio < VERY_TALL else "Slight_Tall"
    if ratio > SLIGHTLY_WIDE:
        return "Wide_Horizontal" if ratio > VERY_WIDE else "Slight_Wide"
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
