"""Turn a training network into its deploy form: a plain detection layer, no auxiliary rows, the same boxes.

Weights stay unfused (batch norms and RepConv branches), so that a deploy file can still be inspected or fused later.
"""

import copy
import re
from typing import Any

import torch

from flatout.yolo.model.blueprint import Blueprint, needed_rows
from flatout.yolo.model.network import Network, build_network


def deploy_config(blueprint: Blueprint) -> dict[str, Any]:
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


def _kept_rows(blueprint: Blueprint) -> list[int]:
    lead = needed_rows(blueprint.rows, blueprint.head.lead_sources)
    return [row.index for row in blueprint.rows if row.index in lead]


def _moved(origin: Any, row: int, renumbered: dict[int, int]) -> Any:
    """`from` of a row after rows before it were dropped."""
    if isinstance(origin, list | tuple):
        return [_moved(each, row, renumbered) for each in origin]
    if origin >= 0:
        return renumbered[origin]
    return renumbered[row + origin] - renumbered[row] if row + origin >= 0 else origin
