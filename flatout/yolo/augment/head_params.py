"""How each head's classes are augmented: the file behind `--head-params`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from flatout.errors import ConfigError, MissingFileError
from flatout.yaml_strict import load_yaml


@dataclass(frozen=True, kw_only=True)
class HeadParams:
    """Ranges of one head. Only the first two are used, as in the reference; all are checked."""

    degrees: float
    shear: float
    flipud: float
    fliplr: float
    mixup: float


def read_head_params(path: str | Path, *, num_heads: int) -> tuple[HeadParams, ...]:
    """Those of `head_0` to `head_{num_heads - 1}`; further keys are left alone. ConfigError names what is missing."""
    if not Path(path).exists():
        raise MissingFileError(f"{path}: no such file. Give the augmentation of the heads with --head-params.")
    content = load_yaml(path)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: head_0 and the other heads are missing.")
    return tuple(_one_head(content.get(f"head_{head}"), f"{path}: head_{head}") for head in range(num_heads))


def _one_head(written: object, where: str) -> HeadParams:
    if not isinstance(written, Mapping):
        raise ConfigError(f"{where} is missing. Every head needs {', '.join(_NAMES)}.")
    return HeadParams(**{name: _number(written, name, where) for name in _NAMES})


def _number(written: Mapping[object, object], name: str, where: str) -> float:
    if name not in written:
        raise ConfigError(f"{where}.{name} is missing. Every head needs {', '.join(_NAMES)}.")
    value = written[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"{where}.{name}={value!r:.40} must be a number, 0 or more.")
    return float(value)


_NAMES = tuple(field.name for field in fields(HeadParams))
