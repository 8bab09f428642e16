"""labels.jpg: which classes there are, and how large their boxes are and where."""

import logging
from collections.abc import Sequence
from pathlib import Path

from flatout.yolo.data.image_set import ImageSet

logger = logging.getLogger(__name__)


def draw_labels(images: ImageSet, names: Sequence[str], folder: Path) -> None:
    """For people: that it cannot be drawn is said, and stops nothing."""
    try:
        from flatout.yolo.pictures.label_statistics import label_statistics

        label_statistics(images.labels, names, folder / "labels.jpg")
    except (ImportError, OSError) as error:
        logger.warning("No picture of the labels was drawn: %s.", error)
