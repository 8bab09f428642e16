"""The list as people and programs read it: every finding with its file, line, reason and fix; CSV and JSON.

Dimension key:  T labels   D detections
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from flatout.errors import counted
from flatout.safefiles import csv_text
from flatout.yolo.data.find import Pair
from flatout.yolo.data.label_text import MAX_BYTES, decode_text, label_line_numbers
from flatout.yolo.label_audit.fixes import Fix, label_text
from flatout.yolo.label_audit.rank import NONE, Evidence, Finding
from flatout.yolo.label_audit.set_boxes import SetBoxes, pairwise_iou
from flatout.yolo.label_audit.statistics import LabelStatistics, unpack_confusion

VERSION = 1
"""Version of audit.json."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """A finding, ready to be shown."""

    rank: int
    """From 1."""
    kind: str
    score: float
    reason: str
    image: str
    label_file: str
    line: int
    """Line of the label in its file, from 1; 0: no label, or the file has no lines (COCO, Pascal VOC)."""
    class_name: str
    """Class of the label; "" for a missing one."""
    box: tuple[float, ...] | None
    """Corners of the label relative to the image; None for a missing one."""
    found_class: str
    """Class of the detection that contradicts the label; "" without one."""
    found_score: float
    found_box: tuple[float, ...] | None
    fix: Fix | None
    """The suggested change; None where label files are not YOLO text."""
    training: "TrainingRecord | None" = None
    """What the steps of the training saw of the label; None for a missing one, and without --audit."""
    twin_box: tuple[float, ...] | None = None
    """Corners of the other label of a duplicate."""

    def as_plain(self) -> dict[str, Any]:
        return asdict(self) | {"score": round(self.score, 4)}

    @property
    def place(self) -> str:
        """File and line, as editors understand it."""
        return f"{self.label_file}:{self.line}" if self.line else self.label_file


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """What the steps of a training saw of a label."""

    epochs: int
    """Epochs in which it was shown."""
    learned: int
    """Epochs in which it was learned."""
    forgotten: int
    """Times that it was learned, and no longer in the next epoch."""
    loss: float
    """Mean loss over the epochs; likewise iou, with its prediction."""
    iou: float
    confused_with: str
    """The class that was predicted at its place with the highest confidence, other than its own; "" without one."""
    confusion: float
    """That confidence."""


@dataclass(frozen=True)
class LabelLines:
    """The lines of a label file, and which of them hold its labels."""

    text: tuple[str, ...]
    number: tuple[int, ...]
    """Line number of each label."""


def records_of(
    findings: Sequence[Finding],
    labels: SetBoxes,
    found: SetBoxes,
    evidence: Evidence,
    pairs: Sequence[Pair],
    names: Sequence[str],
    statistics: LabelStatistics | None = None,
) -> list[Record]:
    """All findings with their places and reasons; `pairs` are the image and label files of the used images."""
    lines_of = cache(_read_lines)
    return [
        _record(number, finding, labels, found, evidence, pairs[finding.image], names, lines_of, statistics)
        for number, finding in enumerate(findings, 1)
    ]


def _how_learned(training: TrainingRecord) -> str:
    """How the label was learned, as the end of a reason."""
    if not training.epochs:
        return "; not seen in any epoch"
    forgotten = f", forgotten {counted(training.forgotten, 'time')}" if training.forgotten else ""
    return f"; learned in {training.learned} of {counted(training.epochs, 'epoch')}{forgotten}"


def training_record(statistics: LabelStatistics, label: int, names: Sequence[str]) -> TrainingRecord:
    """What the steps saw of one label."""
    (confusion,), (number,) = unpack_confusion(statistics.confused_T[label : label + 1])
    epochs = int(statistics.epochs_T[label])
    return TrainingRecord(
        epochs=epochs,
        learned=int(statistics.learned_T[label]),
        forgotten=int(statistics.forgotten_T[label]),
        loss=round(float(statistics.loss_T[label]) / max(1, epochs), 4),
        iou=round(float(statistics.iou_T[label]) / max(1, epochs), 4),
        confused_with="" if number < 0 else names[int(number)],
        confusion=round(float(confusion), 4),
    )


def _record(
    number: int,
    finding: Finding,
    labels: SetBoxes,
    found: SetBoxes,
    evidence: Evidence,
    pair: Pair,
    names: Sequence[str],
    lines_of: Callable[[str], LabelLines | None],
    statistics: LabelStatistics | None,
) -> Record:
    label, detection = finding.label, finding.detection
    training = None if statistics is None or label == NONE else training_record(statistics, label, names)
    lines = lines_of(pair.label)
    line = _line_of(label, finding.image, labels, lines)
    twin_line = _line_of(finding.twin, finding.image, labels, lines)
    class_name = "" if label == NONE else names[int(labels.class_D[label])]
    found_class = "" if detection == NONE else names[int(found.class_D[detection])]
    return Record(
        rank=number,
        kind=finding.kind,
        score=finding.score,
        reason=reason_of(finding, labels, found, evidence, names, twin_line)
        + ("" if training is None else _how_learned(training)),
        image=pair.image,
        label_file=pair.label_place,
        line=line,
        class_name=class_name,
        box=None if label == NONE else _corners(labels.box_D4[label]),
        found_class=found_class,
        found_score=0.0 if detection == NONE else round(float(found.score_D[detection]), 4),
        found_box=None if detection == NONE else _corners(found.box_D4[detection]),
        fix=_fix(finding, labels, found, pair, line, lines),
        training=training,
        twin_box=None if finding.twin == NONE else _corners(labels.box_D4[finding.twin]),
    )


def _corners(box_4: np.ndarray) -> tuple[float, ...]:
    return tuple(round(float(value), 6) for value in box_4)


def reason_of(
    finding: Finding, labels: SetBoxes, found: SetBoxes, evidence: Evidence, names: Sequence[str], twin_line: int
) -> str:
    """One sentence: what contradicts the label. `twin_line`: the line of the other label of a duplicate, or 0."""
    label, detection = finding.label, finding.detection
    if finding.kind == "missing":
        name = names[int(found.class_D[detection])]
        return f"{name} was found with confidence {found.score_D[detection]:.2f}, and no label is there"
    own = names[int(labels.class_D[label])]
    if finding.kind == "spurious":
        return f"labelled {own}, but nothing was found near it (confidence {evidence.near_T[label]:.2f})"
    if finding.kind == "duplicate":
        other = f"the label in line {twin_line}" if twin_line else "another label"
        return f"covers the same object as {other} (IoU {evidence.twin_T[label]:.2f})"
    score = float(found.score_D[detection])
    if finding.kind == "wrong class":
        other = names[int(found.class_D[detection])]
        return f"labelled {own} ({evidence.own_T[label]:.2f}), but looks like {other} ({score:.2f})"
    iou = pairwise_iou(labels.box_D4[label][None], found.box_D4[detection][None])[0, 0]
    return f"{own} was found with confidence {score:.2f}, but the label overlaps it by an IoU of only {iou:.2f}"


def _read_lines(file: str) -> LabelLines | None:
    """The lines of a file of YOLO text; None for other formats and files that cannot be read."""
    if not file.endswith(".txt"):
        return None
    path = Path(file)
    try:
        content = path.read_bytes() if path.stat().st_size <= MAX_BYTES else b""
        return LabelLines(tuple(decode_text(content).splitlines()), tuple(label_line_numbers(content)))
    except FileNotFoundError:
        return LabelLines((), ())
    except (OSError, ValueError):
        return None


def _line_of(label: int, image: int, labels: SetBoxes, lines: LabelLines | None) -> int:
    """The line of a label of an image, from 1; 0 if there is none, or if the file has no lines."""
    rows: slice = labels.rows(image)
    if label == NONE or lines is None or len(lines.number) != rows.stop - rows.start:
        return 0
    return lines.number[label - int(rows.start)]


def _fix(
    finding: Finding, labels: SetBoxes, found: SetBoxes, pair: Pair, line: int, lines: LabelLines | None
) -> Fix | None:
    if lines is None:
        return None
    # A fix list may be applied from another folder.
    file = str(Path(pair.label).absolute())
    if finding.kind == "missing":
        text = label_text(int(found.class_D[finding.detection]), found.box_D4[finding.detection])
        return Fix(action="add", file=file, line=len(lines.text), was="", text=text)
    if not line:
        return None
    was = lines.text[line - 1].strip()
    if finding.kind in ("spurious", "duplicate"):
        return Fix(action="delete", file=file, line=line, was=was, text="")
    if finding.kind == "wrong class":
        # Only the number changes: the box, or polygon, stays as the person drew it.
        text = " ".join([str(int(found.class_D[finding.detection])), *was.split()[1:]])
    else:
        text = label_text(int(labels.class_D[finding.label]), found.box_D4[finding.detection])
    return Fix(action="replace", file=file, line=line, was=was, text=text)


# Files

COLUMNS = (
    "rank", "kind", "score", "label_file", "line", "image", "class_name", "found_class", "found_score", "reason",
)  # fmt: skip
TRAINING_COLUMNS = tuple(each.name for each in fields(TrainingRecord))
"""Columns at the end; empty for findings without a record of the training."""


def as_csv(records: Sequence[Record]) -> str:
    """A table with one row per finding, for spreadsheets."""
    columns, rows = (*COLUMNS, *TRAINING_COLUMNS), []
    for record in records:
        plain = record.as_plain()
        plain |= plain["training"] or dict.fromkeys(TRAINING_COLUMNS, "")
        rows.append([plain[column] for column in columns])
    return csv_text([columns, *rows])


def as_json(records: Sequence[Record], about: Mapping[str, Any]) -> str:
    """All findings with their fixes, after facts about the audit."""
    content = {"version": VERSION, **about, "findings": [record.as_plain() for record in records]}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
