"""Descriptions of networks and weights files: layers, parameters, GFLOPS, and the table and summary line of YOLOv7."""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatout.errors import CheckpointError, counted
from flatout.yolo.load_network import check_fit, is_fused, model_spec_of, num_classes_of
from flatout.yolo.model.configs import find_config, load_config
from flatout.yolo.model.deploy import fused
from flatout.yolo.model.layers import Detect, DownC
from flatout.yolo.model.module_specs import Shape
from flatout.yolo.model.network import Network
from flatout.yolo.model.spec import IMAGE, Head, ModelSpec, Row, parse_model, small_side
from flatout.yolo.weights import State, Weights, read_weights

COUNTED_PX = 640
"""GFLOPS are given for a square image of this side."""


# Size and cost of a network


class ModelSummary(NamedTuple):
    """The numbers of the summary line."""

    num_modules: int
    num_parameters: int
    num_gradients: int
    gflops: float

    def line(self) -> str:
        return (
            f"Model Summary: {self.num_modules} layers, {self.num_parameters} parameters, "
            f"{self.num_gradients} gradients, {self.gflops:.1f} GFLOPS"
        )


def describe(network: Network) -> ModelSummary:
    """Count modules, parameters and operations; nothing runs on the network's own device."""
    parameters = list(network.parameters())
    return ModelSummary(
        num_modules=sum(1 for _ in network.modules()),
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_gradients=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        gflops=count_gflops(network),
    )


def count_gflops(network: Network) -> float:
    """Operations for one image of COUNTED_PX, in billions, two per multiply-add.

    All convolutions that run in training are counted, auxiliary ones included, four multiply-adds per value of a batch
    norm, and one per upsampled value.
    """
    spec = network.spec
    side = small_side(spec, max(int(network.stride.max()), 32))
    shapes = {IMAGE: Shape(spec.channels, side, side)}
    pairs = 0
    # By arithmetic: running the rows takes torch up to a second, even on the meta device.
    for row, layer in zip(spec.rows, network.model, strict=False):
        ins = [shapes[source] for source in row.sources]
        outs = row.output_shapes(ins)
        repeats = layer if isinstance(layer, nn.Sequential) else [layer]
        pairs += sum(map(_pairs_of_layer, repeats, (ins[0], *outs), outs))
        shapes[row.index] = outs[-1]
    pairs += _pairs_of_head(network.head, [shapes[source] for source in spec.head.sources])
    return 2e-9 * (COUNTED_PX / side) ** 2 * pairs


def _pairs_of_layer(layer: nn.Module, before: Shape, after: Shape) -> int:
    """Multiply-adds of a module with one input and one output map."""
    pairs = 0
    for name, module in layer.named_modules():
        # All modules work at the size of the output, except the first convolution of DownC, which precedes the stride.
        counted = before if isinstance(layer, DownC) and name.startswith("cv1.") else after
        pixels = counted.height * counted.width
        if isinstance(module, nn.Conv2d):
            pairs += pixels * module.weight.numel()
        elif isinstance(module, nn.BatchNorm2d):
            pairs += 4 * pixels * module.num_features
        elif isinstance(module, nn.Upsample):
            pairs += pixels * after.channels
    return pairs


def _pairs_of_head(head: Detect, shapes: Sequence[Shape]) -> int:
    """Multiply-adds of the detection layer in training, counted while a copy runs on a single small image."""
    counts: list[int] = []
    # On the meta device only if the network is there, too: some operations import torch's compiler there, which takes
    # longer than to compute them.
    device = "meta" if head.anchors.is_meta else "cpu"
    small_head = copy.deepcopy(head).to(device).float().train()
    for module in small_head.modules():
        module.register_forward_hook(lambda module, inputs, output: counts.append(_pairs(module, inputs, output)))
        if isinstance(module, nn.BatchNorm2d):
            # Skipped: it does not change the shape, and raises for a single pixel in training.
            module.forward = nn.Identity().forward  # type: ignore[method-assign]
    with torch.no_grad():
        small_head([torch.zeros(1, *shape, device=device) for shape in shapes])
    return sum(counts)


