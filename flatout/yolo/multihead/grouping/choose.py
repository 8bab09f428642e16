"""The grouping of a source by a method, and its head configuration file: `flatout yolo group`.

A source is the labels of a data set, a COCO file without its images, or a confusion matrix.

Dimension key:  C classes   T boxes   N images
"""

import json
import logging
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flatout.errors import ConfigError, DataError
from flatout.safefiles import write_file
from flatout.yolo.data.coco import categories_by_id, read_json
from flatout.yolo.data.data_yaml import DataSet, Split, require_valid
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.label_cache import default_folder
from flatout.yolo.data.open_data import open_data_set
from flatout.yolo.data.open_set import SplitConfig, open_split
from flatout.yolo.find_file import find_file
from flatout.yolo.metrics.confusion_file import Confusion, confusion_in, read_confusion
from flatout.yolo.multihead.grouping.methods import (
    HybridConfig,
    confused_pairs,
    group_apart,
    group_by_geometry,
    group_by_hybrid,
    group_standard,
    known_pairs,
    mixed_similarity,
    num_confused_together,
)
from flatout.yolo.multihead.grouping.statistics import BoxTable, ClassStatistics, Grouping, check_heads, statistics_of

logger = logging.getLogger(__name__)

# Sources

TABLES = (".csv", ".npz", ".txt")


@dataclass(frozen=True)
class Source:
    """Class names, and boxes or a confusion matrix of the classes. Boxes are read on demand."""

    where: str
    names: tuple[str, ...]
    read_boxes: Callable[[], BoxTable] | None = None
    """None for a source without boxes, such as a confusion matrix. May take a while, because it scans the labels."""
    confusion: Confusion | None = None


def open_source(given: str, *, split: Split = "train") -> Source:
    """The source in a file of any of the kinds above; a data YAML may also be one that ships with flatout.

    `split` is the part of a data set whose labels count. ConfigError or DataError if the file cannot be used.
    """
    path = Path(given)
    if path.suffix.lower() in TABLES:
        return _source_of_confusion(read_confusion(path), given)
    if path.suffix.lower() == ".json":
        content = read_json(given)
        if isinstance(content, dict) and "annotations" in content:
            return _source_of_coco(content, given)
        return _source_of_confusion(confusion_in(content, where=path), given)
    data = open_data_set(path if path.is_dir() else find_file(given, flag="SOURCE"))
    return Source(given, data.names, lambda: _labelled_boxes(data, split))


def with_confusion(source: Source, path: Path) -> Source:
    """The source with a confusion matrix from a file; ConfigError if it has other classes."""
    confusion = read_confusion(path, num_classes=len(source.names))
    num_classes = len(confusion.count_CC)
    if num_classes != len(source.names):
        raise ConfigError(
            f"{path}: {num_classes} classes, but {source.where} has {len(source.names)}. Give the confusion matrix of "
            "a network that was trained on this data set."
        )
    if confusion.names is not None and confusion.names != source.names:
        raise ConfigError(
            f"{path}: its class names, or their order, differ from those of {source.where}. Give the confusion "
            "matrix of a network that was trained on this data set, or correct the names."
        )
    return Source(source.where, source.names, source.read_boxes, confusion)


def boxes_of(images: ImageSet) -> BoxTable:
    """The boxes of a scanned data set, in pixels of their images."""
    labels = images.labels
    size_T2 = labels.class_box_T5[:, 3:5].astype(np.float64) * images.size_wh_N2[labels.image_T]
    return BoxTable(labels.image_T, labels.class_box_T5[:, 0].astype(np.int64), size_T2)


def _labelled_boxes(data: DataSet, split: Split) -> BoxTable:
    if not data.entries[split]:
        raise ConfigError(
            f"{data.file}: it has no {split} images, whose labels are needed for the grouping. Add their path as "
            f"{split}."
        )
    config = SplitConfig(cache_folder=default_folder())
    return boxes_of(open_split(require_valid(data, [split]), split, config).images)


def _source_of_confusion(confusion: Confusion, where: str) -> Source:
    names = confusion.names or tuple(f"class {number}" for number in range(len(confusion.count_CC)))
    return Source(where, names, None, confusion)


def _source_of_coco(content: dict[str, Any], where: str) -> Source:
    """The source of a COCO file, without its images. Crowds count, as in the fork; classes are numbered by id."""
    categories = categories_by_id(content, where)
    number = {category["id"]: index for index, category in enumerate(categories)}

    def read() -> BoxTable:
        try:
            rows = [
                (int(each["image_id"]), number[each["category_id"]], float(each["bbox"][2]), float(each["bbox"][3]))
                for each in content["annotations"]
            ]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(
                f"{where}: an annotation has no valid image_id, category_id or bbox ({type(error).__name__}: {error}). "
                "Correct it, or export the file again."
            ) from None
        table_T4 = np.array(rows, np.float64).reshape(-1, 4)
        return BoxTable(table_T4[:, 0].astype(np.int64), table_T4[:, 1].astype(np.int64), table_T4[:, 2:])

    return Source(where, tuple(str(category["name"]) for category in categories), read)


# Grouping

