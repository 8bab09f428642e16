"""`--image-weights`: which pictures are shown more often in the next epoch."""

import numpy as np

from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.sampling import class_counts, class_weights, epoch_class_weights, image_weights


class Weighing:
    """Sampling weights of pictures: classes that are rare and not yet found well are shown more often."""

    def __init__(self, images: ImageSet, num_classes: int) -> None:
        self._labels = images.labels
        self._class_weights = class_weights(class_counts(images.labels, num_classes))

    def __call__(self, map_C: np.ndarray) -> np.ndarray:
        return image_weights(self._labels, epoch_class_weights(self._class_weights, map_C))
