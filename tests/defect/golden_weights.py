"""Weights of golden networks: every tensor has its own seed, by its position in the state dict."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flatout.defect.model import DefectNet


def golden_state(shapes: Sequence[tuple[str, Sequence[int]]], seed: int) -> dict[str, Tensor]:
    return {name: torch.from_numpy(_values(name, tuple(shape), seed + j)) for j, (name, shape) in enumerate(shapes)}


def golden_network(version, base: int, seed: int) -> DefectNet:
    """A network with golden weights, in float64."""
    network = DefectNet(version, base)
    shapes = [(name, tensor.shape) for name, tensor in network.state_dict().items()]
    network.load_state_dict(golden_state(shapes, seed))  # drawn in float64, rounded to float32
    return network.double()


def _values(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    rng = np.random.RandomState(seed)
    if name.endswith("num_batches_tracked"):
        return np.zeros(shape, np.int64)
    if name.endswith("running_var"):
        return rng.uniform(0.5, 1.5, shape)
    if name.endswith(("running_mean", ".bias")):
        return rng.uniform(-0.1, 0.1, shape)
    if len(shape) == 1:
        return rng.uniform(0.8, 1.2, shape)
    return rng.uniform(-1, 1, shape) * np.sqrt(6 / np.prod(shape[1:]))
