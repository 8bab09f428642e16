"""The input of training and validation from images that stay on the device, and where these images are kept.

    host store -> DeviceStore (device memory, the rest in pinned RAM; workers stream what fits into neither)
    worker: draw, labels -> slot -> copy -> render -> images in the network's dtype and layout, numbered targets

Polygons are warped and clipped on the device, too: workers only list the labels that may be visible (gpu/source.py).

Dimension key:  N images
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from flatout.errors import ConfigError
from flatout.feed import (
    CHUNK_BYTES,
    Arrays,
    BackgroundFill,
    DeviceStore,
    Feed,
    FeedConfig,
    Output,
    Plan,
    ShapedArrays,
    chunks_of,
    free_bytes,
    free_ram_bytes,
    pin_slots_of_fill,
    settle,
)
from flatout.yolo.augment.draw import AugmentConfig, ClassAware
from flatout.yolo.augment.gpu.batches import DeviceInput, FinishLabels, label_finisher_for, renderer_for
from flatout.yolo.augment.gpu.chroma import Subsampled, kept_shapes
from flatout.yolo.augment.gpu.labels_torch import DeviceLabels
from flatout.yolo.augment.gpu.source import TILES, ParameterSource, ValidationParameters, can_defer_labels
from flatout.yolo.augment.layout import resized_wh
from flatout.yolo.augment.samples import SizeCheckedImages, SizedImages
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.letterbox import RectBatches

logger = logging.getLogger(__name__)

# Where the images of a data set will be kept, computed from their sizes before any of them is decoded.


class MemoryBudget(NamedTuple):
    """Bytes of memory that images may take."""

    device_bytes: int
    pinned_bytes: int


class MemoryPlan(NamedTuple):
    """How many images will be kept where, and the bytes that they take."""

    size: int
    subsampled: bool
    num_images: int
    num_resident: int
    num_pinned: int
    device_bytes: int
    pinned_bytes: int
    streamed_bytes: int

    def __str__(self) -> str:
        each = (self.device_bytes + self.pinned_bytes + self.streamed_bytes) / self.num_images
        how = " as 4:2:0" if self.subsampled else ""
        text = f"{self.num_images} images at {self.size} px{how}, {each:,.0f} bytes each: "
        text += f"{self.num_resident} in device memory ({self.device_bytes / 1e9:.2f} GB)"
        if self.num_pinned:
            text += f", {self.num_pinned} in pinned RAM ({self.pinned_bytes / 1e9:.2f} GB)"
        if num_streamed := self.num_images - self.num_resident - self.num_pinned:
            text += (
                f", {num_streamed} streamed by the workers from the host's store ({self.streamed_bytes / 1e9:.2f} GB)"
            )
        return text


def plan_memory(
    size_wh_N2: np.ndarray, *, size: int, budget: MemoryBudget, batch_items: int, subsampled: bool = False
) -> MemoryPlan:
    """What `image_store` will do with images of these sizes, stored as BGR or with subsampled colours."""
    wh_N2 = resized_wh(size_wh_N2, size)
    chunks_N = chunks_of(kept_shapes(wh_N2).prod(1) if subsampled else wh_N2.prod(1) * 3)
    device_chunks, pinned_chunks = (each // CHUNK_BYTES for each in budget)
    residence, _ = settle(chunks_N, budget=device_chunks, batch_items=batch_items, pinned_budget=pinned_chunks)
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


MIN_TASK_SAMPLES = 128
"""Fewest samples of a worker's task: with fewer, the overhead of NumPy calls exceeds their work."""


@dataclass(frozen=True, kw_only=True)
class DeviceInputConfig:
    """Where images are kept, and the dtype and layout of the network's input."""

    dtype: torch.dtype = torch.bfloat16
    """uint8 for values from 0 to 255, or a floating-point type for 0 to 1."""
    channels_last: bool = True
    workers: int | str = 2
    """Processes that draw and make labels; two are enough for 40,000 samples per second."""
    persistent_workers: bool = True
    """False ends them after each epoch and starts new ones for the next."""
    epochs: int | None = None
    """Epochs of the whole run, if known: nothing is drawn after the last."""
    budget_bytes: int | None = None
    """Device memory for images; None: 80 % of what is free. What does not fit is kept in pinned RAM."""
    pinned_bytes: int | None = None
    """Pinned RAM for images; None: half of what is free. What does not fit there either is streamed by the workers."""
    subsampled: bool = False
    """Store colours at half of the resolution, as most JPEG files do (4:2:0): half of the bytes, not the same pixels
    (see `chroma`)."""
    target_bucket: int | None = None
    """Pad targets to a multiple of this with rows of image -1, so that few shapes occur; None: no padding."""
    polygons_on_device: bool = True
    """Finish labels with polygons on the device; False: in the workers, as labels with boxes are."""
    label_ids: bool = False
    """Deliver `label_ids` with training batches: the number of each target's label in the data set."""
    decode_workers: int | str = "cpu*0.9"
    """Processes that decode images in the background, until all are decoded; the training itself takes little until
    then."""

    def __post_init__(self) -> None:
        if self.target_bucket is not None and self.target_bucket < 1:
            raise ConfigError(f"target_bucket={self.target_bucket} must be 1 or more.")


