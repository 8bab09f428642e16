"""Deploy form and fusing: simpler networks for inference that give the same boxes.

    to_deploy    a plain detection layer without auxiliary rows; implicit vectors folded into its convolutions
    fused        batch norms, RepConv branches and implicit vectors folded into the convolutions

The deploy form keeps batch norms and RepConv branches, so that a deploy file can still be inspected or fused later.
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

# Deploy form


def deploy_config(spec: ModelSpec) -> dict[str, Any]:
    """The deploy config of a training config: detection layer `Detect`, without rows that no box depends on."""
    kept = _kept_rows(spec)
    config = dict(spec.config)
    num_backbone = len(config["backbone"])
    renumbered = {old: new for new, old in enumerate([*kept, spec.head.index])}
    rows = [spec.rows[index].written for index in kept]
    written = [[_moved(row[0], old, renumbered), *row[1:]] for old, row in zip(kept, rows, strict=True)]
    head = spec.head
    lead = [_moved(source, head.index, renumbered) for source in head.lead_sources]
    # A layer with several heads is kept: there is nothing around its convolutions to fold in.
    written.append([lead, 1, head.module if head.groups else "Detect", head.written[3]])
    split = sum(index < num_backbone for index in kept)
    return config | {"backbone": written[:split], "head": written[split:]}


def to_deploy(network: Network) -> Network:
    """A new network in deploy form, in evaluation mode, with the class names and weights of `network`.

    ValueError for a fused network.
    """
    spec = network.spec
    with torch.device("meta"):  # every value comes from the training network
        deployed = build_network(deploy_config(spec), where="deploy config")
    new_row = {old: new for new, old in enumerate([*_kept_rows(spec), spec.head.index])}
    state = deployed.state_dict()
    for key, value in network.state_dict().items():
        old, inner = re.fullmatch(r"model\.(\d+)\.(.*)", key).groups()  # type: ignore[union-attr]
        if int(old) in new_row and (name := f"model.{new_row[int(old)]}.{inner}") in state:
            state[name] = value.clone()
    with torch.no_grad():
        for level in () if spec.head.groups else range(network.head.nl):
            prefix = f"model.{new_row[spec.head.index]}.m.{level}"
            weight, bias = network.head.folded_weights(level)
            state[f"{prefix}.weight"], state[f"{prefix}.bias"] = weight.clone(), bias.clone()
    if any(value.is_meta for value in state.values()):
        raise ValueError("a fused network cannot be converted to its deploy form; convert it before fusing.")
    deployed.load_state_dict(state, assign=True)
    deployed.names = list(network.names)
    return deployed.eval()


@torch.no_grad()
def largest_difference(one: Network, other: Network, *, side_px: int = 128) -> float:
    """Largest difference, in pixels or score, between the boxes of two networks on a random image, in float64."""
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(1, one.spec.channels, side_px, side_px, generator=generator).double()
    boxes = [copy.deepcopy(network).cpu().double().eval()(image).decoded for network in (one, other)]
    return float((boxes[0] - boxes[1]).abs().max())


def _kept_rows(spec: ModelSpec) -> list[int]:
    lead = needed_rows(spec.rows, spec.head.lead_sources)
    return [row.index for row in spec.rows if row.index in lead]


def _moved(origin: Any, row: int, renumbered: dict[int, int]) -> Any:
    """`from` of a row after earlier rows were dropped."""
    if isinstance(origin, list | tuple):
        return [_moved(each, row, renumbered) for each in origin]
    if origin >= 0:
        return renumbered[origin]
    return renumbered[row + origin] - renumbered[row] if row + origin >= 0 else origin


# Fusing


@torch.no_grad()
def fused(network: Network) -> Network:
    """A copy in evaluation mode that computes the same with fewer passes; the original is unchanged.

    Convolutions with a folded batch norm no longer require gradients, as YOLOv7's summary line counts them.
    """
    # Weights that are about to be replaced, which are nearly all of them, are shared instead of copied.
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
    """The weights that fusing replaces."""
    for module in network.modules():
        if isinstance(module, Conv) and module.bn is not None:
            yield module.conv.weight
        elif isinstance(module, RepConv) and module.rbr_reparam is None:
            yield from (each.weight for each in module.modules() if isinstance(each, nn.Conv2d))


def fold_batch_norm(weight: Tensor, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Weight and bias of a convolution that is equivalent to one with `weight`, followed by `norm`."""
    assert norm.running_mean is not None and norm.running_var is not None
    if weight.is_meta:
        # Only shapes matter there, and torch would take milliseconds to compute that they stay the same.
        return torch.empty_like(weight), torch.empty_like(norm.bias)
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    return weight * scale.view(-1, 1, 1, 1), norm.bias - norm.running_mean * scale


def _with_weights(conv: nn.Conv2d, weight: Tensor, bias: Tensor) -> nn.Conv2d:
    """A copy of `conv` with other weights; `conv` itself is unchanged."""
    replaced = copy.copy(conv)
    replaced._parameters = {"weight": nn.Parameter(weight), "bias": nn.Parameter(bias)}
    return replaced


def fuse_branches(module: RepConv) -> None:
    """Replace the branches by one 3x3 convolution, in place."""
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
    """The 1x1 identity kernel, shaped like that of `like` (groups included)."""
    weight = torch.zeros_like(like.weight)
    channels = torch.arange(len(weight), device=weight.device)
    weight[channels, channels % weight.shape[1]] = 1
    return weight


def fuse_implicit(head: IDetect) -> None:
    """Fold the implicit vectors into the convolutions, in place."""
    # The vectors stay in the state_dict, unused, so that fused and unfused files have the same keys.
    for level, conv in enumerate(head.m):
        assert isinstance(conv, nn.Conv2d)
        head.m[level] = _with_weights(conv, *head.folded_weights(level))
    head.fused = True
