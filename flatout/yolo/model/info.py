"""How large is a network, and what does a picture cost? The table and the line that YOLOv7 prints.

What is a network, and what does a file of weights hold? Facts for people and for programs.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatout.errors import CheckpointError
from flatout.yolo.load_network import blueprint_of, check_fit, is_fused, num_classes_of
from flatout.yolo.model.configs import find_config, load_config
from flatout.yolo.model.deploy import fused
from flatout.yolo.model.layers import Detect, DownC
from flatout.yolo.model.module_specs import Shape
from flatout.yolo.model.network import Network
from flatout.yolo.model.spec import IMAGE, Head, ModelSpec, Row, parse_model, small_side
from flatout.yolo.weights import State, Weights, read_weights

COUNTED_PX = 640
"""GFLOPS are given for a square picture of this side."""


class Info(NamedTuple):
    """What the summary line says."""

    num_modules: int
    num_parameters: int
    num_gradients: int
    gflops: float

    def line(self) -> str:
        return (
            f"Model Summary: {self.num_modules} layers, {self.num_parameters} parameters, "
            f"{self.num_gradients} gradients, {self.gflops:.1f} GFLOPS"
        )


def describe(network: Network) -> Info:
    """Count modules, parameters and operations; nothing is run on the network's own device."""
    parameters = list(network.parameters())
    return Info(
        num_modules=sum(1 for _ in network.modules()),
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_gradients=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        gflops=count_gflops(network),
    )


def count_gflops(network: Network) -> float:
    """Operations of one picture of COUNTED_PX: two per multiplication of convolutions (all that run, auxiliary ones
    included), four pairs per batch norm value, one pair per upsampled value."""
    blueprint = network.blueprint
    side = small_side(blueprint, max(int(network.stride.max()), 32))
    shapes = {IMAGE: Shape(blueprint.channels, side, side)}
    pairs = 0
    # By arithmetic: running the rows, even without memory on the meta device, takes torch up to a second.
    for row, layer in zip(blueprint.rows, network.model, strict=False):
        ins = [shapes[source] for source in row.sources]
        outs = row.outs_of(ins)
        repeats = layer if isinstance(layer, nn.Sequential) else [layer]
        pairs += sum(map(_pairs_of_layer, repeats, (ins[0], *outs), outs))
        shapes[row.index] = outs[-1]
    pairs += _pairs_of_head(network.head, [shapes[source] for source in blueprint.head.sources])
    return 2e-9 * (COUNTED_PX / side) ** 2 * pairs


def _pairs_of_layer(layer: nn.Module, before: Shape, after: Shape) -> int:
    """Multiply-add pairs of a module that makes one map of another."""
    pairs = 0
    for name, module in layer.named_modules():
        # All convolutions look at the map that comes out, except the first of DownC, which comes before the stride.
        seen = before if isinstance(layer, DownC) and name.startswith("cv1.") else after
        pixels = seen.height * seen.width
        if isinstance(module, nn.Conv2d):
            pairs += pixels * module.weight.numel()
        elif isinstance(module, nn.BatchNorm2d):
            pairs += 4 * pixels * module.num_features
        elif isinstance(module, nn.Upsample):
            pairs += pixels * after.channels
    return pairs


def _pairs_of_head(head: Detect, shapes: Sequence[Shape]) -> int:
    """Multiply-add pairs of the detection layer in training: counted while a copy runs on the meta device, where only
    shapes are computed."""
    counts: list[int] = []
    shadow = copy.deepcopy(head).to("meta").train()
    for module in shadow.modules():
        module.register_forward_hook(lambda module, inputs, output: counts.append(_pairs(module, inputs, output)))
        if isinstance(module, nn.BatchNorm2d):
            # It keeps the shape, and refuses to train on a single pixel.
            module.forward = nn.Identity().forward  # type: ignore[method-assign]
    shadow([torch.empty(1, *shape, dtype=head.anchors.dtype, device="meta") for shape in shapes])
    return sum(counts)


def _pairs(module: nn.Module, inputs: tuple[Tensor, ...], output: object) -> int:
    """Multiply-add pairs of one call."""
    if isinstance(module, nn.Conv2d) and isinstance(output, Tensor):
        return output.numel() * module.weight[0].numel()
    if isinstance(module, Detect) and isinstance(output, list):
        # Its lead convolutions are not called as modules.
        return sum(raw.numel() * module.folded(level)[0][0].numel() for level, raw in enumerate(output[: module.nl]))
    return 4 * inputs[0].numel() if isinstance(module, nn.BatchNorm2d) else 0


