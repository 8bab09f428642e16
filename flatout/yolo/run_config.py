"""A run's options on paper: opt.yaml and hyp.yaml, which say what a run is and let `--resume` take it up again.

The options of a resumed run are those in opt.yaml, but for what the command says itself. Its hyper-parameters are those
in hyp.yaml, not those in the file that was named then, which may have changed since.
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
from flatout.safefiles import replacing
from flatout.yolo.hyp import Hyp, load_hyp
from flatout.yolo.options import TrainOptions

_SHORTCUTS = (
    "fast", "no_fast_dataloader", "no_persistent_workers", "no_device_augment", "no_channels_last", "no_compile",
    "no_graphs", "no_scaled_decode", "no_gpu_decode", "use_compile",
)  # fmt: skip
"""Options that only say something about others."""
_HYP_DEFAULTS = {f"hyp.{field.name}": field.default for field in fields(Hyp) if field.default is not MISSING}


def identity(options: TrainOptions, hyp: Hyp, *, cuda: bool, bf16: bool) -> Identity:
    """Which training is meant: what a result depends on, options as typed and hyper-parameters as they are.

    What `--fast` stands for differs from machine to machine; two commands are compared by what they mean on this one,
    with or without CUDA and bf16.
    """
    changes: dict[str, Change] = {**changes_of(TrainOptions), "scaled_decode": "different", "gpu_decode": "different"}
    # A search keeps its generations where a training keeps its weights: neither goes on in the folder of the other.
    changes["evolve"] = "different"
    return Identity(config_of_run(options, hyp), partial(_in_effect, cuda=cuda, bf16=bf16), changes)


def config_of_run(options: TrainOptions, hyp: Hyp) -> dict[str, Any]:
    """What a result depends on, in values that JSON knows."""
    return config_of(options) | {f"hyp.{key}": value for key, value in asdict(hyp).items()}


def config_of_defaults() -> dict[str, Any]:
    """What a record means that does not know an option or a key of hyper-parameters, since both came later."""
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
    """opt.yaml and hyp.yaml of a run folder, each whole or not at all; `hyp` before gains and decay are scaled."""
    _write(folder / "opt.yaml", plain(options))
    _write(folder / "hyp.yaml", {key: value for key, value in asdict(hyp).items() if value is not None})


def read_options(folder: Path) -> tuple[TrainOptions, Hyp]:
    """Options and hyper-parameters of a run folder; ConfigError if they are missing or make no sense."""
    return read_config(folder / "opt.yaml", TrainOptions), load_hyp(folder / "hyp.yaml")


def _write(path: Path, values: Mapping[str, Any]) -> None:
    content = "".join(f"{key}: {_yaml(value)}\n" for key, value in values.items()).encode()
    with replacing(path, needed_bytes=len(content)) as sink:
        sink.write(content)


def _yaml(value: Any) -> str:
    # Text in quotes, because a run may be called 1e3; numbers as PyYAML writes them, so that old tools read them.
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    # On one line however long it is: --freeze may name fifty layers.
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).partition("\n")[0]
