"""What a grouping is made from: the labels of a data set, a COCO file without its pictures, or a confusion matrix."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flatout.errors import ConfigError, DataError
from flatout.yolo.data.coco import MOST_BYTES, categories_by_id
from flatout.yolo.data.data_yaml import DataSet, Split, without_complaints
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.label_cache import default_folder
from flatout.yolo.data.open_data import open_data_set
from flatout.yolo.data.open_set import SplitConfig, open_split
from flatout.yolo.find_file import find_file
from flatout.yolo.metrics.confusion_file import Confusion, confusion_in, read_confusion
from flatout.yolo.multihead.grouping.statistics import BoxTable

TABLES = (".csv", ".npz", ".txt")


@dataclass(frozen=True)
class Source:
    """Names of the classes, and what else is known about them. Boxes are read when they are asked for."""

    where: str
    names: tuple[str, ...]
    read_boxes: Callable[[], BoxTable] | None = None
    """None: there are none, as in a confusion matrix. May take a while: labels are scanned."""
    confusion: Confusion | None = None


def open_source(given: str, *, split: Split = "train") -> Source:
    """By what the file is; a data YAML may also be one that comes with flatout. ConfigError or DataError if it is none.

    `split` is the part of a data set whose labels count.
    """
    path = Path(given)
    if path.suffix.lower() in TABLES:
        return _of_confusion(read_confusion(path), given)
    if path.suffix.lower() == ".json":
        content = _load_json(path)
        is_coco = isinstance(content, dict) and "annotations" in content
        return _of_coco(content, given) if is_coco else _of_confusion(confusion_in(content, where=path), given)
    data = open_data_set(path if path.is_dir() else find_file(given, flag="SOURCE"))
    return Source(given, data.names, lambda: _labelled_boxes(data, split))


def with_confusion(source: Source, path: Path) -> Source:
    """The same classes, with a confusion matrix beside them; ConfigError if it is one of other classes."""
    confusion = read_confusion(path, num_classes=len(source.names))
    num_classes = len(confusion.count_CC)
    if num_classes != len(source.names):
        raise ConfigError(f"{path}: {num_classes} classes, but {source.where} has {len(source.names)}.")
    if confusion.names is not None and confusion.names != source.names:
        raise ConfigError(f"{path}: its classes are called otherwise than those of {source.where}.")
    return Source(source.where, source.names, source.read_boxes, confusion)


def boxes_of(images: ImageSet) -> BoxTable:
    """The boxes of a scanned data set, in pixels of their pictures."""
    labels = images.labels
    picture_T = np.repeat(np.arange(len(images)), np.diff(labels.first_N))
    size_T2 = labels.class_box_T5[:, 3:5].astype(np.float64) * images.size_wh_N2[picture_T]
    return BoxTable(picture_T, labels.class_box_T5[:, 0].astype(np.int64), size_T2)


def _labelled_boxes(data: DataSet, split: Split) -> BoxTable:
    if not data.entries[split]:
        raise ConfigError(f"{data.file}: it has no {split} pictures, whose labels would say how classes are alike.")
    config = SplitConfig(cache_folder=default_folder())
    return boxes_of(open_split(without_complaints(data, [split]), split, config).images)


def _of_confusion(confusion: Confusion, where: str) -> Source:
    names = confusion.names or tuple(f"class {number}" for number in range(len(confusion.count_CC)))
    return Source(where, names, None, confusion)


def _of_coco(content: dict[str, Any], where: str) -> Source:
    """Without its pictures. Crowds count, as in the fork; classes are numbered in the order of their ids."""
    categories = categories_by_id(content)
    number = {category["id"]: place for place, category in enumerate(categories)}

    def read() -> BoxTable:
        try:
            rows = [
                (int(each["image_id"]), number[each["category_id"]], float(each["bbox"][2]), float(each["bbox"][3]))
                for each in content["annotations"]
            ]
        except (KeyError, TypeError, ValueError, IndexError):
            raise DataError(
                f"{where}: an annotation lacks image_id, category_id or a bbox of numbers. Export it again."
            ) from None
        table_T4 = np.array(rows, np.float64).reshape(-1, 4)
        return BoxTable(table_T4[:, 0].astype(np.int64), table_T4[:, 1].astype(np.int64), table_T4[:, 2:])

    return Source(where, tuple(str(category["name"]) for category in categories), read)


def _load_json(path: Path) -> Any:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise DataError(f"{path}: larger than {MOST_BYTES >> 30} GiB. Is this the right file?")
        with path.open("rb") as file:
            return json.load(file)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}. Check its path and permissions.") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {str(error)[:100]}. Export it again.") from None
