"""Which loggers does `--log-to` mean? Nothing that leaves the machine is on unless it is named."""

import importlib.util
import logging
from collections.abc import Sequence
from typing import Literal

from flatout.engine.callbacks import Callback
from flatout.engine.loggers.mlflow_tracking import MLflow, check_store
from flatout.engine.loggers.tensorboard import TensorBoard
from flatout.engine.loggers.weights_and_biases import WeightsAndBiases
from flatout.errors import ConfigError

logger = logging.getLogger(__name__)

Logger = Literal["tensorboard", "wandb", "mlflow", "none"]
TO_GET_IT = "python -m pip install tensorboard"


def choose_loggers(
    names: Sequence[Logger], *, wandb: WeightsAndBiases | None = None, board_within: str = ""
) -> list[Callback]:
    """One per name; without names TensorBoard, if it is installed. ConfigError for what cannot be used here."""
    if not names:
        if _is_installed("tensorboard"):
            return [TensorBoard(board_within)]
        logger.info("TensorBoard is not installed, so numbers go to the run folder alone. To have it: %s", TO_GET_IT)
        return []
    made: dict[str, Callback] = {
        "tensorboard": TensorBoard(board_within),
        "wandb": wandb or WeightsAndBiases(),
        "mlflow": MLflow(),
    }
    wanted = [name for name in dict.fromkeys(names) if name != "none"]
    for name in wanted:
        if not _is_installed(name):
            raise ConfigError(f"{name} is not installed: python -m pip install {name}, or log to something else.")
        if name == "mlflow":
            check_store()
    return [made[name] for name in wanted]


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
