"""What a training's command says beside its YAML."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from flatout.cli import option
from flatout.errors import ConfigError
from flatout.runs import RunOptions


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """The flags of `flatout spike train`; what is learned stands in the YAML."""

    LEAST: ClassVar[Mapping[str, int]] = {**RunOptions.LEAST, "log_every": 0}

    config: str = option("", "the YAML of the training; docs/spike.md lists its keys", change="exact", metavar="YAML")
    set: tuple[str, ...] = option(
        (),
        "overrule a key of the YAML: TRAIN.EPOCHS=3",
        change="exact",
        action="append",
        nargs=None,
        metavar="KEY=VALUE",
    )
    settings: Any = option(None, "", change="exact")
    """A SpikeConfig, where there is one already; None: as `config` and `set` say."""
    validate: bool = option(True, "", change="exact")
    """False: only for a look at the speed of training."""

    # Those of every run, with other defaults
    project: str = option(
        "", "folder of the folders of runs (default: as LOG.SAVE_DIR says)", change="exact", metavar="FOLDER"
    )
    name: str = option(
        "", "name of the run; a number is added if that name is taken (default: as LOG.SAVE_DIR says)", change="exact"
    )
    log_every: int = option(
        0, "micro-batches between two lines of the log (default: LOG.PROGRESS_EVERY_STEPS)", change="exact", metavar="N"
    )

    def of(self, settings: Any) -> "TrainOptions":
        """With what the YAML says about the run, where the command does not."""
        save, train = Path(settings.LOG.SAVE_DIR), settings.TRAIN
        if train.RESUME_FROM_CHECKPOINT and not (train.CHECKPOINT_PATH or self.resume):
            raise ConfigError("TRAIN.RESUME_FROM_CHECKPOINT is true, but CHECKPOINT_PATH does not say which one.")
        return replace(
            self,
            settings=settings,
            project=self.project or str(save.parent),
            name=self.name or save.name,
            log_every=self.log_every or settings.LOG.PROGRESS_EVERY_STEPS,
            resume=self.resume or (train.CHECKPOINT_PATH if train.RESUME_FROM_CHECKPOINT else False),
            compile="on" if self.compile == "off" and train.COMPILE_MODEL else self.compile,
            log_to=self.log_to or (() if settings.LOG.TENSORBOARD else ("none",)),
        )
