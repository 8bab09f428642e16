"""One step of a detection training: images and targets in, loss out; with its schedule and the plots of first batches.

    batch --multi-scale, quad--> network --> maps --DetectionLoss--> loss, parts for the log

Dimension key:  B images   C channels   H W input   T targets   G groups of four images
"""

import importlib.util
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.clock import clock
from flatout.engine import Padding, StepSettings
from flatout.feed import DeviceBatch, Purpose, keyed_uniform
from flatout.runs import BackgroundCall
from flatout.yolo.augment.source import quad
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.hyp import Hyp
from flatout.yolo.label_audit.in_step import LabelSums
from flatout.yolo.loss import LossParts, aux_ota_loss, ota_loss, ota_router_loss, plain_loss, plain_router_loss
from flatout.yolo.loss.losses import ITEM_NAMES, LossConfig
from flatout.yolo.loss.matches import Anchors
from flatout.yolo.model.layers import Detect, IAuxDetect
from flatout.yolo.multihead.layer import MultiHeadDetect

logger = logging.getLogger(__name__)

# Loss


@dataclass(frozen=True)
class DetectionLoss:
    """The loss of a network's raw outputs: plain, OTA, or OTA with auxiliary outputs."""

    head: Detect
    config: LossConfig
    """Gains are scaled to the network."""
    ota: bool
    """Assign targets by OTA, from epoch `ota_from` on."""
    ota_from: int = 0

    @property
    def anchors(self) -> Anchors:
        return Anchors(self.head.anchors, tuple(self.head.strides))

    def kind(self, epoch: int) -> str:
        """The loss that steps of this epoch compute: "aux", "ota" or "plain"."""
        if isinstance(self.head, IAuxDetect):
            return "aux"
        return "ota" if self.ota and epoch >= self.ota_from else "plain"

    def __call__(self, kind: str, maps: Sequence[Tensor], targets_T6: Tensor) -> LossParts:
        if isinstance(self.head, MultiHeadDetect):
            router = ota_router_loss if kind == "ota" else plain_router_loss
            return router(maps, targets_T6, self.anchors, self.config, self.head.groups)
        if kind == "aux":
            num = self.head.nl
            return aux_ota_loss(maps[:num], maps[num:], targets_T6, self.anchors, self.config)
        return (ota_loss if kind == "ota" else plain_loss)(maps, targets_T6, self.anchors, self.config)

    def validation(self, maps: Sequence[Tensor], targets_T6: Tensor) -> LossParts:
        """The plain loss of the lead outputs, whatever loss is trained with, so that runs can be compared."""
        if isinstance(self.head, MultiHeadDetect):
            return self("plain", maps, targets_T6)
        return plain_loss(maps[: self.head.nl], targets_T6, self.anchors, self.config)


# Plots of the data, to be checked first in a new training:
#
#     labels.jpg                            classes, and sizes and positions of their boxes
#     train_batch0.jpg to train_batch9.jpg  the first batches as the network sees them

BATCHES = 10
"""Batches that are plotted."""
SHOWN = 16
"""Images per plotted batch, at most."""


class BatchPlots:
    """Keeps images of the first batches on the device and has them plotted after the epoch, so that no step waits."""

    def __init__(self, folder: Path, names: Sequence[str], submit: Callable[[BackgroundCall], None]) -> None:
        """`submit` makes the plots, in order."""
        self._folder = folder if importlib.util.find_spec("cv2") is not None else None
        self._names, self._submit = names, submit
        self._kept: list[tuple[int, Tensor, Tensor]] = []

    def keep(self, epoch: int, step: int, images_BCHW: Tensor, targets_T6: Tensor) -> None:
        if self._folder is not None and epoch == 0 and step < BATCHES:
            self._kept.append((step, images_BCHW[:SHOWN].clone(), targets_T6.clone()))

    def plot(self) -> None:
        """Submit the plots of the kept batches; the host waits for the device here."""
        kept, self._kept = self._kept, []
        for step, images_BCHW, targets_T6 in kept:
            if images_BCHW.is_floating_point():
                images_BCHW = (images_BCHW.float() * 255).round().to(torch.uint8)
            targets_T6 = targets_T6[(targets_T6[:, 0] >= 0) & (targets_T6[:, 0] < len(images_BCHW))]
            self._submit(partial(self._plot, step, images_BCHW.cpu().numpy(), targets_T6.cpu().numpy()))

    def _plot(self, step: int, images_BCHW: np.ndarray, targets_T6: np.ndarray) -> None:
        if self._folder is None:
            return
        from flatout.charts import plot_batch

        try:
            file = self._folder / f"train_batch{step}.jpg"
            plot_batch(images_BCHW, targets_T6, [""] * len(images_BCHW), self._names, file)
        except OSError as error:
            logger.warning("%s: plots of batches cannot be written: %s.", self._folder, error.strerror)
            self._folder = None


