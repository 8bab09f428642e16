"""Passes of a network over an image set with a low threshold: what it finds, whatever the labels say.

    weights, images -> plain and mirrored images -> network -> NMS -> boxes relative to the images

Dimension key:  B images of a batch   C channels   H W input   D detections
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from flatout.errors import ConfigError, counted
from flatout.feed import plan_workers
from flatout.progress import progress
from flatout.yolo.boxes import to_native
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.letterbox import round_up_img_size
from flatout.yolo.evaluate.run import Forward, load_inference_model, warm_up
from flatout.yolo.evaluate.validation_input import ValidationBatch, ValidationInput, open_validation
from flatout.yolo.label_audit.set_boxes import SetBoxes, boxes_by_image
from flatout.yolo.nms import Detections, NmsConfig, non_max_suppression

CONF_THRES, IOU_THRES = 0.02, 0.6
MAX_DET = 200
"""NMS of an audit: also doubtful detections count, because they support a label that the network is unsure about."""


@dataclass(frozen=True, kw_only=True)
class PassConfig:
    """How images are shown to the networks."""

    size: int
    batch_size: int
    device: torch.device
    workers: int
    mirrored: bool = False
    """A second pass with mirrored images, which costs as much as the first."""


def passes_of(weights: Sequence[str], images: ImageSet, config: PassConfig, *, shown: bool = True) -> list[SetBoxes]:
    """The detections of every weights file on all images: a pass each, and one more each if `mirrored`.

    ConfigError if a file was trained for another number of classes than the images have.
    """
    found: list[SetBoxes] = []
    total = len(weights) * len(images)
    with progress("auditing", total, shown=shown) as advance:
        for number, path in enumerate(weights):
            model = load_inference_model([path], config.device)
            if model.num_classes != len(images.names):
                raise ConfigError(
                    f"{path}: trained for {counted(model.num_classes, 'class')}, but the data set names "
                    f"{len(images.names)}. Use the data file that the weights were trained with."
                )
            size = round_up_img_size(config.size, model.stride)
            batch_size = min(config.batch_size, len(images))
            warm_up(model, batch_size=batch_size, size=size, device=config.device)
            workers = min(config.workers, plan_workers("cpu*1.0").total, batch_size)
            with open_validation(
                images, size=size, batch_size=batch_size, stride=model.stride, workers=workers, device=config.device
            ) as batches:
                collectors = [_Collector(len(images)) for _ in range(1 + config.mirrored)]
                done = number * len(images)
                for batch, detections in detect(model.network, batches, mirrored=config.mirrored):
                    for collector, each in zip(collectors, detections, strict=True):
                        collector.add(batch, each)
                    done += len(batch.indices)
                    advance(done, 0)
            found += [collector.boxes() for collector in collectors]
    return found


@torch.no_grad()
def detect(
    network: nn.Module, batches: ValidationInput, *, mirrored: bool = False, amp: torch.dtype | None = None
) -> Iterator[tuple[ValidationBatch, list[Detections]]]:
    """Every batch with its detections in input pixels: of the images, and of the mirrored images."""
    nms = NmsConfig(conf_thres=CONF_THRES, iou_thres=IOU_THRES, multi_label=True, max_det=MAX_DET)
    forward = Forward(network, amp)
    for batch in batches.epoch(0):
        found = [non_max_suppression(forward(batch.images).decoded, nms)]
        if mirrored:
            decoded = forward(batch.images.flip(-1)).decoded
            decoded = torch.cat((batch.images.shape[-1] - decoded[..., :1], decoded[..., 1:]), -1)
            found.append(non_max_suppression(decoded, nms))
        yield batch, found


def relative_rows(batch: ValidationBatch, found: Detections) -> Tensor:
    """Detections in input pixels as rows x1, y1, x2, y2, score, class, relative to their images."""
    native_D4 = to_native(found.box_D4, found.image_D, batch.letterbox)
    relative_D4 = native_D4 / batch.letterbox.native_wh_B2[found.image_D].repeat(1, 2)
    return torch.cat((relative_D4, found.row_D6[:, 4:]), 1)


class _Collector:
    """Collects the detections of a pass on the host."""

    def __init__(self, num_images: int) -> None:
        self._num_images = num_images
        self._images: list[np.ndarray] = []
        self._rows: list[np.ndarray] = []

    def add(self, batch: ValidationBatch, found: Detections) -> None:
        self._images.append(batch.indices[found.image_D.cpu().numpy()])
        self._rows.append(relative_rows(batch, found).cpu().numpy())

    @property
    def image_D(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.int64), *self._images])

    @property
    def row_D6(self) -> np.ndarray:
        return np.concatenate([np.zeros((0, 6), np.float32), *self._rows])

    def boxes(self) -> SetBoxes:
        return boxes_by_image(self.image_D, self.row_D6, self._num_images)
