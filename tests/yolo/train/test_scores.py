"""A new score takes one line in the table of scores; trainings that began without it can be continued."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flatout.engine.callbacks import Callback, Scores
from flatout.yolo.evaluate.evaluate import table
from flatout.yolo.metrics import SCORES, Score, evaluation
from flatout.yolo.options import TrainOptions
from flatout.yolo.train import train
from tests.yolo.test_metrics import evaluate

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = Score("rarity", "Rarity", lambda classes: 1 / classes.num_labels_C)
OLD_COLUMNS = [
    "epoch", "box", "obj", "cls", "total", "precision", "recall", "mAP_0.5", "mAP_0.5:0.95", "val_box", "val_obj",
    "val_cls", "lr0", "lr1", "lr2",
]  # fmt: skip
"""Columns of results.csv before there were more scores."""


class Recorder(Callback):
    def __init__(self) -> None:
        self.scalars: list[dict[str, float]] = []

    def validation(self, scores: Scores) -> None:
        self.scalars.append(dict(scores.scalars))


@pytest.fixture
def with_new_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "SCORES", (*SCORES, NEW))


@pytest.mark.usefixtures("with_new_score")
def test_a_new_score_is_a_column_of_the_table():
    result = evaluate(4).result()
    header, of_all, *of_classes = table(result, ["cat", "dog", "cow"], per_class=True)
    assert header.split()[-1] == "Rarity"
    rarity_C = 1 / np.array([int(line.split()[2]) for line in of_classes])
    assert [float(line.split()[-1]) for line in of_classes] == pytest.approx(rarity_C.tolist(), rel=1e-2)
    assert float(of_all.split()[-1]) == pytest.approx(rarity_C.mean(), rel=1e-2)


@pytest.mark.usefixtures("with_new_score")
def test_a_new_score_goes_wherever_scores_of_a_training_go(
    options: TrainOptions, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "flatout")
    recorder = Recorder()
    result = train(replace(options, epochs=1, log_to=("csv",)), [recorder])
    assert result is not None and result.outcome is not None and "rarity" in result.outcome.scores
    assert "Rarity" in caplog.text
    assert "metrics/rarity" in recorder.scalars[0]
    assert columns_of(result.folder) == [*OLD_COLUMNS, "F1", "AR_0.5:0.95", "rarity"]
    assert "rarity" in events_of(result.folder)[0]
    assert "metrics/rarity" in (result.folder / "scalars.csv").read_text()
    assert len((result.folder / "results.txt").read_text().split()) == 15, "YOLOv7's columns, and no other"


def test_a_run_that_was_begun_with_fewer_scores_goes_on_with_its_table(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "SCORES", SCORES[:4])
    begun = train(replace(options, stop_after=4, log_to=("none",)))
    assert begun is not None and not begun.finished and columns_of(begun.folder) == OLD_COLUMNS
    monkeypatch.setattr(evaluation, "SCORES", SCORES)
    result = train(replace(options, log_to=("none",)))
    assert result is not None and result.finished and result.folder == begun.folder
    with (result.folder / "results.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == OLD_COLUMNS and [len(row) for row in rows] == [15] * 3
    first, second = events_of(result.folder)
    assert "F1" not in first and "F1" in second, "scores without a column are in log.jsonl"


def columns_of(folder: Path) -> list[str]:
    return (folder / "results.csv").read_text().splitlines()[0].split(",")


def events_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
