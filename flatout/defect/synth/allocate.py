"""Which planes a defect goes into: smart allocation over whole batches.

    T   target alone: this is what the label marks          R1  target and ref1
    B   all three planes                                    R2  target and ref2

Dimension key:  M samples   K places for defects   C planes (target, ref1, ref2)
"""

import numpy as np

T, R1, R2, B = range(4)
MOST_TARGET_ONLY = 2
IN_PLANE_GC = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1], [1, 1, 1]], np.bool_)
"""Whether a defect of a group is painted in a plane."""


def num_target_only(num_M: np.ndarray, uniform_M: np.ndarray, *, least: int = 1) -> np.ndarray:
    """How many of n defects are in target alone: uniform on {least, ..., min(2, n // 2)}; int64 [M]."""
    most_M = np.minimum(MOST_TARGET_ONLY, num_M // 2)
    return np.asarray(least + (uniform_M * (most_M - least + 1)).astype(np.int64))


def ranks(key_MK: np.ndarray, num_M: np.ndarray) -> np.ndarray:
    """A random order of the first n places by random keys: the place of each in it, int64 [M, K]."""
    unused_MK = np.arange(key_MK.shape[1]) >= num_M[:, None]
    order_MK = np.argsort(np.where(unused_MK, 2.0, key_MK), axis=1, kind="stable")
    return np.argsort(order_MK, axis=1)  # the inverse of an order


def groups_by_rank(rank_MK: np.ndarray, num_M: np.ndarray, target_only_M: np.ndarray, coin_M: np.ndarray) -> np.ndarray:
    """Group of each place, int64 [M, K]; meaningless from place n on.

    The first t of the order are T. Of the r that follow, r // 3 are R1, as many R2, and all the rest B; a single one is
    R1 or R2, as the coin (bool [M]: R2) says.
    """
    after_MK = rank_MK - target_only_M[:, None]
    rest_M = num_M - target_only_M
    third_M = (rest_M // 3)[:, None]
    group_MK = np.where(after_MK < third_M, R1, np.where(after_MK < 2 * third_M, R2, B))
    group_MK = np.where((rest_M == 1)[:, None], np.where(coin_M, R2, R1)[:, None], group_MK)
    return np.asarray(np.where(after_MK < 0, T, group_MK))
