"""A model YAML, understood: rows with absolute sources, named arguments, shapes and parameter counts.

Pure data, no torch. parse.py makes it of a config, network.py makes a network of it.

Find a model config by path or by name, and read it.

`yolov7-tiny` and `yolov7-tiny.yaml` mean the training config that ships with flatout, `deploy/yolov7-tiny` its
deploy form; a path that exists always wins.

Understand a model config, or say which row is wrong and what to write instead.

    config --overrides--> rows --literals, channels, sizes--> ModelSpec

Pure arithmetic, no torch. Whatever cannot be built is refused here, so that building never fails and never allocates
more than a network of MAX_WEIGHTS.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from flatout.errors import ConfigError
from flatout.yolo.model.module_specs import (
    HEADS,
    KINDS,
    MAX_CHANNELS,
    MAX_CLASSES,
    MULTIHEADS,
    Kind,
    Shape,
    Value,
    bind,
    check_anchors,
    effective_config,
    is_whole,
    read_literal,
    similar,
)
from flatout.yolo.multihead.head_config import HeadConfig, contiguous_heads, head_config_of

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
class ModelSpec:
    """What to build, complete and checked."""

    config: dict[str, Any]
    """A copy of the YAML's content with the overrides in force, and always with `ch`."""
    channels: int
    rows: tuple[Row, ...]
    head: Head

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: copies of a network share the blueprint, which nobody changes."""
        return self


def small_side(blueprint: ModelSpec, at_least_px: int) -> int:
    """Side of a small square picture on which the network surely runs: at_least_px, twice that, ..., or PROBE_PX.

    On a smaller picture than PROBE_PX a row may have nothing left to read, or maps that no longer fit each other.
    """
    doubled = (at_least_px << times for times in range(PROBE_PX.bit_length()))
    return next((side for side in doubled if side < PROBE_PX and _runs_on(blueprint, side)), PROBE_PX)


def _runs_on(blueprint: ModelSpec, side_px: int) -> bool:
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


logger = logging.getLogger(__name__)

MAX_LAYERS = 2_000
"""Rows with their repeats and the layers inside them; the largest network we ship has about 300."""
MAX_LEVELS = 64
"""Inputs of the detection layer; the networks we ship have up to 8."""
MAX_WEIGHTS = 4_000_000_000
MAX_SIDE_PX = 16 * PROBE_PX
"""Largest map a row may make of the probe picture; upsampling in a row would otherwise grow without end."""


def parse_model(
    config: object,
    *,
    nc: int | None = None,
    anchors: float | None = None,
    heads: HeadConfig | None = None,
    where: str = "model config",
) -> ModelSpec:
    """Understand a model config; ConfigError names `where`, the row and the remedy.

    `nc` replaces the number of classes, `anchors` the anchors by so many placeholders per level, `heads` what the key
    `head_config` says about a layer with several heads.
    """
    try:
        effective = effective_config(config, nc, anchors)
        if heads is not None:
            effective["head_config"] = heads.plain()
        blueprint = _Draft(effective).blueprint()
    except ValueError as error:
        sentence = f"{where}: {error}"
        raise ConfigError(sentence if sentence.endswith(("?", ".")) else f"{sentence}.") from None
    written = config["nc"]  # type: ignore[index]
    if written != blueprint.head.num_classes:
        logger.info("%s: nc %s is replaced by %s", where, written, blueprint.head.num_classes)
    return blueprint


class _Draft:
    """Goes through the rows of a checked config, one after the other."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._rows: list[Row] = []
        anchors = config["anchors"]
        self._num_anchors = anchors if isinstance(anchors, int) else len(anchors[0]) // 2
        self._num_layers = 0
        self._num_weights = 0

    def blueprint(self) -> ModelSpec:
        lists = [*self._config["backbone"], *self._config["head"]]
        if not 2 <= len(lists) <= MAX_LAYERS:
            raise ValueError(f"{len(lists)} rows; a network has 2 to {MAX_LAYERS}")
        for index, written in enumerate(lists[:-1]):
            with_row = f"row {index} {_shown(written)}"
            try:
                self._rows.append(self._row(index, *_parts(written)))
            except ValueError as error:
                raise ValueError(f"{with_row}: {error}") from None
            self._num_layers += self._rows[-1].repeats * KINDS[self._rows[-1].kind].layers
            if self._num_layers > MAX_LAYERS:
                raise ValueError(f"{with_row}: the network would have more than {MAX_LAYERS:,} layers")
            self._num_weights += self._rows[-1].num_weights
            if self._num_weights > MAX_WEIGHTS:
                raise ValueError(f"{with_row}: the network would have more than {MAX_WEIGHTS:,} parameters")
        index = len(lists) - 1
        try:
            head = self._head(index, *_parts(lists[-1]))
        except ValueError as error:
            raise ValueError(f"row {index} {_shown(lists[-1])}: {error}") from None
        return ModelSpec(self._config, self._config["ch"], tuple(self._rows), head)

    def _row(self, index: int, origin: Any, number: Any, module: str, values: Sequence[Any]) -> Row:
        if module in HEADS:
            raise ValueError(f"{module} must be the last row")
        if module not in KINDS:
            raise ValueError(f"unknown module {module!r:.80}{similar(module, [*KINDS, *HEADS])}")
        kind = KINDS[module]
        sources = self._sources(index, origin, kind.inputs)
        ins = tuple(self._shape(source) for source in sources)
        repeats = self._repeats(number)
        args = bind(kind, self._positional(kind, repeats, values))
        out, num_weights = kind.shape(ins, args), kind.num_weights(ins, args)
        if max(out[1:]) > MAX_SIDE_PX or out.channels > MAX_CHANNELS:
            raise ValueError(f"gives {out.channels} maps of {out.height} x {out.width} for a {PROBE_PX} px picture")
        if kind.counts_itself:
            repeats = 1
        for _ in range(repeats - 1):
            # Built with identical arguments, so each must be able to read what the one before it wrote.
            if kind.inputs != "one" or out.channels != ins[0].channels:
                raise ValueError(
                    f"{repeats} in a row need as many output as input channels, "
                    f"not {ins[0].channels} -> {out.channels}; write them as separate rows"
                )
            out = kind.shape((out,), args)
        written = (origin, number, module, list(values))
        return Row(index, sources, repeats, module, args, ins, out, repeats * num_weights, written)

    def _positional(self, kind: Kind, repeats: int, values: Sequence[Any]) -> list[Value]:
        names = {"nc": self._config["nc"], "anchors": self._config["anchors"]}
        read = [read_literal(value, names) for value in values]
        if kind.scaled and read and is_whole(read[0], 1, MAX_CHANNELS):
            read[0] = self._scaled(read[0])
        if kind.counts_itself and read:
            read.insert(1, repeats)
        return read

    def _scaled(self, channels: Any) -> int:
        # The width of a prediction layer is a matter of classes and anchors, never of the width multiple.
        if channels == self._num_anchors * (self._config["nc"] + 5):
            return int(channels)
        return math.ceil(float(channels * self._config["width_multiple"]) / 8) * 8

    def _repeats(self, number: object) -> int:
        if not is_whole(number, 1, MAX_LAYERS):
            raise ValueError(f"number={number!r:.40} must be a whole number from 1 to {MAX_LAYERS}")
        count = int(number)  # type: ignore[call-overload]
        depth = float(self._config["depth_multiple"])
        repeats = max(round(count * depth), 1) if count > 1 else 1
        if self._num_layers + repeats > MAX_LAYERS:
            raise ValueError(f"its {repeats} repeats are too many; a network has at most {MAX_LAYERS} layers in all")
        return repeats

    def _sources(self, index: int, origin: Any, inputs: str) -> tuple[int, ...]:
        """Absolute rows of `from`, checked against how many inputs the module takes."""
        origins = origin if isinstance(origin, list | tuple) else [origin]
        wanted = {"one": "a single row number", "two": "a list of two rows", "many": "a list of rows"}[inputs]
        fits = {"one": not isinstance(origin, list | tuple), "two": len(origins) == 2, "many": len(origins) > 0}
        if not fits[inputs]:
            raise ValueError(f"from={origin!r:.60} must be {wanted}")
        sources = []
        for each in origins:
            if not is_whole(each, -math.inf, math.inf):
                raise ValueError(f"from={origin!r:.60} must be {wanted}")
            source = each if each >= 0 else index + each
            first = IMAGE if index == 0 else 0
            if not first <= source < index:
                raise ValueError(
                    f"from={each} is row {source}; it must name an earlier row, 0 to {index - 1}"
                    if index
                    else f"from={each}: the first row can only read the picture, -1"
                )
            sources.append(source)
        return tuple(sources)

    def _shape(self, source: int) -> Shape:
        return Shape(self._config["ch"], PROBE_PX, PROBE_PX) if source == IMAGE else self._rows[source].out

    def _head(self, index: int, origin: Any, number: Any, module: str, values: Sequence[Any]) -> Head:
        if module not in HEADS:
            raise ValueError(f"the last row must be a detection layer ({', '.join(HEADS)})")
        if not is_whole(number, 1, 1):
            raise ValueError(f"number={number!r:.40} must be 1")
        sources = self._sources(index, origin, "many")
        if len(sources) > MAX_LEVELS:
            raise ValueError(f"{len(sources)} inputs; a detection layer reads at most {MAX_LEVELS}")
        anchors, num_classes = self._head_arguments(values, num_levels=len(sources))
        per_level = 2 if module == "IAuxDetect" else 1
        if len(sources) != per_level * len(anchors):
            raise ValueError(
                f"{len(sources)} inputs for {len(anchors)} levels of anchors; {module} needs {per_level} per level"
            )
        shapes = [self._shape(source) for source in sources]
        _check_levels(shapes, len(anchors))
        strides = tuple(PROBE_PX / shape.height for shape in shapes[: len(anchors)])
        if _goes_the_other_way(anchors, strides):
            logger.info("Reversing anchor order")
            anchors = anchors[::-1]
        channels = tuple(shape.channels for shape in shapes)
        written = (origin, number, module, list(values))
        groups = self._groups(module, num_classes)
        head = Head(index, sources, module, num_classes, anchors, channels, strides, written, groups)
        if self._num_weights + head.num_outputs * sum(channels) > MAX_WEIGHTS:
            raise ValueError(f"the network would have more than {MAX_WEIGHTS:,} parameters")
        return head

    def _groups(self, module: str, num_classes: int) -> HeadConfig | None:
        written = self._config.get("head_config")
        if module not in MULTIHEADS:
            if written is not None:
                raise ValueError(f"{module} has one head; head_config is for {' and '.join(MULTIHEADS)}")
            return None
        if written is None:
            return contiguous_heads(num_classes)
        groups = head_config_of(written, where="head_config")
        if groups.nc != num_classes:
            raise ValueError(
                f"head_config shares out {groups.nc} classes, but there are {num_classes}. "
                "Give one for these classes with --head-config"
            )
        return groups

    def _head_arguments(self, values: Sequence[Any], num_levels: int) -> tuple[tuple[tuple[float, ...], ...], int]:
        names = {"nc": self._config["nc"], "anchors": self._config["anchors"]}
        read = [read_literal(value, names) for value in values]
        if len(read) != 2:
            raise ValueError(f"args={list(values)!r:.60} must be [nc, anchors]")
        num_classes, anchors = read
        if not is_whole(num_classes, 1, MAX_CLASSES):
            raise ValueError(f"nc={num_classes!r:.40} must be a whole number from 1 to {MAX_CLASSES}")
        if num_classes != self._config["nc"]:
            raise ValueError(f"{num_classes} classes, but nc is {self._config['nc']}; write nc here")
        check_anchors(anchors)
        if isinstance(anchors, int):
            # Placeholders, for auto-anchor to replace.
            anchors = (tuple(map(float, range(2 * anchors))),) * num_levels
        levels = tuple(tuple(map(float, level)) for level in anchors)  # type: ignore[union-attr,arg-type]
        return levels, int(num_classes)  # type: ignore[arg-type]


