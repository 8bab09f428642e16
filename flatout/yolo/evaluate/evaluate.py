"""The whole of `test.py`: weights and a data set in; a table, label files, JSON and charts out.

options -> pictures of a split, networks -> Evaluate -> table, run folder -> TestResult
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

import torch

from flatout.errors import ConfigError
from flatout.runs import new_run_folder
from flatout.safefiles import replacing, write_error
from flatout.yolo.boxes import xyxy_to_cxcywh
from flatout.yolo.data.letterbox import rounded_up
from flatout.yolo.evaluate.run import Exam, Outcome, Speed, Watcher, open_exam
from flatout.yolo.evaluate.validation_input import ValidationBatch
from flatout.yolo.find_file import weights_files
from flatout.yolo.metrics import YOLOV7_RESULTS, Evaluation, headings, scores_by_class
from flatout.yolo.metrics.coco import (
    CocoExport,
    CocoScores,
    Refused,
    Truth,
    export_for,
    find_truth,
    is_asked_for,
    lines,
    score,
)
from flatout.yolo.nms import Detections
from flatout.yolo.options import TestOptions

logger = logging.getLogger(__name__)

# What `test.py` prints: the columns of YOLOv7, then those of further scores.

FEW_CLASSES = 50
"""With fewer, every class gets its row without being asked for."""


def header() -> str:
    return f"{'Class':>20}" + "".join(f"{column:>12}" for column in ("Images", "Labels", *headings()))


def row(name: str, num_images: int, num_labels: int, *scores: float) -> str:
    return f"{name:>20}{num_images:12d}{num_labels:12d}" + "".join(f"{score:12.3g}" for score in scores)


def table(evaluation: Evaluation, names: Sequence[str], *, per_class: bool) -> Iterator[str]:
    """Header, the row of all classes, and those of the classes that occur in the labels."""
    yield header()
    yield row("all", evaluation.num_images, evaluation.num_labels, *evaluation.scores.values())
    if per_class and evaluation.num_classes > 1:
        yield from _class_rows(evaluation, names)


def _class_rows(evaluation: Evaluation, names: Sequence[str]) -> Iterator[str]:
    found = evaluation.classes
    columns = (found.classes_C, found.num_labels_C, *scores_by_class(found).values())
    for number, num_labels, *scores in zip(*columns, strict=True):
        yield row(names[number], evaluation.num_images, num_labels, *scores)


def speed_line(speed_ms: Speed, *, size: int, batch_size: int) -> str:
    """Milliseconds per image."""
    parts = "/".join(f"{part:.1f}" for part in (speed_ms.inference, speed_ms.nms, speed_ms.total))
    return f"Speed: {parts} ms inference/NMS/total per {size}x{size} image at batch-size {batch_size}"


def study_line(outcome: Outcome, *, size: int, batch_size: int) -> str:
    """A line of a study's file: YOLOv7's seven results, three times, twice the size, the batch."""
    speed = outcome.speed_ms
    results = (outcome.scores[name] for name in YOLOV7_RESULTS)
    numbers = (*results, speed.inference, speed.nms, speed.total, size, size, batch_size)
    return " ".join(f"{number:10.4g}" for number in numbers)


# Detections as label files, one per picture: `--save-txt`, `--save-conf`.
#
# Dimension key:  D detections   n of one picture


class TxtLabels:
    """Writes `class cx cy w h [score]` per detection, the surest first, divided by the size of the picture.

    A file is appended to; a picture without detections gets none.
    """

    def __init__(self, folder: Path, *, scores: bool) -> None:
        self._folder = folder
        self._scores = scores
        self.num_files = 0
        folder.mkdir(parents=True, exist_ok=True)

    def watch(self, batch: ValidationBatch, found: Detections, native: Detections) -> None:
        """One batch; boxes in pixels of the pictures."""
        native_wh_D2 = batch.letterbox.native_wh_B2[native.image_D]
        box_D4 = xyxy_to_cxcywh(native.box_D4) / native_wh_D2.repeat(1, 2)
        columns = [native.row_D6[:, 5:], box_D4, *([native.row_D6[:, 4:5]] if self._scores else [])]
        table = native._replace(row_D6=torch.cat(columns, 1)).per_image()
        for path, row_n in zip(batch.paths, table, strict=True):
            if len(row_n):
                self._append(PurePath(path).stem, row_n.tolist())

    def _append(self, stem: str, rows: list[list[float]]) -> None:
        path = self._folder / f"{stem}.txt"
        text = "".join(" ".join(f"{number:g}" for number in row) + "\n" for row in rows)
        try:
            with path.open("a") as file:
                file.write(text)
        except OSError as error:
            raise write_error(error, path, len(text)) from error
        self.num_files += 1


SPEED_CONF, SPEED_IOU = 0.25, 0.45
STUDY_SIZES = range(256, 1536 + 1, 128)


@dataclass(frozen=True, kw_only=True)
class TestResult:
    """What was found, and what is to be printed."""

    __test__ = False  # pytest: a class of ours, not of tests

    text: str
    outcomes: tuple[Outcome, ...]
    """One; with `--task speed` one per file of weights, with `--task study` one per file and size.
    Where COCO's own AP was computed, its mAP takes the place of ours, as in YOLOv7; the text has both."""
    folder: Path | None = None
    """With the files of the run; None for speed and study."""
    coco: CocoScores | None = None

    @property
    def outcome(self) -> Outcome:
        return self.outcomes[0]

    def __str__(self) -> str:
        return self.text


