"""Give a network several heads: the detection layer of its config replaced, everything before it as it was."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flatout.errors import ConfigError
from flatout.yolo.model.head_config import HeadConfig
from flatout.yolo.model.kinds import MULTIHEADS

PLAIN, ATTENTION = MULTIHEADS
REPLACED = ("Detect", "IDetect", *MULTIHEADS)
"""Detection layers that read one map per level, as layers with several heads do."""


@dataclass(frozen=True)
class HeadChoice:
    """What a command says about heads."""

    groups: HeadConfig | None = None
    """None: those of the config, else blocks of classes."""
    attention: bool = False
    """Let every head look through an attention of its own."""

    def applied_to(self, config: object, *, where: str) -> object:
        """The model config with these heads, in a copy; what is no model config comes back as it is."""
        kind = _detection_layer(config)
        if kind is None:
            return config
        if kind not in REPLACED:
            raise ConfigError(
                f"{where}: its detection layer {kind} cannot be given several heads: it has auxiliary outputs. "
                f"Use a config that ends in one of {', '.join(REPLACED)}."
            )
        assert isinstance(config, Mapping)
        *rows, (origin, number, _, args) = config["head"]
        layer = ATTENTION if self.attention or kind == ATTENTION else PLAIN
        changed: dict[str, Any] = {**config, "head": [*rows, [origin, number, layer, args]]}
        return changed if self.groups is None else changed | {"head_config": self.groups.plain()}


def _detection_layer(config: object) -> str | None:
    """Name of the last row's module; None if there is none, which is for draft.py to complain about."""
    rows = config.get("head") if isinstance(config, Mapping) else None
    last = rows[-1] if isinstance(rows, list | tuple) and rows else None
    return str(last[2]) if isinstance(last, list | tuple) and len(last) == 4 else None
