"""CVAT for images 1.1: one XML file with boxes, polygons, ellipses and masks of all images, in pixels.

Rotated boxes and ellipses are replaced by the upright box around them, and reported.
"""

import os
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape, quoteattr

from flatout.errors import DataError
from flatout.yolo.data.formats.annotated import (
    AnnotatedImage,
    AnnotationFile,
    ImageToWrite,
    Objects,
    XmlEvent,
    ellipse_half,
    numbers,
    parse_xml,
    px,
    rotated_corners,
)

SHAPES = ("box", "polygon", "ellipse", "mask", "polyline", "points", "skeleton", "cuboid")
READ = SHAPES[:4]


def read_cvat(path: str) -> AnnotationFile:
    """Read a file of the format "CVAT for images 1.1"."""
    reader = _Reader(path)
    parse_xml(path, reader.handle)
    return AnnotationFile(reader.images, tuple(dict.fromkeys(reader.names)))


class _Reader:
    """Collects images, shapes and class names from the elements of the file."""

    def __init__(self, path: str) -> None:
        self.images: list[AnnotatedImage] = []
        self.names: list[str] = []
        """Class names in the order in which the file declares them."""
        self._path = path
        self._folder = os.path.dirname(path)
        self._open: list[str] = []
        """Tags of the elements that contain the current place."""
        self._text = ""

    def handle(self, event: XmlEvent) -> None:
        if event.kind == "text":
            self._text += event.value
        elif event.kind == "end":
            self._open.pop()
            if self._open[-2:] == ["labels", "label"] and event.value == "name":
                self.names.append(self._text.strip())
        else:
            self._begin(event)
            self._open.append(event.value)
            self._text = ""

    def _begin(self, event: XmlEvent) -> None:
        parent = self._open[-1] if self._open else ""
        if not parent and event.value != "annotations":
            hint = " It looks like Pascal VOC: give its folder." if event.value == "annotation" else ""
            raise DataError(f"{self._path}: not a file of CVAT, which begins with <annotations>.{hint}")
        if event.value == "track":
            raise DataError(
                f"{self._path}:{event.line}: this file is in the format CVAT for video. Export the task as "
                '"CVAT for images 1.1".'
            )
        if event.value == "image" and parent == "annotations":
            self._add_image(event)
        elif event.value in SHAPES and parent == "image":
            self._add_shape(event)

    def _add_image(self, event: XmlEvent) -> None:
        try:
            name = event.attributes["name"]
            width, height = numbers(event.attributes[side] for side in ("width", "height"))
            if width <= 0 or height <= 0:
                raise ValueError
        except (KeyError, ValueError):
            raise DataError(
                f"{self._path}:{event.line}: an image without name, width and height. Export the file again."
            ) from None
        # Images of a project with subsets are in folders of that name.
        in_subset = os.path.join(event.attributes.get("subset", ""), name)
        if in_subset != name and os.path.lexists(os.path.join(self._folder, "images", in_subset)):
            name = in_subset
        self.images.append(AnnotatedImage(name, Objects(), (width, height)))

    def _add_shape(self, event: XmlEvent) -> None:
        objects = self.images[-1].objects
        place = f"object {len(objects.names) + 1}"
        if event.value not in READ:
            objects.report("label-shape", f"{place}: a {event.value} is not read", line=event.line)
            return
        try:
            if _rotation(event):
                text = f"{place}: rotated; the upright box around it is used"
                objects.report("label-rotated", text, line=event.line)
            _add(objects, event)
        except (KeyError, ValueError):
            text = f"{place}: a {event.value} without a label, or without numbers for its place"
            objects.report("label-columns", text, line=event.line)


def _rotation(event: XmlEvent) -> float:
    """The rotation of a shape in degrees; ValueError if it is not a number."""
    return numbers([event.attributes.get("rotation", "0")])[0]


def _add(objects: Objects, event: XmlEvent) -> None:
    """Add one shape; KeyError or ValueError if it is incomplete."""
    at, line = event.attributes, event.line
    name, degrees = at["label"], _rotation(event)
    if event.value == "polygon":
        points = [numbers(point.split(",")) for point in at["points"].split(";")]
        if any(len(point) != 2 for point in points):
            raise ValueError
        objects.add_polygon(name, points, line=line)
        return
    if event.value == "box":
        x1, y1, x2, y2 = numbers(at[key] for key in ("xtl", "ytl", "xbr", "ybr"))
    elif event.value == "ellipse":
        x, y, radius_x, radius_y = numbers(at[key] for key in ("cx", "cy", "rx", "ry"))
        half_x, half_y = ellipse_half((radius_x, radius_y), degrees)
        objects.add(name, (x - half_x, y - half_y, x + half_x, y + half_y), line=line)
        return
    else:
        x1, y1, width, height = numbers(at[key] for key in ("left", "top", "width", "height"))
        x2, y2 = x1 + width, y1 + height
    if degrees:
        corners = rotated_corners(((x1 + x2) / 2, (y1 + y2) / 2), ((x2 - x1) / 2, (y2 - y1) / 2), degrees)
        objects.add_polygon(name, corners, line=line)
    else:
        objects.add(name, (x1, y1, x2, y2), line=line)


def write_cvat(images: Sequence[ImageToWrite], names: Sequence[str]) -> Iterator[str]:
    """The file of a split, piece by piece."""
    labels = "".join(f"<label><name>{escape(name)}</name></label>" for name in names)
    yield '<?xml version="1.0" encoding="utf-8"?>\n<annotations>\n  <version>1.1</version>\n'
    yield f"  <meta><task><size>{len(images)}</size><labels>{labels}</labels></task></meta>\n"
    for place, image in enumerate(images):
        size = f'width="{image.size_wh[0]}" height="{image.size_wh[1]}"'
        yield f'  <image id="{place}" name={quoteattr(image.name)} {size}>\n'
        for row, (number, corners) in enumerate(zip(image.class_n, image.corners_px().tolist(), strict=True)):
            common = f'label={quoteattr(names[number])} source="manual" occluded="0"'
            if points := image.points_px(row):
                listed = ";".join(f"{x},{y}" for x, y in points)
                yield f'    <polygon {common} points="{listed}" z_order="0"/>\n'
            else:
                x1, y1, x2, y2 = map(px, corners)
                yield f'    <box {common} xtl="{x1}" ytl="{y1}" xbr="{x2}" ybr="{y2}" z_order="0"/>\n'
        yield "  </image>\n"
    yield "</annotations>\n"
