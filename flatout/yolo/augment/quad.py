"""Four samples in one of twice the size, as YOLOv7's --quad collates them.

Dimension key:  B samples   G groups of four   T targets   C H W channels, height and width of a sample
"""

import cv2
import numpy as np

ENLARGED = 0.5
"""Share of the groups of which only the first sample is shown, enlarged."""
PLACES = ((0, 0), (1, 0), (0, 1), (1, 1))
"""Row and column of each of the four: the second goes below the first."""


def quad(images_BCHW: np.ndarray, targets_T6: np.ndarray, uniform_G: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [G, C, 2H, 2W] and their targets; samples that fill no group are left out.

    Targets are (number of the image, class, cx, cy, w, h), in the order of images. `uniform_G` decides for each group.
    """
    num_groups = len(images_BCHW) // 4
    _, channels, height, width = images_BCHW.shape
    out = np.empty((num_groups, channels, 2 * height, 2 * width), np.uint8)
    targets = [np.zeros((0, 6), np.float32)]
    for group, uniform in enumerate(uniform_G[:num_groups]):
        members = range(4 * group, 4 * group + 4)
        own = [targets_T6[targets_T6[:, 0] == member].copy() for member in members]
        if uniform < ENLARGED:
            out[group] = _enlarged(images_BCHW[members[0]])
            own = own[:1]
        else:
            for member, (row, column), target in zip(members, PLACES, own, strict=True):
                place = (slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width))
                out[group][:, *place] = images_BCHW[member]
                target[:, 2:] = (target[:, 2:] + np.array([column, row, 0, 0], np.float32)) / 2
        joined = np.concatenate(own)
        joined[:, 0] = group
        targets.append(joined)
    return out, np.concatenate(targets)


def _enlarged(image_CHW: np.ndarray) -> np.ndarray:
    """Twice the size, bilinear; truncated."""
    channels, height, width = image_CHW.shape
    doubled = [cv2.resize(plane.astype(np.float32), (2 * width, 2 * height)) for plane in image_CHW]
    return np.stack(doubled).astype(np.uint8).reshape(channels, 2 * height, 2 * width)
