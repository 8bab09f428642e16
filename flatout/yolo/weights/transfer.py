"""Move weights into a network that may differ: what fits is taken, the rest is reported."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from flatout.yolo.weights.weights import State


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