def plot_labels(images: ImageSet, names: Sequence[str], folder: Path) -> None:
    """Write labels.jpg; only a warning if that is not possible."""
    try:
        from flatout.charts import plot_label_statistics

        plot_label_statistics(images.labels.class_box_T5, names, folder / "labels.jpg")
    except (ImportError, OSError) as error:
        logger.warning("labels.jpg was not plotted: %s.", error)


# The step

QUAD_GAIN = 4.0
"""Factor of the loss with --quad, where a batch has a quarter of its images."""
CAPACITY_STEP = 64
"""The target capacity of a CUDA graph is a multiple of this."""


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """What the network gets from a batch: with multi-scale in another size, with --quad in groups of four."""

    dtype: torch.dtype
    """Type of the network's input."""
    channels_last: bool
    size: int
    grid: int
    seed: int
    multi_scale: bool = False
    quad: bool = False

    def __call__(
        self, images_BCHW: Tensor, targets_T6: Tensor, epoch: int, step: int, label_T1: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Images and targets of a step, and the ids of their labels if given; a pure function of the batch, the seed
        and the position."""
        if self.multi_scale:
            images_BCHW = self._rescaled(images_BCHW, epoch, step)
        inputs = {"images": images_BCHW, "targets": targets_T6}
        if label_T1 is not None:
            inputs["label_ids"] = label_T1
        return self._in_fours(inputs, epoch, step) if self.quad else inputs

    def as_input(self, images_BCHW: Tensor) -> Tensor:
        """Scale to 0..1 in the dtype and memory format of the network's input; images rendered on the device are so."""
        if images_BCHW.dtype == torch.uint8:
            # 0..255 are exact in every dtype, and the quotient is rounded once.
            images_BCHW = images_BCHW.to(self.dtype) / 255
        if self.channels_last:
            images_BCHW = images_BCHW.contiguous(memory_format=torch.channels_last)
        return images_BCHW

    def _rescaled(self, images_BCHW: Tensor, epoch: int, step: int) -> Tensor:
        size = draw_size(self.size, self.grid, seed=self.seed, epoch=epoch, step=step)
        height, width = images_BCHW.shape[2:]
        shape_hw = scaled_shape(height, width, size=size, grid=self.grid)
        if shape_hw == (height, width):
            return images_BCHW
        return F.interpolate(self.as_input(images_BCHW).float(), shape_hw, mode="bilinear", align_corners=False)

    def _in_fours(self, inputs: dict[str, Tensor], epoch: int, step: int) -> dict[str, Tensor]:
        """--quad: join images in groups of four. Done on the CPU, so that with a GPU the host waits for the device."""
        images_BCHW, targets_T6 = inputs["images"], inputs["targets"]
        num_groups = len(images_BCHW) // 4 or 1
        (uniform_G,) = keyed_uniform(self.seed, epoch, np.array([step]), num_groups, purpose=Purpose.STEP)
        joined, targets, row_T = quad(images_BCHW.cpu().numpy(), targets_T6.cpu().numpy(), uniform_G)
        device = images_BCHW.device
        result = {"images": torch.from_numpy(joined).to(device), "targets": torch.from_numpy(targets).to(device)}
        if "label_ids" in inputs:
            result["label_ids"] = inputs["label_ids"][torch.from_numpy(row_T).to(device)]
        return result


class DetectionJob:
    """The training step of YOLOv7's networks, as the loop of flatout.engine calls it."""

    item_names = ITEM_NAMES

    def __init__(
        self,
        inputs: StepInputs,
        loss: DetectionLoss,
        *,
        capacity: int = 0,
        plots: BatchPlots | None = None,
        label_sums: LabelSums | None = None,
    ) -> None:
        """`capacity`: rows of targets that a CUDA graph has room for; 0: targets are not padded. `plots` keeps the
        first batches, to plot them later. `label_sums` collects what steps see of each label; the batches then have a
        field `label_ids`."""
        self._inputs, self._loss, self._plots, self._label_sums = inputs, loss, plots, label_sums
        self._kind = loss.kind(0)
        self.last_targets: int | Tensor = 0
        """Number of targets of the last batch; int32 [1] on the device if labels are finished there."""
        self.last_width_px = 0
        """Width of the network's input for the last batch."""
        ragged = ("targets", "label_ids") if label_sums is not None else ("targets",)
        self.paddings: Mapping[str, Padding] = dict.fromkeys(ragged, Padding(capacity, -1.0)) if capacity else {}

    def phase(self, epoch: int) -> object:
        self._kind = self._loss.kind(epoch)
        return self._kind

    def inputs(self, batch: DeviceBatch, epoch: int, step: int) -> dict[str, Tensor]:
        if self._plots is not None:
            self._plots.keep(epoch, step, batch["images"], batch["targets"])
        label_T1 = batch["label_ids"] if self._label_sums is not None else None
        inputs = self._inputs(batch["images"], batch["targets"], epoch, step, label_T1)
        self.last_targets = batch.fields.get("num_targets", int(batch.counts["targets"].sum()))
        self.last_width_px = inputs["images"].shape[3]
        return inputs

    def step(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        with clock.stage("train.forward"):
            maps = network(self._inputs.as_input(inputs["images"]))
        with clock.stage("train.loss"):
            parts = self._loss(self._kind, maps, inputs["targets"])
        if self._label_sums is not None:
            assert parts.assigned is not None
            with clock.stage("train.label_sums"):
                self._label_sums.add(maps[: self._loss.head.nl], parts.assigned, inputs["label_ids"])
        return parts.total * QUAD_GAIN if self._inputs.quad else parts.total, parts.items


def capacity_for(expected_per_image: float, batch_size: int) -> int:
    """Rows of targets for a CUDA graph: 1.5 times the expected number. A batch with more runs without the graph."""
    rows = int(1.5 * expected_per_image * batch_size)
    return -(-max(rows, 1) // CAPACITY_STEP) * CAPACITY_STEP


# Multi-scale: another image size for every batch, 0.5 to 1.5 times the training size, in steps of the grid


def sizes_from(image_size: int, grid: int) -> range:
    """Equally likely numbers that a size is drawn from; `size_of_draw` rounds one to the grid."""
    return range(image_size // 2, image_size * 3 // 2 + grid)


def size_of_draw(draw: int, grid: int) -> int:
    """Longer side of the batch in pixels, for a number drawn from `sizes_from`."""
    return draw // grid * grid


def draw_size(image_size: int, grid: int, *, seed: int, epoch: int, step: int) -> int:
    """Longer side of one step's batch; a pure function of the step, the same on all ranks and after a resume."""
    draws = sizes_from(image_size, grid)
    (uniform,) = keyed_uniform(seed, epoch, np.array([step]), 1, purpose=Purpose.STEP)[0]
    return size_of_draw(draws[int(uniform * len(draws))], grid)


def scaled_shape(height: int, width: int, *, size: int, grid: int) -> tuple[int, int]:
    """Height and width of a batch [height, width] whose longer side becomes `size`, each a multiple of the grid."""
    factor = size / max(height, width)
    if factor == 1:
        return height, width
    return math.ceil(height * factor / grid) * grid, math.ceil(width * factor / grid) * grid


# Learning rates, momentum and accumulation of a YOLOv7 training, iteration by iteration:
#
#     iteration  0 ............ num_warmup | rest of that epoch | each later epoch e
#     lr         0 -> lr0 * f(epoch)       | as warm-up left it | lr0 * f(e - 1)
#
# That a later epoch uses the factor of the one before it is a quirk of YOLOv7, kept because results depend on it.

NOMINAL_BATCH = 64
"""Gradients are accumulated until about this many images have been seen."""
MIN_WARMUP = 1000
"""Iterations of warm-up, at least. Short runs never leave it; the hyp key `warmup_iters` overrides it."""


def accumulate_for(total_batch: int) -> int:
    """Iterations per optimizer step, after warm-up."""
    return max(round(NOMINAL_BATCH / total_batch), 1)


def scaled_weight_decay(weight_decay: float, *, total_batch: int) -> float:
    """The weight decay of an optimizer step over `total_batch * accumulate_for(total_batch)` images instead of 64."""
    return weight_decay * (total_batch * accumulate_for(total_batch) / NOMINAL_BATCH)


def num_warmup_iterations(hyp: Hyp, *, steps_per_epoch: int) -> int:
    """The last iteration of warm-up, which begins at 0; 0: there is no warm-up."""
    if hyp.warmup_iters is not None:
        return hyp.warmup_iters
    return max(round(hyp.warmup_epochs * steps_per_epoch), MIN_WARMUP)


def cosine(lrf: float, epochs: int) -> Callable[[int], float]:
    """Factor of the learning rate by epoch: from 1 to `lrf` along half a cosine wave."""
    return lambda epoch: (1 - math.cos(epoch * math.pi / epochs)) / 2 * (lrf - 1) + 1


def line(lrf: float, epochs: int) -> Callable[[int], float]:
    """Factor of the learning rate by epoch: from 1 to `lrf` along a straight line."""
    last = max(epochs - 1, 1)
    return lambda epoch: (1 - epoch / last) * (1 - lrf) + lrf


class YoloSchedule:
    """(epoch, step) -> StepSettings for the three parameter groups of prepare.py.

    A pure function, so a resumed run follows the same schedule. `epochs` is the length of the decay. When a finished
    training gets more epochs, YOLOv7 keeps the original length for the cosine, which then rises again, and takes the
    new total for the line.
    """

    def __init__(
        self, hyp: Hyp, *, epochs: int, steps_per_epoch: int, total_batch: int, linear: bool = False, adam: bool = False
    ) -> None:
        self._hyp = hyp
        self._steps_per_epoch = steps_per_epoch
        self._total_batch = total_batch
        self._adam = adam
        self._factor = (line if linear else cosine)(hyp.lrf, epochs)
        self.num_warmup = num_warmup_iterations(hyp, steps_per_epoch=steps_per_epoch)

    def __call__(self, epoch: int, step: int) -> StepSettings:
        iteration = epoch * self._steps_per_epoch + step
        lr = self._hyp.lr0 * self._factor(self._epoch_of_factor(epoch, iteration))
        bias_lr, momentum = lr, self._hyp.momentum
        if iteration <= self.num_warmup:
            bias_lr = self._warm_up(iteration, self._hyp.warmup_bias_lr, lr)
            momentum = self._warm_up(iteration, self._hyp.warmup_momentum, momentum)
            lr = self._warm_up(iteration, 0.0, lr)
        return StepSettings(
            lrs=(lr, lr, bias_lr),
            momentum=None if self._adam else momentum,
            step_optimizer=iteration % self.accumulate(iteration) == 0,
        )

    def accumulate(self, iteration: int) -> int:
        """Iterations per optimizer step; grows from 1 during warm-up."""
        wanted = self._warm_up(iteration, 1.0, NOMINAL_BATCH / self._total_batch)
        return max(round(wanted), 1)

    def _epoch_of_factor(self, epoch: int, iteration: int) -> int:
        """The epoch whose factor applies: the current one during warm-up and in the epoch in which it ends."""
        in_warmup = iteration <= self.num_warmup or epoch == self.num_warmup // self._steps_per_epoch
        return epoch if in_warmup else epoch - 1

    def _warm_up(self, iteration: int, start: float, end: float) -> float:
        """Linear from `start` at iteration 0 to `end` at the end of warm-up."""
        if iteration >= self.num_warmup:
            return end
        return (end - start) / self.num_warmup * iteration + start
