"""The network that `test.py` judges: one or several files of weights, fused, on a device, with or without views."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatout.errors import ConfigError
from flatout.yolo.input_size import LEAST_GRID
from flatout.yolo.loading import load_network
from flatout.yolo.model.augmented import Ensemble, predict_augmented
from flatout.yolo.model.fuse import fused
from flatout.yolo.model.heads import Predictions
from flatout.yolo.model.network import Network


class Subject(NamedTuple):
    """What is judged."""

    network: nn.Module
    """Gives `Predictions`; half precision on a GPU."""
    num_classes: int
    stride: int
    """Sides of the input are multiples of it."""
    names: tuple[str, ...] = ()
    """Of the classes, as the last file of weights has them."""


class Augmented(nn.Module):
    """Networks that each look at several views of a picture; all their boxes stand side by side."""

    def __init__(self, networks: Sequence[Network], stride: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(networks)
        self._stride = stride

    def forward(self, x: Tensor) -> Predictions:
        return Predictions(torch.cat([predict_augmented(member, x, self._stride) for member in self.members], 1), [])


def load_subject(paths: Sequence[str], device: torch.device, *, augment: bool = False) -> Subject:
    """Networks from files of weights, side by side; CheckpointError if one cannot be used."""
    networks = [fused(load_network(path).network) for path in paths]
    classes = {network.nc for network in networks}
    if len(classes) > 1:
        listed = ", ".join(f"{path}: {network.nc}" for path, network in zip(paths, networks, strict=True))
        raise ConfigError(f"Networks that are judged together must know the same classes, but they know {listed}.")
    stride = max(LEAST_GRID, *(int(network.stride.max()) for network in networks))
    if augment:
        network: nn.Module = Augmented(networks, stride)
    else:
        network = networks[0] if len(networks) == 1 else Ensemble(networks)
    network = network.to(device).eval()
    if device.type == "cuda":
        network = network.half().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Subject(network, classes.pop(), stride, tuple(networks[-1].names))


@torch.no_grad()
def warm_up(subject: Subject, *, batch_size: int, size: int, device: torch.device) -> None:
    """Let a GPU compile and choose its kernels before anything is timed."""
    if device.type == "cuda":
        dtype = next(subject.network.parameters()).dtype
        subject.network(torch.zeros(batch_size, 3, size, size, device=device, dtype=dtype))
