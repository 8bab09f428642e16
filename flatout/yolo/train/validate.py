"""Validation during a training: the moving average on the validation images, and the lines of results.txt."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from flatout.clock import clock, span
from flatout.engine import without_tuning
from flatout.feed import Store, StoreConfig
from flatout.runs import RunContext
from flatout.yolo.augment.samples import ResizedImages
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.evaluate import Evaluate, Outcome
from flatout.yolo.evaluate.evaluate import FEW_CLASSES, table
from flatout.yolo.evaluate.tiles import TileConfig, TiledInput
from flatout.yolo.evaluate.validation_input import ValidationInput, open_validation
from flatout.yolo.metrics import YOLOV7_RESULTS
from flatout.yolo.multihead.layer import MultiHeadDetect
from flatout.yolo.train.step import DetectionLoss

logger = logging.getLogger(__name__)

CONF_THRES, IOU_THRES = 0.001, 0.6
"""NMS thresholds of the validation during training."""
MOST_PIXELS = 80_000_000
"""With more pixels at once a GPU is no busier: 768 images of 320 px."""
BYTES_PER_PIXEL = 256
"""Memory of a network per pixel of its input and byte of its type, at most: several maps of 40 channels at the size of
the input, with which the largest of YOLOv7's networks begin."""
MEMORY_SHARE = 0.25
"""Share of the free GPU memory that maps of a validation may take."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Validation:
    """Evaluates networks on the validation images; these and the workers stay between calls, until the run ends.

    The ranks of the run share the batches; the first rank computes the scores.
    """

    images: ImageSet
    names: Sequence[str]
    loss: DetectionLoss
    run: RunContext
    size: int
    batch_size: int
    grid: int
    workers: int
    amp: torch.dtype
    keeps_images: bool
    """Decode once and keep the images in memory; else decode in every epoch."""
    on_device: bool = False
    """Keep the images in the memory of the GPU."""
    persistent_workers: bool = True
    verify: bool = False
    """Compare stored images with their checksums."""
    v5_metric: bool = False
    single_cls: bool = False
    tiles: TileConfig | None = None
    """Detect by tiles, and score whole images; there are no losses then."""

    def __call__(self, network: nn.Module, last: bool) -> Outcome | None:
        """Evaluate a network; returns None on all ranks but the first.

        Plots and the table of classes are made only with `last`. Raises Interrupted if a signal asks for the end. cuDNN
        tries out no kernels: batches have several shapes, and it would do so for each of them.
        """
        run, world = self.run, self.run.world
        world.broadcast_weights(network)
        evaluate = Evaluate(names=self.names, v5_metric=self.v5_metric, single_cls=self.single_cls)
        with clock.stage("train.validate"), without_tuning():
            outcome = evaluate.run(
                network,
                self._input,
                conf_thres=CONF_THRES,
                iou_thres=IOU_THRES,
                amp=self.amp,
                loss=self.loss.validation,
                plots=run.folder if last and run.plots else None,
                submit=run.background.submit,
                watch=run.stop_if_asked,
                confusion=last,
                gather=(lambda partial: world.gather(partial) or []) if world.size > 1 else None,
                # Joined maps of several heads cannot be split into batches again.
                pixels_at_once=0 if isinstance(self.loss.head, MultiHeadDetect) else self._pixels_at_once,
            )
        if not world.is_first:
            return None
        per_class = last and len(self.names) < FEW_CLASSES
        for line in table(outcome.evaluation, self.names, per_class=per_class):
            logger.info("%s", line)
        return outcome

    @property
    def _pixels_at_once(self) -> int:
        """Pixels that may go through the network together, by the free memory of the GPU; 0 on a CPU, where that gains
        nothing."""
        if self.run.device.type != "cuda":
            return 0
        return pixels_that_fit(torch.cuda.mem_get_info(self.run.device)[0], self.amp)

    @cached_property
    def _input(self) -> ValidationInput | TiledInput:
        with span("validation input"):
            return self._open()

    def _open(self) -> ValidationInput | TiledInput:
        world, stack = self.run.world, self.run.stack
        common: dict[str, Any] = {
            "size": self.size,
            "batch_size": self.batch_size,
            "stride": self.grid,
            "device": self.run.device,
            "single_cls": self.single_cls,
            "rank": world.rank,
            "num_ranks": world.size,
        }
        if self.tiles is not None:
            return TiledInput(self.images, self.tiles, threads=self.workers, **common)
        store = None
        if self.keeps_images:
            resized = ResizedImages(self.images, size=self.size, augment=False)
            store = stack.enter_context(Store.open(resized, StoreConfig(verify=self.verify)))
        return stack.enter_context(
            open_validation(
                self.images,
                workers=self.workers,
                store=store,
                on_device=self.on_device,
                persistent_workers=self.persistent_workers,
                **common,
            )
        )


def pixels_that_fit(free_bytes: int, amp: torch.dtype) -> int:
    """Pixels that go through a network together: as many as keep a GPU busy, if there is much more memory than that."""
    return int(min(MOST_PIXELS, MEMORY_SHARE * free_bytes / (BYTES_PER_PIXEL * amp.itemsize)))


# results.txt


def results_line(
    epoch: int, epochs: int, *, memory_gb: float, mean_losses: Sequence[float], num_targets: int, width_px: int,
    scores: Mapping[str, float],
) -> str:  # fmt: skip
    """The 15 columns that YOLOv7's tools read.

    `memory_gb` is the GPU memory reserved by torch, in units of 10^9 bytes. `mean_losses` are box, obj, cls and total,
    means over the epoch; targets and width are those of the last batch. Of the scores the line holds those of YOLOv7.
    """
    head = f"{f'{epoch}/{epochs - 1}':>10}{f'{memory_gb:.3g}G':>10}"
    numbers = (*mean_losses, num_targets, width_px, *(scores[name] for name in YOLOV7_RESULTS))
    return head + "".join(f"{float(number):10.4g}" for number in numbers)
