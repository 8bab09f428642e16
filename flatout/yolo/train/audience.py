"""Who hears of a detection training: the caller's callbacks, the loggers that flags ask for, and the account."""

import logging
from collections.abc import Iterable
from pathlib import Path

from flatout.engine.callbacks import Callback, Callbacks
from flatout.engine.loggers.choose import choose_loggers
from flatout.engine.loggers.weights_and_biases import WeightsAndBiases
from flatout.engine.spending import Spending
from flatout.errors import ConfigError
from flatout.yolo.options import TrainOptions

logger = logging.getLogger(__name__)


def audience(options: TrainOptions, callbacks: Iterable[Callback], spending: Spending) -> Callbacks:
    """In the order in which they are called. ConfigError if a logger's package is missing."""
    wandb = WeightsAndBiases(
        project="flatout" if options.project == TrainOptions.project else Path(options.project).stem,
        entity=options.entity,
        save_period=options.save_period,
        alias=options.artifact_alias,
    )
    loggers = choose_loggers(options.log_to, wandb=wandb)
    if options.entity is not None and wandb not in loggers:
        loggers += _for_entity(wandb)
    _say_what_is_not_done(options)
    return Callbacks([spending, *loggers, *callbacks])


def _for_entity(wandb: WeightsAndBiases) -> list[Callback]:
    """`--entity` switches W&B on where it is installed; without it a command goes on, as it does in YOLOv7."""
    try:
        return choose_loggers(("wandb",), wandb=wandb)
    except ConfigError as error:
        logger.warning("--entity: %s Training goes on without it.", error)
        return []


def _say_what_is_not_done(options: TrainOptions) -> None:
    if options.upload_dataset:
        logger.warning("--upload_dataset: pictures are not sent to Weights & Biases; the data set stays where it is.")
    if options.bbox_interval != TrainOptions.bbox_interval:
        logger.info("--bbox_interval: pictures with boxes are sent once, after the last epoch.")
