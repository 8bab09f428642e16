"""What an evaluation draws: the first batches with labels and with detections, curves, the confusion matrix."""

import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path

from flatout.errors import ResourceError
from flatout.yolo.confusion_file import write_confusion
from flatout.yolo.metrics import Evaluation
from flatout.yolo.nms import Detections
from flatout.yolo.validation_input import ValidationBatch

logger = logging.getLogger(__name__)

BATCHES = 3


class EvaluationPictures:
    """Writes test_batch{0,1,2}_{labels,pred}.jpg while batches come, and the rest at the end.

    Pictures are extras: without OpenCV, or where they cannot be written, one warning says so and the evaluation
    goes on.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder = folder
        self._names = names
        self._drawn = 0
        self._works = importlib.util.find_spec("cv2") is not None
        if not self._works:
            logger.warning("No pictures are drawn: OpenCV is not installed (pip install opencv-python-headless).")

    def watch(self, batch: ValidationBatch, found: Detections, native: Detections) -> None:
        """Draw the batch if it is one of the first."""
        if not self._works or self._drawn == BATCHES:
            return
        from flatout.yolo.pictures.batch import MOST_IMAGES, draw_batch, draw_detections

        try:
            head = f"test_batch{self._drawn}"
            images, targets_T6 = batch.images[:MOST_IMAGES].cpu().numpy(), batch.targets_T6.cpu().numpy()
            draw_batch(images, targets_T6, batch.paths, self._names, self._folder / f"{head}_labels.jpg")
            draw_detections(images, found, batch.paths, self._names, self._folder / f"{head}_pred.jpg")
        except OSError as error:
            self._give_up(error)
        self._drawn += 1

    def finish(self, evaluation: Evaluation) -> None:
        """Curves, if anything was found, and the confusion matrix, drawn and as numbers."""
        if not self._works:
            return
        from flatout.yolo.pictures.confusion import as_shown
        from flatout.yolo.pictures.evaluation import plot_evaluation

        try:
            plot_evaluation(evaluation, self._names, self._folder)
            if evaluation.confusion is not None:
                write_confusion(as_shown(evaluation.confusion), self._names, self._folder / "confusion_matrix.csv")
        except OSError as error:
            self._give_up(error)
        except ResourceError as error:
            logger.warning("%s The evaluation goes on.", error)

    def _give_up(self, error: OSError) -> None:
        self._works = False
        logger.warning("%s: pictures cannot be written (%s). The evaluation goes on.", self._folder, error.strerror)
