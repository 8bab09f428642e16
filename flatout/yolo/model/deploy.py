"""A training network in its deploy form: a plain detection layer, no auxiliary rows, linear parts folded.

Weights stay unfused (batch norms and RepConv branches), so that a deploy file can still be inspected or fused later.
"""

import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.yolo.model.layers import Conv, IDetect, RepConv
from flatout.yolo.model.network import Network, build_network
from flatout.yolo.model.spec import ModelSpec, needed_rows


def deploy_config(blueprint: ModelSpec) -> dict[str, Any]:
    """The deploy config of a training config: detection layer `Detect`, rows that no box depends on gone."""
    kept = _kept_rows(blueprint)
    config = dict(blueprint.config)
    num_backbone = len(config["backbone"])
    renumbered = {old: new for new, old in enumerate([*kept, blueprint.head.index])}
    rows = [blueprint.rows[index].written for index in kept]
    written = [[_moved(row[0], old, renumbered), *row[1:]] for old, row in zip(kept, rows, strict=True)]
    head = blueprint.head
    lead = [_moved(source, head.index, renumbered) for source in head.lead_sources]
    # Several heads stay as they are: there is nothing around their convolutions to fold in.
    written.append([lead, 1, head.kind if head.groups else "Detect", head.written[3]])
    split = sum(index < num_backbone for index in kept)
    return config | {"backbone": written[:split], "head": written[split:]}


def to_deploy(network: Network) -> Network:
    """A new network in deploy form, in evaluation mode, with the classes' names and this network's weights."""
    blueprint = network.blueprint
    with torch.device("meta"):  # every value comes from the training network
        deployed = build_network(deploy_config(blueprint), where="deploy config")
    new_row = {old: new for new, old in enumerate([*_kept_rows(blueprint), blueprint.head.index])}
    state = deployed.state_dict()
    for key, value in network.state_dict().items():
        old, inner = re.fullmatch(r"model\.(\d+)\.(.*)", key).groups()  # type: ignore[union-attr]
        if int(old) in new_row and (name := f"model.{new_row[int(old)]}.{inner}") in state:
            state[name] = value.clone()
    with torch.no_grad():
        for level in () if blueprint.head.groups else range(network.head.nl):
            prefix = f"model.{new_row[blueprint.head.index]}.m.{level}"
            weight, bias = network.head.folded(level)
            state[f"{prefix}.weight"], state[f"{prefix}.bias"] = weight.clone(), bias.clone()
    if any(value.is_meta for value in state.values()):
        raise ValueError("a fused network cannot be converted; convert it to its deploy form before fusing.")
    deployed.load_state_dict(state, assign=True)
    deployed.names = list(network.names)
    return deployed.eval()


@torch.no_grad()
def largest_difference(one: Network, other: Network, *, side_px: int = 128) -> float:
    """Largest difference, in pixels or score, between the boxes of two networks on a random picture, in float64."""
    noise = torch.Generator().manual_seed(0)
    picture = torch.rand(1, one.blueprint.channels, side_px, side_px, generator=noise).double()
    boxes = [copy.deepcopy(network).cpu().double().eval()(picture).decoded for network in (one, other)]
    return float((boxes[0] - boxes[1]).abs().max())


def _kept_rows(blueprint: ModelSpec) -> list[int]:
    lead = needed_rows(blueprint.rows, blueprint.head.lead_sources)
    return [row.index for row in blueprint.rows if row.index in lead]


def _moved(origin: Any, row: int, renumbered: dict[int, int]) -> Any:
    """`from` of a row after rows before it were dropped."""
    if isinstance(origin, list | tuple):
        return [_moved(each, row, renumbered) for each in origin]
    if origin >= 0:
        return renumbered[origin]
    return renumbered[row + origin] - renumbered[row] if row + origin >= 0 else origin


# Fold what is linear at inference into the convolutions: batch norms, RepConv's branches, implicit vectors.


@torch.no_grad()
def fused(network: Network) -> Network:
    """A copy in evaluation mode that computes the same with fewer passes; the original is untouched.

    Convolutions that swallowed a batch norm no longer ask for gradients; YOLOv7's info line counts them so.
    """
    # What is about to be replaced is not copied: nearly all of it.
    network = copy.deepcopy(network, {id(weight): weight for weight in _replaced(network)}).eval()
    for module in network.modules():
        if isinstance(module, Conv) and module.bn is not None:
            module.conv = _with_weights(module.conv, *fold_batch_norm(module.conv.weight, module.bn))
            module.conv.requires_grad_(False)
            module.bn = None
        elif isinstance(module, RepConv) and module.rbr_reparam is None:
            fuse_branches(module)
        elif isinstance(module, IDetect):
            fuse_implicit(module)
    return network


def _replaced(network: Network) -> Iterator[Tensor]:
    """The weights that a fused network has others for."""
    for module in network.modules():
        if isinstance(module, Conv) and module.bn is not None:
            yield module.conv.weight
        elif isinstance(module, RepConv) and module.rbr_reparam is None:
            yield from (each.weight for each in module.modules() if isinstance(each, nn.Conv2d))


def fold_batch_norm(weight: Tensor, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Weight and bias of the convolution that does what `weight` and then `norm` did."""
    assert norm.running_mean is not None and norm.running_var is not None
    if weight.is_meta:
        # There only shapes are computed, and torch takes milliseconds to find out that these stay the same.
        return torch.empty_like(weight), torch.empty_like(norm.bias)
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    return weight * scale.view(-1, 1, 1, 1), norm.bias - norm.running_mean * scale


def _with_weights(conv: nn.Conv2d, weight: Tensor, bias: Tensor) -> nn.Conv2d:
    """A convolution like `conv` with other weights; made anew so that the old one stays as it was."""
    made = copy.copy(conv)
    made._parameters = {"weight": nn.Parameter(weight), "bias": nn.Parameter(bias)}
    return made


def fuse_branches(module: RepConv) -> None:
    assert module.rbr_dense is not None and module.rbr_1x1 is not None
    dense, norm = module.rbr_dense
    assert isinstance(dense, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
    weight, bias = fold_batch_norm(dense.weight, norm)
    point, norm = module.rbr_1x1
    assert isinstance(point, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
    branches = [fold_batch_norm(point.weight, norm)]
    if module.rbr_identity is not None:
        branches.append(fold_batch_norm(_unit_kernel(point), module.rbr_identity))
    for point_weight, point_bias in branches:
        weight, bias = weight + F.pad(point_weight, [1, 1, 1, 1]), bias + point_bias
    module.rbr_reparam = _with_weights(dense, weight, bias)
    module.rbr_dense = module.rbr_1x1 = module.rbr_identity = None


def _unit_kernel(like: nn.Conv2d) -> Tensor:
    """The 1x1 kernel that changes nothing, shaped like that of `like` (groups included)."""
    weight = torch.zeros_like(like.weight)
    channels = torch.arange(len(weight), device=weight.device)
    weight[channels, channels % weight.shape[1]] = 1
    return weight


def fuse_implicit(head: IDetect) -> None:
    # The vectors stay in the state_dict, unused, so that fused and unfused files name the same things.
    for level, conv in enumerate(head.m):
        assert isinstance(conv, nn.Conv2d)
        head.m[level] = _with_weights(conv, *head.folded(level))
    head.fused = True
