"""CVAT for images 1.1: one XML file with boxes, polygons, ellipses and masks of all images, in pixels.

Rotated boxes and ellipses are replaced by the upright box around them, and reported.
"""

import os
from collections.abc import Iterator, Sequence
from xml.parsers import expat
from xml.sax.saxutils import escape, quoteattr

from flatout.errors import DataError
from flatout.yolo.data.formats.annotated import (
    AnnotatedImage,
    AnnotationFile,
    ImageToWrite,
    Objects,
    ellipse_half,
    numbers,
    opened,
    px,
    rotated_corners,
)

SHAPES = ("box", "polygon", "ellipse", "mask", "polyline", "points", "skeleton", "cuboid")
READ = SHAPES[:4]


def read_cvat(path: str) -> AnnotationFile:
    """Read a file of the format "CVAT for images 1.1"."""
    return _Reader(path).read()


class _Reader:
    """Collects images, shapes and class names from the elements of a file of any size, piece by piece."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._images: list[AnnotatedImage] = []
        self._names: dict[str, None] = {}
        """Class names in the order in which the file declares them."""
        self._open: list[str] = []
        """Tags of the elements that contain the current place."""
        self._text = ""
        self._parser = expat.ParserCreate()
        self._parser.buffer_text = True
        self._parser.StartDoctypeDeclHandler = self._parser.EntityDeclHandler = self._refuse
        self._parser.StartElementHandler, self._parser.EndElementHandler = self._begin, self._end
        self._parser.CharacterDataHandler = self._add_text

    def read(self) -> AnnotationFile:
        try:
            with opened(self._path) as file:
                self._parser.ParseFile(file)
        except DataError:
            raise
        except (expat.ExpatError, LookupError, ValueError) as error:
            reason = str(error).partition(":")[0]
            raise DataError(f"{self._path}:{self._line}: not valid XML: {reason}. Export it again.") from None
        return AnnotationFile(self._images, tuple(self._names))

    @property
    def _line(self) -> int:
        return self._parser.CurrentLineNumber

    def _refuse(self, *_: object) -> None:
        # Nested entities can expand to gigabytes, and annotations never need them.
        raise DataError(
            f"{self._path}:{self._line}: XML with a document type declaration (<!DOCTYPE, <!ENTITY) is not read, "
            "because entities can expand without limit. Delete it, or export without it."
        )

    def _begin(self, tag: str, attributes: dict[str, str]) -> None:
        parent = self._open[-1] if self._open else ""
        if not parent and tag != "annotations":
            hint = " It looks like Pascal VOC: give its folder." if tag == "annotation" else ""
            raise DataError(f"{self._path}: not a file of CVAT, which begins with <annotations>.{hint}")
        if tag == "track":
            raise DataError(
                f"{self._path}:{self._line}: this file is in the format CVAT for video. Export the task as "
                '"CVAT for images 1.1".'
            )
        if tag == "image" and parent == "annotations":
            self._add_image(attributes)
        elif tag in SHAPES and parent == "image":
            self._add_shape(tag, attributes)
        self._open.append(tag)
        self._text = ""

    def _end(self, tag: str) -> None:
        self._open.pop()
        if self._open[-2:] == ["labels", "label"] and tag == "name":
            self._names[self._text.strip()] = None

    def _add_text(self, text: str) -> None:
        self._text += text

    def _add_image(self, attributes: dict[str, str]) -> None:
        try:
            name = attributes["name"]
            width, height = numbers(attributes[side] for side in ("width", "height"))
            if width <= 0 or height <= 0:
                raise ValueError
        except (KeyError, ValueError):
            raise DataError(
                f"{self._path}:{self._line}: an image without name, width and height. Export the file again."
            ) from None
        # Images of a project with subsets are in folders of that name.
        in_subset = os.path.join(attributes.get("subset", ""), name)
        if in_subset != name and os.path.lexists(os.path.join(os.path.dirname(self._path), "images", in_subset)):
            name = in_subset
        self._images.append(AnnotatedImage(name, Objects(), (width, height)))

    def _add_shape(self, tag: str, attributes: dict[str, str]) -> None:
        objects = self._images[-1].objects
        place = f"object {len(objects.names) + 1}"
        if tag not in READ:
            objects.report("label-shape", f"{place}: a {tag} is not read", line=self._line)
            return
        try:
            degrees = numbers([attributes.get("rotation", "0")])[0]
            if degrees:
                text = f"{place}: rotated; the upright box around it is used"
                objects.report("label-rotated", text, line=self._line)
            _add(objects, tag, attributes, degrees, self._line)
        except (KeyError, ValueError):
            text = f"{place}: a {tag} without a label, or without numbers for its place"
            objects.report("label-columns", text, line=self._line)


def _add(objects: Objects, tag: str, at: dict[str, str], degrees: float, line: int) -> None:
    """Add one shape; KeyError or ValueError if it is incomplete."""
    name = at["label"]
    if tag == "polygon":
        points = [numbers(point.split(",")) for point in at["points"].split(";")]
        if any(len(point) != 2 for point in points):
            raise ValueError
        objects.add_polygon(name, points, line=line)
        return
    if tag == "box":
        x1, y1, x2, y2 = numbers(at[key] for key in ("xtl", "ytl", "xbr", "ybr"))
    elif tag == "ellipse":
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
