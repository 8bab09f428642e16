"""The Weights of a network, their checks, our own file format, and the transfer to a network.

plain values of a file --checked_weights--> Weights --save_weights--> file of ours
                                            Weights --transfer--> network, which may differ: what fits is copied
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from flatout.safefiles import DAMAGED, Refusal, quoted, write_container

State = dict[str, Tensor]
"""state_dict key -> tensor on the CPU, in the precision of the file."""

WeightsKind = Literal["full", "stripped", "deploy", "model", "ema", "state_dict", "exported"]
"""full: can be resumed. stripped: the result of a training. deploy: converted for inference. model: a bare network.
ema: the moving average only. state_dict: tensors only. exported: from a safetensors file."""
WEIGHTS_KINDS: tuple[WeightsKind, ...] = ("full", "stripped", "deploy", "model", "ema", "state_dict", "exported")

MAX_WRAPPERS = 4
"""Most wrappers around a network; each prefixes the names of its tensors with "module."."""

Format = Literal["legacy", "flatout", "safetensors"]


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The content of a weights file: plain values and tensors, owned by the caller; None for what it does not have."""

    state: State
    """State of the network that was trained."""
    ema: State | None = None
    """State of its moving average, which is what was validated."""
    config: dict[str, Any] | None = None
    """Content of the model YAML."""
    names: list[str] | None = None
    nc: int | None = None
    hyp: dict[str, Any] | None = None
    """Hyper-parameters, with gains and weight decay already scaled to the run, as YOLOv7 saves them."""
    epoch: int | None = None
    """Last finished epoch, from 0; -1 after the training has ended."""
    best_fitness: float | None = None
    training_results: str | None = None
    """Text of results.txt."""
    updates: int | None = None
    """Number of updates of the moving average."""
    optimizer: dict[str, Any] | None = None
    """`state` (parameter number -> name -> tensor) and `param_groups`; legacy.parameter_groups names the numbers."""
    wandb_id: str | None = None
    tiles: dict[str, Any] | None = None
    """`tile` and `overlap` of a training on tiles (`--tiles`)."""
    kind: WeightsKind
    format: Format

    def for_inference(self) -> State:
        """The moving average if there is one, else the network."""
        return self.ema or self.state

    def for_training(self) -> State:
        """The network itself, also if there is a moving average."""
        return self.state


# Our own file format: the section "weights" of a container

SECTION = "weights"


def save_weights(path: str | Path, weights: Weights) -> None:
    """Write weights in our own format, completely or not at all; ResourceError if the disk is too full."""
    write_container(path, {SECTION: section_of(weights)})


def section_of(weights: Weights) -> dict[str, object]:
    """The section of a container: all fields except `format`, which the container implies."""
    return {field.name: getattr(weights, field.name) for field in fields(weights) if field.name != "format"}


def weights_from(sections: dict[str, object]) -> Weights:
    """The weights in a container; Refusal says what is wrong with them."""
    section = sections.get(SECTION)
    if not isinstance(section, dict):
        raise Refusal("is a file of flatout without weights. Use a file with weights.")
    state = checked_state(section.get("state"), "state")
    ema = section.get("ema")
    return checked_weights(
        state, None if ema is None else checked_state(ema, "ema"), section, str(section.get("kind")), "flatout"
    )


# Checks of values from a file

_TYPES: dict[str, type] = {
    "config": dict,
    "names": list,
    "nc": int,
    "hyp": dict,
    "epoch": int,
    "best_fitness": float,
    "training_results": str,
    "updates": int,
    "optimizer": dict,
    "wandb_id": str,
    "tiles": dict,
}


def checked_weights(
    state: State, ema: State | None, fields: Mapping[str, object], kind: str, format: Format
) -> Weights:
    """Weights from plain values of unknown types; Refusal names the value that is wrong."""
    if kind not in WEIGHTS_KINDS:
        raise Refusal(f"its kind is {quoted(str(kind))}, which is not one of {', '.join(WEIGHTS_KINDS)}. {DAMAGED}")
    values = {name: fields.get(name) for name in _TYPES}
    values["names"] = _names_as_list(values["names"])
    values["best_fitness"] = _as_float(values["best_fitness"])
    for name, expected in _TYPES.items():
        if values[name] is not None and type(values[name]) is not expected:
            raise _wrong_type(name, values[name])
    values["nc"] = _num_classes(values)
    return Weights(state=state, ema=ema, kind=kind, format=format, **values)  # type: ignore[arg-type]


