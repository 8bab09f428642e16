"""How large is a network, and what does a picture cost? The table and the line that YOLOv7 prints."""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatout.yolo.model.heads import Detect
from flatout.yolo.model.layers import DownC
from flatout.yolo.model.module_specs import Shape
from flatout.yolo.model.network import Network
from flatout.yolo.model.spec import IMAGE, Head, Row, small_side

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
