"""A data set whose training samples are drawn: what the sources of the CPU and of the device have in common."""

from collections.abc import Mapping

import numpy as np

from flatout.errors import ConfigError
from flatout.yolo.augment.class_aware import ClassAware
from flatout.yolo.augment.config import AugmentConfig
from flatout.yolo.augment.draw import draw_training
from flatout.yolo.augment.layout import resized_wh
from flatout.yolo.data.image_set import ImageSet


class DrawnSet:
    """Samples of `size` x `size` pixels by number: how many, where each is from, and what is drawn for it."""

    def __init__(
        self, image_set: ImageSet, config: AugmentConfig, *, size: int, class_aware: ClassAware | None = None
    ) -> None:
        if size < 2 or size % 2:
            raise ConfigError(f"size={size} must be even: a mosaic is cut off by half of it on every side.")
        self._image_set = image_set
        self._config = config
        self._class_aware = class_aware
        self._size = size
        self._wh_N2 = resized_wh(image_set.size_wh_N2, size)

    @property
    def expected_targets(self) -> float:
        """Of a sample. A mosaic shows about the area of two pictures of four or nine; too small a plan only grows."""
        return 2 + 3 * len(self._image_set.labels.class_box_T5) / max(1, len(self))

    def __len__(self) -> int:
        return len(self._image_set)

    def where(self, index: int) -> str:
        return self._image_set.paths[index]

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        return draw_training(
            self._config,
            num_pictures=len(self),
            size=self._size,
            seed=seed,
            epoch=epoch,
            positions_M=positions,
            indices_M=indices,
            class_aware=self._class_aware,
        )
