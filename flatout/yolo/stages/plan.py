"""The file of stages: options that all trainings share, and those of each; checked as a whole before the first begins.

    common: {data: my.yaml, cfg: yolov7-tiny, img_size: 320}
    stages:
      - {epochs: 100, freeze: 50, hyp: data/hyp.scratch.tiny.noota.yaml}
      - {epochs: 200, freeze: 0, hyp: data/hyp.scratch.tiny.noota.stage4.yaml}

Keys are flags of train.py, with or without dashes for underscores. Flags of the command win over both.
"""

import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from flatout.cli import changes_of
from flatout.config import build_config, read_config
from flatout.errors import ConfigError
from flatout.runs import Identity
from flatout.yolo.commands.flags import refuse_what_is_not_built, train_and_test_size
from flatout.yolo.find_file import find_file
from flatout.yolo.hyp import Hyp, load_hyp
from flatout.yolo.multihead.head_config import read_head_config
from flatout.yolo.options import TrainOptions
from flatout.yolo.run_config import config_of_defaults, config_of_run

OF_THE_JOB = ("project", "name", "fresh")
"""Said by the command, and about all stages together."""
NOT_HERE = ("resume", "exist_ok", "evolve", "profile", "local_rank", "stop_after", "use_compile", "diagnose_compile")
"""What a stage cannot be asked for: the job itself goes on where it was, in its own folders."""
PROJECT = "runs/stages"


@dataclass(frozen=True)
class _Written:
    """The file."""

    stages: list[dict[str, Any]]
    common: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to train, one stage after the other."""

    file: Path
    project: Path
    name: str
    stages: tuple[TrainOptions, ...]
    """As train() gets them, but for where a stage is saved and what all but the first start from."""
    hyps: tuple[Hyp, ...]
    """Of each stage, as its file is now."""
    fresh: bool = False

    @property
    def num_epochs(self) -> int:
        return sum(stage.epochs for stage in self.stages)

    def config(self) -> dict[str, Any]:
        """What the result depends on, in values that JSON knows: `stage2.freeze` and the like, hyp values included."""
        config: dict[str, Any] = {"name": self.name, "epochs": self.num_epochs}
        for number, (stage, hyp) in enumerate(zip(self.stages, self.hyps, strict=True), 1):
            values = config_of_run(stage, hyp) | ({"heads_in_it": _digest(stage)} if stage.head_config else {})
            config |= {f"stage{number}.{key}": value for key, value in values.items()}
        return config

    def identity(self) -> Identity:
        """Which job is meant. What a record does not know was at its default, as in every run."""
        numbers = range(1, len(self.stages) + 1)
        known = {f"stage{number}.{key}": value for number in numbers for key, value in config_of_defaults().items()}
        changes = {f"stage{number}.{key}": each for number in numbers for key, each in changes_of(TrainOptions).items()}
        return Identity(self.config(), lambda old: known | dict(old), changes)


def read_plan(
    file: str | Path, flags: Mapping[str, Any] | None = None, *, of_this_call: Mapping[str, Any] | None = None
) -> Plan:
    """The plan in a file, with flags of the command in force; ConfigError names every mistake.

    `of_this_call` are options from the environment, such as `stop_after`; they count from the beginning of a stage.
    """
    path = find_file(str(file), flag="FILE")
    written, flags = read_config(path, _Written), dict(flags or {})
    if not written.stages:
        raise ConfigError(f"{path}: stages: empty - name at least one.")
    _check_keys("common", written.common, path)
    for number, stage in enumerate(written.stages, 1):
        _check_keys(f"stage {number}", stage, path, also_not=("weights",) if number > 1 else ())
    if refused := [f"--{key.replace('_', '-')}" for key in NOT_HERE if key in flags]:
        raise ConfigError(f"{refused[0]} is not for stages: the same command continues, and --fresh begins anew.")
    job = {key: flags.pop(key) for key in OF_THE_JOB if key in flags}
    stages = [
        _stage(number, written.common, stage, flags, where=f"{path}: stage {number}")
        for number, stage in enumerate(written.stages, 1)
    ]
    for options in stages:
        refuse_what_is_not_built(options)
        # Now, because the last stage may begin days after the first.
        find_file(options.data, flag="--data")
    return Plan(
        file=path,
        project=Path(job.get("project", PROJECT)),
        name=job.get("name", path.stem.removeprefix("stages.")),
        stages=tuple(replace(options, **(of_this_call or {})) for options in stages),
        hyps=tuple(load_hyp(find_file(options.hyp, flag="--hyp")) for options in stages),
        fresh=job.get("fresh", False),
    )


def _stage(
    number: int, common: Mapping[str, Any], stage: Mapping[str, Any], flags: Mapping[str, Any], *, where: str
) -> TrainOptions:
    values = _in_full(common) | _in_full(stage) | _in_full(flags)
    if number > 1:
        # From the best of the stage before: its network with its anchors, unless this stage brings a network.
        brought = _in_full(stage).get("cfg", "")
        values |= {"weights": "", "cfg": brought, "transfer_weights": True, "noautoanchor": True}
    return build_config(values, TrainOptions, where=where)


def _digest(stage: TrainOptions) -> str:
    """Of what `--head-config` says: heads with other classes are another network, whatever the file is called."""
    heads = read_head_config(find_file(stage.head_config, flag="--head-config")).plain()
    return hashlib.sha256(json.dumps(heads).encode()).hexdigest()[:12]


def _in_full(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys with underscores; one number where options have several."""
    plain = {key.replace("-", "_"): value for key, value in values.items()}
    if isinstance(freeze := plain.get("freeze"), int):
        plain["freeze"] = [freeze]
    if "img_size" in plain:
        sizes = plain["img_size"]
        plain["img_size"] = train_and_test_size(sizes if isinstance(sizes, list) and sizes else [sizes])
    return plain


def _check_keys(part: str, values: Mapping[str, Any], path: Path, also_not: Sequence[str] = ()) -> None:
    known = [option.name for option in fields(TrainOptions)]
    for key in (key.replace("-", "_") for key in values):
        if key in OF_THE_JOB:
            raise ConfigError(f"{path}: {part}: {key} is about all stages: give it with the command, as --{key}.")
        if key in NOT_HERE:
            raise ConfigError(f"{path}: {part}: {key} is not for stages. Leave it out.")
        if key in also_not:
            raise ConfigError(f"{path}: {part}: {key}: a stage starts from the best of the one before. Leave it out.")
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            advice = f"did you mean {close[0]!r}?" if close else "keys are flags of train.py."
            raise ConfigError(f"{path}: {part}: unknown key {key!r} - {advice}")