def _pairs(module: nn.Module, inputs: tuple[Tensor, ...], output: object) -> int:
    """Multiply-adds of one call."""
    if isinstance(module, nn.Conv2d) and isinstance(output, Tensor):
        return output.numel() * module.weight[0].numel()
    if isinstance(module, Detect) and isinstance(output, list):
        # Its 1 x 1 convolutions are not called as modules, so they have no hook. The last inputs are only read by
        # auxiliary ones.
        return sum(raw.numel() * x.shape[1] for raw, x in zip(output, inputs[0], strict=False))
    return 4 * inputs[0].numel() if isinstance(module, nn.BatchNorm2d) else 0


def layer_table(network: Network) -> str:
    """One line per row: index, from, repeats, parameters, module, arguments."""
    lines = [f"{'':>4}{'from':>18}{'n':>4}{'params':>12}  {'module':<12} arguments"]
    for row in _rows(network):
        numbers = f"{row['index']:>4}{_short(row['from']):>18}{row['number']:>4}{row['parameters']:>12}"
        lines.append(f"{numbers}  {row['module']:<12} {', '.join(map(str, row['args']))}")
    return "\n".join(lines)


def _short(origin: object) -> str:
    text = str(origin).replace(" ", "")
    return text if len(text) <= 17 else f"{text[:13]}..]"


# Descriptions of configs and weights files


@dataclass(frozen=True)
class NetworkFacts:
    """The network that a config describes."""

    head: str
    """Detect, IDetect, IAuxDetect, or a layer with several heads."""
    num_classes: int
    channels: int
    """Channels of the input image."""
    strides: list[float]
    anchors_px: list[list[float]]
    """Per level: w0, h0, w1, h1, ..."""
    size: ModelSummary
    fused_size: ModelSummary
    """Size with batch norms folded into the convolutions, as for inference."""
    rows: list[dict[str, Any]]
    """Per row: index, from, number, module, args, parameters."""
    table: str
    """The rows as aligned text."""
    heads: list[dict[str, Any]] | None = None
    """Name, classes and weight of each head; None for a layer with one head."""


@dataclass(frozen=True)
class WeightsContents:
    """The contents of a weights file; None for a value that it does not store."""

    num_bytes: int
    format: str
    kind: str
    num_tensors: int
    num_values: int
    dtypes: dict[str, int]
    """dtype -> number of tensors."""
    num_classes: int | None
    names: list[str] | None
    epoch: int | None
    best_fitness: float | None
    has_ema: bool
    ema_updates: int | None
    has_optimizer: bool
    has_config: bool
    has_hyperparameters: bool
    has_training_results: bool


@dataclass(frozen=True)
class Description:
    """Description of a config or of a weights file; `network` or `contents` may be missing."""

    source: str
    network: NetworkFacts | None
    contents: WeightsContents | None
    problem: str | None = None
    """Why the network cannot be built from the weights file; None if it can."""

    def __str__(self) -> str:
        return as_text(self)


def describe_config(cfg: str | Path) -> Description:
    """Describe a config, given by path or by name."""
    path = find_config(cfg)
    return Description(str(path), _facts(parse_model(load_config(path), where=str(path))), None)


def describe_weights(path: str | Path, *, cfg: str | Path | None = None) -> Description:
    """Describe a weights file, and the network of its own config or of `cfg`."""
    weights = read_weights(path)
    contents = _contents(weights, Path(path).stat().st_size)
    try:
        spec = model_spec_of(weights, where=path, cfg=cfg, nc=num_classes_of(weights))
        facts = _facts(spec, weights.for_inference(), where=path)
    except CheckpointError as error:
        return Description(str(path), None, contents, str(error))
    return Description(str(path), facts, contents)


def _facts(spec: ModelSpec, state: State | None = None, where: str | Path = "") -> NetworkFacts:
    """Facts about a network built on the meta device; its anchors come from the state, if there is one."""
    head = spec.head
    with torch.device("meta"):
        network = Network(spec)
    inference = fused(network)
    anchors_px = [list(level) for level in head.anchors_px]
    if state is not None:
        check_fit(inference if is_fused(state) else network, state, where)
        anchors_px = state[f"model.{head.index}.anchor_grid"].float().flatten(1).tolist()
    return NetworkFacts(
        head=head.module,
        num_classes=head.num_classes,
        channels=spec.channels,
        strides=list(head.strides),
        anchors_px=anchors_px,
        size=describe(network),
        fused_size=describe(inference),
        rows=_rows(network),
        table=layer_table(network),
        heads=None if head.groups is None else [asdict(group) for group in head.groups.heads],
    )


