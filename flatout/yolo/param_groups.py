"""Which parameters shrink by weight decay, and which learn as biases do: the three groups of YOLOv7's optimizers."""

from typing import NamedTuple

from torch import nn

from flatout.yolo.compat.optimizer_order import parameter_groups as names_of_groups


class ParameterGroups(NamedTuple):
    """Every parameter of a network exactly once, frozen ones included, in YOLOv7's order."""

    no_decay: list[nn.Parameter]
    """Weights of batch norms, and implicit vectors."""
    decay: list[nn.Parameter]
    """All other weights: convolutions, linear layers."""
    bias: list[nn.Parameter]


def parameter_groups(network: nn.Module) -> ParameterGroups:
    """The groups of a network, in the order in which an optimizer state of YOLOv7 numbers them."""
    parameters = dict(network.named_parameters())
    groups = names_of_groups(network.state_dict())
    grouped = [name for group in groups for name in group]
    assert sorted(grouped) == sorted(parameters), f"in no group: {sorted(set(parameters) ^ set(grouped))}"
    return ParameterGroups(*([parameters[name] for name in group] for group in groups))