def layer_table(network: Network) -> str:
    """One line per row: index, from, repeats, parameters, module, arguments."""
    blueprint = network.blueprint
    lines = [f"{'':>4}{'from':>18}{'n':>4}{'params':>12}  {'module':<12} arguments"]
    rows: tuple[Row | Head, ...] = (*blueprint.rows, blueprint.head)
    for row, layer in zip(rows, network.model, strict=True):
        origin, number, kind, args = row.written
        count = sum(parameter.numel() for parameter in layer.parameters())
        shown = ", ".join(map(str, args))
        lines.append(f"{row.index:>4}{_short(origin):>18}{number:>4}{count:>12}  {kind:<12} {shown}")
    return "\n".join(lines)


def _short(origin: object) -> str:
    text = str(origin).replace(" ", "")
    return text if len(text) <= 17 else f"{text[:13]}..]"


@dataclass(frozen=True)
class NetworkFacts:
    """What a config builds."""

    head: str
    """Detect, IDetect, IAuxDetect, or a layer with several heads."""
    num_classes: int
    channels: int
    """Of the picture."""
    strides: list[float]
    anchors_px: list[list[float]]
    """Per level: w0, h0, w1, h1, ..."""
    size: Info
    fused_size: Info
    """With batch norms folded into the convolutions, as for inference."""
    rows: list[dict[str, Any]]
    """index, from, number, module, args, parameters."""
    table: str
    """The rows as aligned text."""
    heads: list[dict[str, Any]] | None = None
    """Of a layer with several: name, classes and weight of each."""


@dataclass(frozen=True)
class Contents:
    """What a file of weights holds; None is what it does not say."""

    num_bytes: int
    format: str
    kind: str
    num_tensors: int
    num_values: int
    dtypes: dict[str, int]
    """dtype -> how many tensors have it."""
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
    """Of a config, or of a file of weights; one of the two parts may be missing."""

    source: str
    network: NetworkFacts | None
    contents: Contents | None
    problem: str | None = None
    """Why the network of a file of weights cannot be built from it."""


def describe_config(cfg: str | Path) -> Description:
    """A config, by path or by name."""
    path = find_config(cfg)
    return Description(str(path), _facts(parse_model(load_config(path), where=str(path))), None)


def describe_weights(path: str | Path, *, cfg: str | Path | None = None) -> Description:
    """A file of weights, and the network that its own config (or `cfg`) builds."""
    weights = read_weights(path)
    contents = _contents(weights, Path(path).stat().st_size)
    try:
        blueprint = blueprint_of(weights, where=path, cfg=cfg, nc=num_classes_of(weights))
        facts = _facts(blueprint, weights.for_inference(), where=path)
    except CheckpointError as error:
        return Description(str(path), None, contents, str(error))
    return Description(str(path), facts, contents)


def _facts(blueprint: ModelSpec, state: State | None = None, where: str | Path = "") -> NetworkFacts:
    """Facts of a network that is built without memory; its anchors are those of the state, if there is one."""
    head = blueprint.head
    with torch.device("meta"):
        network = Network(blueprint)
    inference = fused(network)
    anchors_px = [list(level) for level in head.anchors_px]
    if state is not None:
        check_fit(inference if is_fused(state) else network, state, where)
        anchors_px = state[f"model.{head.index}.anchor_grid"].float().flatten(1).tolist()
    return NetworkFacts(
        head=head.kind,
        num_classes=head.num_classes,
        channels=blueprint.channels,
        strides=list(head.strides),
        anchors_px=anchors_px,
        size=describe(network),
        fused_size=describe(inference),
        rows=_rows(network),
        table=layer_table(network),
        heads=None if head.groups is None else [asdict(group) for group in head.groups.heads],
    )


def _rows(network: Network) -> list[dict[str, Any]]:
    rows: tuple[Row | Head, ...] = (*network.blueprint.rows, network.blueprint.head)
    return [
        dict(zip(("from", "number", "module", "args"), row.written, strict=True))
        | {"index": row.index, "parameters": sum(parameter.numel() for parameter in layer.parameters())}
        for row, layer in zip(rows, network.model, strict=True)
    ]


def _contents(weights: Weights, num_bytes: int) -> Contents:
    tensors = weights.for_inference().values()
    return Contents(
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
