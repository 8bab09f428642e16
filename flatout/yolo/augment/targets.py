"""Labels as the loss wants them: normalised centre and size, with the number of their image in the batch.

Dimension key:  T targets   M samples
"""

import numpy as np


def to_targets(
    sample_T: np.ndarray, label_T5: np.ndarray, out_wh: tuple[int, int], flip_M2: np.ndarray, *, first_row: int
) -> np.ndarray:
    """Number of the image, class, normalised centre and size, flipped; float32 [T, 6].

    `label_T5` holds class and corners in pixels, `sample_T` the number of the sample in its micro-batch, which begins
    at row `first_row` of the batch.
    """
    scale_2 = np.array(out_wh, np.float32)
    low_T2, high_T2 = label_T5[:, 1:3], label_T5[:, 3:5]
    target_T6 = np.empty((len(label_T5), 6), np.float32)
    target_T6[:, 0] = sample_T + first_row
    target_T6[:, 1] = label_T5[:, 0]
    centre_T2 = (low_T2 + high_T2) / 2 / scale_2
    target_T6[:, 2:4] = np.where(flip_M2[sample_T][:, ::-1], 1 - centre_T2, centre_T2)
    target_T6[:, 4:6] = (high_T2 - low_T2) / scale_2
    return target_T6
