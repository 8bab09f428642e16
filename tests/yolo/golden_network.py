"""Weights and images of the yolov7-models goldens, drawn from seeds instead of stored."""

import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor, nn

KEPT = ("anchors", "anchor_grid", "num_batches_tracked")


def uniform(key: str, seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Random float64 values in 0..1 for a state_dict key."""
    generator = np.random.Generator(np.random.PCG64(seed * 2**32 + zlib.crc32(key.encode())))
    return generator.random(size=shape)


def golden_value(key: str, seed: int, shape: tuple[int, ...], norm_scale: float = 1.0) -> Tensor:
    """The float32 value of a state_dict entry."""
    parts = key.split(".")
    # base + gain * u or base + gain * (2u - 1), computed in place, because networks have up to 166 million values.
    centred = True
    match parts[-1]:
        case "running_mean" | "bias":
            base, gain = 0.0, 0.2
        case "running_var":
            base, gain, centred = 0.75, 0.75, False
        case "implicit":
            base, gain = (0.0 if "ia" in parts else 1.0), 0.2
        case "weight" if len(shape) == 4:
            base, gain = 0.0, (1.5 if {"m", "m2"} & set(parts) else 1.0)
        case "weight":
            base, gain, centred = 0.8, 0.4, False
        case _:
            raise KeyError(f"no rule for the golden value of {key}")
    value = np.asarray(uniform(key, seed, shape))
    if centred:
        value *= 2
        value -= 1
    value *= gain
    if len(shape) == 4 and parts[-1] == "weight":
        value *= np.sqrt(3 / np.prod(shape[1:]))
    if base:
        value += base
    if parts[-1] == "running_var":
        value *= norm_scale
    return torch.from_numpy(value.astype(np.float32))


Recipe = tuple[str, int, tuple[int, ...], float]
"""The arguments of `golden_value`, which determine its result."""


def fill(
    module: nn.Module,
    seed: int,
    *,
    prefix: str = "",
    norm_scales: Mapping[str, float] | None = None,
    known: Mapping[Recipe, Tensor] | None = None,
) -> dict[Recipe, Tensor]:
    """Set every entry of the state_dict to its golden value, taken from `known` or computed.

    Returns the entries, which can be passed as `known` for another module.
    """
    state = module.state_dict()
    names = [name for name in state if name.split(".")[-1] not in KEPT]

    def fill_one(name: str) -> tuple[Recipe, Tensor]:
        key = prefix + name
        recipe = (key, seed, tuple(state[name].shape), (norm_scales or {}).get(key, 1.0))
        value = (known or {}).get(recipe)
        return recipe, state[name].copy_(golden_value(*recipe) if value is None else value)

    with ThreadPoolExecutor(2) as threads:
        return dict(threads.map(fill_one, names))


def golden_images(seed: int, shape: tuple[int, int, int, int]) -> Tensor:
    """Random images, float32 [B, 3, H, W] in 0..1: coarse blocks with fine noise."""
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
    """The module in training mode, except that batch norms use their running statistics."""
    module.train()
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.eval()
    return module
