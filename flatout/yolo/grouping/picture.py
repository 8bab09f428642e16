"""A grouping as a picture: a column of class names per head, and below them what the heads were chosen by."""

from collections.abc import Sequence
from pathlib import Path

from flatout.errors import counted
from flatout.yolo.grouping.choose import Grouped
from flatout.yolo.grouping.picture_map import SIDE, draw_map
from flatout.yolo.grouping.picture_shapes import CHART_H, draw_shapes
from flatout.yolo.pictures.lettering import shortened
from flatout.yolo.pictures.palette import FAINT, INK, MUTED, colour_of
from flatout.yolo.pictures.picture_file import write_picture
from flatout.yolo.pictures.sheet import Sheet

COLUMN_W, COLUMNS = 156, 4
MARGIN, TOP = 24, 44
TITLE_H, LINE_H = 66, 13
LETTERS_PX, SMALL_PX, MOST_LETTERS = 7.5, 5.8, 20
MOST_NAMES = 40
"""Of one head; the others are counted."""
GAP = 66
"""Between the columns and what is below them."""


def draw_grouping(grouped: Grouped, path: Path) -> Path:
    """PNG or JPEG, by the ending of the name."""
    config = grouped.grouping.config
    rows = [range(first, min(first + COLUMNS, config.num_heads)) for first in range(0, config.num_heads, COLUMNS)]
    heights = [max(_height(len(config.heads[head].classes)) for head in row) for row in rows]
    below = SIDE if grouped.likeness_CC is not None else CHART_H if grouped.statistics is not None else 0
    sheet = Sheet(2 * MARGIN + COLUMNS * COLUMN_W, TOP + sum(heights) + (below + GAP + 30 if below else 0) + MARGIN)
    title = f"{counted(config.nc, 'class')} in {counted(config.num_heads, 'head')}: {config.grouping}"
    sheet.text(title, MARGIN, 26, px=10, bold=True)
    top = float(TOP)
    for row, height in zip(rows, heights, strict=True):
        for place, head in enumerate(row):
            _draw_head(sheet, grouped, head, MARGIN + place * COLUMN_W, top)
        top += height
    if grouped.likeness_CC is not None:
        draw_map(sheet, config, grouped.likeness_CC, grouped.names, left=MARGIN, top=top + GAP)
    elif grouped.statistics is not None:
        draw_shapes(sheet, config, grouped.statistics, grouped.names, left=MARGIN, top=top + GAP)
    return write_picture(path, sheet.picture())


def _height(num_classes: int) -> int:
    return TITLE_H + (min(num_classes, MOST_NAMES) + (num_classes > MOST_NAMES)) * LINE_H + 18


def _draw_head(sheet: Sheet, grouped: Grouped, head: int, left: float, top: float) -> None:
    group, comment = grouped.grouping.config.heads[head], grouped.grouping.comments[head]
    right = left + COLUMN_W - 14
    sheet.block(left, top, right, top + 4, colour_of(head))
    sheet.text(f"head {head}", left, top + 19, px=8.5, bold=True)
    counted = f"{len(group.classes)} class{'es' if len(group.classes) > 1 else ''}"
    sheet.text(counted, right, top + 19, px=SMALL_PX, colour=MUTED, anchor="right")
    name = "" if group.name == f"Head {head}" else group.name.removesuffix("_Group").replace("_", " ")
    weight = "" if group.weight == 1 else f"weight {group.weight:g}"
    for place, text in enumerate(part for part in (name, comment, weight) if part):
        fitted = _fitted(sheet, text, right - left)
        sheet.text(fitted, left, top + 33 + place * 12, px=SMALL_PX, colour=MUTED)
    sheet.line([(left, top + TITLE_H - 11), (right, top + TITLE_H - 11)], FAINT, 0.8)
    for place, text in enumerate(_lines(group.classes, grouped.names)):
        sheet.text(text, left, top + TITLE_H + 5 + place * LINE_H, px=LETTERS_PX, colour=INK)


def _lines(classes: Sequence[int], names: Sequence[str]) -> list[str]:
    shown = [f"{number:>2}  {shortened(names[number], MOST_LETTERS)}" for number in classes[:MOST_NAMES]]
    return shown + ([f"and {len(classes) - MOST_NAMES} more"] if len(classes) > MOST_NAMES else [])


def _fitted(sheet: Sheet, text: str, width: float) -> str:
    """As many letters as there is room for."""
    most = len(text)
    while most > 4 and sheet.text_width(shortened(text, most), SMALL_PX) > width:
        most -= 1
    return shortened(text, most)
