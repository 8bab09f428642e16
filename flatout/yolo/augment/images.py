"""Pictures of a data set, decoded and resized: what a store keeps, and what sources read."""

import numpy as np

from flatout.clock import clock
from flatout.images import read_usable
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.letterbox import resize_long_side, resize_part


class ResizedPictures:
    """Items of a `flatout.feed.Store`: uint8 [h, w, 3], BGR, longer side `size`.

    Open a store with them and give it to a source, or give them to it directly: then every visit decodes.
    """

    def __init__(self, image_set: ImageSet, *, size: int, augment: bool, shrunk: bool = False) -> None:
        """`shrunk`: JPEG files are decoded at a half, a quarter or an eighth, where that is not below `size`.

        That is faster and smoother than decoding all of it and picking pixels, but not YOLOv7's pixels
        (bench/augment_shrunk.py): for training only, and only for those who ask for speed.
        """
        assert augment or not shrunk
        self._paths = image_set.paths
        self._size = size
        self._augment = augment
        self._at_least_px = size if shrunk else 0

    @property
    def parameters(self) -> str:
        import cv2

        shrunk = ", decoded small" if self._at_least_px else ""
        return f"BGR, longest side {self._size}, augment {self._augment}, OpenCV {cv2.__version__}, version 1{shrunk}"

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
            picture = read_usable(self._paths[index], at_least_px=self._at_least_px)
        with clock.stage("resize"):
            width, height = picture.header.size_wh
            if picture.image.shape[:2] != (height, width):
                return resize_part(picture.image, (height, width), self._size)
            return resize_long_side(picture.image, self._size, augment=self._augment).image
