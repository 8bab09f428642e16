"""Options of a training with several heads: their classes, and augmentation per head."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from flatout.errors import ConfigError, MissingFileError, counted
from flatout.yaml_strict import load_yaml
from flatout.yolo.augment.draw import ClassAware
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.find_file import find_file
from flatout.yolo.model.module_specs import MULTIHEADS
from flatout.yolo.model.network import Network
from flatout.yolo.multihead.head_config import HeadConfig, contiguous_heads, read_head_config
from flatout.yolo.multihead.layer import MultiHeadDetect

logger = logging.getLogger(__name__)

# Augmentation per head: the file of `--head-params`


@dataclass(frozen=True, kw_only=True)
class HeadParams:
    """Ranges of augmentation for one head. Only the first two are used, as in the original program; all are checked."""

    degrees: float
    shear: float
    flipud: float
    fliplr: float
    mixup: float


def read_head_params(path: str | Path, *, num_heads: int) -> tuple[HeadParams, ...]:
    """Params of `head_0` to `head_{num_heads - 1}`; other keys are ignored. ConfigError names what is missing."""
    if not Path(path).exists():
        raise MissingFileError(
            f"{path}: no such file. Give --head-params a YAML file with the augmentation of each head."
        )
    content = load_yaml(path)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: head_0 and the other heads are missing. Every head needs {', '.join(_NAMES)}.")
    return tuple(_head_params(content.get(f"head_{head}"), f"{path}: head_{head}") for head in range(num_heads))


def _head_params(written: object, where: str) -> HeadParams:
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


# Model configs with several heads: only the detection layer is replaced

PLAIN, ATTENTION = MULTIHEADS
REPLACED = ("Detect", "IDetect", *MULTIHEADS)
"""Detection layers that read one map per level, as layers with several heads do."""


@dataclass(frozen=True)
class HeadChoice:
    """The heads that a command asks for."""

    groups: HeadConfig | None = None
    """None for the groups of the config, else for blocks of consecutive classes."""
    attention: bool = False
    """Whether every head gets an attention module."""

    def applied_to(self, config: object, *, where: str) -> object:
        """A copy of the model config with these heads; a value that is not a model config is returned unchanged.

        ConfigError for a network with auxiliary outputs.
        """
        module = _detection_layer(config)
        if module is None:
            return config
        if module not in REPLACED:
            raise ConfigError(
                f"{where}: its detection layer {module} has auxiliary outputs, so it cannot be replaced by several "
                f"heads. Use a config that ends in one of {', '.join(REPLACED)}."
            )
        assert isinstance(config, Mapping)
        *rows, (origin, number, _, args) = config["head"]
        layer = ATTENTION if self.attention or module == ATTENTION else PLAIN
        changed: dict[str, Any] = {**config, "head": [*rows, [origin, number, layer, args]]}
        return changed if self.groups is None else changed | {"head_config": self.groups.plain()}


def _detection_layer(config: object) -> str | None:
    """The module of the last row; None if there is none, which model/spec.py reports."""
    rows = config.get("head") if isinstance(config, Mapping) else None
    last = rows[-1] if isinstance(rows, list | tuple) and rows else None
    return str(last[2]) if isinstance(last, list | tuple) and len(last) == 4 else None


@dataclass(frozen=True, kw_only=True)
class WantedHeads:
    """The values of `--head-config`, `--heads` and `--head-attention`."""

    file: str = ""
    """The head configuration."""
    num_heads: int = 0
    """Without a file: that many heads with blocks of classes; 0 if not given."""
    attention: bool = False


def chosen_heads(wanted: WantedHeads, *, num_classes: int) -> HeadChoice | None:
    """The heads for a training; None if no flag was given. ConfigError if they do not fit the classes."""
    if wanted == WantedHeads():
        return None
    return HeadChoice(_groups(wanted, num_classes), wanted.attention)


def _groups(wanted: WantedHeads, num_classes: int) -> HeadConfig | None:
    if wanted.file:
        groups = read_head_config(find_file(wanted.file, flag="--head-config"))
        if groups.nc != num_classes:
            raise ConfigError(
                f"--head-config {wanted.file}: assigns {groups.nc} classes, but the data set has {num_classes}. "
                "Create a file for this data set with `flatout yolo group`."
            )
        if wanted.num_heads not in (0, groups.num_heads):
            logger.warning(
                "--heads %d is ignored: %s has %d heads.",
                wanted.num_heads, wanted.file, groups.num_heads,
            )  # fmt: skip
        return groups
    if not wanted.num_heads:
        return None
    if wanted.num_heads > num_classes:
        raise ConfigError(
            f"--heads {wanted.num_heads}: there are only {counted(num_classes, 'class')}, and each head needs at least "
            f"one. Use --heads {num_classes} or fewer."
        )
    return contiguous_heads(num_classes, wanted.num_heads)


def class_aware(params_file: str, network: Network, images: ImageSet) -> ClassAware | None:
    """Rotation and shear per head for `--class-aware-aug`; None for a network with one head."""
    if not isinstance(network.head, MultiHeadDetect):
        logger.warning("--class-aware-aug: the network has one head, so images are augmented as in the hyp file.")
        return None
    groups = network.head.groups
    params = read_head_params(find_file(params_file, flag="--head-params"), num_heads=groups.num_heads)
    degrees_H, shear_H = np.array([(one.degrees, one.shear) for one in params]).T
    return ClassAware.of(images.labels, np.array(groups.head_C), degrees_H, shear_H)
