"""From a data YAML to the pictures of a split, checked and counted: the way every command opens a data set."""

import logging
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from flatout.errors import DataError
from flatout.yolo.data.data_yaml import DataSet, Split, refuse_missing
from flatout.yolo.data.find import Pair
from flatout.yolo.data.gather import gather
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.scan import ScanConfig
from flatout.yolo.data.scan_table import ScanTable, image_set

logger = logging.getLogger(__name__)


class OpenedSplit(NamedTuple):
    """The pictures that can be used, and the table of all that were looked at."""

    images: ImageSet
    pairs: list[Pair]
    table: ScanTable


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """How a split is opened."""

    scan: ScanConfig = field(default_factory=ScanConfig)
    cache_folder: Path | None = None
    """Where label caches are kept; None: nowhere. `label_cache.default_folder()` is the usual place."""
    single_class: bool = False


def open_split(data: DataSet, split: Split, config: SplitConfig) -> OpenedSplit:
    """The pictures of a split; DataError if there are none, or labels of classes that have no name."""
    scan = replace(config.scan, names=data.names)
    found, pairs, table = gather(data.entries[split], scan, cache_folder=config.cache_folder)
    if found.absent:
        raise refuse_missing(data, found.absent[0])
    if not found.paths:
        raise DataError(
            f"{data.file}: {split}: no pictures in {', '.join(data.entries[split])}. Is it the right folder?"
        )
    images = image_set(table, [pair.image for pair in pairs], data.names, single_class=config.single_class)
    if not config.single_class:
        _check_classes(images, data)
    tell(split, table)
    if not len(images):
        raise DataError(
            f"{data.file}: {split}: none of {len(pairs)} pictures can be used. See: flatout yolo check {data.file}"
        )
    return OpenedSplit(images, pairs, table)


def tell(split: str, table: ScanTable) -> None:
    """One line with the counts, and one if anything was dropped."""
    counts = table.counts()
    logger.info("%s: %s", split, ", ".join(f"{count} {name}" for name, count in counts.items()))
    told = Counter(problem.check for listed in table.problems.values() for problem in listed)
    if told:
        listed = ", ".join(f"{count} {check}" for check, count in told.most_common(5))
        logger.warning("%s: %d remarks (%s). List them with: flatout yolo check DATA.yaml", split, told.total(), listed)


def _check_classes(images: ImageSet, data: DataSet) -> None:
    class_T = images.labels.class_box_T5[:, 0]
    if len(class_T) and class_T.max() >= len(data.names):
        label = int(class_T.argmax())
        picture = int(images.labels.first_N.searchsorted(label, "right")) - 1
        raise DataError(
            f"{images.paths[picture]}: a label of class {int(class_T[label])}, but {data.file} names "
            f"{len(data.names)} classes (0 to {len(data.names) - 1}). List all with: flatout yolo check {data.file}"
        )
