"""Spectral clustering: k-means on the leading eigenvectors of the normalised Laplacian of a similarity.

Dimension key:  C classes   K clusters
"""

import numpy as np

from flatout.yolo.grouping.k_means import k_means

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
