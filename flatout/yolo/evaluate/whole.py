"""The whole of `test.py`: weights and a data set in; a table, files and pictures out.

options -> pictures of a split, networks -> Evaluate -> table, run folder -> TestResult
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from flatout.engine.checkpoint.atomic import replacing
from flatout.engine.run_folder import new_run_folder
from flatout.errors import CheckpointError, ConfigError
from flatout.yolo.evaluate import coco_ap
from flatout.yolo.evaluate.exam import Exam, open_exam
from flatout.yolo.evaluate.run import Outcome, Watcher
from flatout.yolo.evaluate.table import FEW_CLASSES, speed_line, study_line, table
from flatout.yolo.evaluate.txt_labels import TxtLabels
from flatout.yolo.input_size import rounded_up
from flatout.yolo.metrics.coco import CocoExport
from flatout.yolo.metrics.coco_api import CocoScores
from flatout.yolo.options import TestOptions

logger = logging.getLogger(__name__)

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
    _check_files(options)
    exam = open_exam(options)
    if options.task == "speed":
        return _speed(exam)
    if options.task == "study":
        return _study(exam)
    return _judge(exam)


def _check_files(options: TestOptions) -> None:
    """What can be known before anything long begins."""
    for path in options.weights:
        if not Path(path).is_file():
            raise CheckpointError(f"--weights {path}: no such file. Check the path.")
    if options.save_per_class_ap and not Path(options.save_per_class_ap).absolute().parent.is_dir():
        raise ConfigError(f"--save-per-class-ap {options.save_per_class_ap}: its folder does not exist. Make it first.")


def _judge(exam: Exam) -> TestResult:
    """The tasks train, val and test: everything there is."""
    options = exam.options
    subject = exam.load(options.weights)
    folder = new_run_folder(Path(options.project), options.name, options.exist_ok)
    size = rounded_up(options.img_size, subject.stride)
    wants_coco = options.save_json or coco_ap.is_asked_for(exam.data)
    truth = coco_ap.find_truth(exam.data, exam.split, exam.names, exam.images) if wants_coco else None
    export = coco_ap.export_for(truth, exam.names) if truth is not None else None
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
    exam: Exam, outcome: Outcome, export: CocoExport, truth: coco_ap.Truth | coco_ap.Refused, folder: Path
) -> tuple[Outcome, CocoScores | None, list[str]]:
    """The JSON file, and COCO's own AP where annotations and an evaluator are there."""
    file = folder / f"{Path(exam.options.weights[0]).stem}_predictions.json"
    _write(file, json.dumps(export.records()))
    text = [f"Detections saved to {file}"]
    scores = coco_ap.score(export, truth)
    if isinstance(scores, coco_ap.Refused):
        return outcome, None, [*text, scores.text]
    assert isinstance(truth, coco_ap.Truth)
    found = replace(outcome.evaluation, map50=scores.ap50, map50_95=scores.ap)
    return outcome._replace(evaluation=found), scores, [*text, *truth.remarks, *coco_ap.lines(scores)]


def _write(path: Path, text: str) -> None:
    content = text.encode()
    with replacing(path, needed_bytes=len(content)) as sink:
        sink.write(content)
