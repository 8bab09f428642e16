"""The stages file: options that all stages share, and options of each; checked as a whole before the first begins.

    common: {data: my.yaml, cfg: yolov7-tiny, img_size: 320}
    stages:
      - {epochs: 100, freeze: 50, hyp: data/hyp.scratch.tiny.noota.yaml}
      - {epochs: 200, freeze: 0, hyp: data/hyp.scratch.tiny.noota.stage4.yaml}

Keys are flags of train.py, written with dashes or underscores. Flags of the command override both parts.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from flatout.cli import changes_of
from flatout.config import build_config, read_config
from flatout.errors import ConfigError, did_you_mean
from flatout.runs import Identity
from flatout.yolo.commands.flags import refuse_unsupported, train_and_test_size
from flatout.yolo.find_file import find_file
from flatout.yolo.hyp import Hyp, load_hyp
from flatout.yolo.multihead.head_config import read_head_config
from flatout.yolo.options import TrainOptions
from flatout.yolo.run_config import config_of_defaults, config_of_run

JOB_KEYS = ("project", "name", "fresh")
"""Options of the whole job, given on the command line only."""
REFUSED_KEYS = (
    "resume",
    "exist_ok",
    "evolve",
    "profile",
    "local_rank",
    "stop_after",
    "use_compile",
    "diagnose_compile",
)
"""Options that stages refuse: a job continues by itself, in its own folders."""
PROJECT = "runs/stages"
"""The default of --project."""


@dataclass(frozen=True)
class _StagesFile:
    """The content of a stages file."""

    stages: list[dict[str, Any]]
    common: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The trainings of a job, one per stage."""

    file: Path
    project: Path
    name: str
    stages: tuple[TrainOptions, ...]
    """Options of each stage for train(), without its folder and without the weights that later stages start from."""
    hyps: tuple[Hyp, ...]
    """Hyper-parameters of each stage, read from its hyp file."""
    fresh: bool = False

    @property
    def num_epochs(self) -> int:
        return sum(stage.epochs for stage in self.stages)

    def config(self) -> dict[str, Any]:
        """What the result depends on, as plain JSON values: keys such as `stage2.freeze`, hyper-parameters included."""
        config: dict[str, Any] = {"name": self.name, "epochs": self.num_epochs}
        for number, (stage, hyp) in enumerate(zip(self.stages, self.hyps, strict=True), 1):
            values = config_of_run(stage, hyp) | ({"heads_in_it": _digest(stage)} if stage.head_config else {})
            config |= {f"stage{number}.{key}": value for key, value in values.items()}
        return config

    def identity(self) -> Identity:
        """The identity of the job. Options missing from an older record were at their defaults, as in every run."""
        numbers = range(1, len(self.stages) + 1)
        known = {f"stage{number}.{key}": value for number in numbers for key, value in config_of_defaults().items()}
        changes = {f"stage{number}.{key}": each for number in numbers for key, each in changes_of(TrainOptions).items()}
        return Identity(self.config(), lambda old: known | dict(old), changes)


def read_plan(
    file: str | Path, flags: Mapping[str, Any] | None = None, *, of_this_call: Mapping[str, Any] | None = None
) -> StagePlan:
    """Read a plan from a file and apply the flags of the command; ConfigError names the mistake.

    `of_this_call` are options from the environment, such as `stop_after`; they count separately in every stage.
    """
    path = find_file(str(file), flag="FILE")
    written, flags = read_config(path, _StagesFile), dict(flags or {})
    if not written.stages:
        raise ConfigError(f"{path}: stages: the list is empty. Name at least one stage.")
    _check_keys("common", written.common, path)
    for number, stage in enumerate(written.stages, 1):
        _check_keys(f"stage {number}", stage, path, also_refused=("weights",) if number > 1 else ())
    if refused := [f"--{key.replace('_', '-')}" for key in REFUSED_KEYS if key in flags]:
        raise ConfigError(
            f"{refused[0]} cannot be used with stages: the same command continues them, --fresh starts again."
        )
    job = {key: flags.pop(key) for key in JOB_KEYS if key in flags}
    stages = [
        _stage(number, written.common, stage, flags, where=f"{path}: stage {number}")
        for number, stage in enumerate(written.stages, 1)
    ]
    for options in stages:
        refuse_unsupported(options)
        # Checked now, because the last stage may begin days after the first.
        find_file(options.data, flag="--data")
    return StagePlan(
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
    values = _normalised(common) | _normalised(stage) | _normalised(flags)
    if number > 1:
        # From the best weights of the stage before: its network and anchors, unless this stage has a cfg of its own.
        cfg = _normalised(stage).get("cfg", "")
        values |= {"weights": "", "cfg": cfg, "transfer_weights": True, "noautoanchor": True}
    return build_config(values, TrainOptions, where=where)


def _digest(stage: TrainOptions) -> str:
    """A digest of the content of `--head-config`: heads with other classes are another network under any file name."""
    heads = read_head_config(find_file(stage.head_config, flag="--head-config")).plain()
    return hashlib.sha256(json.dumps(heads).encode()).hexdigest()[:12]


def _normalised(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with underscores in their keys, a single `freeze` as a list, and `img_size` for training and test."""
    plain = {key.replace("-", "_"): value for key, value in values.items()}
    if isinstance(freeze := plain.get("freeze"), int):
        plain["freeze"] = [freeze]
    if "img_size" in plain:
        sizes = plain["img_size"]
        plain["img_size"] = train_and_test_size(sizes if isinstance(sizes, list) and sizes else [sizes])
    return plain


def _check_keys(part: str, values: Mapping[str, Any], path: Path, also_refused: Sequence[str] = ()) -> None:
    known = [option.name for option in fields(TrainOptions)]
    for key in (key.replace("-", "_") for key in values):
        if key in JOB_KEYS:
            raise ConfigError(f"{path}: {part}: {key} applies to all stages: give it to the command, as --{key}.")
        if key in REFUSED_KEYS:
            raise ConfigError(f"{path}: {part}: {key} cannot be used in stages. Leave it out.")
        if key in also_refused:
            raise ConfigError(
                f"{path}: {part}: {key}: a stage starts from the best weights of the one before. Leave it out."
            )
        if key not in known:
            advice = did_you_mean(key, known, "keys are flags of train.py.")
            raise ConfigError(f"{path}: {part}: unknown key {key!r} - {advice}")
