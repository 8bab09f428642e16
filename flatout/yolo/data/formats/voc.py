"""Pascal VOC: one XML file per image, with boxes in whole pixels that count from 1 and include both corners.

How a file is parsed is in `label_text.parse_voc`.
"""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from flatout.yolo.data.formats.annotated import ImageToWrite

IMAGES, LABELS, LISTS = "JPEGImages", "Annotations", "ImageSets/Main"


def write_voc(image: ImageToWrite, names: Sequence[str]) -> bytes:
    """The file of one image; coordinates are rounded to whole pixels, and a box has at least one."""
    width, height = image.size_wh
    lines = [
        "<annotation>",
        f"  <folder>{IMAGES}</folder>",
        f"  <filename>{escape(image.name)}</filename>",
        f"  <size><width>{width}</width><height>{height}</height><depth>3</depth></size>",
        "  <segmented>0</segmented>",
    ]
    for number, corners in zip(image.class_n, image.corners_px().tolist(), strict=True):
        x1, y1, x2, y2 = map(round, corners)
        x1, y1 = min(x1, width - 1), min(y1, height - 1)
        box = {"xmin": x1 + 1, "ymin": y1 + 1, "xmax": max(x2, x1 + 1), "ymax": max(y2, y1 + 1)}
        placed = "".join(f"<{key}>{value}</{key}>" for key, value in box.items())
        lines += [
            "  <object>",
            f"    <name>{escape(names[number])}</name>",
            "    <pose>Unspecified</pose><truncated>0</truncated><difficult>0</difficult>",
            f"    <bndbox>{placed}</bndbox>",
            "  </object>",
        ]
    return "\n".join([*lines, "</annotation>", ""]).encode(errors="surrogateescape")