def _rows(network: Network) -> list[dict[str, Any]]:
    rows: tuple[Row | Head, ...] = (*network.spec.rows, network.spec.head)
    return [
        dict(zip(("from", "number", "module", "args"), row.written, strict=True))
        | {"index": row.index, "parameters": sum(parameter.numel() for parameter in layer.parameters())}
        for row, layer in zip(rows, network.model, strict=True)
    ]


def _contents(weights: Weights, num_bytes: int) -> WeightsContents:
    tensors = weights.for_inference().values()
    return WeightsContents(
        num_bytes=num_bytes,
        format=weights.format,
        kind=weights.kind,
        num_tensors=len(tensors),
        num_values=sum(tensor.numel() for tensor in tensors),
        dtypes=dict(Counter(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)),
        num_classes=num_classes_of(weights),
        names=weights.names,
        epoch=weights.epoch,
        best_fitness=weights.best_fitness,
        has_ema=weights.ema is not None,
        ema_updates=weights.updates,
        has_optimizer=weights.optimizer is not None,
        has_config=weights.config is not None,
        has_hyperparameters=weights.hyp is not None,
        has_training_results=weights.training_results is not None,
    )


# The description as text


def as_text(description: Description) -> str:
    """The description as text: the table of layers, then a line per fact."""
    lines = network_lines(description.network) if description.network else []
    if description.contents:
        lines += ["", *contents_lines(description.source, description.contents)]
    if description.problem:
        lines.append(_line("network", description.problem))
    return "\n".join(lines).strip("\n")


def network_lines(network: NetworkFacts) -> list[str]:
    levels = zip(network.strides, network.anchors_px, strict=True)
    classes = counted(network.num_classes, "class")
    fused = network.fused_size.line().removeprefix("Model Summary: ")
    return [
        network.table,
        "",
        network.size.line(),
        _line("fused", fused),
        _line("head", f"{network.head}, {classes}, images with {network.channels} channels"),
        *(_line(f"stride {stride:g}", f"anchors {_anchor_pairs(anchors)} px") for stride, anchors in levels),
        *(_line(f"head {number}", _group(head)) for number, head in enumerate(network.heads or ())),
    ]


def _group(head: dict[str, Any]) -> str:
    classes = head["classes"]
    shown = ", ".join(map(str, classes[:12])) + (", ..." if len(classes) > 12 else "")
    return f"{head['name']}: {counted(len(classes), 'class')} ({shown}), weight {head['weight']:g}"


def contents_lines(source: str, contents: WeightsContents) -> list[str]:
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in contents.dtypes.items())
    yes_no = {True: "yes", False: "no"}
    updates = "" if contents.ema_updates is None else f", {contents.ema_updates} updates"
    return [
        _line("file", f"{source}: {contents.num_bytes:,} bytes, {contents.kind}, format {contents.format}"),
        _line("tensors", f"{contents.num_tensors} ({dtypes}), {contents.num_values:,} values"),
        _line("classes", _classes(contents)),
        _line("epoch", _epoch(contents.epoch)),
        _line("fitness", "not stored" if contents.best_fitness is None else f"best {contents.best_fitness:.5g}"),
        _line("EMA", f"{yes_no[contents.has_ema]}{updates}"),
        _line("optimizer", yes_no[contents.has_optimizer]),
        _line("config", yes_no[contents.has_config]),
        _line("hyp", yes_no[contents.has_hyperparameters]),
        _line("results", yes_no[contents.has_training_results]),
    ]


def _line(name: str, text: str) -> str:
    return f"{name:<10} {text}"


def _anchor_pairs(anchors: list[float]) -> str:
    return " ".join(f"{width:g},{height:g}" for width, height in zip(anchors[::2], anchors[1::2], strict=True))


def _classes(contents: WeightsContents) -> str:
    if contents.num_classes is None:
        return "not stored"
    # A name in a file may contain anything, including control codes for the terminal.
    shown = [name[:40] if name.isprintable() else repr(name[:40]) for name in (contents.names or [])[:10]]
    more = ", ..." if len(contents.names or []) > len(shown) else ""
    return f"{contents.num_classes}{': ' if shown else ''}{', '.join(shown)}{more}"


def _epoch(epoch: int | None) -> str:
    if epoch is None:
        return "not stored"
    return f"{epoch} (from 0)" if epoch >= 0 else f"{epoch}: the training has ended"
