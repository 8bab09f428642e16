"""From a YAML file and `--set` to a config, and back to plain values."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from flatout.config import build_config
from flatout.errors import ConfigError
from flatout.spike.config.unused import DEAD
from flatout.spike.config.whole import SpikeConfig
from flatout.yaml_strict import load_yaml, parse_yaml

logger = logging.getLogger(__name__)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> SpikeConfig:
    """Read a YAML file; ConfigError names every wrong, missing and unknown key at once.

    An override is what `--set` takes: "TRAIN.EPOCHS=3".
    """
    values = load_yaml(path)
    values = {} if values is None else values
    for override in overrides:
        _override(values, override)
    config = build_config(values, SpikeConfig, where=str(path))
    for note in notes(values if isinstance(values, dict) else {}, config):
        logger.warning("%s: %s", path, note)
    return config


def _override(values: Any, text: str) -> None:
    name, equals, value = text.partition("=")
    keys = name.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {text}: write SECTION.KEY=VALUE, as in TRAIN.EPOCHS=3.")
    for key in keys[:-1]:
        values = values.setdefault(key, {}) if isinstance(values, dict) else None
    if not isinstance(values, dict):
        raise ConfigError(f"--set {text}: the file has no group of keys there.")
    values[keys[-1]] = parse_yaml(value, where=f"--set {text}")


def notes(values: Mapping[Any, Any], config: SpikeConfig) -> Iterator[str]:
    """What a reader should know about a file that is correct."""
    for section, keys in DEAD.items():
        given = values.get(section) or {}
        if used := [key for key in keys if key in given]:
            yield f"{section}.{', '.join(used)}: of the early VRT-based code; accepted and not used here."
    data = config.DATA
    if data.K is not None and data.NUM_VOXEL_BINS is not None and data.NUM_VOXEL_BINS != data.K:
        yield f"DATA.K={data.K} is ignored: the loader makes NUM_VOXEL_BINS={data.NUM_VOXEL_BINS} channels, so the "\
            "network takes as many."  # fmt: skip
    if config.TRAIN.OPTIM.TYPE == "adamw8bit":
        yield "TRAIN.OPTIM.TYPE: adamw8bit is not built in: adamw is used, which takes 6 bytes more per parameter."


def plain(config: object) -> Any:
    """A config as dicts, lists and plain values, for YAML and JSON."""
    if is_dataclass(config):
        return {each.name: plain(getattr(config, each.name)) for each in fields(config)}
    return list(config) if isinstance(config, tuple) else config
