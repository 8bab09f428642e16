"""The loggers of `--log-to`. None that sends data off the machine is on by default.

`LOGGERS` is the only list of them: flags, errors and tests of the documentation follow from it. Does not import torch,
so that help is fast.
"""

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from flatout.errors import ConfigError

if TYPE_CHECKING:
    from flatout.engine import Callback

logger = logging.getLogger(__name__)


class LoggerSpec(NamedTuple):
    """Where a logger is defined; imported only when it is chosen."""

    home: str
    """'module:class' of a `Callback`, which raises ConfigError if it cannot be used."""
    needs: str = ""
    """The module that must be importable."""
    package: str = ""
    """What pip installs for it, if it has another name."""


LOGGERS = {
    "tensorboard": LoggerSpec("flatout.runs.loggers.tensorboard:TensorBoard", needs="tensorboard"),
    "wandb": LoggerSpec("flatout.runs.loggers.weights_and_biases:WeightsAndBiases", needs="wandb"),
    "mlflow": LoggerSpec("flatout.runs.loggers.mlflow_tracking:MLflow", needs="mlflow", package="mlflow-skinny"),
    "csv": LoggerSpec("flatout.runs.loggers.plain_csv:PlainCsv"),
}
DEFAULT, NONE = "tensorboard", "none"

if TYPE_CHECKING:
    LogTo = str
else:
    LogTo = Literal[(*LOGGERS, NONE)]


def choose_loggers(names: Sequence[LogTo], **settings: Mapping[str, Any]) -> list["Callback"]:
    """Create the loggers with these names; without names the default one, if it is installed.

    ConfigError if one cannot be used. `settings` are keyword arguments by the name of the logger.
    """
    if not names and not _is_installed(LOGGERS[DEFAULT]):
        logger.info(
            "TensorBoard is not installed: numbers go only to files in the run folder. To install it: "
            "python -m pip install tensorboard"
        )
        return []
    chosen = {name: LOGGERS[name] for name in names or (DEFAULT,) if name != NONE}
    for name, spec in chosen.items():
        if not _is_installed(spec):
            raise ConfigError(
                f"{name} is not installed: python -m pip install {spec.package or spec.needs}, or choose another "
                "logger with --log-to."
            )
    return [resolve_name(spec.home)(**settings.get(name, {})) for name, spec in chosen.items()]


def _is_installed(spec: LoggerSpec) -> bool:
    return not spec.needs or importlib.util.find_spec(spec.needs) is not None
