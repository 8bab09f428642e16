"""Model configs parsed into a checked ModelSpec; ConfigError names the row and says what to write instead.

    config --overrides--> rows --literals, channels, sizes--> ModelSpec --network.py--> Network

Pure arithmetic, no torch. Everything that cannot be built is refused here, so that building never fails and never
allocates more than a network of MAX_WEIGHTS.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from flatout.errors import ConfigError
from flatout.yolo.model.module_specs import (
    HEADS,
    MAX_CHANNELS,
    MAX_CLASSES,
    MODULE_SPECS,
    MULTIHEADS,
    ModuleSpec,
    Shape,
    Value,
    bind,
    check_anchors,
    effective_config,
    is_whole,
    read_literal,
    suggestion,
)
from flatout.yolo.multihead.head_config import HeadConfig, contiguous_heads, head_config_of

logger = logging.getLogger(__name__)

IMAGE = -1
"""The source of a row that reads the input image."""

PROBE_PX = 256
"""Side of the image for which all shapes and strides are computed."""

MAX_LAYERS = 2_000
"""Rows with their repeats and the layers inside them; the largest network we ship has about 300."""
MAX_LEVELS = 64
"""Inputs of the detection layer; the networks we ship have up to 8."""
MAX_WEIGHTS = 4_000_000_000
MAX_SIDE_PX = 16 * PROBE_PX
"""Largest output of a row for an image of PROBE_PX; otherwise successive upsampling rows could grow without limit."""


@dataclass(frozen=True)
class Row:
    """One layer: its inputs, module, arguments and output shape."""

    index: int
    sources: tuple[int, ...]
    """Absolute row numbers; IMAGE is the input image."""
    repeats: int
    module: str
    args: Mapping[str, Any]
    ins: tuple[Shape, ...]
    """Shapes of the inputs, for an image of PROBE_PX."""
    out: Shape
    num_weights: int
    written: tuple[Any, ...]
    """[from, number, module, args] as in the YAML, for the table that is printed."""

    def output_shapes(self, ins: Sequence[Shape]) -> list[Shape]:
        """Output shape of each repeat for other inputs than `ins`; ValueError if a repeat cannot read its input."""
        outs: list[Shape] = []
        for _ in range(self.repeats):
            outs.append(MODULE_SPECS[self.module].shape(outs[-1:] or ins, self.args))
        return outs


@dataclass(frozen=True)
class Head:
    """The detection layer, always the last row."""

    index: int
    sources: tuple[int, ...]
    module: str
    num_classes: int
    anchors_px: tuple[tuple[float, ...], ...]
    """Per level: w0, h0, w1, h1, ... in pixels of the input."""
    channels: tuple[int, ...]
    """Channels of each input; the auxiliary levels follow the lead levels."""
    strides: tuple[float, ...]
    """Strides of the lead levels."""
    written: tuple[Any, ...]
    groups: HeadConfig | None = None
    """Which head predicts which classes; None for a layer with one head."""

    @property
    def num_levels(self) -> int:
        return len(self.anchors_px)

    @property
    def num_anchors(self) -> int:
        """Anchors per level."""
        return len(self.anchors_px[0]) // 2

    @property
    def num_outputs(self) -> int:
        """Output channels per level: anchors x (x, y, w, h, objectness, classes), summed over all heads."""
        per_anchor = self.num_classes + 5 if self.groups is None else sum(self.groups.outputs_H)
        return self.num_anchors * per_anchor

    @property
    def lead_sources(self) -> tuple[int, ...]:
        return self.sources[: self.num_levels]


@dataclass(frozen=True)
class ModelSpec:
    """A complete, checked description of a network."""

    config: dict[str, Any]
    """A copy of the YAML's content with overrides applied, and always with `ch`."""
    channels: int
    rows: tuple[Row, ...]
    head: Head

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: it is immutable, so copies of a network share it."""
        return self


def parse_model(
    config: object,
    *,
    nc: int | None = None,
    anchors: float | None = None,
    heads: HeadConfig | None = None,
    where: str = "model config",
) -> ModelSpec:
    """Parse a model config; ConfigError names `where`, the row and the remedy.

    `nc` overrides the number of classes. `anchors` replaces the anchors by that many placeholders per level. `heads`
    overrides the key `head_config` of a layer with several heads.
    """
    try:
        effective = effective_config(config, nc, anchors)
        if heads is not None:
            effective["head_config"] = heads.plain()
        spec = _Parser(effective).parse()
    except ValueError as error:
        sentence = f"{where}: {error}"
        raise ConfigError(sentence if sentence.endswith(("?", ".")) else f"{sentence}.") from None
    written = config["nc"]  # type: ignore[index]
    if written != spec.head.num_classes:
        logger.info("%s: nc %s is replaced by %s", where, written, spec.head.num_classes)
    return spec


def needed_rows(rows: Sequence[Row], wanted: Iterable[int]) -> set[int]:
    """The wanted rows and all rows that they depend on, directly or not."""
    needed = set(wanted)
    for row in reversed(rows):
        if row.index in needed:
            needed.update(row.sources)
    return needed


def small_side(spec: ModelSpec, at_least_px: int) -> int:
    """Side of a small square image on which the network surely runs: at_least_px, twice that, ..., or PROBE_PX.

    For an image smaller than PROBE_PX, a row may get an empty input, or maps whose sizes no longer match.
    """
    doubled = (at_least_px << times for times in range(PROBE_PX.bit_length()))
    return next((side for side in doubled if side < PROBE_PX and _runs_on(spec, side)), PROBE_PX)


def _runs_on(spec: ModelSpec, side_px: int) -> bool:
    shapes = {IMAGE: Shape(spec.channels, side_px, side_px)}
    try:
        for row in spec.rows:
            shapes[row.index] = row.output_shapes([shapes[source] for source in row.sources])[-1]
    except ValueError:
        return False
    return True


class _Parser:
    """Parses the rows of a checked config, in order."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._rows: list[Row] = []
        anchors = config["anchors"]
        self._num_anchors = anchors if isinstance(anchors, int) else len(anchors[0]) // 2
        self._num_layers = 0
        self._num_weights = 0

    def parse(self) -> ModelSpec:
        lists = [*self._config["backbone"], *self._config["head"]]
        if not 2 <= len(lists) <= MAX_LAYERS:
            raise ValueError(f"{len(lists)} rows; a network has 2 to {MAX_LAYERS}")
        for index, written in enumerate(lists):
            try:
                if index == len(lists) - 1:
                    head = self._head(index, *_split_row(written))
                else:
                    self._add_row(self._row(index, *_split_row(written)))
            except ValueError as error:
                raise ValueError(f"row {index} {_shortened(written)}: {error}") from None
        return ModelSpec(self._config, self._config["ch"], tuple(self._rows), head)

    def _add_row(self, row: Row) -> None:
        self._rows.append(row)
        self._num_layers += row.repeats * MODULE_SPECS[row.module].layers
        if self._num_layers > MAX_LAYERS:
            raise ValueError(f"the network would have more than {MAX_LAYERS:,} layers")
        self._num_weights += row.num_weights
        if self._num_weights > MAX_WEIGHTS:
            raise ValueError(f"the network would have more than {MAX_WEIGHTS:,} parameters")

    def _row(self, index: int, origin: Any, number: Any, module: str, values: Sequence[Any]) -> Row:
        if module in HEADS:
            raise ValueError(f"{module} must be the last row")
        if module not in MODULE_SPECS:
            raise ValueError(f"unknown module {module!r:.80}{suggestion(module, [*MODULE_SPECS, *HEADS])}")
        spec = MODULE_SPECS[module]
        sources = self._sources(index, origin, spec.inputs)
        ins = tuple(self._shape(source) for source in sources)
        repeats = self._repeats(number)
        args = bind(spec, self._positional(spec, repeats, values))
        out, num_weights = spec.shape(ins, args), spec.num_weights(ins, args)
        if max(out[1:]) > MAX_SIDE_PX or out.channels > MAX_CHANNELS:
            raise ValueError(
                f"gives {out.channels} maps of {out.height} x {out.width} for a {PROBE_PX} px image; "
                f"the limit is {MAX_CHANNELS} maps of {MAX_SIDE_PX} x {MAX_SIDE_PX}"
            )
        if spec.takes_repeats:
            repeats = 1
        for _ in range(repeats - 1):
            # All repeats are built with the same arguments, so each must be able to read the output of the one before.
            if spec.inputs != "one" or out.channels != ins[0].channels:
                raise ValueError(
                    f"{repeats} repeats need as many output as input channels, "
                    f"not {ins[0].channels} -> {out.channels}; write them as separate rows"
                )
            out = spec.shape((out,), args)
        written = (origin, number, module, list(values))
        return Row(index, sources, repeats, module, args, ins, out, repeats * num_weights, written)

    def _positional(self, spec: ModuleSpec, repeats: int, values: Sequence[Any]) -> list[Value]:
        read = self._literals(values)
        if spec.scaled and read and is_whole(read[0], 1, MAX_CHANNELS):
            read[0] = self._scaled(read[0])
        if spec.takes_repeats and read:
            read.insert(1, repeats)
        return read

    def _literals(self, values: Sequence[Any]) -> list[Value]:
        names = {"nc": self._config["nc"], "anchors": self._config["anchors"]}
        return [read_literal(value, names) for value in values]

    def _scaled(self, channels: Any) -> int:
        # The width of a prediction layer follows from classes and anchors; the width multiple does not apply to it.
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
        """Absolute row numbers of `from`, checked against how many inputs the module takes."""
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
                    else f"from={each}: the first row can only read the image, -1"
                )
            sources.append(source)
        return tuple(sources)

    def _shape(self, source: int) -> Shape:
        return Shape(self._config["ch"], PROBE_PX, PROBE_PX) if source == IMAGE else self._rows[source].out

    def _head(self, index: int, origin: Any, number: Any, module: str, values: Sequence[Any]) -> Head:
        if module not in HEADS:
            raise ValueError(f"the last row must be a detection layer ({', '.join(HEADS)})")
        if not is_whole(number, 1, 1):
            raise ValueError(f"number={number!r:.40} must be 1: a detection layer cannot be repeated")
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
        if _are_reversed(anchors, strides):
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
                f"head_config assigns {groups.nc} classes, but the network has {num_classes}. "
                "Use --head-config with a file for these classes"
            )
        return groups

    def _head_arguments(self, values: Sequence[Any], num_levels: int) -> tuple[tuple[tuple[float, ...], ...], int]:
        read = self._literals(values)
        if len(read) != 2:
            raise ValueError(f"args={list(values)!r:.60} must be [nc, anchors]")
        num_classes, anchors = read
        if not is_whole(num_classes, 1, MAX_CLASSES):
            raise ValueError(f"nc={num_classes!r:.40} must be a whole number from 1 to {MAX_CLASSES}")
        if num_classes != self._config["nc"]:
            raise ValueError(f"{num_classes} classes, but nc is {self._config['nc']}; write nc here")
        check_anchors(anchors)
        if isinstance(anchors, int):
            # Placeholders, which auto-anchor replaces.
            anchors = (tuple(map(float, range(2 * anchors))),) * num_levels
        levels = tuple(tuple(map(float, level)) for level in anchors)  # type: ignore[union-attr,arg-type]
        return levels, int(num_classes)  # type: ignore[arg-type]