def training_input(
    image_set: ImageSet,
    images: Arrays,
    augment: AugmentConfig,
    plan: Plan,
    *,
    size: int,
    device: str | torch.device,
    config: DeviceInputConfig | None = None,
    store: DeviceStore | None = None,
    class_aware: ClassAware | None = None,
    rect: RectBatches | None = None,
    fill_from: tuple[int, int] | None = None,
) -> DeviceInput:
    """Augmented batches on `device`, from `images` resized for training at `size` (a Store of ResizedImages).

    The plan decides about sampling weights, ranks and the order of rectangular batches, whose shapes are in `rect`;
    shapes in the plan are ignored. Pass a `store` made by `image_store` to use it again.

    With `fill_from` the images are decoded in the background, those first that the training needs from this epoch and
    step on, and the batches are the same. All must fit into the device's memory (`plan_memory`).
    """
    config = config or DeviceInputConfig()
    out_wh_N2 = None if rect is None else batch_shapes(rect)
    filled = None
    if fill_from is not None:
        wh_N2 = resized_wh(image_set.size_wh_N2, size)
        images = filled = Subsampled(images, wh_N2) if config.subsampled else SizedImages(images, wh_N2)
    store = store or image_store(
        image_set, images, size=size, device=device, plan=plan, config=config, filled=filled is None
    )
    finish_labels = _label_finisher(image_set, augment, config, device)
    source = ParameterSource(
        image_set,
        augment,
        size=size,
        class_aware=class_aware,
        out_wh_N2=out_wh_N2,
        streamed=store.streamed_items(),
        defer_labels=finish_labels is not None,
        label_ids=config.label_ids,
    )
    render = renderer_for(
        device, mixup=augment.mixup > 0, perspective=augment.perspective > 0, subsampled=config.subsampled
    )
    feed = Feed(source, replace(plan, shapes=None), _feed_config(config, plan), unreadable=store.unreadable)
    fill = None
    if filled is not None and fill_from is not None:
        epoch, step = fill_from
        if step >= feed.plan.epoch(epoch).num_steps:  # saved before the validation of this epoch
            epoch, step = epoch + 1, 0
        fill = BackgroundFill(
            filled,
            image_set.paths,
            store.put,
            images_by_step(source, feed.plan, (epoch, step)),
            begin=(epoch, step),
            workers=config.decode_workers,
            before_reading=partial(pin_slots_of_fill, store.device_index) if store.device.type == "cuda" else None,
        )
        fill.start()
    return DeviceInput(
        feed,
        store,
        render,
        _image_output(config, size, rect),
        out_wh_N2=out_wh_N2,
        finish_labels=finish_labels,
        target_bucket=config.target_bucket,
        subsampled=config.subsampled,
        fill=fill,
    )


def images_by_step(source: ParameterSource, plan: Plan, begin: tuple[int, int]) -> Iterator[np.ndarray]:
    """The images that each step is made of, from a step (epoch, step) to the end of its epoch."""
    epoch, first = begin
    steps = plan.epoch(epoch)
    for number in range(first, steps.num_steps):
        step = steps.step(number)
        yield source.items_read(source.draw(plan.seed, epoch, step.positions, step.indices))


