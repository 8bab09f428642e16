"""Options of `flatout spike train` beside its YAML file."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from flatout.cli import option
from flatout.errors import ConfigError
from flatout.runs import RunOptions

OPTIONS_NAME = "options.yaml"
"""The flags of a run, in its folder; everything else about it is in config.yaml."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """The flags of `flatout spike train`; everything about the training itself is in the YAML file."""

    LEAST: ClassVar[Mapping[str, int]] = {**RunOptions.LEAST, "log_every": 0}

    config: str = option(
        "", "YAML file that describes the training; docs/spike.md lists its keys", change="exact", metavar="YAML"
    )
    set: tuple[str, ...] = option(
        (),
        "override a key of the YAML file, as in TRAIN.EPOCHS=3; can be given several times",
        change="exact",
        action="append",
        nargs=None,
        metavar="KEY=VALUE",
    )
    settings: Any = option(None, "", change="exact")
    """A loaded SpikeConfig; None: load it from `config` and `set`."""
    validate: bool = option(True, "", change="exact")
    """False: no validation, to measure the speed of training."""

    # Options of every run, with other defaults
    project: str = option(
        "",
        "folder that holds the run folders (default: the parent folder of LOG.SAVE_DIR)",
        change="exact",
        metavar="FOLDER",
    )
    name: str = option(
        "",
        "name of the run; a number is added if that name is taken (default: the last part of LOG.SAVE_DIR)",
        change="exact",
    )
    log_every: int = option(
        0, "micro-batches between two lines of the log (default: LOG.PROGRESS_EVERY_STEPS)", change="exact", metavar="N"
    )

    def with_checkpoint(self) -> "TrainOptions":
        """These options with the run to resume that `settings` name, unless the command names one itself."""
        train = self.settings.TRAIN
        if self.resume or not train.RESUME_FROM_CHECKPOINT:
            return self
        if not train.CHECKPOINT_PATH:
            raise ConfigError(
                "TRAIN.RESUME_FROM_CHECKPOINT is true, but no checkpoint is given: set TRAIN.CHECKPOINT_PATH, or use "
                "--resume."
            )
        return replace(self, resume=train.CHECKPOINT_PATH)

    def resolved(self) -> "TrainOptions":
        """These options with what `settings` say about the run, unless a flag says it."""
        log = self.settings.LOG
        save = Path(log.SAVE_DIR)
        return replace(
            self,
            project=self.project or str(save.parent),
            name=self.name or save.name,
            log_every=self.log_every or log.PROGRESS_EVERY_STEPS,
            compile="on" if self.compile == "off" and self.settings.TRAIN.COMPILE_MODEL else self.compile,
            log_to=self.log_to or (() if log.TENSORBOARD else ("none",)),
        )
