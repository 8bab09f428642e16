"""Networks with the weights and pictures of the yolov7-models goldens, made from seeds instead of stored."""

import zlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

KEPT = ("anchors", "anchor_grid", "num_batches_tracked")


def uniform(key: str, seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """float64 in 0..1, drawn for a state_dict key."""
    generator = np.random.Generator(np.random.PCG64(seed * 2**32 + zlib.crc32(key.encode())))
    return generator.random(size=shape)


def golden_value(key: str, seed: int, shape: tuple[int, ...], norm_scale: float = 1.0) -> Tensor:
    """The float32 value of a state_dict entry."""
    u = uniform(key, seed, shape)
    v = 2 * u - 1
    parts = key.split(".")
    match parts[-1]:
        case "running_mean" | "bias":
            value = 0.2 * v
        case "running_var":
            value = (0.75 + 0.75 * u) * norm_scale
        case "implicit":
            value = 0.2 * v if "ia" in parts else 1 + 0.2 * v
        case "weight" if len(shape) == 4:
            gain = 1.5 if {"m", "m2"} & set(parts) else 1.0
            value = v * gain * np.sqrt(3 / np.prod(shape[1:]))
        case "weight":
            value = 0.8 + 0.4 * u
        case _:
            raise KeyError(f"the recipe does not say how to fill {key}")
    return torch.from_numpy(np.asarray(value, np.float32))


def fill(module: nn.Module, seed: int, *, prefix: str = "", norm_scales: Mapping[str, float] | None = None) -> None:
    """Give every entry of the state_dict its golden value."""
    state = module.state_dict()
    for name, old in state.items():
        if name.split(".")[-1] not in KEPT:
            key = prefix + name
            state[name] = golden_value(key, seed, tuple(old.shape), (norm_scales or {}).get(key, 1.0))
    module.load_state_dict(state)


def golden_picture(seed: int, shape: tuple[int, int, int, int]) -> Tensor:
    """float32 [B, 3, H, W] in 0..1: coarse blocks with fine noise."""
    batch, channels, height, width = shape
    generator = np.random.Generator(np.random.PCG64(seed))
    fine = generator.random(shape)
    coarse = generator.random((batch, channels, height // 16, width // 16)).repeat(16, 2).repeat(16, 3)
    return torch.from_numpy(np.float32(0.25 * fine + 0.75 * coarse))


def samples(output: Tensor, count: int) -> np.ndarray:
    """The `count` values of an output that a golden stores."""
    flat = output.detach().double().flatten().numpy()
    return flat[(np.arange(count, dtype=np.int64) * 2654435761 + 97) % len(flat)]


def running_statistics(module: nn.Module) -> nn.Module:
    """Training mode, except that batch norms use their running statistics."""
    module.train()
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.eval()
    return module
