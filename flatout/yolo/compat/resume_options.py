"""A run's options on paper: opt.yaml and hyp.yaml, which say what a run is and let `--resume` take it up again.

As in YOLOv7, the options of a resumed run are those in opt.yaml, whatever else the command says. Its hyper-parameters
are those in hyp.yaml, not those in the file that was named then, which may have changed since.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from flatout.config import read_config
from flatout.engine.checkpoint.atomic import replacing
from flatout.engine.run_folder import newest_last
from flatout.errors import CheckpointError
from flatout.yolo.hyp import Hyp, load_hyp
from flatout.yolo.options import TrainOptions

_OF_THIS_CALL = ("resume", "break_lock", "allow_data_change", "local_rank", "stop_after", "diagnose_compile",
                 "profile", "price", "budget", "on_done", "no_preflight", "mirror", "once")  # fmt: skip
"""Said anew by every command; never taken from a run."""
_NO_MATTER = (
    *_OF_THIS_CALL, "fresh", "exist_ok", "project", "name", "device", "workers", "save_every_minutes",
    "save_every_steps", "log_every", "compat_pt", "verify_cache", "evolve", "log_to", "entity", "upload_dataset",
    "bbox_interval", "save_period", "artifact_alias", "allow_bad_labels", "no_persistent_workers",
)  # fmt: skip
"""Where, on what and how often: nothing that is learned depends on them, so a run may go on with others."""
_CAME_LATER = {
    "hyp.aspect": 0.0, "no_fast_dataloader": False, "no_device_augment": False, "no_channels_last": False,
    "no_compile": False, "no_graphs": False, "no_scaled_decode": False, "no_gpu_decode": False,
}  # fmt: skip
"""Keys that older runs have not written down, with what those runs did: left out while they say just that."""


def config_of_run(options: TrainOptions, hyp: Hyp) -> dict[str, Any]:
    """What a result depends on, in values that JSON knows: commands with equal ones mean the same run.

    From the options as typed: what `--fast` stands for differs from machine to machine.
    """
    settings = {key: value for key, value in _plain(options).items() if key not in _NO_MATTER}
    settings |= {f"hyp.{key}": value for key, value in asdict(hyp).items()}
    return {key: value for key, value in settings.items() if key not in _CAME_LATER or value != _CAME_LATER[key]}


def write_options(folder: Path, options: TrainOptions, hyp: Hyp) -> None:
    """opt.yaml and hyp.yaml of a run folder, each whole or not at all; `hyp` before gains and decay are scaled."""
    _write(folder / "opt.yaml", _plain(options))
    _write(folder / "hyp.yaml", {key: value for key, value in asdict(hyp).items() if value is not None})


def read_options(folder: Path) -> tuple[TrainOptions, Hyp]:
    """Options and hyper-parameters of a run folder; ConfigError if they are missing or make no sense."""
    return read_config(folder / "opt.yaml", TrainOptions), load_hyp(folder / "hyp.yaml")


def checkpoint_to_resume(options: TrainOptions, *, root: Path = Path()) -> Path | None:
    """The file that `--resume` names, else the newest last.pt below `root`; None without `--resume`."""
    if options.resume is False:
        return None
    if options.resume is True:
        return newest_last(root)
    path = Path(options.resume)
    if not path.exists():
        raise CheckpointError(f"--resume {path}: no such file. Name a last.pt, or nothing to take the newest.")
    return path


def options_to_resume(asked: TrainOptions, folder: Path) -> tuple[TrainOptions, Hyp]:
    """Options and hyper-parameters of the run in `folder`; only what every call says anew comes from `asked`."""
    stored, hyp = read_options(folder)
    return replace(stored, **{key: getattr(asked, key) for key in _OF_THIS_CALL}), hyp


def _plain(options: TrainOptions) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(options).items()}


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
