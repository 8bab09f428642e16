"""What a file of weights holds, whatever its format was.

Move weights into a network that may differ: what fits is taken, the rest is reported.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from flatout.safefiles import DAMAGED, Refusal, quoted, write_container

State = dict[str, Tensor]
"""state_dict key -> tensor on the CPU, in the precision of the file."""

Kind = Literal["full", "stripped", "deploy", "model", "ema", "state_dict", "exported"]
"""full: can be resumed. stripped: the result of a training. deploy: converted for inference. model: a bare network.
ema: the moving average only. state_dict: tensors only. exported: from safetensors."""
KINDS: tuple[Kind, ...] = ("full", "stripped", "deploy", "model", "ema", "state_dict", "exported")

MAX_WRAPPERS = 4
"""Around a network, each of which puts "module." before the names of its tensors."""

Format = Literal["legacy", "flatout", "safetensors"]


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The content of a file of weights: plain values and tensors, owned by the caller. None is what it does not say."""

    state: State
    """Of the network that was trained."""
    ema: State | None = None
    """Of its moving average, which is what was evaluated."""
    config: dict[str, Any] | None = None
    """Model YAML, as it was written."""
    names: list[str] | None = None
    nc: int | None = None
    hyp: dict[str, Any] | None = None
    """Hyper-parameters, gains and weight decay already scaled to the run (YOLOv7 saves them so)."""
    epoch: int | None = None
    """Last finished epoch, from 0; -1 after the training has ended."""
    best_fitness: float | None = None
    training_results: str | None = None
    """Text of results.txt."""
    updates: int | None = None
    """Of the moving average."""
    optimizer: dict[str, Any] | None = None
    """`state` (parameter number -> name -> tensor) and `param_groups`; compat/optimizer_order.py names the numbers."""
    wandb_id: str | None = None
    kind: Kind
    format: Format

    def for_inference(self) -> State:
        """The moving average where there is one, else the network."""
        return self.ema or self.state

    def for_training(self) -> State:
        return self.state


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
}


def checked_weights(
    state: State, ema: State | None, fields: Mapping[str, object], kind: str, format: Format
) -> Weights:
    """Weights from plain values of unknown types; a Refusal names the one that is wrong."""
    if kind not in KINDS:
        raise Refusal(f"claims to be {quoted(str(kind))}, which is none of {', '.join(KINDS)}. {DAMAGED}")
    values = {name: fields.get(name) for name in _TYPES}
    values["names"] = _names_as_list(values["names"])
    values["best_fitness"] = _as_float(values["best_fitness"])
    for name, kept_as in _TYPES.items():
        if values[name] is not None and type(values[name]) is not kept_as:
            raise _wrong_type(name, values[name])
    values["nc"] = _num_classes(values)
    return Weights(state=state, ema=ema, kind=kind, format=format, **values)  # type: ignore[arg-type]


def checked_state(value: object, what: str) -> State:
    """A state_dict out of plain values, without the prefixes that wrappers for several GPUs leave."""
    if not isinstance(value, dict):
        raise _wrong_type(what, value)
    if not value:
        raise Refusal(f"its {what} holds no tensors. Give a file with weights.")
    for key, tensor in value.items():
        if type(key) is not str or not key.isprintable() or not isinstance(tensor, Tensor):
            raise Refusal(f"its {what} has an entry {quoted(str(key))} that is no named tensor. {DAMAGED}")
    for _ in range(MAX_WRAPPERS):
        if all(key.startswith("module.") for key in value):
            value = {key.removeprefix("module."): tensor for key, tensor in value.items()}
    return value


def _names_as_list(names: object) -> object:
    # Newer programs of the family save {0: "person", 1: ...}.
    if isinstance(names, dict) and all(type(number) is int for number in names):
        in_order = sorted(names)
        names = [names[number] for number in in_order] if in_order == list(range(len(names))) else names
    if not isinstance(names, tuple | list):
        return names
    # YOLOv7 keeps them as its YAML reader gave them: digits unquoted are numbers, a class called `no` is False.
    if not all(isinstance(name, str | int | float) for name in names):
        raise Refusal(f"its names are not all text. {DAMAGED}")
    return [str(name) for name in names]


def _as_float(fitness: object) -> object:
    """YOLOv7 saves an array of one number, or the number 0."""
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
    return Refusal(f"its {name} is of type {type(value).__name__}, which it never is in weights. {DAMAGED}")


# Weights in files of ours: the section "weights" of a container.

SECTION = "weights"


def save_weights(path: str | Path, weights: Weights) -> None:
    """Write weights in our own format, whole or not at all; ResourceError if the disk cannot take them."""
    write_container(path, {SECTION: section_of(weights)})


def section_of(weights: Weights) -> dict[str, object]:
    """What a container keeps of weights; the format is the container's."""
    return {field.name: getattr(weights, field.name) for field in fields(weights) if field.name != "format"}


def weights_from(sections: dict[str, object]) -> Weights:
    """The weights of a container; a Refusal says what is wrong with them."""
    section = sections.get(SECTION)
    if not isinstance(section, dict):
        raise Refusal("is a file of flatout without weights. Give one with weights.")
    state = checked_state(section.get("state"), "state")
    ema = section.get("ema")
    return checked_weights(
        state, None if ema is None else checked_state(ema, "ema"), section, str(section.get("kind")), "flatout"
    )


@dataclass(frozen=True)
class Transfer:
    """What was taken over and what was not; all keys in state_dict order."""

    state: State
    """The entries taken over, as they are in the file."""
    total: int
    """Entries of the network."""
    missing: list[str]
    """In the network only: they keep their fresh value."""
    unexpected: list[str]
    """In the file only."""
    mismatched: list[str]
    """In both, with another shape or another kind of number."""
    skipped: list[str]
    """Anchors that were left out on purpose."""

    @property
    def kept(self) -> int:
        return len(self.state)

    def line(self, path: str | Path) -> str:
        return f"Transferred {self.kept}/{self.total} items from {path}"


def transfer(target: nn.Module | Mapping[str, Tensor], weights: State, *, skip_anchors: bool) -> Transfer:
    """Take over every entry whose key and shape the target has; a module gets them in its own precision.

    `skip_anchors` leaves out keys with "anchor": YOLOv7 does so when a config or anchors were given and the run is no
    resume. A mapping is only compared, not changed.
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
