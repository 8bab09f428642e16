"""Validation inside a training: the moving average on the validation pictures, which stay decoded between epochs."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from flatout.engine.interrupts import Interrupts
from flatout.errors import Interrupted
from flatout.feed import Store, StoreConfig
from flatout.profiler import clock
from flatout.yolo.augment.pictures import ResizedPictures
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.evaluate import Evaluate, Outcome
from flatout.yolo.evaluate.table import FEW_CLASSES, table
from flatout.yolo.nms import Detections
from flatout.yolo.train.loss_choice import DetectionLoss
from flatout.yolo.validation_input import ValidationBatch, ValidationInput, open_validation

logger = logging.getLogger(__name__)

CONF_THRES, IOU_THRES = 0.001, 0.6
"""Of validation during training."""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """How the average is judged after an epoch."""

    size: int
    batch_size: int
    grid: int
    workers: int
    device: torch.device
    amp: torch.dtype
    keeps_pictures: bool
    """Decode once, into memory; else in every epoch."""
    on_device: bool = False
    """Keep them in the memory of the GPU."""
    interruptible: bool = True
    """Stop for a signal. Not with several ranks, the others of which wait for the end."""
    verify: bool = False
    v5_metric: bool = False
    single_cls: bool = False


class Validation:
    """Judges networks again and again on the same pictures. A context manager."""

    def __init__(
        self,
        images: ImageSet,
        names: Sequence[str],
        config: ValidationConfig,
        loss: DetectionLoss,
        folder: Path,
        interrupts: Interrupts,
    ) -> None:
        self._images, self._names, self._config = images, names, config
        self._loss = loss
        self._folder = folder
        self._interrupts = interrupts
        self._stack = ExitStack()
        self._input: ValidationInput | None = None

    def __enter__(self) -> "Validation":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def __call__(self, network: nn.Module, last: bool) -> Outcome:
        """Pictures and the table of classes only come with the last epoch. Interrupted if a signal wants it."""
        evaluate = Evaluate(names=self._names, v5_metric=self._config.v5_metric, single_cls=self._config.single_cls)
        with clock.stage("train.validate"):
            outcome = evaluate.run(
                network,
                self._opened(),
                conf_thres=CONF_THRES,
                iou_thres=IOU_THRES,
                amp=self._config.amp,
                loss=self._loss.validation,
                plots=self._folder if last else None,
                watchers=[self._stop_if_asked],
            )
        per_class = last and len(self._names) < FEW_CLASSES
        for line in table(outcome.evaluation, self._names, per_class=per_class):
            logger.info("%s", line)
        return outcome

    def _stop_if_asked(self, batch: ValidationBatch, found: Detections, native: Detections) -> None:
        if self._config.interruptible and self._interrupts.requested is not None:
            raise Interrupted.by(self._interrupts.requested)

    def _opened(self) -> ValidationInput:
        if self._input is None:
            config = self._config
            store = None
            if config.keeps_pictures:
                pictures = ResizedPictures(self._images, size=config.size, augment=False)
                store = self._stack.enter_context(Store.open(pictures, StoreConfig(verify=config.verify)))
            self._input = self._stack.enter_context(
                open_validation(
                    self._images,
                    size=config.size,
                    batch_size=config.batch_size,
                    stride=config.grid,
                    workers=config.workers,
                    device=config.device,
                    store=store,
                    on_device=config.on_device,
                    single_cls=config.single_cls,
                )
            )
        return self._input
