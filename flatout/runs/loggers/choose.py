"""The loggers that `--log-to` can name. Nothing that leaves the machine is on unless it is named.

`LOGGERS` is the only list of them: flags, errors and tests of the documentation follow from it. No torch: help must
answer at once.
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


class Known(NamedTuple):
    """A logger, imported when it is chosen."""

    home: str
    """module:class, of a `Callback`. The class raises ConfigError if it cannot work here."""
    needs: str = ""
    """A package that must be installed."""


LOGGERS = {
    "tensorboard": Known("flatout.runs.loggers.tensorboard:TensorBoard", needs="tensorboard"),
    "wandb": Known("flatout.runs.loggers.weights_and_biases:WeightsAndBiases", needs="wandb"),
    "mlflow": Known("flatout.runs.loggers.mlflow_tracking:MLflow", needs="mlflow"),
    "csv": Known("flatout.runs.loggers.plain_csv:PlainCsv"),
}
DEFAULT, NONE = "tensorboard", "none"

if TYPE_CHECKING:
    LogTo = str
else:
    LogTo = Literal[(*LOGGERS, NONE)]


def choose_loggers(names: Sequence[LogTo], **settings: Mapping[str, Any]) -> list["Callback"]:
    """One per name; without names the default, if it is installed. ConfigError for what cannot be used here.

    `settings` holds keywords of loggers, by their names.
    """
    if not names and not _is_installed(LOGGERS[DEFAULT]):
        logger.info(
            "TensorBoard is not installed, so numbers go to the run folder alone. To have it: "
            "python -m pip install tensorboard"
        )
        return []
    wanted = {name: LOGGERS[name] for name in names or (DEFAULT,) if name != NONE}
    for name, known in wanted.items():
        if not _is_installed(known):
            needs = known.needs
            raise ConfigError(f"{name} is not installed: python -m pip install {needs}, or log to something else.")
    return [resolve_name(known.home)(**settings.get(name, {})) for name, known in wanted.items()]


def _is_installed(known: Known) -> bool:
    return not known.needs or importlib.util.find_spec(known.needs) is not None
