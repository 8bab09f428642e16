"""Which columns of a run's log share a chart, under which names, and on which axis.

A score from 0 to 1 always has the axis 0 to 1, so that a curve looks as good as it is. Training and validation of the
same loss share a chart. Columns that nobody reads (`lr1`, `bad_steps`) and those that never change are hidden until
the reader asks for them. A column that is not listed here, of whichever job, gets a chart of its own.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, float]
INTERNAL = {"lr1", "lr2", "bad_steps", "seconds", "missing", "num_frames", "samples_per_s", "threshold"}
"""Columns that explain a run to its developers."""
VALIDATION = "val_"
"""Prefix of a column that validation computes for the training column of the same name."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Columns of the log that are plotted together."""

    title: str
    columns: Mapping[str, str]
    """What the legend calls each column."""
    score: bool = False
    """From 0 to 1, more is better: the axis is fixed, and a constant curve is shown, because that is news."""
    from_zero: bool = False
    """The axis starts at 0, so that a difference looks as large as it is."""


CHARTS = (
    Chart(title="mAP", columns={"mAP_0.5": "IoU 0.5", "mAP_0.5:0.95": "IoU 0.5 to 0.95"}, score=True),
    Chart(
        title="Precision and recall",
        columns={"precision": "precision", "recall": "recall", "F1": "F1", "AR_0.5:0.95": "average recall"},
        score=True,
    ),
    Chart(
        title="Pixels",
        columns={"pixel_AP": "average precision", "pixel_best_F1": "best F1", "pixel_IoU": "IoU"},
        score=True,
    ),
    Chart(title="AUROC", columns={"image_AUROC": "images", "pixel_AUROC": "pixels"}, score=True),
    Chart(
        title="Defects found",
        columns={"recall@1FP": "1 false detection per image", "recall@0.1FP": "0.1 false detections per image"},
        score=True,
    ),
    Chart(title="PSNR (dB)", columns={"psnr": "restored", "blurry_psnr": "blurry input"}),
    Chart(title="SSIM", columns={"ssim": "restored", "blurry_ssim": "blurry input"}, score=True),
    Chart(title="Loss", columns={"loss": "training", "total": "training", "val_loss": "validation"}),
    Chart(title="Box loss", columns={"box": "training", "val_box": "validation"}),
    Chart(title="Objectness loss", columns={"obj": "training", "val_obj": "validation"}),
    Chart(title="Class loss", columns={"cls": "training", "val_cls": "validation"}),
    Chart(title="Images per second", columns={"images_per_s": "training"}, from_zero=True),
    Chart(
        title="Milliseconds per step",
        columns={"step_ms": "whole step", "wait_ms": "waiting for a batch"},
        from_zero=True,
    ),
    Chart(title="Learning rate", columns={"lr": "all parameters", "lr0": "weights"}),
)


def charts_of(rows_by_run: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    """The charts of one or several runs, in values that JSON can hold: known ones first, hidden ones last.

    Each has a title, the ends and ticks of its axes, whether it is hidden, and lines with run, label and points
    [epoch, value].
    """
    columns = dict.fromkeys(name for rows in rows_by_run.values() for row in rows for name in row if name != "epoch")
    plotted = [_plotted(chart, rows_by_run) for chart in _charts_for(list(columns))]
    return sorted((chart for chart in plotted if chart["lines"]), key=lambda chart: chart["hidden"])


def ticks_between(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers that cover low..high; the first and last are the ends of the axis."""
    # A range that rounding could make is none: its ticks would be one and the same number.
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)
    rough = (high - low) / count
    size = 10.0 ** math.floor(math.log10(rough))
    step = size * next(factor for factor in (1, 2, 5, 10) if size * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _charts_for(columns: Sequence[str]) -> Iterator[Chart]:
    """The known charts, then one for each column that none of them has, with its validation."""
    yield from CHARTS
    known = {column for chart in CHARTS for column in chart.columns}
    others = [column for column in columns if column not in known]
    for column in others:
        pair = VALIDATION + column
        if pair in others:
            yield Chart(title=_plain(column), columns={column: "training", pair: "validation"})
        elif column.removeprefix(VALIDATION) not in others or not column.startswith(VALIDATION):
            yield Chart(title=_plain(column), columns={column: _plain(column)})


def _plotted(chart: Chart, rows_by_run: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    found = [
        (run, label, [(row.get("epoch", number), row[column]) for number, row in enumerate(rows) if column in row])
        for column, label in chart.columns.items()
        for run, rows in rows_by_run.items()
    ]
    values = [value for _, _, points in found for _, value in points]
    epochs = [epoch for _, _, points in found for epoch, _ in points]
    if not values:
        return {"lines": []}
    lowest = min(0.0, *values) if chart.from_zero else min(values)
    constant = len(values) > 2 and min(values) == max(values) and not chart.score
    score = chart.score and min(values) >= 0 and max(values) <= 1
    return {
        "title": chart.title,
        "lines": [{"run": run, "label": label, "points": points} for run, label, points in found if points],
        "hidden": constant or INTERNAL.issuperset(chart.columns),
        "ticks": [0, 0.25, 0.5, 0.75, 1] if score else ticks_between(lowest, max(values)),
        "epochs": _whole_ticks(min(epochs), max(epochs)),
    }


def _whole_ticks(first: float, last: float) -> list[float]:
    """Round epochs between the first and the last, with both ends."""
    inside = [tick for tick in ticks_between(first, last) if tick == int(tick) and first < tick < last]
    distance = (last - first) / 8
    return [first, *(tick for tick in inside if min(tick - first, last - tick) >= distance), last]


def _plain(column: str) -> str:
    return column.replace("_", " ")
