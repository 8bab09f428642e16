"""Formats with one label file per image that contains class names: which there are, and where their files are.

YOLO text is not among them: it is what an image has unless something else is found.
"""

import os
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

from flatout.yolo.data.formats.labelme import MAX_BYTES as MAX_LABELME_BYTES
from flatout.yolo.data.formats.labelme import labelme_names, parse_labelme
from flatout.yolo.data.formats.voc import parse_voc, voc_names
from flatout.yolo.data.label_text import MAX_BYTES, ImageLabels

HEAD_BYTES = 1 << 16


class Sidecar(NamedTuple):
    """How the label files of a format are recognized and parsed."""

    title: str
    is_one: Callable[[bytes], bool]
    """Whether a file is of this format, judged by its first bytes."""
    parse: Callable[[bytes, tuple[str, ...], tuple[int, int]], ImageLabels]
    """Labels from the content of a file, the class names, and the size of the image."""
    names_in: Callable[[bytes], Set[str]]
    max_bytes: int


SIDECARS: dict[str, Sidecar] = {
    ".xml": Sidecar("Pascal VOC", lambda head: b"<annotation>" in head, parse_voc, voc_names, MAX_BYTES),
    ".json": Sidecar("labelme", lambda head: b'"shapes"' in head, parse_labelme, labelme_names, MAX_LABELME_BYTES),
}
"""Ending of the label file -> its format."""


class LabelFolder(NamedTuple):
    """Where the label files of the images of a folder are."""

    folder: str
    ending: str

    def label_of(self, image: str) -> str:
        """The label file of an image; it need not exist."""
        stem = os.path.splitext(os.path.basename(image))[0]
        return os.path.join(self.folder, f"{stem}{self.ending}")


def find_sidecars(images_folder: str, stems: Sequence[str]) -> LabelFolder | None:
    """The label files for images with these names (without ending): beside them, or in `annotations` or `labels` beside
    their folder. None if there are none of a known format."""
    above = os.path.dirname(os.path.abspath(images_folder))
    beside = [os.path.join(above, name) for name in ("annotations", "Annotations", "labels")]
    for folder in (images_folder, *beside):
        try:
            names = set(os.listdir(folder or "."))
        except OSError:
            continue
        for ending, sidecar in SIDECARS.items():
            if not any(name.endswith(ending) for name in names):  # the usual case, found faster than image by image
                continue
            first = next((stem for stem in stems if f"{stem}{ending}" in names), None)
            if first is not None and sidecar.is_one(read_head(os.path.join(folder, f"{first}{ending}"))):
                return LabelFolder(folder, ending)
    return None


def read_head(path: str) -> bytes:
    """The first bytes of a file; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return b""
