"""`test.py`: weights and a data set in; a table, label files, JSON and plots out.

options -> images of a split, networks -> Evaluate -> table, run folder -> TestResult

Dimension key:  D detections of a batch   n detections of one image   C classes
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import NamedTuple

import torch

from flatout.errors import ConfigError
from flatout.runs import new_run_folder
from flatout.safefiles import append_text, write_file
from flatout.yolo.boxes import xyxy_to_cxcywh
from flatout.yolo.data.letterbox import round_up_img_size
from flatout.yolo.evaluate.run import BatchObserver, EvaluationRun, Outcome, Speed, open_evaluation_run
from flatout.yolo.evaluate.tiles import AT_ONCE
from flatout.yolo.evaluate.validation_input import ValidationBatch
from flatout.yolo.find_file import weights_files
from flatout.yolo.metrics import YOLOV7_RESULTS, Evaluation, headings, scores_by_class
from flatout.yolo.metrics.coco import (
    CocoExport,
    CocoScores,
    CocoTruth,
    CocoUnavailable,
    export_for,
    find_truth,
    is_requested,
    lines,
    score,
)
from flatout.yolo.nms import Detections
from flatout.yolo.options import TestOptions

logger = logging.getLogger(__name__)

# The table: YOLOv7's columns, then those of further scores

FEW_CLASSES = 50
"""If there are fewer classes, each gets a row also without --verbose."""


def header() -> str:
    """The first line of the table: the names of its columns."""
    return f"{'Class':>20}" + "".join(f"{column:>12}" for column in ("Images", "Labels", *headings()))


def row(name: str, num_images: int, num_labels: int, *scores: float) -> str:
    """A line of the table; scores in the order of `header`."""
    return f"{name:>20}{num_images:12d}{num_labels:12d}" + "".join(f"{score:12.3g}" for score in scores)


def table(evaluation: Evaluation, names: Sequence[str], *, per_class: bool) -> Iterator[str]:
    """The lines of the table: header, all classes together, and each class that occurs in the labels."""
    yield header()
    yield row("all", evaluation.num_images, evaluation.num_labels, *evaluation.scores.values())
    if per_class and evaluation.num_classes > 1:
        yield from _class_rows(evaluation, names)


def _class_rows(evaluation: Evaluation, names: Sequence[str]) -> Iterator[str]:
    found = evaluation.classes
    columns = (found.classes_C, found.num_labels_C, *scores_by_class(found).values())
    for number, num_labels, *scores in zip(*columns, strict=True):
        yield row(names[number], evaluation.num_images, num_labels, *scores)


def speed_line(speed_ms: Speed, *, size: int, batch_size: int, tiles: int | None = None) -> str:
    """Milliseconds per image: "Speed: 1.2/0.8/2.0 ms inference/NMS/total per 640x640 image at batch-size 32".

    With `tiles`, their side, the image is a whole one, and a batch has so many tiles.
    """
    parts = "/".join(f"{part:.1f}" for part in (speed_ms.inference, speed_ms.nms, speed_ms.total))
    image = f"{size}x{size} image" if tiles is None else f"whole image, in tiles of {tiles} px,"
    return f"Speed: {parts} ms inference/NMS/total per {image} at batch-size {batch_size}"


def study_line(outcome: Outcome, *, size: int, batch_size: int) -> str:
    """A line of a study file: YOLOv7's seven results, three times in ms, the size twice, the batch size."""
    speed = outcome.speed_ms
    results = (outcome.scores[name] for name in YOLOV7_RESULTS)
    numbers = (*results, speed.inference, speed.nms, speed.total, size, size, batch_size)
    return " ".join(f"{number:10.4g}" for number in numbers)


# Label files: `--save-txt`, `--save-conf`


