"""Find the image files of a split and the label file of each."""

import os
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple, NoReturn

from flatout.errors import DataError
from flatout.yolo.data.formats.sidecars import LabelFolder, find_sidecars

SUFFIXES = frozenset({"bmp", "jpg", "jpeg", "png", "tif", "tiff", "dng", "webp", "mpo"})
MAX_LIST_BYTES = 1 << 30
VOC_IMAGES, VOC_LABELS, VOC_LISTS = "JPEGImages", "Annotations", "ImageSets"
"""Folders of a Pascal VOC data set."""


class Pair(NamedTuple):
    """The paths of an image and of its label file."""

    image: str
    label: str

    @property
    def has_own_label_file(self) -> bool:
        """Whether the label file is of this image alone, which its name tells."""
        names = (os.path.splitext(os.path.basename(path))[0] for path in self)
        return len(set(names)) == 1

    @property
    def label_place(self) -> str:
        """Path to report for the labels: the image itself where one file has the labels of all images."""
        return self.label if self.has_own_label_file else self.image


class FoundImages(NamedTuple):
    """The images of a split, and what was skipped during the search."""

    paths: list[str]
    """Image paths, sorted as text."""
    absent: list[str]
    """Entries that do not exist."""
    empty: list[str]
    """Entries without a single image."""
    hidden: list[str]
    """Files with the ending of an image whose name starts with a dot."""
    other: list[str]
    """Other files in image folders."""


def find_images(entries: Iterable[str]) -> FoundImages:
    """Find the images in folders (including subfolders), in .txt lists, and given as single files.

    They are sorted as text by their whole path: 10.png comes before 2.png. An image that is listed twice appears twice.
    """
    found = FoundImages([], [], [], [], [])
    for entry in entries:
        count = len(found.paths)
        if os.path.isdir(entry):
            _search(_voc_images(entry) or entry, found)
        elif not os.path.isfile(entry):
            found.absent.append(entry)
            continue
        elif is_image_name(entry):
            found.paths.append(entry)
        elif os.sep + VOC_LISTS + os.sep in os.path.abspath(entry):
            found.paths.extend(_voc_listed(entry))
        else:
            found.paths.extend(line for line in read_list(entry) if is_image_name(line))
        if len(found.paths) == count:
            found.empty.append(entry)
    found.paths.sort()
    return found


def read_list(path: str) -> list[str]:
    """The paths in a list file; a leading "./" stands for the folder of the list.

    Only the leading one is replaced. YOLOv7 replaces every "./" in such a line, which breaks "./a/../b".
    """
    if os.path.getsize(path) > MAX_LIST_BYTES:
        raise DataError(f"{path}: this image list is larger than {MAX_LIST_BYTES >> 20} MiB. Is it the right file?")
    folder = os.path.dirname(path)
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape", newline=None) as file:
            lines = file.read().strip().splitlines()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}. Check its permissions.") from None
    return [os.path.join(folder, line[2:]) if line.startswith("./") else line for line in lines]


def label_path(image: str) -> str:
    """The label file of an image: the first /images/ in its path becomes /labels/, and the ending .txt.

    Without a folder `images` in the path, the label file is beside the image.
    """
    moved = image.replace("/images/", "/labels/", 1)
    return f"{moved.rsplit('.', 1)[0]}.txt"


def pair_up(images: Iterable[str]) -> list[Pair]:
    """Each image with its label file: the one of `label_path`, or else an .xml of Pascal VOC or a .json of labelme."""
    by_folder: dict[str, list[str]] = {}
    listed = list(images)
    for image in listed:
        by_folder.setdefault(os.path.dirname(image), []).append(image)
    rules = {folder: _label_rule(folder, own) for folder, own in by_folder.items()}
    return [Pair(image, rules[os.path.dirname(image)](image)) for image in listed]


def _label_rule(folder: str, images: list[str]) -> Callable[[str], str]:
    """Which label file an image of this folder has."""
    if os.path.basename(folder) == VOC_IMAGES and os.path.isdir(_voc_labels(folder)):
        return LabelFolder(_voc_labels(folder), ".xml").label_of
    found = find_sidecars(folder, [os.path.splitext(os.path.basename(image))[0] for image in images])
    # One YOLO file is enough: other files of the same name may be anything.
    if found is None or any(os.path.exists(label_path(image)) for image in images):
        return label_path
    return found.label_of


def is_image_name(path: str) -> bool:
    """Whether a path has the ending of an image, in upper or lower case; the file is not opened."""
    return path.rpartition(".")[2].lower() in SUFFIXES


def _search(folder: str, found: FoundImages) -> None:
    """Add the files of a folder and its subfolders, once even if symbolic links form a cycle; no hidden folders."""

    def refuse(error: OSError) -> NoReturn:
        raise DataError(
            f"{error.filename}: the folder cannot be read: {error.strerror}. Check its permissions."
        ) from None

    seen = set()
    for directory, subfolders, names in os.walk(folder, onerror=refuse, followlinks=True):
        try:
            status = os.stat(directory)
        except OSError as error:  # its name could be read, but the folder above it may not be entered
            refuse(error)
        if (status.st_dev, status.st_ino) in seen:
            subfolders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        # Of two ways to the same folder, the one that is taken first names its images: runs continue with these names.
        subfolders[:] = [name for name in reversed(subfolders) if not name.startswith(".")]
        for name in names:
            path = os.path.join(directory, name)
            if not is_image_name(name):
                found.other.append(path)
            elif name.startswith("."):
                found.hidden.append(path)
            else:
                found.paths.append(path)


def _voc_images(folder: str) -> str:
    """The image folder of a Pascal VOC data set; "" if the folder is not one."""
    images = os.path.join(folder, VOC_IMAGES)
    return images if os.path.isdir(images) and os.path.isdir(os.path.join(folder, VOC_LABELS)) else ""


def _voc_labels(images: str) -> str:
    return os.path.join(os.path.dirname(images), VOC_LABELS)


def _voc_listed(path: str) -> list[str]:
    """The images of a list such as ImageSets/Main/train.txt, which gives names without folder and ending.

    Lists of one class have a number, -1, 0 or 1, after each name; a name may end in such a number, too: "scan 1".
    """
    root = os.path.abspath(path).rpartition(os.sep + VOC_LISTS + os.sep)[0]
    folder = os.path.join(root, VOC_IMAGES)
    names = os.listdir(folder) if os.path.isdir(folder) else []
    present = {os.path.splitext(name)[0]: name for name in sorted(names, reverse=True) if is_image_name(name)}
    lines = [line.strip() for line in read_list(path) if line.strip()]
    stems = [line if line in present else re.sub(r"\s+(-1|0|1)$", "", line) for line in lines]
    return [os.path.join(folder, present.get(stem, f"{stem}.jpg")) for stem in stems]
