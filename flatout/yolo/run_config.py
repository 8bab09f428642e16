"""opt.yaml and hyp.yaml of a run folder, and the identity by which two runs are compared.

The options of a resumed run are those in opt.yaml, except those given with the command. Its hyper-parameters are those
in hyp.yaml, not those in the file that was given at the start, which may have changed since.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from flatout.cli import Change, changes_of
from flatout.config import read_config
from flatout.runs import Identity, config_of, plain
from flatout.safefiles import write_file
from flatout.yolo.hyp import Hyp, load_hyp
from flatout.yolo.options import OPTIONS_NAME, TrainOptions

_SHORTCUTS = (
    "fast", "no_fast_dataloader", "no_persistent_workers", "no_device_augment", "no_channels_last", "no_compile",
    "no_graphs", "no_scaled_decode", "no_gpu_decode", "use_compile",
)  # fmt: skip
"""Options that only determine other options."""
_HYP_DEFAULTS = {f"hyp.{field.name}": field.default for field in fields(Hyp) if field.default is not MISSING}


def identity(options: TrainOptions, hyp: Hyp, *, cuda: bool, bf16: bool) -> Identity:
    """The identity of a training: everything its result depends on, with options as given and hyper-parameters.

    What `--fast` stands for depends on the machine, so two commands are compared by their meaning on this one, with or
    without CUDA and bf16.
    """
    changes: dict[str, Change] = {**changes_of(TrainOptions), "scaled_decode": "different"}
    # A search and a training keep different files in the run folder, so neither may continue in that of the other.
    changes["evolve"] = "different"
    return Identity(config_of_run(options, hyp), partial(_in_effect, cuda=cuda, bf16=bf16), changes)


def config_of_run(options: TrainOptions, hyp: Hyp) -> dict[str, Any]:
    """Everything a result depends on, as JSON values."""
    return config_of(options) | {f"hyp.{key}": value for key, value in asdict(hyp).items()}


def config_of_defaults() -> dict[str, Any]:
    """Values for options and hyper-parameters that an old record lacks, because they were added later."""
    return config_of(TrainOptions()) | _HYP_DEFAULTS


def _in_effect(config: Mapping[str, Any], *, cuda: bool, bf16: bool) -> dict[str, Any]:
    known = {field.name for field in fields(TrainOptions)}
    given: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in config.items() if key in known
    }
    options = TrainOptions(**given).resolved(cuda=cuda, bf16=bf16)
    means = {key: value for key, value in plain(options).items() if key not in _SHORTCUTS}
    means |= {
        "amp": options.amp or ("fp16" if cuda else "off"),
        "scaled_decode": options.decodes_scaled,
        "gpu_decode": options.decodes_on_gpu,
    }
    return means | _HYP_DEFAULTS | {key: value for key, value in config.items() if key.startswith("hyp.")}


def write_options(folder: Path, options: TrainOptions, hyp: Hyp) -> None:
    """Write opt.yaml and hyp.yaml of a run folder atomically; `hyp` is the one before scaling."""
    _write(folder / OPTIONS_NAME, plain(options))
    _write(folder / "hyp.yaml", {key: value for key, value in asdict(hyp).items() if value is not None})


def read_options(folder: Path) -> tuple[TrainOptions, Hyp]:
    """Read the options and hyper-parameters of a run folder; ConfigError if they are missing or invalid."""
    return read_config(folder / OPTIONS_NAME, TrainOptions), load_hyp(folder / "hyp.yaml")


def _write(path: Path, values: Mapping[str, Any]) -> None:
    write_file(path, "".join(f"{key}: {_yaml(value)}\n" for key, value in values.items()))


def _yaml(value: Any) -> str:
    # Text is quoted, because a run may be named 1e3. Numbers are written by PyYAML, so that old tools can read them.
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    # On one line of any length: --freeze may list fifty layers.
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).partition("\n")[0]
