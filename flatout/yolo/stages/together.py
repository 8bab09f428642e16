"""The results of all stages as one: a table whose epochs go on counting, and a plot with a line where a stage begins.

    stage1/results.*, stage2/results.* ...  ->  results.txt, results.csv, log.jsonl, results.png

Made anew from the stages' own files every time: nothing here needs to be saved or cut back.
"""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

from flatout.engine.callbacks import Callback, Scores
from flatout.engine.checkpoint.atomic import replacing
from flatout.yolo.stages.job_folder import stage_folder


class Together(Callback):
    """Writes the tables of a job after every epoch of a stage."""

    def __init__(self, job: Path, num_stages: int, num_epochs: int) -> None:
        self._job, self._num_stages, self._num_epochs = job, num_stages, num_epochs

    def validation(self, scores: Scores) -> None:
        write_tables(self._job, num_stages=self._num_stages, num_epochs=self._num_epochs)


def write_tables(job: Path, *, num_stages: int, num_epochs: int) -> list[int]:
    """results.txt, results.csv and log.jsonl of a job; returns the epoch at which each begun stage begins."""
    stages = [stage_folder(job, number) for number in range(1, num_stages + 1)]
    begins, count = [], 0
    for stage in stages:
        if lines := _lines(stage / "results.txt"):
            begins.append(count)
            count += len(lines)
    _write(job / "results.txt", "".join(_renumbered_text(stages, num_epochs)))
    _write(job / "results.csv", _renumbered_csv(stages))
    _write(job / "log.jsonl", "".join(_renumbered_events(stages)))
    return begins


def draw(job: Path, begins: list[int]) -> Path:
    """results.png; DataError if there is no epoch yet."""
    from flatout.yolo.pictures.results import results_png

    # Half an epoch before the first of a stage: between the two points it comes after and before.
    return results_png(job / "results.txt", job / "results.png", marks=[begin - 0.5 for begin in begins[1:]])


def _renumbered_text(stages: list[Path], num_epochs: int) -> Iterator[str]:
    """The 15 columns of YOLOv7, the first of which says epoch/last."""
    lines = [line for stage in stages for line in _lines(stage / "results.txt")]
    for epoch, line in enumerate(lines):
        rest = line.lstrip().partition(" ")[2]
        yield f"{f'{epoch}/{num_epochs - 1}':>10} {rest}\n"


def _renumbered_csv(stages: list[Path]) -> str:
    rows: list[dict[str, object]] = []
    for number, stage in enumerate(stages, 1):
        for row in csv.DictReader(_lines(stage / "results.csv")):
            rows.append(row | {"stage": number, "epoch": len(rows)})
    names = dict.fromkeys(["stage", *(name for row in rows for name in row)])
    text = io.StringIO()
    table = csv.DictWriter(text, list(names), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue() if rows else ""


def _renumbered_events(stages: list[Path]) -> Iterator[str]:
    epoch = 0
    for number, stage in enumerate(stages, 1):
        for line in _lines(stage / "log.jsonl"):
            event = json.loads(line)
            if "epoch" in event:
                event |= {"stage": number, "epoch": epoch}
                epoch += 1
            yield json.dumps(event) + "\n"


def _lines(path: Path) -> list[str]:
    """Without marks of rows that a full disk has cost."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def _write(path: Path, text: str) -> None:
    content = text.encode()
    with replacing(path, needed_bytes=len(content)) as sink:
        sink.write(content)
