"""The shapes of classes on a line, in the colours of their heads: where one head ends and the next begins.

Dimension key:  C classes
"""

from collections.abc import Sequence

import numpy as np

from flatout.yolo.grouping.box_statistics import ClassStatistics
from flatout.yolo.model.head_config import HeadConfig
from flatout.yolo.pictures.axes import Axes, Place, ticks
from flatout.yolo.pictures.lettering import shortened
from flatout.yolo.pictures.palette import FAINT, INK, MUTED, colour_of
from flatout.yolo.pictures.sheet import Sheet

CHART_H = 230
MOST_NAMES = 40
"""With more classes only the dots are drawn."""
FEWEST_TICKS = 3
RATIOS = (0.1, 0.2, 0.33, 0.5, 0.75, 1.0, 1.33, 2.0, 3.0, 5.0, 10.0)


def draw_shapes(
    sheet: Sheet, config: HeadConfig, statistics: ClassStatistics, names: Sequence[str], *, left: float, top: float
) -> None:
    """Across: mean width / height, in even steps of its logarithm. Up: boxes, likewise in powers of ten."""
    log_ratio_C, power_C = statistics.log_ratio_C, np.log10(np.maximum(statistics.num_boxes_C, 1))
    low, high = float(log_ratio_C.min()), float(log_ratio_C.max())
    margin = 0.06 * (high - low) + 0.05
    place = Place(left + 34, top, sheet.width - left, top + CHART_H)
    limits = (low - margin, high + margin)
    axes = Axes(
        sheet, place, x=limits, y=(0, float(power_C.max()) * 1.15 + 0.1), title="Shape and number of boxes",
        x_label="mean width / height", y_label="boxes, as a power of 10", x_ticks=False,
    )  # fmt: skip
    _draw_ratios(axes, limits)
    for number, head in enumerate(config.heads):
        classes = list(head.classes)
        axes.dots(log_ratio_C[classes], power_C[classes], colour_of(number), 3)
    if config.nc <= MOST_NAMES:
        for number, (x, y) in enumerate(axes.to_px(log_ratio_C, power_C).tolist()):
            sheet.text(shortened(names[number], 14), x + 5, y + 2.5, px=6.5, colour=INK)
    axes.close()


def _draw_ratios(axes: Axes, limits: tuple[float, float]) -> None:
    """The ticks, which are no even numbers on a logarithm."""
    for ratio, text in ratio_ticks(*limits):
        (x, _), *_ = axes.to_px(np.array([np.log(ratio)]), np.array([0.0])).tolist()
        axes.sheet.line([(x, axes.place.top), (x, axes.place.bottom)], FAINT, 0.7)
        axes.sheet.text(text, x, axes.place.bottom + 15, px=7.5, colour=MUTED, anchor="middle")


def ratio_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Ratios between two logarithms, and how they are written; even numbers where all boxes have about one shape."""
    usual = [(ratio, f"{ratio:g}") for ratio in RATIOS if low <= np.log(ratio) <= high]
    return usual if len(usual) >= FEWEST_TICKS else ticks(float(np.exp(low)), float(np.exp(high)), most=6)
