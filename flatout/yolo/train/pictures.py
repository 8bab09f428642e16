"""Pictures for people, from the beginning of a training: look at these first.

labels.jpg                            which classes there are, and how large their boxes are and where
train_batch0.jpg to train_batch9.jpg  the first batches as the network sees them
"""

import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from flatout.yolo.data.image_set import ImageSet

logger = logging.getLogger(__name__)

BATCHES = 10
SHOWN = 16
"""Pictures of a batch."""


class BatchPictures:
    """Keeps some pictures of the first batches on the device, and draws them later: a step waits for nothing."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder = folder if importlib.util.find_spec("cv2") is not None else None
        self._names = names
        self._kept: list[tuple[int, Tensor, Tensor]] = []

    def keep(self, epoch: int, step: int, images_BCHW: Tensor, targets_T6: Tensor) -> None:
        if self._folder is not None and epoch == 0 and step < BATCHES:
            self._kept.append((step, images_BCHW[:SHOWN].clone(), targets_T6.clone()))

    def draw(self) -> None:
        """Write what was kept; the host waits for the device here."""
        if self._folder is None or not self._kept:
            return
        from flatout.charts import draw_batch

        kept, self._kept = self._kept, []
        for step, images_BCHW, targets_T6 in kept:
            if images_BCHW.is_floating_point():
                images_BCHW = (images_BCHW.float() * 255).round().to(torch.uint8)
            targets_T6 = targets_T6[(targets_T6[:, 0] >= 0) & (targets_T6[:, 0] < len(images_BCHW))]
            try:
                draw_batch(
                    images_BCHW.cpu().numpy(),
                    targets_T6.cpu().numpy(),
                    [""] * len(images_BCHW),
                    self._names,
                    self._folder / f"train_batch{step}.jpg",
                )
            except OSError as error:
                logger.warning("%s: no pictures of batches are written: %s.", self._folder, error.strerror)
                return


def draw_labels(images: ImageSet, names: Sequence[str], folder: Path) -> None:
    """labels.jpg; that it cannot be drawn is said, and stops nothing."""
    try:
        from flatout.charts import draw_label_statistics

        draw_label_statistics(images.labels.class_box_T5, names, folder / "labels.jpg")
    except (ImportError, OSError) as error:
        logger.warning("No picture of the labels was drawn: %s.", error)
