"""The label formats: how files are recognised, read and written. A new format is a file here and a line below.

    entry of the data YAML --annotation_files--> files with the labels of many images --open_listed--> ListedImages
                           --otherwise--> images, each with its own label file (`find.pair_up`, `sidecars`)

Dimension key:  N images
"""

import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flatout.errors import ConfigError, DataError
from flatout.yolo.data.find import SUFFIXES, is_image_name, label_path
from flatout.yolo.data.formats.annotated import (
    AnnotatedImage,
    AnnotationFile,
    ClassNumbers,
    ImageToWrite,
    Objects,
    find_listed,
    to_labels,
)
from flatout.yolo.data.formats.coco import read_coco, write_coco
from flatout.yolo.data.formats.createml import read_createml, write_createml
from flatout.yolo.data.formats.csv_tables import (
    DESCRIPTIONS,
    read_open_images,
    read_retinanet,
    read_tensorflow,
    write_descriptions,
    write_open_images,
)
from flatout.yolo.data.formats.cvat import read_cvat, write_cvat
from flatout.yolo.data.formats.huggingface import read_metadata, read_parquet, write_metadata
from flatout.yolo.data.formats.labelme import write_labelme
from flatout.yolo.data.formats.sidecars import read_head
from flatout.yolo.data.formats.voc import IMAGES as VOC_IMAGES
from flatout.yolo.data.formats.voc import LABELS as VOC_LABELS
from flatout.yolo.data.formats.voc import LISTS as VOC_LISTS
from flatout.yolo.data.formats.voc import write_voc
from flatout.yolo.data.formats.yolo import write_yolo
from flatout.yolo.data.label_text import ImageLabels

# Files with the labels of many images


@dataclass(frozen=True)
class SetFormat:
    """A format with one annotation file for many images."""

    title: str
    endings: tuple[str, ...]
    """Endings of its files."""
    is_one: Callable[[bytes], bool]
    """Whether a file with such an ending is of this format, judged by its first bytes."""
    in_folder: str
    """Pattern of the names that such a file has inside a folder of images."""
    read: Callable[[str], AnnotationFile]
    image_endings: tuple[str, ...] = ("",)
    """What to add to the names of images in the file."""
    lists_all: bool = True
    """Whether images without objects are listed too."""
    needs_names: bool = False
    """Whether a class that is not among the names of the data YAML is an error of the file, not of the label."""


def _header(*columns: str) -> Callable[[bytes], bool]:
    """Whether the first line of a CSV file has these columns."""

    def has_columns(head: bytes) -> bool:
        first = head.removeprefix(b"\xef\xbb\xbf").partition(b"\n")[0]
        return set(columns) <= {name.strip().strip('"') for name in first.decode(errors="replace").split(",")}

    return has_columns


def _is_retinanet(head: bytes) -> bool:
    first = head.partition(b"\n")[0].decode(errors="replace").strip().split(",")
    return len(first) == 6 and is_image_name(first[0]) and all(part.strip("-").isdecimal() for part in first[1:5])


_LOWER = ("jpg", *sorted(SUFFIXES - {"jpg"}))
_ANY_ENDING = (*(f".{suffix}" for suffix in _LOWER), *(f".{suffix.upper()}" for suffix in _LOWER), "")
"""Endings of images whose file is named without one; Open Images itself has nothing but .jpg."""
PARQUET = SetFormat(
    "Hugging Face parquet", (".parquet", ".arrow"), lambda head: True, r".*\.(parquet|arrow)", read_parquet
)
SET_FORMATS: tuple[SetFormat, ...] = (
    SetFormat("CreateML", (".json",), lambda head: head.lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"["),
              r"_annotations\.createml\.json", read_createml),
    SetFormat("COCO", (".json",), lambda head: True, r"_annotations\.coco\.json", read_coco, needs_names=True),
    SetFormat("CVAT", (".xml",), lambda head: True, r"annotations\.xml", read_cvat),
    SetFormat("Open Images", (".csv",), _header("ImageID", "LabelName", "XMin"), r".*-annotations-bbox\.csv",
              read_open_images, _ANY_ENDING, lists_all=False),
    SetFormat("TensorFlow CSV", (".csv",), _header("filename", "class", "xmin"), r"_annotations\.csv",
              read_tensorflow, lists_all=False),
    SetFormat("RetinaNet CSV", (".csv",), _is_retinanet, r"_annotations\.csv", read_retinanet, lists_all=False),
    SetFormat("Hugging Face metadata", (".csv",), _header("file_name", "objects"), r"metadata\.csv", read_metadata),
    SetFormat("Hugging Face metadata", (".jsonl",), lambda head: b'"file_name"' in head, r"metadata\.jsonl",
              read_metadata),
    PARQUET,
)  # fmt: skip
"""In the order in which they are tried."""


class SetFile(NamedTuple):
    """An annotation file and its format."""

    format: SetFormat
    path: str
    folder: str = ""
    """The folder that the user named, whose images without a row are background; "" if the user named the file."""


class ListedImages(NamedTuple):
    """The images of an annotation file, sorted by path."""

    paths: list[str]
    absent: list[str]
    """Images that the file lists but that do not exist."""
    labels: Callable[[np.ndarray], list[ImageLabels]]
    """The labels of `paths`, from the sizes of these images, int [N, 2]."""


_IN_FOLDER = re.compile("|".join(f"(?:{format.in_folder})" for format in SET_FORMATS))
"""Names of annotation files of any format."""


def recognise(path: str) -> SetFormat | None:
    """The format of an annotation file; None for any other file, such as an image or a list of images."""
    ending = os.path.splitext(path)[1].lower()
    candidates = [format for format in SET_FORMATS if ending in format.endings]
    head = read_head(path) if candidates else b""
    return next((format for format in candidates if format.is_one(head)), None)


