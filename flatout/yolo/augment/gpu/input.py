"""The input of training and validation from pictures that stay on the device: where they lie, and all parts together.

    host store -> DeviceStore (device memory, the rest in pinned RAM; what fits into neither, workers bring along)
    worker: draw, labels -> slot -> copy -> render -> images in the network's dtype and layout, numbered targets

Polygons are warped and clipped on the device too: workers say which labels may be seen (gpu/source.py).

Dimension key:  N pictures
"""

import logging
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from flatout.errors import ConfigError
from flatout.feed import (
    CHUNK_BYTES,
    Arrays,
    DeviceStore,
    Feed,
    FeedConfig,
    Output,
    Plan,
    ShapedArrays,
    chunks_of,
    free_bytes,
    free_ram_bytes,
    settle,
)
from flatout.yolo.augment.draw import AugmentConfig, ClassAware
from flatout.yolo.augment.gpu.batches import DeviceInput, FinishLabels, label_finisher_for, renderer_for
from flatout.yolo.augment.gpu.chroma import Subsampled, kept_shapes
from flatout.yolo.augment.gpu.labels_torch import DeviceLabels
from flatout.yolo.augment.gpu.source import TILES, ParameterSource, ValidationParameters, can_open
from flatout.yolo.augment.layout import as_scanned, resized_wh
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.letterbox import RectBatches

logger = logging.getLogger(__name__)

# Where the pictures of a data set will lie, from their sizes alone: before one of them is decoded.
#
# Dimension key:  N pictures


class Room(NamedTuple):
    """Bytes that pictures may take."""

    device_bytes: int
    pinned_bytes: int


class MemoryPlan(NamedTuple):
    """How many pictures will lie where, and the bytes that they take."""

    size: int
    subsampled: bool
    num_pictures: int
    num_resident: int
    num_pinned: int
    device_bytes: int
    pinned_bytes: int
    away_bytes: int

    def __str__(self) -> str:
        each = (self.device_bytes + self.pinned_bytes + self.away_bytes) / self.num_pictures
        how = " as 4:2:0" if self.subsampled else ""
        text = f"{self.num_pictures} pictures at {self.size} px{how}, {each:,.0f} bytes each: "
        text += f"{self.num_resident} in device memory ({self.device_bytes / 1e9:.2f} GB)"
        if self.num_pinned:
            text += f", {self.num_pinned} in pinned RAM ({self.pinned_bytes / 1e9:.2f} GB)"
        if num_away := self.num_pictures - self.num_resident - self.num_pinned:
            text += f", {num_away} brought by the workers from the host's store ({self.away_bytes / 1e9:.2f} GB)"
        return text