def _check_levels(shapes: Sequence[Shape], num_levels: int) -> None:
    """Check that maps are square for a square image, and auxiliary levels as large as their lead levels."""
    for level, shape in enumerate(shapes):
        lead = shapes[level % num_levels]
        if shape.height != shape.width or shape.height > PROBE_PX:
            raise ValueError(
                f"input {level} has a map of {shape.height} x {shape.width} for an image of {PROBE_PX} x {PROBE_PX}; "
                "a level must have one stride, and it must be at least 1"
            )
        if shape.height != lead.height:
            raise ValueError(
                f"input {level} has a map of {shape.height} x {shape.width}, "
                f"but its lead level has one of {lead.height} x {lead.width}"
            )


def _are_reversed(anchors: Sequence[Sequence[float]], strides: Sequence[float]) -> bool:
    """Whether the anchors shrink from level to level while the strides grow, or the other way round."""
    growth = math.prod(anchors[-1][-2:]) - math.prod(anchors[0][:2])
    stride_growth = strides[-1] - strides[0]
    return (growth > 0, growth < 0) != (stride_growth > 0, stride_growth < 0)


def _split_row(written: object) -> tuple[Any, Any, str, Sequence[Any]]:
    if not isinstance(written, list | tuple) or len(written) != 4:
        raise ValueError("a row is [from, number, module, args]")
    origin, number, module, values = written
    if not isinstance(module, str):
        raise ValueError(f"module {module!r:.60} must be a name")
    if not isinstance(values, list | tuple):
        raise ValueError(f"args={values!r:.60} must be a list")
    return origin, number, module, values


def _shortened(written: object) -> str:
    text = repr(written)
    return text if len(text) <= 80 else f"{text[:76]} ..."
