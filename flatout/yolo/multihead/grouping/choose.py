"""From a source and a method to heads: what `flatout yolo group` does, before anything is written.

Dimension key:  C classes
"""

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from flatout.errors import ConfigError
from flatout.safefiles import replacing
from flatout.yolo.multihead.grouping.methods import (
    HybridConfig,
    confused_pairs,
    group_apart,
    group_by_geometry,
    group_by_hybrid,
    group_standard,
    kept_together,
    known_pairs,
    mixed_similarity,
)
from flatout.yolo.multihead.grouping.sources import Source
from flatout.yolo.multihead.grouping.statistics import ClassStatistics, Grouping, check_heads, statistics_of

logger = logging.getLogger(__name__)

Method = Literal["standard", "geometry", "hybrid", "anticonfusion"]


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """How classes are shared out."""

    method: Method
    heads: int = 4
    hybrid: HybridConfig = field(default_factory=HybridConfig)
    confused_from: float = 0.02
    """Share of a class's objects that must be taken for another class for the two to be kept apart."""

    def __post_init__(self) -> None:
        if not 0 < self.confused_from <= 1:
            raise ConfigError(f"--confused-from {self.confused_from:g} is outside 0 to 1.")


@dataclass(frozen=True)
class Grouped:
    """The heads, and what they were chosen by: that is what the picture shows."""

    grouping: Grouping
    names: tuple[str, ...]
    statistics: ClassStatistics | None = None
    likeness_CC: np.ndarray | None = None
    """float64, 0 to 1: how alike classes are, or how much they are mixed up."""


def group_classes(source: Source, config: GroupConfig) -> Grouped:
    """ConfigError where the method needs more than the source has."""
    check_heads(config.heads, len(source.names))
    if config.method == "standard":
        return Grouped(group_standard(source.names, config.heads), source.names)
    if config.method == "anticonfusion":
        return _kept_apart(source, config)
    statistics = _statistics(source, config.method)
    if config.method == "geometry":
        return Grouped(group_by_geometry(statistics, config.heads), source.names, statistics)
    grouping = group_by_hybrid(statistics, config.heads, config.hybrid)
    return Grouped(grouping, source.names, statistics, mixed_similarity(statistics, config.hybrid))


def _statistics(source: Source, method: str) -> ClassStatistics:
    if source.read_boxes is None:
        raise ConfigError(
            f"{source.where}: --method {method} looks at boxes, and this has none: name a data YAML or a COCO file."
        )
    boxes = source.read_boxes()
    if not len(boxes.class_T):
        raise ConfigError(f"{source.where}: it has no boxes, so --method {method} has nothing to go by.")
    return statistics_of(boxes, len(source.names))


def _kept_apart(source: Source, config: GroupConfig) -> Grouped:
    statistics = None if source.read_boxes is None else _statistics(source, config.method)
    if source.confusion is not None:
        share_CC = source.confusion.share_CC
        confused_CC = confused_pairs(share_CC, least=config.confused_from)
        likeness_CC = np.maximum(share_CC, share_CC.T) * (1 - np.eye(len(share_CC)))
    else:
        confused_CC = known_pairs(source.names)
        likeness_CC = confused_CC.astype(np.float64)
        if not confused_CC.any():
            raise ConfigError(
                f"{source.where}: which of these classes are mixed up is known for COCO's names only: "
                "give a confusion matrix with --confusion (test.py writes confusion_matrix.csv)."
            )
    if statistics is not None:
        num_boxes_C = statistics.num_boxes_C
    else:
        assert source.confusion is not None
        num_boxes_C = source.confusion.num_objects_C.round().astype(np.int64)
    grouping = group_apart(num_boxes_C, confused_CC, config.heads)
    num_pairs, together = int(confused_CC.sum()) // 2, kept_together(confused_CC, grouping)
    if num_pairs:
        logger.info("%d of %d confused pairs are in different heads.", num_pairs - together, num_pairs)
    else:
        logger.warning("No classes are mixed up that often: heads are chosen by numbers of boxes alone.")
    if together:
        logger.warning("%d confused pairs share a head: more heads would keep them apart.", together)
    return Grouped(grouping, source.names, statistics, likeness_CC)


# A grouping as a head configuration: YAML that `--head-config` takes.

LINE = 112
"""Longer lists of classes are broken."""


def write_grouping(grouping: Grouping, path: Path, *, generated_by: str) -> Path:
    """Whole or not at all."""
    content = as_yaml(grouping, generated_by=generated_by).encode()
    with replacing(path, needed_bytes=len(content)) as sink:
        sink.write(content)
    return path


def as_yaml(grouping: Grouping, *, generated_by: str) -> str:
    """The keys of the head configuration in the order in which people read them."""
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
    lines, line = ["    classes: ["], "     "
    for place, number in enumerate(classes):
        word = f" {number}" if place == len(classes) - 1 else f" {number},"
        if len(line) + len(word) > LINE:
            lines.append(line)
            line = "     "
        line += word
    return [*lines, line, "    ]"]


def _quoted(text: str) -> str:
    # JSON's quotes are YAML's, and keep colons and hashes text.
    return json.dumps(text, ensure_ascii=False)
