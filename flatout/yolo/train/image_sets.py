"""The pictures of a training, and how its data is told from changed data."""

import hashlib
from dataclasses import dataclass

import numpy as np

from flatout.yolo.data.image_set import ImageSet


@dataclass(frozen=True)
class Pictures:
    """The two sets of a training; validation pictures are those of the first rank only."""

    train: ImageSet
    val: ImageSet

    def fingerprint(self) -> str:
        """Changes when a picture comes, goes or changes its size, or when any label changes."""
        digest = hashlib.sha256()
        for images in (self.train, self.val):
            digest.update("\n".join((*images.names, *images.paths)).encode(errors="surrogateescape"))
            for array in (images.size_wh_N2, images.labels.class_box_T5, images.labels.first_N, images.labels.point_P2):
                digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()
