"""Networks in files: of ours, and of the trainers that came before. Nothing in a file is ever run.

{"model_state_dict": tensors, "img_height": ..., "img_width": ...}     older trainings
{"weights": {"state": tensors, "version": ..., "base": ..., ...}}      ours
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from flatout.defect.model import DefectNet, Version
from flatout.errors import CheckpointError
from flatout.safefiles import (
    PlainReader,
    Refusal,
    file_kind,
    is_container,
    plain_allowlist,
    read_objects,
    reading,
    sections_of,
)

FIRST = "encoder.block1.0.weight"
OF_V2 = "encoder.sppf.conv1.0.weight"


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What a file says about a network."""

    state: Mapping[str, Tensor]
    version: Version
    base: int
    patch: int | None
    """Side of the patches it was trained on; None: the file does not say."""
    threshold: float | None = None
    """Probability above which a pixel counts as defect, where one was chosen."""


def read_weights(path: str | Path) -> Weights:
    """Weights of any known file, on the CPU; CheckpointError says in a line why one is not read."""
    with reading(path) as file:
        if file_kind(file) != "zip":
            raise Refusal("is a safetensors file. Give a .pt or .pth file of a defect training.")
        objects = read_objects(file, plain_allowlist)
        return _from_ours(sections_of(objects)) if is_container(objects) else _from_older(objects)


def load_network(path: str | Path) -> tuple[DefectNet, Weights]:
    """The network of a file, on the CPU, in evaluation mode."""
    weights = read_weights(path)
    network = DefectNet(weights.version, weights.base)
    wanted = network.state_dict()
    if missing := sorted(wanted.keys() - weights.state.keys()):
        raise CheckpointError(f"{path}: {len(missing)} tensors are missing, such as {missing[0]}.")
    for name, tensor in wanted.items():
        if weights.state[name].shape != tensor.shape:
            found = tuple(weights.state[name].shape)
            raise CheckpointError(f"{path}: {name} has shape {found}, a {weights.version} has {tuple(tensor.shape)}.")
    network.load_state_dict({name: weights.state[name] for name in wanted})
    return network.eval(), weights


def about(network: DefectNet, *, patch: int) -> dict[str, Any]:
    """What files of weights say about the network, without its tensors."""
    return {"job": "defect", "version": network.version, "base": network.base, "patch": patch}


def _from_ours(sections: Mapping[str, object]) -> Weights:
    match sections.get("weights"):
        case {"job": "defect", "state": dict(state), **rest}:
            return _checked(state, patch=rest.get("patch"), threshold=rest.get("threshold"))
    raise Refusal("holds no weights of a defect training. Give a .pt file from the folder weights/ of one.")


def _from_older(objects: object) -> Weights:
    top = PlainReader().plain(objects, "content")
    match top:
        case {"model_state_dict": dict(state), **rest}:
            return _checked(state, patch=rest.get("img_height"))
        case dict(state) if FIRST in state:
            return _checked(state, patch=None)
    raise Refusal("holds no network of the defect job: there is neither a model_state_dict nor our own section.")


def _checked(state: Mapping[Any, object], *, patch: object, threshold: object = None) -> Weights:
    tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    first = tensors.get(FIRST)
    if first is None or first.ndim != 4 or len(tensors) != len(state):
        raise Refusal(f"its state has no tensor {FIRST}, or values that are none: it is of another network.")
    return Weights(
        state=tensors,
        version="v2" if OF_V2 in tensors else "v1",
        base=int(first.shape[0]),
        patch=patch if type(patch) is int and patch > 0 else None,
        threshold=threshold if isinstance(threshold, float) else None,
    )
