"""A model YAML, understood: rows with absolute sources, named arguments, shapes and parameter counts.

Pure data, no torch. parse.py makes it of a config, network.py makes a network of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from flatout.yolo.model.module_specs import KINDS, Shape
from flatout.yolo.multihead.head_config import HeadConfig

IMAGE = -1
"""The source of a row that reads the input picture."""

PROBE_PX = 256
"""Side of the picture whose maps give the strides."""


@dataclass(frozen=True)
class Row:
    """One layer: where its inputs come from and what it makes of them."""

    index: int
    sources: tuple[int, ...]
    """Absolute row numbers; IMAGE is the input picture."""
    repeats: int
    kind: str
    args: Mapping[str, Any]
    ins: tuple[Shape, ...]
    """Shapes of the inputs, for a picture of PROBE_PX."""
    out: Shape
    num_weights: int
    written: tuple[Any, ...]
    """[from, number, module, args] as in the YAML, for the table people read."""

    def outs_of(self, ins: Sequence[Shape]) -> list[Shape]:
        """What each of its repeats makes of other inputs than `ins`; ValueError if one of them cannot read its own."""
        outs: list[Shape] = []
        for _ in range(self.repeats):
            outs.append(KINDS[self.kind].shape(outs[-1:] or ins, self.args))
        return outs


@dataclass(frozen=True)
class Head:
    """The detection layer, always the last row."""

    index: int
    sources: tuple[int, ...]
    kind: str
    num_classes: int
    anchors_px: tuple[tuple[float, ...], ...]
    """Per level: w0, h0, w1, h1, ... in pixels of the input."""
    channels: tuple[int, ...]
    """Of every input; those of the auxiliary levels follow the lead ones."""
    strides: tuple[float, ...]
    """Of the lead levels."""
    written: tuple[Any, ...]
    groups: HeadConfig | None = None
    """Of a layer with several heads: which of them answers for which classes."""

    @property
    def num_levels(self) -> int:
        return len(self.anchors_px)

    @property
    def num_anchors(self) -> int:
        """Of each level."""
        return len(self.anchors_px[0]) // 2

    @property
    def num_outputs(self) -> int:
        """Of a level: anchors x (x, y, w, h, objectness, classes), of all heads."""
        per_anchor = self.num_classes + 5 if self.groups is None else sum(self.groups.outputs_H)
        return self.num_anchors * per_anchor

    @property
    def lead_sources(self) -> tuple[int, ...]:
        return self.sources[: self.num_levels]


@dataclass(frozen=True)
class Blueprint:
    """What to build, complete and checked."""

    config: dict[str, Any]
    """A copy of the YAML's content with the overrides in force, and always with `ch`."""
    channels: int
    rows: tuple[Row, ...]
    head: Head

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: copies of a network share the blueprint, which nobody changes."""
        return self


def small_side(blueprint: Blueprint, at_least_px: int) -> int:
    """Side of a small square picture on which the network surely runs: at_least_px, twice that, ..., or PROBE_PX.

    On a smaller picture than PROBE_PX a row may have nothing left to read, or maps that no longer fit each other.
    """
    doubled = (at_least_px << times for times in range(PROBE_PX.bit_length()))
    return next((side for side in doubled if side < PROBE_PX and _runs_on(blueprint, side)), PROBE_PX)


def _runs_on(blueprint: Blueprint, side_px: int) -> bool:
    shapes = {IMAGE: Shape(blueprint.channels, side_px, side_px)}
    try:
        for row in blueprint.rows:
            shapes[row.index] = row.outs_of([shapes[source] for source in row.sources])[-1]
    except ValueError:
        return False
    return True


def needed_rows(rows: Sequence[Row], wanted: Iterable[int]) -> set[int]:
    """The wanted rows and all that they depend on, directly or not."""
    needed = set(wanted)
    for row in reversed(rows):
        if row.index in needed:
            needed.update(row.sources)
    return needed
