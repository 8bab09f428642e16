"""Boxes through affine warps.

Dimension key:  Q sheets   T boxes
"""

import numpy as np


def warped_boxes(box_T4: np.ndarray, matrix_Q33: np.ndarray, sheet_T: np.ndarray) -> np.ndarray:
    """Box around the four warped corners of each box, float64 [T, 4]; sheet_T says whose matrix is its.

    A corner's place is (a x + b y) + c. Sums are monotonic, also when rounded: so the least of the four corners is the
    lesser a x plus the lesser b y, to the bit, at a third of the work.
    """
    x1_T, y1_T, x2_T, y2_T = box_T4.T.astype(np.float64, order="C")
    result_T4 = np.empty((len(box_T4), 4))
    for axis in (0, 1):
        a_T, b_T, c_T = (matrix_Q33[:, axis, column][sheet_T] for column in range(3))
        by_x, by_y = (a_T * x1_T, a_T * x2_T), (b_T * y1_T, b_T * y2_T)
        for end, extreme in ((axis, np.minimum), (axis + 2, np.maximum)):
            result_T4[:, end] = extreme(*by_x) + extreme(*by_y) + c_T
    return result_T4


def are_seen(box_T4: np.ndarray, matrix_Q33: np.ndarray, sheet_T: np.ndarray, out_wh: tuple[int, int]) -> np.ndarray:
    """Whether any of a box may lie in the output, bool [T]."""
    warped_T4 = warped_boxes(box_T4, matrix_Q33, sheet_T)
    # A little more than the output: what just touches it is decided by those who look at it closely.
    low_T2, high_T2 = warped_T4[:, :2], warped_T4[:, 2:]
    return np.asarray(((high_T2 > -1) & (low_T2 < np.array(out_wh) + 1)).all(1))
