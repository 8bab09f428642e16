"""Several heads in a training: which classes each has, and how its mosaics are turned."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from flatout.errors import ConfigError, MissingFileError
from flatout.yaml_strict import load_yaml
from flatout.yolo.augment.draw import ClassAware
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.find_file import find_file
from flatout.yolo.model.module_specs import MULTIHEADS
from flatout.yolo.model.network import Network
from flatout.yolo.multihead.head_config import HeadConfig, contiguous_heads, read_head_config
from flatout.yolo.multihead.layer import MultiHeadDetect

logger = logging.getLogger(__name__)

# How each head's classes are augmented: the file behind `--head-params`.


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


# Give a network several heads: the detection layer of its config replaced, everything before it as it was.

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
    """Name of the last row's module; None if there is none, which is for model/parse.py to complain about."""
    rows = config.get("head") if isinstance(config, Mapping) else None
    last = rows[-1] if isinstance(rows, list | tuple) and rows else None
    return str(last[2]) if isinstance(last, list | tuple) and len(last) == 4 else None


@dataclass(frozen=True, kw_only=True)
class WantedHeads:
    """What `--head-config`, `--heads` and `--head-attention` ask for."""

    file: str = ""
    """Says which head answers for which classes."""
    num_heads: int = 0
    """Each for a block of classes, where there is no file; 0: not said."""
    attention: bool = False


def chosen_heads(wanted: WantedHeads, *, num_classes: int) -> HeadChoice | None:
    """None if nothing is wanted."""
    if wanted == WantedHeads():
        return None
    return HeadChoice(_groups(wanted, num_classes), wanted.attention)


def _groups(wanted: WantedHeads, num_classes: int) -> HeadConfig | None:
    if wanted.file:
        groups = read_head_config(find_file(wanted.file, flag="--head-config"))
        if groups.nc != num_classes:
            raise ConfigError(
                f"--head-config {wanted.file}: shares out {groups.nc} classes, but the data set has "
                f"{num_classes}. Make one for it with `flatout yolo group`."
            )
        if wanted.num_heads not in (0, groups.num_heads):
            logger.warning(
                "--heads %d: %s has %d heads, and that is how many there are.",
                wanted.num_heads, wanted.file, groups.num_heads,
            )  # fmt: skip
        return groups
    if not wanted.num_heads:
        return None
    if wanted.num_heads > num_classes:
        raise ConfigError(f"--heads {wanted.num_heads}: there are only {num_classes} classes to share out.")
    return contiguous_heads(num_classes, wanted.num_heads)


def class_aware(params_file: str, network: Network, images: ImageSet) -> ClassAware | None:
    """Turn and shear by head for `--class-aware-aug`; None where the network has no heads."""
    if not isinstance(network.head, MultiHeadDetect):
        logger.warning("--class-aware-aug: the network has one head, so pictures are augmented as the hyp file says.")
        return None
    groups = network.head.groups
    params = read_head_params(find_file(params_file, flag="--head-params"), num_heads=groups.num_heads)
    degrees_H, shear_H = np.array([(one.degrees, one.shear) for one in params]).T
    return ClassAware.of(images.labels, np.array(groups.head_C), degrees_H, shear_H)
