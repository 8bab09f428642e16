"""How alike classes are, or how much they are mixed up, as a map sorted by heads: blocks on the diagonal are heads.

Dimension key:  C classes
"""

from collections.abc import Sequence

import numpy as np

from flatout.yolo.model.head_config import HeadConfig
from flatout.yolo.pictures.confusion import shade
from flatout.yolo.pictures.lettering import shortened
from flatout.yolo.pictures.palette import INK, MUTED, PAPER, colour_of
from flatout.yolo.pictures.sheet import Sheet

MOST_NAMES = 100
MOST_LETTERS = 16


NAMES_W, SIDE = 96, 400
"""Of the names at the left, and of the map itself."""


def draw_map(
    sheet: Sheet, config: HeadConfig, likeness_CC: np.ndarray, names: Sequence[str], *, left: float, top: float
) -> None:
    """Cells from light to dark; the darkest cell off the diagonal sets the scale."""
    order = [number for head in config.heads for number in head.classes]
    shown_CC = likeness_CC[np.ix_(order, order)]
    most = float((shown_CC * (1 - np.eye(len(order)))).max(initial=0)) or 1.0
    title, remark = _title(config)
    sheet.text(title, left, top - 30, px=9, bold=True)
    sheet.text(f"{remark} The darkest cell is {most:.2f}.", left, top - 14, px=7, colour=MUTED)
    left += NAMES_W
    colours = [[shade(min(1.0, value / most)) if value else PAPER for value in row] for row in shown_CC.tolist()]
    sheet.image(np.array(colours, np.uint8), left, top, SIDE, SIDE)
    sheet.frame(left, top, left + SIDE, top + SIDE, INK, 0.8)
    cell = SIDE / len(order)
    _draw_heads(sheet, config, left, top, cell)
    if len(order) <= MOST_NAMES:
        _draw_names(sheet, [shortened(names[number], MOST_LETTERS) for number in order], left, top, cell)


def _title(config: HeadConfig) -> tuple[str, str]:
    if config.grouping == "anticonfusion":
        return "What is mixed up", "Dark cells should lie outside the frames."
    return "How alike classes are", "Dark cells should lie inside the frames, which are the heads."


def _draw_heads(sheet: Sheet, config: HeadConfig, left: float, top: float, cell: float) -> None:
    first = 0
    for number, head in enumerate(config.heads):
        begin, end = first * cell, (first + len(head.classes)) * cell
        sheet.frame(left + begin, top + begin, left + end, top + end, colour_of(number), 1.6)
        sheet.block(left + SIDE + 6, top + begin + 1, left + SIDE + 10, top + end - 1, colour_of(number))
        sheet.text(f"head {number}", left + SIDE + 15, top + (begin + end) / 2 + 3.5, px=7)
        first += len(head.classes)


def _draw_names(sheet: Sheet, labels: Sequence[str], left: float, top: float, cell: float) -> None:
    px = min(7.0, cell * 0.75)
    for place, text in enumerate(labels):
        sheet.text(text, left - 5, top + (place + 0.5) * cell + px / 2, px=px, anchor="right")
