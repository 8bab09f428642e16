"""Pascal VOC: one XML file of boxes per picture, classes by name."""

import xml.etree.ElementTree as ElementTree

import numpy as np

from flatout.yolo.data.label_text import MOST_LABELS, MOST_PROBLEMS, NO_BOXES, PictureLabels, Problem, too_many

MOST_BYTES = 4 << 20


def read_voc(content: bytes, names: tuple[str, ...], size_wh: tuple[int, int]) -> PictureLabels:
    """Boxes of an annotation file. VOC's pixels count from 1 and both corners belong to the box.

    `size_wh` is the picture's own size, because the one in the file is often wrong. Objects marked difficult are
    left out, as VOC's own evaluation does.
    """
    try:
        root = _parse(content)
    except ValueError as error:
        return PictureLabels(NO_BOXES, [], [Problem("label-encoding", 0, str(error))], num_dropped=1)
    objects = list(root.iter("object"))
    if len(objects) > MOST_LABELS:
        return too_many()
    rows, problems = [], []
    numbers = {name: number for number, name in enumerate(names)}
    for place, item in enumerate(objects, 1):
        if (item.findtext("difficult") or "0").strip() == "1":
            continue
        row = _row(item, numbers, size_wh)
        if isinstance(row, str):
            check = "class-beyond-names" if "name" in row else "label-zero-area" if "area" in row else "label-columns"
            problems.append(Problem(check, 0, f"object {place}: {row}"))
        else:
            rows.append(row)
    boxes = np.array(rows, np.float32) if rows else NO_BOXES
    return PictureLabels(boxes, [], problems[:MOST_PROBLEMS], len(problems))


def names_in(content: bytes) -> set[str]:
    """Names of the objects in an annotation file; none if it cannot be read."""
    try:
        return {name for item in _parse(content).iter("object") if (name := (item.findtext("name") or "").strip())}
    except ValueError:
        return set()


def _parse(content: bytes) -> ElementTree.Element:
    # Entities are the way XML explodes; annotations have no use for them.
    if len(content) > MOST_BYTES or b"<!DOCTYPE" in content or b"<!ENTITY" in content:
        raise ValueError(f"XML with a document type, or larger than {MOST_BYTES >> 20} MiB")
    try:
        return ElementTree.fromstring(content)
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise ValueError(f"not valid XML: {error}") from None


def _row(item: ElementTree.Element, numbers: dict[str, int], size_wh: tuple[int, int]) -> list[float] | str:
    """Class, centre and size divided by the picture's; or what is wrong."""
    name = (item.findtext("name") or "").strip()
    if name not in numbers:
        return f"the name {name[:40]!r} is not among the names of the data set"
    try:
        corners = [float(item.findtext(f"bndbox/{key}") or "") for key in ("xmin", "ymin", "xmax", "ymax")]
    except ValueError:
        return "no bndbox with xmin, ymin, xmax, ymax"
    if not np.isfinite(corners).all():
        return "a corner is nan or inf"
    x1, y1, x2, y2 = corners
    width, height = size_wh
    left, right = np.clip((x1 - 1, x2), 0, width) / width
    top, bottom = np.clip((y1 - 1, y2), 0, height) / height
    if right <= left or bottom <= top:
        return f"a box without area inside the picture: {x1:g} {y1:g} {x2:g} {y2:g}"
    return [numbers[name], (left + right) / 2, (top + bottom) / 2, right - left, bottom - top]
