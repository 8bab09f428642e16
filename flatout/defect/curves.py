"""results.png: the loss and the scores of a run, epoch by epoch."""

import csv
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

SHOWN = ("loss", "pixel_AP", "pixel_best_F1", "recall@1FP")
SIDE_HW = (220, 320)
LEFT, TOP, RIGHT, BOTTOM = 62, 28, 12, 26
_INK, _LINE, _RIM = (60, 60, 60), (190, 90, 20), (200, 200, 200)
LOGARITHMIC = ("loss",)


def results_png(table: Path, out: Path) -> bool:
    """Draw the columns of results.csv that are there; False if there is nothing to draw yet."""
    import cv2

    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["epoch"] and not row["epoch"].startswith("#")]
    panels = [_panel(name, [row.get(name, "") for row in rows]) for name in SHOWN if any(row.get(name) for row in rows)]
    if not panels:
        return False
    out.write_bytes(cv2.imencode(".png", np.concatenate(panels, axis=1))[1].tobytes())
    return True


def _panel(name: str, texts: Sequence[str]) -> np.ndarray:
    """One curve with its extremes at the axis; a value that is missing leaves a gap."""
    import cv2

    height, width = SIDE_HW
    panel = np.full((height, width, 3), 255, np.uint8)
    cv2.rectangle(panel, (LEFT, TOP), (width - RIGHT, height - BOTTOM), _RIM, 1)
    value_E = np.array([float(text) if text else np.nan for text in texts])
    drawn_E = np.log10(np.maximum(value_E, 1e-12)) if name in LOGARITHMIC else value_E
    low, high = (float(drawn_E[np.isfinite(drawn_E)].min()), float(drawn_E[np.isfinite(drawn_E)].max()))
    span = max(high - low, 1e-12)
    x_E = LEFT + np.arange(len(value_E)) * (width - LEFT - RIGHT) / max(len(value_E) - 1, 1)
    y_E = height - BOTTOM - (drawn_E - low) / span * (height - TOP - BOTTOM)
    points = [(round(x), round(y)) if np.isfinite(y) else None for x, y in zip(x_E, y_E, strict=True)]
    for before, after in pairwise(points):
        if before is not None and after is not None:
            cv2.line(panel, before, after, _LINE, 1, cv2.LINE_AA)
    for point in points:
        if point is not None:
            cv2.circle(panel, point, 2, _LINE, -1, cv2.LINE_AA)
    finite_E = value_E[np.isfinite(value_E)]
    _write(panel, name + (" (log)" if name in LOGARITHMIC else ""), (LEFT, 18))
    _write(panel, f"{finite_E.max():.3g}", (4, TOP + 8))
    _write(panel, f"{finite_E.min():.3g}", (4, height - BOTTOM))
    _write(panel, f"epoch 0 to {len(value_E) - 1}, last {value_E[-1]:.4g}", (LEFT, height - 8))
    return panel


def _write(panel: np.ndarray, text: str, place_xy: tuple[int, int]) -> None:
    import cv2

    cv2.putText(panel, text, place_xy, cv2.FONT_HERSHEY_SIMPLEX, 0.42, _INK, 1, cv2.LINE_AA)