def annotation_files(entry: str) -> list[SetFile]:
    """The annotation files that an entry of a data YAML stands for; none if its images have label files of their own.

    An entry is the file itself; or a folder with such a file, unless its images have YOLO labels; or what the names of
    some parquet files begin with: data/train for data/train-00000-of-00002.parquet.
    """
    if os.path.isdir(entry):
        return _in_folder(entry)
    if not os.path.exists(entry):
        shards = sorted(glob.glob(f"{glob.escape(entry)}-*.parquet"))
        return [SetFile(PARQUET, shard) for shard in shards]
    format = recognise(entry)
    return [] if format is None else [SetFile(format, entry)]


def _in_folder(folder: str) -> list[SetFile]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:  # the search for images reports it
        return []
    found: list[SetFile] = []
    for name in filter(_IN_FOLDER.fullmatch, names):
        named = [format for format in SET_FORMATS if re.fullmatch(format.in_folder, name)]
        path = os.path.join(folder, name)
        format = recognise(path)
        if format in named and (not found or found[0].format is format):
            assert format is not None
            found.append(SetFile(format, path, folder))
    images = (os.path.join(folder, name) for name in names if is_image_name(name))
    if found and any(os.path.exists(label_path(image)) for image in images):
        return []
    return found


def open_listed(file: SetFile, names: Sequence[str]) -> ListedImages:
    """Find the images of an annotation file; class numbers are positions in `names`. DataError if it is damaged."""
    images, classes = file.format.read(file.path).images, ClassNumbers(names)
    used = {name: classes.of(name) for image in images for name in image.objects.names}
    if file.format.needs_names and (unknown := [name for name, number in used.items() if number is None]):
        raise DataError(f"{file.path}: category {unknown[0]!r} is not among the names in the data YAML. Add it there.")
    places = find_listed(file.path, [image.name for image in images], endings=file.format.image_endings)
    if file.folder and not file.format.lists_all:
        background = _others(file.folder, set(places))
        places += background
        images = [*images, *(AnnotatedImage(path, Objects()) for path in background)]
    rows = sorted(zip(places, images, strict=True), key=lambda row: row[0])
    present = [(path, image) for path, image in rows if os.path.lexists(path)]
    absent = [path for path, _ in rows if not os.path.lexists(path)]

    def labels(size_N2: np.ndarray) -> list[ImageLabels]:
        return [
            to_labels(image, classes, (width, height))
            for (_, image), (width, height) in zip(present, size_N2.tolist(), strict=True)
        ]

    return ListedImages([path for path, _ in present], absent, labels)


def _others(folder: str, listed: set[str]) -> list[str]:
    """The images of a folder that are not listed."""
    paths = (os.path.join(folder, name) for name in os.listdir(folder) if is_image_name(name) and name[0] != ".")
    return [path for path in paths if path not in listed]


def names_of(file: SetFile) -> tuple[str, ...]:
    """The class names of an annotation file, for use without a YAML."""
    return file.format.read(file.path).names


# Writing


@dataclass(frozen=True)
class Layout:
    """Where the files of a format are in a data set that `convert-data` writes, and how they are made.

    Paths are below the folder of the data set; {split} and {stem} are filled in. Exactly one of `write_image` and
    `write_set` is given.
    """

    title: str
    images: str
    """Folder of the images."""
    labels: str
    """Label file of an image, or annotation file of a split."""
    entry: str
    """The entry of a split in the data YAML."""
    write_image: Callable[[ImageToWrite, Sequence[str]], bytes] | None = None
    write_set: Callable[[Sequence[ImageToWrite], Sequence[str]], Iterator[str]] | None = None
    write_names: tuple[str, Callable[[Sequence[str]], bytes]] | None = None
    """A file with the class names, and its content."""
    write_list: str = ""
    """A list with the names of the images of a split, without endings."""
    keeps_polygons: bool = False


LAYOUTS: dict[str, Layout] = {
    "yolo": Layout("YOLO", "images/{split}", "labels/{split}/{stem}.txt", "images/{split}", write_image=write_yolo,
                   keeps_polygons=True),
    "coco": Layout("COCO", "images/{split}", "annotations/instances_{split}.json",
                   "annotations/instances_{split}.json", write_set=write_coco, keeps_polygons=True),
    "voc": Layout("Pascal VOC", VOC_IMAGES, f"{VOC_LABELS}/{{stem}}.xml", f"{VOC_LISTS}/{{split}}.txt",
                  write_image=write_voc, write_list=f"{VOC_LISTS}/{{split}}.txt"),
    "labelme": Layout("labelme", "{split}", "{split}/{stem}.json", "{split}", write_image=write_labelme,
                      keeps_polygons=True),
    "cvat": Layout("CVAT for images 1.1", "{split}/images", "{split}/annotations.xml", "{split}/annotations.xml",
                   write_set=write_cvat, keeps_polygons=True),
    "createml": Layout("CreateML", "{split}", "{split}/_annotations.createml.json",
                       "{split}/_annotations.createml.json", write_set=write_createml),
    "openimages": Layout("Open Images", "{split}", "{split}/{split}-annotations-bbox.csv", "{split}",
                         write_set=write_open_images, write_names=(DESCRIPTIONS, write_descriptions)),
    "huggingface": Layout("Hugging Face metadata", "{split}", "{split}/metadata.jsonl", "{split}",
                          write_set=write_metadata),
}  # fmt: skip
"""Name after `--to` -> layout."""


def layout_of(name: str) -> Layout:
    """The layout of a format; ConfigError for an unknown name."""
    if name not in LAYOUTS:
        raise ConfigError(f"{name!r} is no format that can be written. Use one of {', '.join(LAYOUTS)}.")
    return LAYOUTS[name]