def validation_input(
    image_set: ImageSet,
    images: Arrays,
    plan: Plan,
    *,
    size: int,
    device: str | torch.device,
    config: DeviceInputConfig | None = None,
    rect: RectBatches | None = None,
) -> DeviceInput:
    """Letterboxed batches on `device`, from `images` resized for validation at `size`, in the shapes of `rect`."""
    config = config or DeviceInputConfig()
    out_wh_N2 = None if rect is None else batch_shapes(rect)
    store = image_store(image_set, images, size=size, device=device, plan=plan, config=config)
    streamed = store.streamed_items()
    if streamed is None:
        # The boxes of a batch take a millisecond, and starting workers for them takes longer than a short validation.
        config = replace(config, workers=0)
    source = ValidationParameters(image_set, size=size, out_wh_N2=out_wh_N2, streamed=streamed)
    render = renderer_for(device, mixup=False, recolor=False, subsampled=config.subsampled)
    feed = Feed(source, replace(plan, shapes=None), _feed_config(config, plan), unreadable=store.unreadable)
    output = _image_output(config, size, rect)
    return DeviceInput(feed, store, render, output, out_wh_N2=out_wh_N2, target_bucket=config.target_bucket)


def image_store(
    image_set: ImageSet,
    images: Arrays,
    *,
    size: int,
    device: str | torch.device,
    plan: Plan,
    config: DeviceInputConfig,
    filled: bool = True,
) -> DeviceStore:
    """Upload the images; logs first where they will be kept. `filled`: see `DeviceStore`."""
    budget = memory_budget(device, config)
    items = plan.batch_size * TILES
    planned = plan_memory(
        image_set.size_wh_N2, size=size, budget=budget, batch_items=items, subsampled=config.subsampled
    )
    logger.info("%s", planned)
    wh_N2 = resized_wh(image_set.size_wh_N2, size)
    if config.subsampled:
        images = images if isinstance(images, Subsampled) else Subsampled(images, wh_N2)
    elif not isinstance(images, ShapedArrays):
        # If workers stream some, all are read once to find out which ones are unreadable: where objects are pasted in,
        # other substitutes would be chosen if workers found out later.
        are_kept = planned.num_resident + planned.num_pinned == planned.num_images
        images = SizedImages(images, wh_N2) if are_kept else SizeCheckedImages(images, wh_N2)
    return DeviceStore(
        images,
        device,
        budget_bytes=budget.device_bytes,
        batch_items=items,
        pinned_bytes=budget.pinned_bytes,
        filled=filled,
    )


def memory_budget(device: str | torch.device, config: DeviceInputConfig) -> MemoryBudget:
    """The memory that images may take: as configured, else by what is free now."""
    return MemoryBudget(
        free_bytes(torch.device(device)) if config.budget_bytes is None else config.budget_bytes,
        free_ram_bytes() if config.pinned_bytes is None else config.pinned_bytes,
    )


def _label_finisher(
    image_set: ImageSet, augment: AugmentConfig, config: DeviceInputConfig, device: str | torch.device
) -> FinishLabels | None:
    """Finishes labels with polygons on the device; None if there are none, or workers make them, which is logged."""
    if not len(image_set.labels.point_P2):
        return None
    if not config.polygons_on_device or not can_defer_labels(image_set, augment):
        why = "copy_paste needs all of them" if config.polygons_on_device else "polygons_on_device is off"
        logger.info("Labels with polygons are made by the workers: %s.", why)
        return None
    labels = DeviceLabels.of(image_set.labels, device)
    return label_finisher_for(device, labels, perspective=augment.perspective > 0)


def batch_shapes(rect: RectBatches) -> np.ndarray:
    """Width and height of the batch that each image is in, int64 [N, 2]; 0 for images in no batch."""
    out_wh_N2 = np.zeros((rect.order_N.max() + 1, 2), np.int64)
    out_wh_N2[rect.order_N] = rect.shape_hw_S2[rect.batch_N][:, ::-1]
    return out_wh_N2


def _image_output(config: DeviceInputConfig, size: int, rect: RectBatches | None) -> Output:
    """The images to render, in the largest shape that occurs."""
    height, width = (size, size) if rect is None else rect.shape_hw_S2.max(0).tolist()
    return Output((3, height, width), config.dtype, config.channels_last)


def _feed_config(config: DeviceInputConfig, plan: Plan) -> FeedConfig:
    workers = FeedConfig(workers=config.workers).num_workers
    per_task = max(min(MIN_TASK_SAMPLES, plan.batch_size), -(-plan.batch_size // (2 * max(1, workers))))
    return FeedConfig(
        workers=config.workers,
        micro_batch=per_task,
        persistent_workers=config.persistent_workers,
        epochs=config.epochs,
        on_error="substitute",
    )
