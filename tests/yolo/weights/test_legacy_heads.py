"""Checkpoints of 1B4H networks as the original program pickles them are read safely, with their heads."""

import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatout.errors import CheckpointError
from flatout.yolo.load_network import load_network
from flatout.yolo.model.network import Network
from flatout.yolo.multihead.head_config import HeadConfig as OurHeadConfig
from tests.yolo.head_batches import make_groups, narrow_network

GROUPS = make_groups([[5, 0], [2], [1, 4, 3]], [1.0, 0.5, 2.0])


class Model(nn.Module):
    """Any module: only its attributes are pickled."""


class HeadConfig:
    """Pickled in place of the original program's class."""


@contextmanager
def reference_names():
    """In this context the classes above are pickled under the original program's module names."""
    homes = {Model: "models.yolo", HeadConfig: "utils.head_config"}
    names = ("models", "models.yolo", "utils", "utils.head_config")
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update({name: ModuleType(name) for name in names})
    own = {cls: cls.__module__ for cls in homes}
    for cls, home in homes.items():
        setattr(sys.modules[home], cls.__name__, cls)
        cls.__module__ = home
    try:
        yield
    finally:
        for cls, home in own.items():
            cls.__module__ = home
        for name, module in before.items():
            sys.modules.pop(name) if module is None else sys.modules.__setitem__(name, module)


def small_network(groups: OurHeadConfig) -> Network:
    return narrow_network("yolov7-tiny-1b4h", groups).eval()


def pickled(network: Network, head_config: object) -> Any:
    """The network as a tree of modules of the original program, with its head configuration in the last one."""
    root: Any = Model()
    for key, value in network.state_dict().items():
        *path, name = key.split(".")
        module: nn.Module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, Model())
            module = module.get_submodule(part)
        _register(module, name, value)
    root.get_submodule(f"model.{network.spec.head.index}").head_config = head_config
    root.yaml = {key: value for key, value in network.config.items() if key != "head_config"}
    root.names, root.nc = list("abcdef"), network.nc
    return root


def _register(module: nn.Module, name: str, value: Tensor) -> None:
    if name in ("weight", "bias"):
        module.register_parameter(name, nn.Parameter(value))
    else:
        module.register_buffer(name, value)


def saved(path: Path, network: Network, attributes: dict[str, object]) -> Path:
    with reference_names():
        head_config = HeadConfig()
        head_config.__dict__.update(attributes)
        torch.save({"model": pickled(network, head_config), "epoch": -1, "optimizer": None}, path)
    return path


FORMS = {
    "lists per head": {
        "config_path": "data/heads.yaml",
        "head_classes": {0: [5, 0], 1: [2], 2: [1, 4, 3]},
        "head_weights": {0: 1.0, 1: 0.5, 2: 2.0},
        "full_head": False,
    },
    "a path, a list of lists and a list of weights": {
        "config_path": Path("data/heads.yaml"),
        "classes": [[5, 0], [2], [1, 4, 3]],
        "weights": [1.0, 0.5, 2.0],
    },
    "the file's content": {"config": GROUPS.plain()},
    "maps of classes": {
        "global_to_head": {0: 0, 1: 2, 2: 1, 3: 2, 4: 2, 5: 0},
        "global_to_local": {0: 1, 1: 0, 2: 0, 3: 2, 4: 1, 5: 0},
        "head_weights": [1.0, 0.5, 2.0],
    },
}


@pytest.mark.parametrize("attributes", FORMS.values(), ids=FORMS.keys())
@torch.no_grad()
def test_a_pickled_network_comes_back_with_its_heads(attributes, tmp_path):
    network = small_network(GROUPS)
    loaded = load_network(saved(tmp_path / "1b4h.pt", network, attributes)).network
    assert loaded.head.groups.head_C == GROUPS.head_C and loaded.head.groups.local_C == GROUPS.local_C
    assert loaded.head.groups.weight_H == GROUPS.weight_H
    image = torch.rand(1, 3, 64, 64)
    torch.testing.assert_close(loaded(image).decoded, network(image).decoded)


def test_a_head_configuration_of_unknown_format_is_refused(tmp_path):
    path = saved(tmp_path / "1b4h.pt", small_network(GROUPS), {"heads": 3})
    with pytest.raises(CheckpointError, match=r"head configuration has an unknown format.*--cfg"):
        load_network(path)
