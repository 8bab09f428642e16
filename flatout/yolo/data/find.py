"""Find the image files of a split and the label file of each."""

import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

from flatout.errors import DataError

SUFFIXES = frozenset({"bmp", "jpg", "jpeg", "png", "tif", "tiff", "dng", "webp", "mpo"})
MAX_LIST_BYTES = 1 << 30
VOC_IMAGES, VOC_LABELS, VOC_LISTS = "JPEGImages", "Annotations", "ImageSets"
"""Folders of a Pascal VOC data set."""


class Pair(NamedTuple):
    """The paths of an image and of its label file."""

    image: str
    label: str

    @property
    def label_place(self) -> str:
        """Path to report for the labels: the image itself where one .json file has the labels of all images."""
        return self.image if self.label.endswith(".json") else self.label


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
    """Each image with its label file, which is the one of `label_path`, or an .xml in the folders of Pascal VOC."""
    is_voc = cache(lambda folder: os.path.basename(folder) == VOC_IMAGES and os.path.isdir(_voc_labels(folder)))
    return [_voc_pair(image) if is_voc(os.path.dirname(image)) else Pair(image, label_path(image)) for image in images]


def is_image_name(path: str) -> bool:
    """Whether a path has the ending of an image, in upper or lower case; the file is not opened."""
    return path.rpartition(".")[2].lower() in SUFFIXES


def resize_hint(path: str) -> str:
    """A sentence with the command that makes a missing copy of COCO, for a path such as ./coco320/images/train2017.

    Starts with a space; "" for other paths.
    """
    found = re.match(r"(.*/|)(coco[-_]?([2-9]\d{2}|1[0-5]\d{2}))(?=[/.]|$)", path)
    if found is None:
        return ""
    return f" Make it from COCO with: flatout yolo resize coco.yaml --size {found[3]} --out {found[1]}{found[2]}"


def _search(folder: str, found: FoundImages) -> None:
    seen: set[tuple[int, int]] = set()
    for directory in _walk(folder, seen):
        for name in directory.names:
            path = os.path.join(directory.path, name)
            if not is_image_name(name):
                found.other.append(path)
            elif name.startswith("."):
                found.hidden.append(path)
            else:
                found.paths.append(path)


class _Directory(NamedTuple):
    path: str
    names: list[str]


def _walk(folder: str, seen: set[tuple[int, int]]) -> Iterator[_Directory]:
    """Visit every directory once, even if symbolic links form a cycle; hidden ones are skipped."""
    waiting = [folder]
    while waiting:
        path = waiting.pop()
        try:
            status = os.stat(path)
            entries = list(os.scandir(path))
        except OSError as error:
            raise DataError(f"{path}: the folder cannot be read: {error.strerror}. Check its permissions.") from None
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        names = []
        for entry in entries:
            if _is_folder(entry):
                if not entry.name.startswith("."):
                    waiting.append(entry.path)
            else:
                names.append(entry.name)
        yield _Directory(path, names)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself; the scan will report it
        return False


def _voc_images(folder: str) -> str:
    """The image folder of a Pascal VOC data set; "" if the folder is not one."""
    images = os.path.join(folder, VOC_IMAGES)
    return images if os.path.isdir(images) and os.path.isdir(os.path.join(folder, VOC_LABELS)) else ""


def _voc_labels(images: str) -> str:
    return os.path.join(os.path.dirname(images), VOC_LABELS)


def _voc_pair(image: str) -> Pair:
    folder, name = os.path.split(image)
    return Pair(image, os.path.join(_voc_labels(folder), f"{name.rsplit('.', 1)[0]}.xml"))


def _voc_listed(path: str) -> list[str]:
    """The images of a list such as ImageSets/Main/train.txt, which gives names without folder and ending."""
    root = os.path.abspath(path).rpartition(os.sep + VOC_LISTS + os.sep)[0]
    stems = [line.split()[0] for line in read_list(path) if line.split()]
    return [os.path.join(root, VOC_IMAGES, f"{stem}.jpg") for stem in stems]
