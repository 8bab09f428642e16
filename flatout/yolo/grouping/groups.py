"""A finished grouping: the heads, and a remark on each for people."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from flatout.errors import ConfigError
from flatout.yolo.model.head_config import HeadConfig, HeadGroup


@dataclass(frozen=True)
class Grouping:
    """Heads that share all classes out, each with a comment ("" for none)."""

    config: HeadConfig
    comments: tuple[str, ...]


def make_grouping(
    grouping: str, classes_H: Iterable[Sequence[int]], names: Sequence[str], comments: Sequence[str]
) -> Grouping:
    """Heads of equal weight, their classes ascending."""
    heads = [
        HeadGroup(tuple(sorted(map(int, classes))), 1.0, name) for classes, name in zip(classes_H, names, strict=True)
    ]
    num_classes = sum(len(head.classes) for head in heads)
    return Grouping(HeadConfig(num_classes, tuple(heads), grouping), tuple(comments))


def members_of(label_C: np.ndarray) -> list[np.ndarray]:
    """The classes of each label, from label 0 on; every label up to the largest has some."""
    return [np.flatnonzero(label_C == label) for label in range(int(label_C.max()) + 1)]


def check_heads(heads: int, num_classes: int) -> None:
    """ConfigError unless so many heads can each have a class."""
    if not 1 <= heads <= num_classes:
        raise ConfigError(f"--heads {heads}: {num_classes} classes can be shared out to 1 to {num_classes} heads.")
