"""Which loggers does `--log-to` mean? Nothing that leaves the machine is on unless it is named."""

import importlib.util
from collections.abc import Sequence
from typing import Literal

from flatout.engine.callbacks import Callback
from flatout.engine.loggers.mlflow_tracking import MLflow
from flatout.engine.loggers.tensorboard import TensorBoard
from flatout.engine.loggers.weights_and_biases import WeightsAndBiases
from flatout.errors import ConfigError

Logger = Literal["tensorboard", "wandb", "mlflow", "none"]


def choose_loggers(
    names: Sequence[Logger], *, wandb: WeightsAndBiases | None = None, board_within: str = ""
) -> list[Callback]:
    """One per name; without names TensorBoard, if it is installed. ConfigError for a package that is not there."""
    if not names:
        return [TensorBoard(board_within)] if _is_installed("tensorboard") else []
    made: dict[str, Callback] = {
        "tensorboard": TensorBoard(board_within),
        "wandb": wandb or WeightsAndBiases(),
        "mlflow": MLflow(),
    }
    wanted = [name for name in dict.fromkeys(names) if name != "none"]
    for name in wanted:
        if not _is_installed(name):
            raise ConfigError(f"{name} is not installed: python -m pip install {name}, or log to something else.")
    return [made[name] for name in wanted]


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
