"""What a detector found in a batch: one row per box, images one behind the other.

Dimension key:  B images   D boxes of all images
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Detections(NamedTuple):
    """Boxes of a batch, images ascending, inside an image by descending score; on one device."""

    row_D6: Tensor
    """float32: x1, y1, x2, y2, score, class."""

    image_D: Tensor
    """int64, the image of each row."""

    num_images: int

    @property
    def box_D4(self) -> Tensor:
        return self.row_D6[:, :4]

    @property
    def score_D(self) -> Tensor:
        return self.row_D6[:, 4]

    @property
    def class_D(self) -> Tensor:
        """int64."""
        return self.row_D6[:, 5].long()

    def per_image(self) -> list[Tensor]:
        """One [n, 6] view per image, [0, 6] where nothing was found. The host waits for the counts."""
        counts = torch.bincount(self.image_D, minlength=self.num_images).tolist()
        return list(self.row_D6.split(counts))
