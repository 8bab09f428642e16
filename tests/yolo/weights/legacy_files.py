"""Checkpoints as YOLOv7 pickles them, from small classes with the same names."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

CONFIG = {"nc": 2, "depth_multiple": 1.0, "backbone": [[-1, 1, "Conv", [4, 3]]], "head": [[[0], 1, "Detect", ["nc"]]]}


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.act = nn.SiLU()
        self.rbr_identity = None


class Detect(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("anchors", torch.rand(1, 3, 2))
        self.register_buffer("grid", torch.zeros(1), persistent=False)
        self.m = nn.ModuleList([nn.Conv2d(4, 21, 1)])
        self.scale = nn.Parameter(torch.ones(3))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(Conv(), Detect())
        self.yaml = CONFIG
        self.names = ["ant", "bee"]
        self.nc = 2
        self.hyp = {"lr0": 0.01, "anchor_t": 4}
        # Not read, but they must not cause a refusal.
        self.stride = torch.tensor([8.0])
        self.device = torch.device("cpu")
        self.visited = {"a", "b"}


@contextmanager
def yolov7_names() -> Iterator[None]:
    """In this context the classes above are pickled under YOLOv7's module names."""
    modules = {name: ModuleType(name) for name in ("models", "models.common", "models.yolo")}
    homes = {Conv: "models.common", Detect: "models.yolo", Model: "models.yolo"}
    before = {cls: cls.__module__ for cls in homes}
    for cls, home in homes.items():
        setattr(modules[home], cls.__name__, cls)
        cls.__module__ = home
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        for cls, home in before.items():
            cls.__module__ = home


def training_checkpoint(model: nn.Module, ema: nn.Module) -> dict[str, Any]:
    """The content of a checkpoint after an epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    # As the warm-up sets it.
    optimizer.param_groups[0]["lr"] = np.float64(0.05)
    return {
        "epoch": 7,
        "best_fitness": np.array([0.25]),
        "training_results": "0/1\n1/1\n",
        "model": model,
        "ema": ema,
        "updates": 12,
        "optimizer": optimizer.state_dict(),
        "wandb_id": None,
    }