class TxtLabels:
    """Writes detections as label files, one per image: `class cx cy w h [score]`, normalised, highest score first.

    Existing files are appended to; an image without detections gets no file.
    """

    def __init__(self, folder: Path, *, scores: bool) -> None:
        self._folder = folder
        self._scores = scores
        self.num_files = 0
        folder.mkdir(parents=True, exist_ok=True)

    def on_batch(self, batch: ValidationBatch, found: Detections, native: Detections) -> None:
        """Write one batch from `native`, whose boxes are in pixels of the images."""
        native_wh_D2 = batch.letterbox.native_wh_B2[native.image_D]
        box_D4 = xyxy_to_cxcywh(native.box_D4) / native_wh_D2.repeat(1, 2)
        columns = [native.row_D6[:, 5:], box_D4, *([native.row_D6[:, 4:5]] if self._scores else [])]
        table = native._replace(row_D6=torch.cat(columns, 1)).per_image()
        for path, row_n in zip(batch.paths, table, strict=True):
            if len(row_n):
                text = "".join(" ".join(f"{number:g}" for number in row) + "\n" for row in row_n.tolist())
                append_text(self._folder / f"{PurePath(path).stem}.txt", text)
                self.num_files += 1


# The tasks of `test.py`

SPEED_CONF, SPEED_IOU = 0.25, 0.45
"""NMS thresholds of `--task speed`: those of detection."""
STUDY_SIZES = range(256, 1536 + 1, 128)


class ClassRow(NamedTuple):
    """The scores of one class: precision and recall at the confidence that is best for all classes together."""

    name: str
    number: int
    labels: int
    precision: float
    recall: float
    map50: float
    map: float


@dataclass(frozen=True, kw_only=True, repr=False)
class TestResult:
    """The result of a test; its text is what the command prints."""

    __test__ = False  # pytest: a class of ours, not of tests

    text: str
    outcomes: tuple[Outcome, ...]
    """One outcome; with `--task speed` one per weights file, with `--task study` one per file and size.
    If COCO's own AP was computed, it replaces our mAP here, as in YOLOv7; the text has both."""
    folder: Path | None = None
    """The run folder; None for speed and study."""
    coco: CocoScores | None = None
    names: tuple[str, ...] = ()
    """Names of the classes."""

    @property
    def outcome(self) -> Outcome:
        return self.outcomes[0]

    @property
    def map50(self) -> float:
        """mAP@.5, the mean over the classes that occur in the labels."""
        return self.outcome.evaluation.map50

    @property
    def map(self) -> float:
        """mAP@.5:.95."""
        return self.outcome.evaluation.map50_95

    @property
    def precision(self) -> float:
        return self.outcome.evaluation.precision

    @property
    def recall(self) -> float:
        return self.outcome.evaluation.recall

    @property
    def per_class(self) -> list[ClassRow]:
        """A row for every class that occurs in the labels; `pandas.DataFrame(result.per_class)` is a table."""
        found = self.outcome.evaluation.classes
        columns = (
            found.classes_C,
            found.num_labels_C,
            found.precision_C,
            found.recall_C,
            found.ap_CK[:, 0],
            found.ap_CK.mean(1),
        )
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [ClassRow(self.names[number], number, *scores) for number, *scores in rows]

    def __repr__(self) -> str:
        return f"mAP@.5 {self.map50:.3f}, mAP@.5:.95 {self.map:.3f}"

    def __str__(self) -> str:
        return self.text


def test(options: TestOptions) -> TestResult:
    """Evaluate weights on a data set. Raises ConfigError, DataError or CheckpointError if that is not possible."""
    run = open_evaluation_run(_with_files(options))
    if options.task == "speed":
        return _speed(run)
    if options.task == "study":
        return _study(run)
    return _evaluate(run)


def _with_files(options: TestOptions) -> TestOptions:
    """The options with names of weights replaced by files. Paths are checked here, before the long work."""
    weights = weights_files(options.weights)
    if options.save_per_class_ap and not Path(options.save_per_class_ap).absolute().parent.is_dir():
        raise ConfigError(
            f"--save-per-class-ap {options.save_per_class_ap}: its folder does not exist. Create it first."
        )
    return replace(options, weights=weights)