def test(options: TestOptions) -> TestResult:
    """Judge weights as the options say; ConfigError, DataError or CheckpointError where that cannot be done."""
    exam = open_exam(_with_files(options))
    if options.task == "speed":
        return _speed(exam)
    if options.task == "study":
        return _study(exam)
    return _judge(exam)


def _with_files(options: TestOptions) -> TestOptions:
    """The options with files in place of names of weights; what can be wrong with paths is found before the work."""
    weights = weights_files(options.weights)
    if options.save_per_class_ap and not Path(options.save_per_class_ap).absolute().parent.is_dir():
        raise ConfigError(f"--save-per-class-ap {options.save_per_class_ap}: its folder does not exist. Make it first.")
    return replace(options, weights=weights)


def _judge(exam: Exam) -> TestResult:
    """The tasks train, val and test: everything there is."""
    options = exam.options
    subject = exam.load(options.weights)
    folder = new_run_folder(Path(options.project), options.name, options.exist_ok)
    size = rounded_up(options.img_size, subject.stride)
    wants_coco = options.save_json or is_asked_for(exam.data)
    truth = find_truth(exam.data, exam.split, exam.names, exam.images) if wants_coco else None
    export = export_for(truth, exam.names) if truth is not None else None
    wants_txt = options.save_txt or options.save_hybrid
    txt = TxtLabels(folder / "labels", scores=options.save_conf) if wants_txt else None
    watchers: list[Watcher] = [txt.watch] if txt else []
    if export is not None:
        watchers.append(lambda batch, found, native: export.add(native, batch.paths))
    outcome = exam.run(
        subject,
        size,
        conf_thres=options.conf_thres,
        iou_thres=options.iou_thres,
        plots=folder,
        watchers=watchers,
    )
    text = [*_table(exam, outcome), _speed_line(exam, outcome, size)]
    coco = None
    if export is not None and truth is not None:
        outcome, coco, told = _write_coco(exam, outcome, export, truth, folder)
        text += told
    if options.save_per_class_ap:
        _write(Path(options.save_per_class_ap), json.dumps(outcome.evaluation.per_class_ap(exam.names), indent=2))
        text.append(f"AP of every class saved to {options.save_per_class_ap}")
    if txt:
        text.append(f"{txt.num_files} label files saved to {folder / 'labels'}")
    text.append(f"Results saved to {folder}")
    return TestResult(text="\n".join(text), outcomes=(outcome,), folder=folder, coco=coco)


def _speed(exam: Exam) -> TestResult:
    """`--task speed`: detection's thresholds, no files; one file of weights after the other."""
    text, outcomes = [], []
    for weights in exam.options.weights:
        subject = exam.load([weights])
        size = rounded_up(exam.options.img_size, subject.stride)
        outcomes.append(exam.run(subject, size, conf_thres=SPEED_CONF, iou_thres=SPEED_IOU))
        text += [weights, *_table(exam, outcomes[-1]), _speed_line(exam, outcomes[-1], size)]
    return TestResult(text="\n".join(text), outcomes=tuple(outcomes))


def _study(exam: Exam) -> TestResult:
    """`--task study`: sizes from 256 to 1536; a line each in study_<data>_<weights>.txt."""
    options, text, outcomes = exam.options, [], []
    for weights in options.weights:
        subject, rows = exam.load([weights]), []
        for wanted in STUDY_SIZES:
            size = -(-wanted // subject.stride) * subject.stride
            outcome = exam.run(subject, size, conf_thres=options.conf_thres, iou_thres=options.iou_thres)
            rows.append(study_line(outcome, size=wanted, batch_size=options.batch_size))
            logger.info("%s at %d px: %s", weights, size, rows[-1])
            outcomes.append(outcome)
        file = Path(f"study_{exam.data.file.stem}_{Path(weights).stem}.txt")
        _write(file, "\n".join(rows) + "\n")
        text += [weights, *rows, f"Study saved to {file}"]
    return TestResult(text="\n".join(text), outcomes=tuple(outcomes))


def _table(exam: Exam, outcome: Outcome) -> Iterator[str]:
    per_class = exam.options.verbose or len(exam.names) < FEW_CLASSES
    return table(outcome.evaluation, exam.names, per_class=per_class)


def _speed_line(exam: Exam, outcome: Outcome, size: int) -> str:
    return speed_line(outcome.speed_ms, size=size, batch_size=exam.options.batch_size)


def _write_coco(
    exam: Exam, outcome: Outcome, export: CocoExport, truth: Truth | Refused, folder: Path
) -> tuple[Outcome, CocoScores | None, list[str]]:
    """The JSON file, and COCO's own AP where annotations and an evaluator are there."""
    file = folder / f"{Path(exam.options.weights[0]).stem}_predictions.json"
    _write(file, json.dumps(export.records()))
    text = [f"Detections saved to {file}"]
    scores = score(export, truth)
    if isinstance(scores, Refused):
        return outcome, None, [*text, scores.text]
    assert isinstance(truth, Truth)
    ours = outcome.evaluation
    found = replace(ours, scores={**ours.scores, "mAP_0.5": scores.ap50, "mAP_0.5:0.95": scores.ap})
    return outcome._replace(evaluation=found), scores, [*text, *truth.remarks, *lines(scores)]


def _write(path: Path, text: str) -> None:
    content = text.encode()
    with replacing(path, needed_bytes=len(content)) as sink:
        sink.write(content)
