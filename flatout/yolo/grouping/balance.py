"""Heads of similar size: classes move from clusters that are too large to clusters that are too small.

Dimension key:  C classes   K clusters
"""

import numpy as np

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
