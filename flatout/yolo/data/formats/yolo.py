"""YOLO text: one file per image, `class cx cy w h` or the points of a polygon, relative to the image.

How a file is parsed is in `label_text.parse_labels`.
"""

from collections.abc import Sequence

from flatout.yolo.data.formats.annotated import ImageToWrite


def write_yolo(image: ImageToWrite, names: Sequence[str]) -> bytes:
    """The file of one image; `names` are in the data YAML instead."""
    lines = []
    for place, (number, (x1, y1, x2, y2)) in enumerate(zip(image.class_n, image.box_n4.tolist(), strict=True)):
        points_P2 = image.polygons[place] if image.polygons else ()
        values = (
            [value for point in points_P2 for value in point.tolist()]
            if len(points_P2)
            else ((x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1)
        )
        # Nine digits are what float32 needs to stay the same number.
        lines.append(" ".join([str(number), *(f"{value:.9g}" for value in values)]))
    return "".join(f"{line}\n" for line in lines).encode()
