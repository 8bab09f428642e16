"""`--image-weights`: which pictures are shown more often in the next epoch."""

import numpy as np

from flatout.engine.distributed import World
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.sampling import class_counts, class_weights, epoch_class_weights, image_weights
from flatout.yolo.train.epoch_end import Resample
from flatout.yolo.train.input import TrainingInput


class Weighing:
    """Sampling weights of pictures: classes that are rare and not yet found well are shown more often."""

    def __init__(self, images: ImageSet, num_classes: int) -> None:
        self._labels = images.labels
        self.never_found = [0.0] * num_classes
        """Scores before the first validation."""
        self._class_weights = class_weights(class_counts(images.labels, num_classes))

    def __call__(self, map_C: np.ndarray) -> np.ndarray:
        return image_weights(self._labels, epoch_class_weights(self._class_weights, map_C))


def resampling(source: TrainingInput, weigh: Weighing, world: World) -> Resample:
    """Weigh the pictures of `source` now, and again whenever the score of each class is known."""

    def resample(maps: list[float], epoch: int) -> None:
        # One rank has validated; all must draw the same pictures.
        source.set_weights(weigh(np.array(world.from_first(maps) or weigh.never_found)), epoch)

    source.feed.set_weights(weigh(np.array(weigh.never_found)))
    return resample
