"""Pictures of a data set, decoded and resized: what a store keeps, and what sources read."""

import numpy as np

from flatout.profiler import clock
from flatout.yolo.data.decode import read_picture
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.resize import resize_long_side


class ResizedPictures:
    """Items of a `flatout.feed.Store`: uint8 [h, w, 3], BGR, longer side `size`.

    Open a store with them and give it to a source, or give them to it directly: then every visit decodes.
    """

    def __init__(self, image_set: ImageSet, *, size: int, augment: bool) -> None:
        self._paths = image_set.paths
        self._size = size
        self._augment = augment

    @property
    def parameters(self) -> str:
        import cv2

        return f"BGR, longest side {self._size}, augment {self._augment}, OpenCV {cv2.__version__}, version 1"

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.decode(index)

    def path(self, index: int) -> str:
        return self._paths[index]

    def where(self, index: int) -> str:
        return self._paths[index]

    def decode(self, index: int) -> np.ndarray:
        with clock.stage("decode"):
            picture = read_picture(self._paths[index])
        with clock.stage("resize"):
            return resize_long_side(picture, self._size, augment=self._augment).image