def _check_levels(shapes: Sequence[Shape], num_levels: int) -> None:
    """Maps that boxes can be read from: square for a square picture, and as large for the auxiliary levels."""
    for level, shape in enumerate(shapes):
        lead = shapes[level % num_levels]
        if shape.height != shape.width or shape.height > PROBE_PX:
            raise ValueError(
                f"input {level} has a map of {shape.height} x {shape.width} for a picture of {PROBE_PX} x {PROBE_PX}; "
                "a level has one stride, 1 or more"
            )
        if shape.height != lead.height:
            raise ValueError(
                f"input {level} has a map of {shape.height} x {shape.width}, "
                f"but its lead level has one of {lead.height} x {lead.width}"
            )


def _goes_the_other_way(anchors: Sequence[Sequence[float]], strides: Sequence[float]) -> bool:
    """Do the anchors shrink from level to level while the strides grow, or the other way round?"""
    growth = math.prod(anchors[-1][-2:]) - math.prod(anchors[0][:2])
    stride_growth = strides[-1] - strides[0]
    return (growth > 0, growth < 0) != (stride_growth > 0, stride_growth < 0)


def _parts(written: object) -> tuple[Any, Any, str, Sequence[Any]]:
    if not isinstance(written, list | tuple) or len(written) != 4:
        raise ValueError("a row is [from, number, module, args]")
    origin, number, module, values = written
    if not isinstance(module, str):
        raise ValueError(f"module {module!r:.60} must be a name")
    if not isinstance(values, list | tuple):
        raise ValueError(f"args={values!r:.60} must be a list")
    return origin, number, module, values


def _shown(written: object) -> str:
    text = repr(written)
    return text if len(text) <= 80 else f"{text[:76]} ..."
