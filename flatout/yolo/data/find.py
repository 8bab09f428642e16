"""Which files are the pictures of a split, and where are their labels?"""

import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

from flatout.errors import DataError

SUFFIXES = frozenset({"bmp", "jpg", "jpeg", "png", "tif", "tiff", "dng", "webp", "mpo"})
MOST_LIST_BYTES = 1 << 30
VOC_IMAGES, VOC_LABELS, VOC_LISTS = "JPEGImages", "Annotations", "ImageSets"
"""Folders of a Pascal VOC data set."""


class Pair(NamedTuple):
    """A picture and where its labels are."""

    image: str
    label: str

    @property
    def label_place(self) -> str:
        """What to name in a text about the labels: a file for all pictures would say too little."""
        return self.image if self.label.endswith(".json") else self.label


class Found(NamedTuple):
    """The pictures of a split, sorted as text, and what was passed over on the way."""

    paths: list[str]
    absent: list[str]
    """Entries that do not exist."""
    empty: list[str]
    """Entries without a single picture."""
    hidden: list[str]
    """Files with the ending of a picture whose name begins with a dot."""
    other: list[str]
    """Files in picture folders that are something else."""


def find_images(entries: Iterable[str]) -> Found:
    """Pictures of folders (searched with everything below them), .txt lists and single files.

    Sorted as text over the whole path: 10.png comes before 2.png. A picture that is named twice is there twice.
    """
    found = Found([], [], [], [], [])
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
    """The lines of a list file; a leading "./" means the folder of the list.

    Only the leading one: YOLOv7 replaces every "./" of such a line, which damages "./a/../b".
    """
    if os.path.getsize(path) > MOST_LIST_BYTES:
        raise DataError(f"{path}: a list of pictures larger than {MOST_LIST_BYTES >> 20} MiB. Is this the right file?")
    folder = os.path.dirname(path)
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape", newline=None) as file:
            lines = file.read().strip().splitlines()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}. Check its permissions.") from None
    return [os.path.join(folder, line[2:]) if line.startswith("./") else line for line in lines]


def label_path(image: str) -> str:
    """Where the labels of a picture are: the first /images/ becomes /labels/, the ending becomes .txt.

    Without a folder `images` in its path the labels lie beside the picture.
    """
    moved = image.replace("/images/", "/labels/", 1)
    return f"{moved.rsplit('.', 1)[0]}.txt"


def pair_up(images: Iterable[str]) -> list[Pair]:
    """Each picture with its label file: by `label_path`, or by Pascal VOC's folders where there are such."""
    is_voc = cache(lambda folder: os.path.basename(folder) == VOC_IMAGES and os.path.isdir(_voc_labels(folder)))
    return [_voc_pair(image) if is_voc(os.path.dirname(image)) else Pair(image, label_path(image)) for image in images]


def is_image_name(path: str) -> bool:
    """By the ending, in any case. What the file really is shows only when it is opened."""
    return path.rpartition(".")[2].lower() in SUFFIXES


def how_to_resize(path: str) -> str:
    """The command that makes a missing copy of COCO, such as ./coco320/images/train2017; "" for other paths."""
    found = re.match(r"(.*/|)(coco[-_]?([2-9]\d{2}|1[0-5]\d{2}))(?=[/.]|$)", path)
    if found is None:
        return ""
    return f" Make it from COCO with: flatout yolo resize coco.yaml --size {found[3]} --out {found[1]}{found[2]}"


def _search(folder: str, found: Found) -> None:
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
    """Every directory once, also if symbolic links lead in circles; hidden ones are left out."""
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
    except OSError:  # a link that leads to itself: the scan says what is wrong with it
        return False


def _voc_images(folder: str) -> str:
    """The folder of pictures of a Pascal VOC data set; "" if it is none."""
    images = os.path.join(folder, VOC_IMAGES)
    return images if os.path.isdir(images) and os.path.isdir(os.path.join(folder, VOC_LABELS)) else ""


def _voc_labels(images: str) -> str:
    return os.path.join(os.path.dirname(images), VOC_LABELS)


def _voc_pair(image: str) -> Pair:
    folder, name = os.path.split(image)
    return Pair(image, os.path.join(_voc_labels(folder), f"{name.rsplit('.', 1)[0]}.xml"))


def _voc_listed(path: str) -> list[str]:
    """Pictures of ImageSets/Main/train.txt, which names them without folder and ending."""
    root = os.path.abspath(path).rpartition(os.sep + VOC_LISTS + os.sep)[0]
    stems = [line.split()[0] for line in read_list(path) if line.split()]
    return [os.path.join(root, VOC_IMAGES, f"{stem}.jpg") for stem in stems]
