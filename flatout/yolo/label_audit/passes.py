"""Passes of a network over an image set with a low threshold: what it finds, whatever the labels say.

    weights, images -> plain and mirrored images, or their tiles -> network -> NMS -> boxes relative to the images

Dimension key:  B images of a batch   C channels   H W input   D detections
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from flatout.errors import ConfigError, counted
from flatout.feed import plan_workers
from flatout.progress import progress
from flatout.yolo.boxes import to_native
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.letterbox import round_up_img_size
from flatout.yolo.evaluate.run import Forward, InferenceModel, load_inference_model, warm_up
from flatout.yolo.evaluate.tiles import TileConfig, TiledInput
from flatout.yolo.evaluate.validation_input import ValidationBatch, open_validation
from flatout.yolo.label_audit.set_boxes import SetBoxes, boxes_by_image
from flatout.yolo.nms import Detections, NmsConfig, non_max_suppression

logger = logging.getLogger(__name__)

NMS = NmsConfig(conf_thres=0.02, iou_thres=0.6, multi_label=True, max_det=200)
"""Also doubtful detections count, because they support a label that the network is unsure about."""


@dataclass(frozen=True, kw_only=True)
class PassConfig:
    """How images are shown to the networks."""

    size: int
    batch_size: int
    device: torch.device
    workers: int
    mirrored: bool = False
    """A second pass with mirrored images, which costs as much as the first."""
    tiles: TileConfig | None = None
    """Look at images in tiles, and merge what is found; None: images are shrunk to `size`."""


def passes_of(weights: Sequence[str], images: ImageSet, config: PassConfig, *, shown: bool = True) -> list[SetBoxes]:
    """The detections of every weights file on all images: a pass each, and one more each if `mirrored`.

    ConfigError if a file was trained for another number of classes than the images have.
    """
    found: list[SetBoxes] = []
    total, unit = len(images), "images"
    if config.tiles is not None:
        total, unit = (1 + config.mirrored) * config.tiles.views_of_all(images.size_wh_N2), "tiles"
    with progress("auditing", len(weights) * total, unit=unit, shown=shown) as advance:
        for number, path in enumerate(weights):
            model = load_inference_model([path], config.device)
            if model.num_classes != len(images.names):
                raise ConfigError(
                    f"{path}: trained for {counted(model.num_classes, 'class')}, but the data set names "
                    f"{len(images.names)}. Use the data file that the weights were trained with."
                )
            if config.tiles is None and model.tiles is not None:
                logger.warning(
                    "%s: trained on tiles of %d px, but images are shrunk: use --tiles %d.",
                    path, model.tiles, model.tiles,
                )  # fmt: skip
            forward = Forward(model.network, None)
            collectors = [_Collector(len(images)) for _ in range(1 + config.mirrored)]
            looks = list(zip(collectors, (partial(_plain, forward), partial(_mirrored, forward)), strict=False))
            look_at = _at_whole_images if config.tiles is None else _at_tiles

            def on_done(done: int, before: int = number * total) -> None:
                advance(before + done, 0)

            look_at(model, images, config, looks, on_done)
            found += [collector.boxes() for collector in collectors]
    return found


Look = tuple["_Collector", Callable[[Tensor], Tensor]]
"""What collects the detections of a pass, and its predictions for a batch of images."""


@torch.no_grad()
def _at_whole_images(
    model: InferenceModel, images: ImageSet, config: PassConfig, looks: Sequence[Look], on_done: Callable[[int], None]
) -> None:
    """Collect what a network finds in images; `on_done` is called with the images so far."""
    size = round_up_img_size(config.size, model.stride)
    batch_size = min(config.batch_size, len(images))
    warm_up(model, batch_size=batch_size, size=size, device=config.device)
    workers = min(config.workers, plan_workers("cpu*1.0").total, batch_size)
    done = 0
    with open_validation(
        images, size=size, batch_size=batch_size, stride=model.stride, workers=workers, device=config.device
    ) as batches:
        for batch in batches.epoch(0):
            for collector, predict in looks:
                collector.add(batch, non_max_suppression(predict(batch.images), NMS))
            done += len(batch.indices)
            on_done(done)


def _at_tiles(
    model: InferenceModel, images: ImageSet, config: PassConfig, looks: Sequence[Look], on_done: Callable[[int], None]
) -> None:
    """The same by tiles, whose detections are merged; `on_done` is called with the tiles so far."""
    assert config.tiles is not None
    size = round_up_img_size(config.size, model.stride)
    warm_up(model, batch_size=config.batch_size, size=size, device=config.device)
    threads = min(config.workers, plan_workers("cpu*1.0").total)
    for number, (collector, predict) in enumerate(looks):
        tiled = TiledInput(
            images,
            config.tiles,
            size=size,
            stride=model.stride,
            device=config.device,
            threads=threads,
            batch_size=config.batch_size,
        )

        def on_tiles(done: int, before: int = number * tiled.num_tiles) -> None:
            on_done(before + done)

        for batch, found in tiled.detected(predict, NMS, on_tiles):
            collector.add(batch, found)


def _plain(forward: Forward, images_BCHW: Tensor) -> Tensor:
    return forward(images_BCHW).decoded


def _mirrored(forward: Forward, images_BCHW: Tensor) -> Tensor:
    """The predictions for mirrored images, where they are in the images themselves."""
    decoded = forward(images_BCHW.flip(-1)).decoded
    return torch.cat((images_BCHW.shape[-1] - decoded[..., :1], decoded[..., 1:]), -1)


def relative_rows(batch: ValidationBatch, found: Detections) -> Tensor:
    """Detections in input pixels as rows x1, y1, x2, y2, score, class, relative to their images."""
    native_D4 = to_native(found.box_D4, found.image_D, batch.letterbox)
    relative_D4 = native_D4 / batch.letterbox.native_wh_B2[found.image_D].repeat(1, 2)
    return torch.cat((relative_D4, found.row_D6[:, 4:]), 1)


class _Collector:
    """Collects the detections of a pass on the host."""

    def __init__(self, num_images: int) -> None:
        self._num_images = num_images
        self._images = [np.zeros(0, np.int64)]
        self._rows = [np.zeros((0, 6), np.float32)]

    def add(self, batch: ValidationBatch, found: Detections) -> None:
        self._images.append(batch.indices[found.image_D.cpu().numpy()])
        self._rows.append(relative_rows(batch, found).cpu().numpy())

    def boxes(self) -> SetBoxes:
        return boxes_by_image(np.concatenate(self._images), np.concatenate(self._rows), self._num_images)
