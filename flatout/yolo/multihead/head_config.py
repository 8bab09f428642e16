"""The head configuration of 1B4H: which head predicts which classes, and the channels of a joined map.

Pure data, no torch. The position of a class in its head's list is its local id, also if the list is not sorted; class
numbers of the data set are global ids. `flatout yolo group` writes these files, networks are built from them.

Dimension key:  C classes of the data set   H heads   A anchors per level   O = 5 + the classes a head predicts
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from flatout.errors import ConfigError, MissingFileError
from flatout.yaml_strict import load_yaml
from flatout.yolo.model.module_specs import MAX_CLASSES, is_number, is_whole

DEFAULT_CLASSES = 80
DEFAULT_HEADS = 4


@dataclass(frozen=True)
class HeadGroup:
    """One head: its classes by global id, in the order of its outputs."""

    classes: tuple[int, ...]
    weight: float = 1.0
    """Weight of its losses."""
    name: str = ""


@dataclass(frozen=True)
class HeadConfig:
    """A partition of the classes 0 to nc - 1 into heads; ConfigError (a ValueError) names a class that violates it."""

    nc: int
    heads: tuple[HeadGroup, ...]
    grouping: str = "standard"
    """Origin of the groups: free text."""
    full_head: bool = False
    """Whether every head predicts all classes, of which only its own are used."""
    single_class_logit: bool = False
    """Whether the score of a head with one class is multiplied by its class output, which no loss trains, as in the
    original program; see docs/migrate.md."""

    def __post_init__(self) -> None:
        _check_partition(self.nc, [group.classes for group in self.heads])

    @property
    def num_heads(self) -> int:
        return len(self.heads)

    @cached_property
    def head_C(self) -> tuple[int, ...]:
        """The head of every class."""
        head = {class_id: index for index, group in enumerate(self.heads) for class_id in group.classes}
        return tuple(head[class_id] for class_id in range(self.nc))

    @cached_property
    def local_C(self) -> tuple[int, ...]:
        """The local id of every class."""
        local = {class_id: index for group in self.heads for index, class_id in enumerate(group.classes)}
        return tuple(local[class_id] for class_id in range(self.nc))

    @property
    def outputs_H(self) -> tuple[int, ...]:
        """Outputs of a cell of each head: x, y, w, h, objectness and the classes it predicts."""
        return tuple(5 + (self.nc if self.full_head else len(group.classes)) for group in self.heads)

    @property
    def weight_H(self) -> tuple[float, ...]:
        return tuple(group.weight for group in self.heads)

    def plain(self) -> dict[str, Any]:
        """The content of a YAML file, which `head_config_of` parses."""
        assignments = {
            f"head_{index}": {"name": group.name, "classes": list(group.classes), "weight": group.weight}
            for index, group in enumerate(self.heads)
        }
        return {
            "nc": self.nc,
            "heads": self.num_heads,
            "grouping": self.grouping,
            "full_head": self.full_head,
            "single_class_logit": self.single_class_logit,
            "head_assignments": assignments,
        }


def read_head_config(path: str | Path, full_head: bool | None = None) -> HeadConfig:
    """The head configuration in a YAML file; `full_head` overrides the value in the file.

    MissingFileError if there is no such file, ConfigError for mistakes in it.
    """
    if not Path(path).exists():
        raise MissingFileError(f"{path}: no such head configuration. Pass the path of a YAML file.")
    return head_config_of(load_yaml(path), where=str(path), full_head=full_head)


def head_config_of(content: object, *, where: str, full_head: bool | None = None) -> HeadConfig:
    """The head configuration in the content of a YAML file, other keys are ignored; ConfigError, with `where`."""
    try:
        return _parse(content, full_head)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def contiguous_heads(nc: int, num_heads: int = DEFAULT_HEADS) -> HeadConfig:
    """The default of a network with several heads: blocks of consecutive classes, as equal as possible."""
    num_heads = min(num_heads, nc)
    firsts = [head * nc // num_heads for head in range(num_heads + 1)]
    groups = [HeadGroup(tuple(range(*block)), 1.0, f"Head {head}") for head, block in enumerate(pairwise(firsts))]
    return HeadConfig(nc, tuple(groups), grouping="contiguous")


def _parse(content: object, full_head: bool | None) -> HeadConfig:
    if not isinstance(content, Mapping):
        raise ValueError(f"a head configuration is a mapping with head_assignments, not {content!r:.60}.")
    nc = _whole(content, "nc", DEFAULT_CLASSES)
    num_heads = _whole(content, "heads", DEFAULT_HEADS)
    assignments = content.get("head_assignments")
    if not isinstance(assignments, Mapping):
        wrong = "is missing" if assignments is None else f"is {assignments!r:.60}"
        raise ValueError(f"head_assignments {wrong}; it must be a mapping of head_0, head_1, ... to their classes.")
    groups = tuple(_group(assignments, head, num_heads) for head in range(num_heads))
    full_head = _yes_or_no(content, "full_head") if full_head is None else full_head
    grouping = str(content.get("grouping", "standard"))
    return HeadConfig(nc, groups, grouping, full_head, _yes_or_no(content, "single_class_logit"))


def _whole(content: Mapping[Any, Any], key: str, default: int) -> int:
    value = content.get(key, default)
    if not is_whole(value, 1, MAX_CLASSES):
        raise ValueError(f"{key}={value!r:.40} must be a whole number from 1 to {MAX_CLASSES}.")
    return int(value)


def _yes_or_no(content: Mapping[Any, Any], key: str) -> bool:
    value = content.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"{key}={value!r:.40} must be true or false.")
    return value


def _group(assignments: Mapping[Any, Any], head: int, num_heads: int) -> HeadGroup:
    key = f"head_{head}"
    if not isinstance(written := assignments.get(key), Mapping):
        raise ValueError(f"head_assignments.{key} is missing. {num_heads} heads need head_0 to head_{num_heads - 1}.")
    classes = written.get("classes")
    if not isinstance(classes, list | tuple) or not classes:
        raise ValueError(f"{key}.classes is empty or missing. It must be a list of class numbers.")
    if wrong := [class_id for class_id in classes if not is_whole(class_id, -MAX_CLASSES, MAX_CLASSES)]:
        raise ValueError(f"{key}.classes contains {wrong[0]!r:.40}. Class numbers must be whole numbers.")
    weight = written.get("weight", 1.0)
    if not is_number(weight) or weight < 0:
        raise ValueError(f"{key}.weight={weight!r:.40} must be a number, 0 or more.")
    return HeadGroup(tuple(classes), float(weight), str(written.get("name", f"Head {head}")))


def _check_partition(nc: int, classes_H: Sequence[Sequence[int]]) -> None:
    if not classes_H or not all(classes_H):
        raise ConfigError("a head has no classes. Every head needs one or more: assign some, or use fewer heads.")
    owner: dict[int, int] = {}
    for head, class_id in ((head, class_id) for head, classes in enumerate(classes_H) for class_id in classes):
        if class_id in owner:
            raise ConfigError(
                f"class {class_id} is assigned twice: to head_{owner[class_id]} and head_{head}. Remove it from one."
            )
        owner[class_id] = head
    if outside := sorted(class_id for class_id in owner if not 0 <= class_id < nc):
        raise ConfigError(f"class {outside[0]} is outside 0 to {nc - 1}. Correct its number, or nc.")
    if missing := sorted(set(range(nc)) - owner.keys()):
        raise ConfigError(
            f"class {missing[0]} belongs to no head; {len(missing)} of {nc} classes are not assigned. Assign each to "
            "a head."
        )


# The order of the channels in a joined map of several heads
#
# First the boxes and classes, (x, y, w, h, classes ...), of every head and anchor; then the objectness of all of them,
# contiguously. The loss reads the objectness of every cell and little else. This way it is in one piece of a pixel's
# memory instead of a dozen, and so is its gradient.

OBJECTNESS = 4
"""Index of objectness in the outputs of a head's own convolution."""


def channels_of_planes(outputs_H: Sequence[int], num_anchors: int) -> list[list[int]]:
    """For each head and anchor, in this order, the channels of its outputs (x, y, w, h, objectness, classes ...)."""
    first_objectness = num_anchors * sum(outputs - 1 for outputs in outputs_H)
    planes: list[list[int]] = []
    begin = 0
    for outputs in outputs_H:
        for _ in range(num_anchors):
            others = list(range(begin, begin + outputs - 1))
            others.insert(OBJECTNESS, first_objectness + len(planes))
            planes.append(others)
            begin += outputs - 1
    return planes


def channels_of_outputs(outputs_H: Sequence[int], num_anchors: int) -> list[int]:
    """The channel in a joined map of every output of the heads' own convolutions, head by head."""
    return [channel for plane in channels_of_planes(outputs_H, num_anchors) for channel in plane]