def checked_state(value: object, what: str) -> State:
    """A state_dict from plain values, without the prefixes of wrappers for several GPUs."""
    if not isinstance(value, dict):
        raise _wrong_type(what, value)
    if not value:
        raise Refusal(f"its {what} has no tensors. Use a file with weights.")
    for key, tensor in value.items():
        if type(key) is not str or not key.isprintable() or not isinstance(tensor, Tensor):
            raise Refusal(f"its {what} has an entry {quoted(str(key))} that is not a named tensor. {DAMAGED}")
    for _ in range(MAX_WRAPPERS):
        if all(key.startswith("module.") for key in value):
            value = {key.removeprefix("module."): tensor for key, tensor in value.items()}
    return value


def _names_as_list(names: object) -> object:
    # Later YOLO versions save {0: "person", 1: ...}.
    if isinstance(names, dict) and all(type(number) is int for number in names):
        in_order = sorted(names)
        names = [names[number] for number in in_order] if in_order == list(range(len(names))) else names
    if not isinstance(names, tuple | list):
        return names
    # YOLOv7 keeps them as its YAML parser returned them: unquoted digits are numbers, a class named `no` is False.
    if not all(isinstance(name, str | int | float) for name in names):
        raise Refusal(f"its names are not all text. {DAMAGED}")
    return [str(name) for name in names]


def _as_float(fitness: object) -> object:
    """The fitness as a float; YOLOv7 saves an array of one number, or the number 0."""
    if isinstance(fitness, list | tuple) and len(fitness) == 1:
        fitness = fitness[0]
    return float(fitness) if type(fitness) is int and abs(fitness) < 1 << 63 else fitness


def _num_classes(values: Mapping[str, object]) -> int | None:
    config, names = values["config"], values["names"]
    if values["nc"] is None and isinstance(config, dict) and type(config.get("nc")) is int:
        return int(config["nc"])
    if values["nc"] is None and isinstance(names, list):
        return len(names)
    return values["nc"]  # type: ignore[return-value]


def _wrong_type(name: str, value: object) -> Refusal:
    return Refusal(f"its {name} is of type {type(value).__name__}, which is not valid in weights. {DAMAGED}")


# Transfer to a network


@dataclass(frozen=True)
class Transfer:
    """Which entries were transferred and which were not; all keys in state_dict order."""

    state: State
    """The transferred entries, as they are in the file."""
    total: int
    """Number of entries of the network."""
    missing: list[str]
    """Keys in the network only, which keep their initial values."""
    unexpected: list[str]
    """Keys in the file only."""
    mismatched: list[str]
    """Keys in both, with different shapes, or one of them floating-point and the other not."""
    skipped: list[str]
    """Keys of anchors that were skipped on purpose."""

    @property
    def kept(self) -> int:
        return len(self.state)

    def line(self, path: str | Path) -> str:
        return f"Transferred {self.kept}/{self.total} items from {path}"


def transfer(target: nn.Module | Mapping[str, Tensor], weights: State, *, skip_anchors: bool) -> Transfer:
    """Transfer every entry whose key and shape the target has; a module keeps its own precision.

    `skip_anchors` skips keys with "anchor", as YOLOv7 does if a config or anchors were given and the run is not
    resumed. A mapping is only compared, not changed.
    """
    own = target.state_dict() if isinstance(target, nn.Module) else target
    wanted = {key: tensor for key, tensor in weights.items() if not (skip_anchors and "anchor" in key)}
    state = {key: tensor for key, tensor in wanted.items() if key in own and _fits(tensor, own[key])}
    if isinstance(target, nn.Module):
        target.load_state_dict(state, strict=False)
    return Transfer(
        state=state,
        total=len(own),
        missing=[key for key in own if key not in weights],
        unexpected=[key for key in weights if key not in own],
        mismatched=[key for key in wanted if key in own and key not in state],
        skipped=[key for key in weights if key not in wanted and key in own],
    )


def _fits(tensor: Tensor, own: Tensor) -> bool:
    return tensor.shape == own.shape and tensor.is_floating_point() == own.is_floating_point()
