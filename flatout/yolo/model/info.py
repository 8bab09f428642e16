"""How large is a network, and what does a picture cost? The table and the line that YOLOv7 prints."""

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatout.yolo.model.blueprint import Head, Row
from flatout.yolo.model.heads import Detect
from flatout.yolo.model.network import Network

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
    """Count modules and parameters, and run one small picture through a copy to count operations."""
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
    side = max(int(network.stride.max()), 32)
    counts: list[int] = []
    # On the meta device only shapes are computed.
    shadow = copy.deepcopy(network).to("meta").train()
    for module in shadow.modules():
        module.register_forward_hook(lambda module, inputs, output: counts.append(_pairs(module, inputs, output)))
        if isinstance(module, nn.BatchNorm2d):
            # It keeps the shape; torch would take two thirds of the time to find that out.
            module.forward = nn.Identity().forward  # type: ignore[method-assign]
    shadow(torch.empty(1, network.blueprint.channels, side, side, device="meta"))
    return 2e-9 * (COUNTED_PX / side) ** 2 * sum(counts)


def _pairs(module: nn.Module, inputs: tuple[Tensor, ...], output: object) -> int:
    """Multiply-add pairs of one call."""
    if isinstance(module, nn.Conv2d) and isinstance(output, Tensor):
        return output.numel() * module.weight[0].numel()
    if isinstance(module, Detect) and isinstance(output, list):
        # Its lead convolutions are not called as modules.
        return sum(raw.numel() * module.folded(level)[0][0].numel() for level, raw in enumerate(output[: module.nl]))
    if isinstance(module, nn.BatchNorm2d):
        return 4 * inputs[0].numel()
    if isinstance(module, nn.Upsample) and isinstance(output, Tensor):
        return output.numel()
    return 0


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
