"""What a step of the detection job computes: images and targets in, loss out.

Dimension key:  B pictures   T targets   H W input
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.clock import clock
from flatout.engine import Filling
from flatout.feed import DeviceBatch, Purpose, keyed_uniform
from flatout.yolo.augment.render import quad
from flatout.yolo.loss import LossParts, aux_ota_loss, ota_loss, ota_router_loss, plain_loss, plain_router_loss
from flatout.yolo.loss.config import LossConfig
from flatout.yolo.loss.matches import Anchors
from flatout.yolo.model.heads import Detect, IAuxDetect
from flatout.yolo.multihead.layer import MultiHeadDetect
from flatout.yolo.train.pictures import BatchPictures
from flatout.yolo.train.schedule import draw_size, scaled_shape

QUAD_GAIN = 4.0
CAPACITY_STEP = 64


@dataclass(frozen=True)
class DetectionLoss:
    """The loss of a network's raw outputs."""

    head: Detect
    config: LossConfig
    """With gains scaled to the network."""
    ota: bool
    ota_from: int = 0
    """First epoch of OTA."""

    @property
    def anchors(self) -> Anchors:
        return Anchors(self.head.anchors, tuple(self.head.strides))

    def kind(self, epoch: int) -> str:
        """ "aux", "ota" or "plain": what a step of this epoch computes."""
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
        """The plain loss of the lead outputs, whatever training uses, so that runs can be compared."""
        if isinstance(self.head, MultiHeadDetect):
            return self("plain", maps, targets_T6)
        return plain_loss(maps[: self.head.nl], targets_T6, self.anchors, self.config)


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """How a batch becomes a loss."""

    dtype: torch.dtype
    """Of the network's input."""
    channels_last: bool
    size: int
    grid: int
    seed: int
    multi_scale: bool = False
    quad: bool = False
    capacity: int = 0
    """Rows of targets that a CUDA graph has room for."""


class LastBatch:
    """What the results line says about an epoch's last batch."""

    targets: int | Tensor = 0
    """How many; int32 [1] on the device where labels are finished there."""
    width_px = 0

    @property
    def num_targets(self) -> int:
        """The host may wait for the device here."""
        return int(self.targets)


class DetectionJob:
    """Boxes, objectness and classes of YOLOv7's networks."""

    item_names = ("box", "obj", "cls", "total")

    def __init__(self, config: StepConfig, loss: DetectionLoss, pictures: BatchPictures | None = None) -> None:
        """`pictures` keeps some of the first batches, for people."""
        self._config = config
        self._loss = loss
        self._kind = loss.kind(0)
        self._pictures = pictures
        self.last = LastBatch()
        self.fillings: Mapping[str, Filling] = {"targets": Filling(config.capacity, -1.0)} if config.capacity else {}

    def phase(self, epoch: int) -> object:
        self._kind = self._loss.kind(epoch)
        return self._kind

    def inputs(self, batch: DeviceBatch, epoch: int, step: int) -> dict[str, Tensor]:
        images, targets_T6 = batch["images"], batch["targets"]
        if self._pictures is not None:
            self._pictures.keep(epoch, step, images, targets_T6)
        if self._config.multi_scale:
            images = self._rescaled(images, epoch, step)
        if self._config.quad:
            images, targets_T6 = self._in_fours(images, targets_T6, epoch, step)
        self.last.targets = batch.fields.get("num_targets", int(batch.counts["targets"].sum()))
        self.last.width_px = images.shape[3]
        return {"images": images, "targets": targets_T6}

    def step(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        with clock.stage("train.forward"):
            maps = network(self._as_input(inputs["images"]))
        with clock.stage("train.loss"):
            parts = self._loss(self._kind, maps, inputs["targets"])
        return parts.total * QUAD_GAIN if self._config.quad else parts.total, parts.items

    def _as_input(self, images_BCHW: Tensor) -> Tensor:
        """0..1 in the dtype and memory format of the network's input; pictures made on the device already are that."""
        if images_BCHW.dtype == torch.uint8:
            # 0..255 are exact in every dtype, and the quotient is rounded once.
            images_BCHW = images_BCHW.to(self._config.dtype) / 255
        if self._config.channels_last:
            images_BCHW = images_BCHW.contiguous(memory_format=torch.channels_last)
        return images_BCHW

    def _rescaled(self, images_BCHW: Tensor, epoch: int, step: int) -> Tensor:
        config = self._config
        size = draw_size(config.size, config.grid, seed=config.seed, epoch=epoch, step=step)
        height, width = images_BCHW.shape[2:]
        shape_hw = scaled_shape(height, width, size=size, grid=config.grid)
        if shape_hw == (height, width):
            return images_BCHW
        return F.interpolate(self._as_input(images_BCHW).float(), shape_hw, mode="bilinear", align_corners=False)

    def _in_fours(self, images_BCHW: Tensor, targets_T6: Tensor, epoch: int, step: int) -> tuple[Tensor, Tensor]:
        """Four pictures in one, made on the CPU: on a GPU this waits, which --quad has to pay for."""
        uniform_G = keyed_uniform(
            self._config.seed, epoch, np.array([step]), len(images_BCHW) // 4 or 1, purpose=Purpose.STEP
        )[0]
        joined, targets = quad(images_BCHW.cpu().numpy(), targets_T6.cpu().numpy(), uniform_G)
        return torch.from_numpy(joined).to(images_BCHW.device), torch.from_numpy(targets).to(images_BCHW.device)


def capacity_for(expected_per_picture: float, batch_size: int) -> int:
    """Rows of targets for a graph: half as many again as expected; a batch with more runs without the graph."""
    rows = int(1.5 * expected_per_picture * batch_size)
    return -(-max(rows, 1) // CAPACITY_STEP) * CAPACITY_STEP
