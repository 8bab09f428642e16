"""What `test.py` prints, in the columns of YOLOv7."""

from collections.abc import Iterator, Sequence

from flatout.yolo.evaluate.run import Outcome, Speed
from flatout.yolo.metrics import Evaluation

COLUMNS = ("Class", "Images", "Labels", "P", "R", "mAP@.5", "mAP@.5:.95")
FEW_CLASSES = 50
"""With fewer, every class gets its row without being asked for."""


def header() -> str:
    return f"{COLUMNS[0]:>20}" + "".join(f"{column:>12}" for column in COLUMNS[1:])


def row(name: str, num_images: int, num_labels: int, *scores: float) -> str:
    return f"{name:>20}{num_images:12d}{num_labels:12d}" + "".join(f"{score:12.3g}" for score in scores)


def table(evaluation: Evaluation, names: Sequence[str], *, per_class: bool) -> Iterator[str]:
    """Header, the row of all classes, and those of the classes that occur in the labels."""
    yield header()
    means = evaluation.precision, evaluation.recall, evaluation.map50, evaluation.map50_95
    yield row("all", evaluation.num_images, evaluation.num_labels, *means)
    if per_class and evaluation.num_classes > 1:
        yield from _class_rows(evaluation, names)


def _class_rows(evaluation: Evaluation, names: Sequence[str]) -> Iterator[str]:
    found = evaluation.classes
    columns = (found.classes_C, found.num_labels_C, found.precision_C, found.recall_C, found.ap_CK)
    for number, num_labels, precision, recall, ap_K in zip(*columns, strict=True):
        yield row(names[number], evaluation.num_images, num_labels, precision, recall, ap_K[0], ap_K.mean())


def speed_line(speed_ms: Speed, *, size: int, batch_size: int) -> str:
    """Milliseconds per image."""
    parts = "/".join(f"{part:.1f}" for part in (speed_ms.inference, speed_ms.nms, speed_ms.total))
    return f"Speed: {parts} ms inference/NMS/total per {size}x{size} image at batch-size {batch_size}"


def study_line(outcome: Outcome, *, size: int, batch_size: int) -> str:
    """A line of a study's file: the seven scores, three times, twice the size, the batch."""
    speed = outcome.speed_ms
    numbers = (*outcome.scores, speed.inference, speed.nms, speed.total, size, size, batch_size)
    return " ".join(f"{number:10.4g}" for number in numbers)
