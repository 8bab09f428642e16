"""Validation inside a training: the moving average on the validation pictures, which stay decoded between epochs."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from flatout.engine.distributed import World
from flatout.engine.interrupts import Interrupts
from flatout.errors import Interrupted
from flatout.feed import Store, StoreConfig
from flatout.profiler import clock
from flatout.yolo.augment.pictures import ResizedPictures
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.evaluate import Evaluate, Outcome
from flatout.yolo.evaluate.shares import Share
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
    persistent_workers: bool = True
    world: World = field(default_factory=World)
    """The ranks that share the work; the first sums up."""
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

    def __call__(self, network: nn.Module, last: bool) -> Outcome | None:
        """Pictures and the table of classes only come with the last epoch; None on all ranks but the first.

        Interrupted if a signal wants it. Not with several ranks: those of them that heard none would wait for ever.
        """
        world = self._config.world
        world.copy_from_first(network)
        evaluate = Evaluate(names=self._names, v5_metric=self._config.v5_metric, single_cls=self._config.single_cls)
        with clock.stage("train.validate"):
            outcome = evaluate.run(
                network,
                self._opened(),
                conf_thres=CONF_THRES,
                iou_thres=IOU_THRES,
                amp=self._config.amp,
                loss=self._loss.validation,
                plots=self._folder if last and world.is_first else None,
                watchers=[self._stop_if_asked],
                confusion=last,
                join=self._join if world.size > 1 else None,
            )
        if not world.is_first:
            return None
        per_class = last and len(self._names) < FEW_CLASSES
        for line in table(outcome.evaluation, self._names, per_class=per_class):
            logger.info("%s", line)
        return outcome

    def _stop_if_asked(self, batch: ValidationBatch, found: Detections, native: Detections) -> None:
        if self._config.world.size == 1 and self._interrupts.requested is not None:
            raise Interrupted.by(self._interrupts.requested)

    def _join(self, share: Share) -> Sequence[Share]:
        return self._config.world.to_first(share) or []

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
                    persistent_workers=config.persistent_workers,
                    single_cls=config.single_cls,
                    rank=config.world.rank,
                    num_ranks=config.world.size,
                )
            )
        return self._input