def plan_memory(
    size_wh_N2: np.ndarray, *, size: int, room: Room, batch_items: int, subsampled: bool = False
) -> MemoryPlan:
    """What `picture_store` will do with pictures of these sizes, kept as BGR, or with subsampled colours."""
    wh_N2 = resized_wh(size_wh_N2, size)
    chunks_N = chunks_of(kept_shapes(wh_N2).prod(1) if subsampled else wh_N2.prod(1) * 3)
    budget, pinned_budget = (each // CHUNK_BYTES for each in room)
    residence, _ = settle(chunks_N, budget=budget, batch_items=batch_items, pinned_budget=pinned_budget)
    return MemoryPlan(
        size,
        subsampled,
        len(chunks_N),
        residence.num_resident,
        residence.num_pinned,
        residence.device_chunks * CHUNK_BYTES,
        residence.host_chunks * CHUNK_BYTES,
        int(chunks_N[residence.num_kept :].sum()) * CHUNK_BYTES,
    )


LEAST_TASK = 128
"""Samples of a worker's task: below, NumPy's calls cost more than its work."""


@dataclass(frozen=True, kw_only=True)
class DeviceInputConfig:
    """Where pictures are kept and what the network wants."""

    dtype: torch.dtype = torch.bfloat16
    """uint8 as they are; floating point from 0 to 1."""
    channels_last: bool = True
    workers: int | str = 2
    """Processes that draw and make labels; two are enough for 40,000 samples per second."""
    persistent_workers: bool = True
    """False ends them after each epoch and starts others for the next."""
    epochs: int | None = None
    """Epochs of the whole run, if known: nothing is drawn beyond the last."""
    budget_bytes: int | None = None
    """Of device memory for pictures; None: 80 % of what is free. What does not fit is kept in pinned RAM."""
    pinned_bytes: int | None = None
    """Of pinned RAM; None: half of what is free. What does not fit there either is brought by the workers."""
    subsampled: bool = False
    """Keep the colours of pictures at half their size, as JPEG mostly does (4:2:0): half of the bytes, not the same
    pixels (see `chroma`)."""
    target_bucket: int | None = None
    """Targets are filled up to a multiple of this with rows of image -1, so that few shapes occur. None: not."""
    polygons_on_device: bool = True
    """Labels of data sets with polygons are finished on the device; False: by the workers, as those with boxes are."""

    def __post_init__(self) -> None:
        if self.target_bucket is not None and self.target_bucket < 1:
            raise ConfigError(f"target_bucket={self.target_bucket} must be 1 or more.")


def training_input(
    image_set: ImageSet,
    pictures: Arrays,
    augment: AugmentConfig,
    plan: Plan,
    *,
    size: int,
    device: str | torch.device,
    config: DeviceInputConfig | None = None,
    store: DeviceStore | None = None,
    class_aware: ClassAware | None = None,
    rect: RectBatches | None = None,
) -> DeviceInput:
    """Augmented batches on `device`, from `pictures` resized for training at `size` (a Store of ResizedImages).

    Sampling weights and ranks are the plan's affair; so is the order of rectangular batches, whose shapes `rect` gives.
    A `store` made by `picture_store` before is used again. Shapes in the plan are left out of account.
    """
    config = config or DeviceInputConfig()
    out_wh_N2 = None if rect is None else shapes_of_pictures(rect)
    store = store or picture_store(image_set, pictures, size=size, device=device, plan=plan, config=config)
    finish_labels = _label_finisher(image_set, augment, config, device)
    source = ParameterSource(
        image_set,
        augment,
        size=size,
        class_aware=class_aware,
        out_wh_N2=out_wh_N2,
        bringing=store.bringing(),
        opens_labels=finish_labels is not None,
    )
    render = renderer_for(
        device, mixup=augment.mixup > 0, perspective=augment.perspective > 0, subsampled=config.subsampled
    )
    feed = Feed(source, replace(plan, shapes=None), _feed_config(config, plan), unreadable=store.unreadable)
    return DeviceInput(
        feed,
        store,
        render,
        _images(config, size, rect),
        out_wh_N2=out_wh_N2,
        finish_labels=finish_labels,
        target_bucket=config.target_bucket,
        subsampled=config.subsampled,
    )


def validation_input(
    image_set: ImageSet,
    pictures: Arrays,
    plan: Plan,
    *,
    size: int,
    device: str | torch.device,
    config: DeviceInputConfig | None = None,
    store: DeviceStore | None = None,
    rect: RectBatches | None = None,
) -> DeviceInput:
    """Letterboxed batches on `device`, from `pictures` resized for validation at `size`; in the shapes of `rect`."""
    config = config or DeviceInputConfig()
    out_wh_N2 = None if rect is None else shapes_of_pictures(rect)
    store = store or picture_store(image_set, pictures, size=size, device=device, plan=plan, config=config)
    source = ValidationParameters(image_set, size=size, out_wh_N2=out_wh_N2, bringing=store.bringing())
    render = renderer_for(device, mixup=False, recolor=False, subsampled=config.subsampled)
    feed = Feed(source, replace(plan, shapes=None), _feed_config(config, plan), unreadable=store.unreadable)
    images = _images(config, size, rect)
    return DeviceInput(feed, store, render, images, out_wh_N2=out_wh_N2, target_bucket=config.target_bucket)


def picture_store(
    image_set: ImageSet,
    pictures: Arrays,
    *,
    size: int,
    device: str | torch.device,
    plan: Plan,
    config: DeviceInputConfig,
) -> DeviceStore:
    """Upload the pictures; what lies where is logged first."""
    room = Room(
        free_bytes(torch.device(device)) if config.budget_bytes is None else config.budget_bytes,
        free_ram_bytes() if config.pinned_bytes is None else config.pinned_bytes,
    )
    batch_items = plan.batch_size * TILES
    planned = plan_memory(
        image_set.size_wh_N2, size=size, room=room, batch_items=batch_items, subsampled=config.subsampled
    )
    logger.info("%s", planned)
    wh_N2 = resized_wh(image_set.size_wh_N2, size)
    if config.subsampled:
        pictures = Subsampled(pictures, wh_N2)
    elif not isinstance(pictures, ShapedArrays):
        pictures = AsScanned(pictures, wh_N2)
    return DeviceStore(
        pictures, device, budget_bytes=room.device_bytes, batch_items=batch_items, pinned_bytes=room.pinned_bytes
    )


class AsScanned:
    """Pictures whose sizes follow from the scan; DecodeError for one that has changed since."""

    def __init__(self, pictures: Arrays, wh_N2: np.ndarray) -> None:
        self._pictures, self._wh_N2 = pictures, wh_N2

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: int) -> np.ndarray:
        return as_scanned(self._pictures[index], self._wh_N2[index])


def _label_finisher(
    image_set: ImageSet, augment: AugmentConfig, config: DeviceInputConfig, device: str | torch.device
) -> FinishLabels | None:
    """What finishes labels with polygons; None where workers make them, which the log then says, or there are none."""
    if not len(image_set.labels.point_P2):
        return None
    if not config.polygons_on_device or not can_open(image_set, augment):
        why = "copy_paste must know them all" if config.polygons_on_device else "polygons_on_device is off"
        logger.info("Labels with polygons are made by the workers: %s.", why)
        return None
    labels = DeviceLabels.of(image_set.labels, device)
    return label_finisher_for(device, labels, perspective=augment.perspective > 0)


def shapes_of_pictures(rect: RectBatches) -> np.ndarray:
    """Width and height of the batch that each picture is in, int64 [N, 2]; 0 for pictures in no batch."""
    out_wh_N2 = np.zeros((rect.order_N.max() + 1, 2), np.int64)
    out_wh_N2[rect.order_N] = rect.shape_hw_S2[rect.batch_N][:, ::-1]
    return out_wh_N2


def _images(config: DeviceInputConfig, size: int, rect: RectBatches | None) -> Output:
    """What is rendered, in the largest shape that occurs."""
    height, width = (size, size) if rect is None else rect.shape_hw_S2.max(0).tolist()
    return Output((3, height, width), config.dtype, config.channels_last)


def _feed_config(config: DeviceInputConfig, plan: Plan) -> FeedConfig:
    workers = FeedConfig(workers=config.workers).num_workers
    per_task = max(min(LEAST_TASK, plan.batch_size), -(-plan.batch_size // (2 * max(1, workers))))
    return FeedConfig(
        workers=config.workers,
        micro_batch=per_task,
        persistent_workers=config.persistent_workers,
        epochs=config.epochs,
        on_error="substitute",
    )
