"""Labels as the loss wants them: normalised centre and size, with the number of their image in the batch.

Dimension key:  T targets   B samples of a batch
"""

import numpy as np

from flatout.feed.batch import Batch


def to_targets(label_T5: np.ndarray, out_wh: tuple[int, int], flip_2: np.ndarray) -> np.ndarray:
    """Class and corners in pixels to class and normalised centre and size, flipped; float32 [T, 5]."""
    scale_2 = np.array(out_wh, np.float32)
    low_T2, high_T2 = label_T5[:, 1:3], label_T5[:, 3:5]
    centre_T2 = (low_T2 + high_T2) / 2 / scale_2
    centre_T2 = np.where(flip_2[::-1], 1 - centre_T2, centre_T2)
    return np.concatenate((label_T5[:, :1], centre_T2, (high_T2 - low_T2) / scale_2), axis=1, dtype=np.float32)


def number_targets(batch: Batch) -> np.ndarray:
    """Targets [T, 6] with the number of their image in the batch in column 0, in place.

    A source fills a part of a batch and does not know which; here all of it is known.
    """
    targets_T6, count_B = batch["targets"], batch.counts["targets"]
    targets_T6[:, 0] = np.repeat(np.arange(len(count_B)), count_B)
    return targets_T6
