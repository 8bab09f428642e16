"""Weights files of flatout and of older trainers, read without executing anything in them.

{"model_state_dict": tensors, "img_height": ..., "img_width": ...}     older trainers
{"weights": {"state": tensors, "version": ..., "base": ..., ...}}      flatout
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

FIRST_WEIGHT = "encoder.block1.0.weight"
V2_ONLY_WEIGHT = "encoder.sppf.conv1.0.weight"


@dataclass(frozen=True, kw_only=True)
class DefectWeights:
    """The content of a weights file."""

    state: Mapping[str, Tensor]
    version: Version
    base: int
    patch: int | None
    """Side of the patches that it was trained on; None if the file does not state it."""
    threshold: float | None = None
    """Probability at or above which a pixel counts as defect; None if none was chosen."""


def read_weights(path: str | Path) -> DefectWeights:
    """Read a weights file of any known kind, on the CPU; CheckpointError if it cannot be used."""
    with reading(path) as file:
        if file_kind(file) != "zip":
            raise Refusal("is a safetensors file. Use a .pt or .pth file of a defect training.")
        objects = read_objects(file, plain_allowlist)
        return _from_container(sections_of(objects)) if is_container(objects) else _from_legacy(objects)


def load_network(path: str | Path) -> tuple[DefectNet, DefectWeights]:
    """Load the network of a weights file, on the CPU and in evaluation mode."""
    weights = read_weights(path)
    network = DefectNet(weights.version, weights.base)
    expected = network.state_dict()
    if missing := sorted(expected.keys() - weights.state.keys()):
        raise CheckpointError(f"{path}: {len(missing)} tensors are missing, such as {missing[0]}.")
    for name, tensor in expected.items():
        if weights.state[name].shape != tensor.shape:
            found = tuple(weights.state[name].shape)
            raise CheckpointError(
                f"{path}: {name} has shape {found}, but a {weights.version} network has {tuple(tensor.shape)}."
            )
    network.load_state_dict({name: weights.state[name] for name in expected})
    return network.eval(), weights


def weights_metadata(network: DefectNet, *, patch: int) -> dict[str, Any]:
    """The metadata of a weights file: everything about the network but its tensors."""
    return {"job": "defect", "version": network.version, "base": network.base, "patch": patch}


def _from_container(sections: Mapping[str, object]) -> DefectWeights:
    match sections.get("weights"):
        case {"job": "defect", "state": dict(state), **rest}:
            return _checked(state, patch=rest.get("patch"), threshold=rest.get("threshold"))
    raise Refusal("holds no weights of a defect training. Use a .pt file from the folder weights/ of such a run.")


def _from_legacy(objects: object) -> DefectWeights:
    top = PlainReader().plain(objects, "content")
    match top:
        case {"model_state_dict": dict(state), **rest}:
            return _checked(state, patch=rest.get("img_height"))
        case dict(state) if FIRST_WEIGHT in state:
            return _checked(state, patch=None)
    raise Refusal("holds no defect network: it has neither a model_state_dict nor flatout's section of weights.")


def _checked(state: Mapping[Any, object], *, patch: object, threshold: object = None) -> DefectWeights:
    tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    first = tensors.get(FIRST_WEIGHT)
    if first is None or first.ndim != 4 or len(tensors) != len(state):
        raise Refusal(
            f"belongs to another network: its state lacks {FIRST_WEIGHT}, or has values that are not tensors."
        )
    return DefectWeights(
        state=tensors,
        version="v2" if V2_ONLY_WEIGHT in tensors else "v1",
        base=int(first.shape[0]),
        patch=patch if type(patch) is int and patch > 0 else None,
        threshold=threshold if isinstance(threshold, float) else None,
    )