Method = Literal["standard", "geometry", "hybrid", "anticonfusion"]


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """Options of a grouping."""

    method: Method
    heads: int = 4
    hybrid: HybridConfig = field(default_factory=HybridConfig)
    confused_from: float = 0.02
    """Two classes are separated if at least this fraction of one's objects is detected as the other."""

    def __post_init__(self) -> None:
        if not 0 < self.confused_from <= 1:
            raise ConfigError(f"--confused-from {self.confused_from:g} must be above 0 and at most 1.")


@dataclass(frozen=True)
class GroupingResult:
    """A grouping, and the data it was made from, for the chart."""

    grouping: Grouping
    names: tuple[str, ...]
    statistics: ClassStatistics | None = None
    similarity_CC: np.ndarray | None = None
    """float64, 0 to 1: similarity of classes, or confusion between them."""


def group_classes(source: Source, config: GroupConfig) -> GroupingResult:
    """Group the classes of a source; ConfigError if the source lacks data that the method needs."""
    check_heads(config.heads, len(source.names))
    if config.method == "standard":
        return GroupingResult(group_standard(source.names, config.heads), source.names)
    if config.method == "anticonfusion":
        return _group_anticonfusion(source, config)
    statistics = _statistics(source, config.method)
    if config.method == "geometry":
        return GroupingResult(group_by_geometry(statistics, config.heads), source.names, statistics)
    grouping = group_by_hybrid(statistics, config.heads, config.hybrid)
    return GroupingResult(grouping, source.names, statistics, mixed_similarity(statistics, config.hybrid))


def _statistics(source: Source, method: str) -> ClassStatistics:
    if source.read_boxes is None:
        raise ConfigError(
            f"{source.where}: --method {method} needs boxes, and this source has none. Use a data YAML or a COCO file."
        )
    boxes = source.read_boxes()
    if not len(boxes.class_T):
        raise ConfigError(f"{source.where}: it has no boxes, which --method {method} needs. Use labelled data.")
    return statistics_of(boxes, len(source.names))


def _group_anticonfusion(source: Source, config: GroupConfig) -> GroupingResult:
    statistics = None if source.read_boxes is None else _statistics(source, config.method)
    if source.confusion is not None:
        fraction_CC = source.confusion.fraction_CC
        confused_CC = confused_pairs(fraction_CC, least=config.confused_from)
        similarity_CC = np.maximum(fraction_CC, fraction_CC.T) * (1 - np.eye(len(fraction_CC)))
    else:
        confused_CC = known_pairs(source.names)
        similarity_CC = confused_CC.astype(np.float64)
        if not confused_CC.any():
            raise ConfigError(
                f"{source.where}: confused pairs of classes are known for COCO's names only. "
                "Use --confusion with a confusion matrix (test.py writes confusion_matrix.csv)."
            )
    if statistics is not None:
        num_boxes_C = statistics.num_boxes_C
    else:
        assert source.confusion is not None
        num_boxes_C = source.confusion.num_objects_C.round().astype(np.int64)
    grouping = group_apart(num_boxes_C, confused_CC, config.heads)
    num_pairs, together = int(confused_CC.sum()) // 2, num_confused_together(confused_CC, grouping)
    if num_pairs:
        logger.info("%d of %d confused pairs are in different heads.", num_pairs - together, num_pairs)
    else:
        logger.warning("No classes are confused that often, so heads are chosen by numbers of boxes only.")
    if together:
        logger.warning("%d confused pairs share a head. More heads would separate them.", together)
    return GroupingResult(grouping, source.names, statistics, similarity_CC)


# The head configuration file, YAML for `--head-config`

LINE = 112
"""Length at which lists of classes are wrapped."""


def write_grouping(grouping: Grouping, path: Path, *, generated_by: str) -> Path:
    """Write the head configuration, completely or not at all; returns the path."""
    write_file(path, as_yaml(grouping, generated_by=generated_by))
    return path


def as_yaml(grouping: Grouping, *, generated_by: str) -> str:
    """The text of the head configuration, with its keys in a readable order."""
    config = grouping.config
    lines = [
        f"nc: {config.nc}",
        f"heads: {config.num_heads}",
        f"grouping: {config.grouping}",
        f"generated_by: {_quoted(generated_by)}",
        "",
        "head_assignments:",
    ]
    for number, (head, comment) in enumerate(zip(config.heads, grouping.comments, strict=True)):
        lines += [f"  head_{number}:", f"    name: {_quoted(head.name)}", *_listed(head.classes)]
        lines += [f"    weight: {head.weight}"]
        lines += [f"    comment: {_quoted(comment)}"] if comment else []
    return "\n".join(lines) + "\n"


def _listed(classes: tuple[int, ...]) -> list[str]:
    whole = f"    classes: [{', '.join(map(str, classes))}]"
    if len(whole) <= LINE:
        return [whole]
    indent = " " * 6
    wrapped = textwrap.wrap(", ".join(map(str, classes)), LINE, initial_indent=indent, subsequent_indent=indent)
    return ["    classes: [", *wrapped, "    ]"]


def _quoted(text: str) -> str:
    # JSON strings are valid YAML, and colons and hashes in them remain text.
    return json.dumps(text, ensure_ascii=False)