def _evaluate(run: EvaluationRun) -> TestResult:
    """`--task` train, val and test: scores, plots and all requested files."""
    options = run.options
    model = run.load(options.weights)
    folder = new_run_folder(Path(options.project), options.name, options.exist_ok)
    size = round_up_img_size(options.img_size, model.stride)
    wants_coco = options.save_json or is_requested(run.data, run.split)
    truth = find_truth(run.data, run.split, run.names, run.images) if wants_coco else None
    export = export_for(truth, run.names) if truth is not None else None
    wants_txt = options.save_txt or options.save_hybrid
    txt = TxtLabels(folder / "labels", scores=options.save_conf) if wants_txt else None
    observers: list[BatchObserver] = [txt.on_batch] if txt else []
    if export is not None:
        observers.append(lambda batch, found, native: export.add(native, batch.paths))
    outcome = run.evaluate(
        model,
        size,
        conf_thres=options.conf_thres,
        iou_thres=options.iou_thres,
        plots=folder,
        observers=observers,
    )
    text = [*_table(run, outcome), _speed_line(run, outcome, size)]
    coco = None
    if export is not None and truth is not None:
        outcome, coco, coco_text = _write_coco(run, outcome, export, truth, folder)
        text += coco_text
    if options.save_per_class_ap:
        write_file(Path(options.save_per_class_ap), json.dumps(outcome.evaluation.per_class_ap(run.names), indent=2))
        text.append(f"AP of every class saved to {options.save_per_class_ap}")
    if txt:
        text.append(f"{txt.num_files} label files saved to {folder / 'labels'}")
    text.append(f"Results saved to {folder}")
    return TestResult(text="\n".join(text), outcomes=(outcome,), folder=folder, coco=coco, names=tuple(run.names))


def _speed(run: EvaluationRun) -> TestResult:
    """`--task speed`: each weights file by itself, with the thresholds of detection; nothing is written."""
    text, outcomes = [], []
    for weights in run.options.weights:
        model = run.load([weights])
        size = round_up_img_size(run.options.img_size, model.stride)
        outcomes.append(run.evaluate(model, size, conf_thres=SPEED_CONF, iou_thres=SPEED_IOU))
        text += [weights, *_table(run, outcomes[-1]), _speed_line(run, outcomes[-1], size)]
    return TestResult(text="\n".join(text), outcomes=tuple(outcomes), names=tuple(run.names))


def _study(run: EvaluationRun) -> TestResult:
    """`--task study`: sizes from 256 to 1536, one line each in study_<data>_<weights>.txt."""
    options, text, outcomes = run.options, [], []
    for weights in options.weights:
        model, rows = run.load([weights]), []
        for wanted in STUDY_SIZES:
            size = -(-wanted // model.stride) * model.stride
            outcome = run.evaluate(model, size, conf_thres=options.conf_thres, iou_thres=options.iou_thres)
            rows.append(study_line(outcome, size=wanted, batch_size=options.batch_size))
            logger.info("%s at %d px: %s", weights, size, rows[-1])
            outcomes.append(outcome)
        file = Path(f"study_{run.data.file.stem}_{Path(weights).stem}.txt")
        write_file(file, "\n".join(rows) + "\n")
        text += [weights, *rows, f"Study saved to {file}"]
    return TestResult(text="\n".join(text), outcomes=tuple(outcomes), names=tuple(run.names))


def _table(run: EvaluationRun, outcome: Outcome) -> Iterator[str]:
    per_class = run.options.verbose or len(run.names) < FEW_CLASSES
    return table(outcome.evaluation, run.names, per_class=per_class)


def _speed_line(run: EvaluationRun, outcome: Outcome, size: int) -> str:
    options = run.options
    is_one_by_one = options.tiles is not None and run.device.type == "cpu"
    batch_size = AT_ONCE["cpu"] if is_one_by_one else options.batch_size
    return speed_line(outcome.speed_ms, size=size, batch_size=batch_size, tiles=options.tiles)


def _write_coco(
    run: EvaluationRun, outcome: Outcome, export: CocoExport, truth: CocoTruth | CocoUnavailable, folder: Path
) -> tuple[Outcome, CocoScores | None, list[str]]:
    """Write the JSON file, and compute COCO's own AP if there are annotations and an evaluator."""
    file = folder / f"{Path(run.options.weights[0]).stem}_predictions.json"
    write_file(file, json.dumps(export.records()))
    text = [f"Detections saved to {file}"]
    scores = score(export, truth)
    if isinstance(scores, CocoUnavailable):
        return outcome, None, [*text, scores.text]
    assert isinstance(truth, CocoTruth)
    ours = outcome.evaluation
    found = replace(ours, scores={**ours.scores, "mAP_0.5": scores.ap50, "mAP_0.5:0.95": scores.ap})
    return outcome._replace(evaluation=found), scores, [*text, *truth.remarks, *lines(scores)]
