"""Pascal VOC: one XML file per image, with boxes in whole pixels that count from 1 and include both corners."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from xml.sax.saxutils import escape

from flatout.yolo.data.formats.annotated import (
    AnnotatedImage,
    ClassNumbers,
    ImageToWrite,
    Objects,
    numbers,
    to_labels,
)
from flatout.yolo.data.label_text import NO_BOXES, ImageLabels, Problem

IMAGES, LABELS, LISTS = "JPEGImages", "Annotations", "ImageSets/Main"
MAX_XML_BYTES = 4 << 20


def parse_voc(content: bytes, names: tuple[str, ...], size_wh: tuple[int, int]) -> ImageLabels:
    """Parse the boxes of a file. `size_wh` is the size of the image itself, because the one in the file is often wrong.

    Objects marked difficult are skipped, as in VOC's own evaluation.
    """
    try:
        root = _parse_xml(content)
    except ValueError as error:
        return ImageLabels(NO_BOXES, [], [Problem("label-encoding", 0, str(error))], num_dropped=1)
    objects = Objects()
    for place, item in enumerate(root.iter("object"), 1):
        if (item.findtext("difficult") or "0").strip() == "1":
            continue
        try:
            corners = numbers(item.findtext(f"bndbox/{key}") or "" for key in ("xmin", "ymin", "xmax", "ymax"))
        except ValueError:
            objects.report("label-columns", f"object {place}: no bndbox with numbers xmin, ymin, xmax, ymax")
        else:
            objects.add(_name(item), (corners[0] - 1, corners[1] - 1, *corners[2:]))
    return to_labels(AnnotatedImage("", objects), ClassNumbers(names), size_wh)


def voc_names(content: bytes) -> set[str]:
    """Class names of the objects in a file; an empty set if it cannot be parsed."""
    try:
        return {name for item in _parse_xml(content).iter("object") if (name := _name(item))}
    except ValueError:
        return set()


def _name(item: ElementTree.Element) -> str:
    return (item.findtext("name") or "").strip()


def _parse_xml(content: bytes) -> ElementTree.Element:
    # Nested entities can expand to gigabytes, and annotations never need them.
    if len(content) > MAX_XML_BYTES or b"<!DOCTYPE" in content or b"<!ENTITY" in content:
        raise ValueError(f"XML with a document type declaration, or larger than {MAX_XML_BYTES >> 20} MiB")
    try:
        return ElementTree.fromstring(content)
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise ValueError(f"not valid XML: {error}") from None


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
