"""The input of training and validation from pictures that stay on the device: all parts put together.

    host store -> DeviceStore (device memory, the rest in pinned RAM; what fits into neither, workers bring along)
    worker: draw, labels -> slot -> copy -> render -> images in the network's dtype and layout, numbered targets

Dimension key:  N pictures   B samples of a batch   T targets
"""

import logging
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from flatout.errors import ConfigError
from flatout.feed.arrays import Arrays
from flatout.feed.batch import Batch
from flatout.feed.device_feed import DeviceFeed, Output, Render
from flatout.feed.device_store import DeviceStore, free_bytes, free_ram_bytes
from flatout.feed.feed import Feed
from flatout.feed.knobs import FeedConfig
from flatout.feed.plan import Plan
from flatout.yolo.augment.choose_render import filler_for, paster_for, renderer_for
from flatout.yolo.augment.chroma import Subsampled
from flatout.yolo.augment.class_aware import ClassAware
from flatout.yolo.augment.config import AugmentConfig
from flatout.yolo.augment.device_copy import plan_copies
from flatout.yolo.augment.device_paste import PICTURE_COLUMN
from flatout.yolo.augment.device_source import TILES, ParameterSource, ValidationParameters
from flatout.yolo.augment.fill_torch import Fills
from flatout.yolo.augment.layout import resized_wh
from flatout.yolo.augment.memory_plan import Room, plan_memory
from flatout.yolo.augment.paste_torch import Pasting
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.rect import RectBatches

logger = logging.getLogger(__name__)

BATCH_FIELDS: tuple[str, ...] = ("images", "targets", "shapes")
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

    def __post_init__(self) -> None:
        if self.target_bucket is not None and self.target_bucket < 1:
            raise ConfigError(f"target_bucket={self.target_bucket} must be 1 or more.")


class DeviceInput(DeviceFeed):
    """Batches of the detection job: `images` [B, 3, H, W], `targets` [T, 6], for validation `shapes` [B, 6].

    Borrowed, as all batches of a `DeviceFeed`; counts, indices and positions are on the host. A context manager;
    `close()` ends the workers.
    """

    def __init__(
        self,
        feed: Feed,
        store: DeviceStore,
        render: Render,
        config: DeviceInputConfig,
        *,
        largest_hw: tuple[int, int],
        out_wh_N2: np.ndarray | None = None,
    ) -> None:
        """`out_wh_N2` says in which shape a picture's batch is, none larger than `largest_hw`."""
        images = Output((3, *largest_hw), config.dtype, config.channels_last)
        super().__init__(feed, store, render, {"images": images})
        self._out_wh_N2 = out_wh_N2
        self._bucket = config.target_bucket
        self._subsampled = config.subsampled
        self._padded: dict[tuple[int, int], Tensor] = {}
        self._paste = paster_for(store.device)
        self._fill = filler_for(store.device)

    def __enter__(self) -> "DeviceInput":
        self.feed.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self.feed.close()

    def shape_of(self, name: str, batch: Batch) -> tuple[int, ...]:
        if self._out_wh_N2 is None:
            return super().shape_of(name, batch)
        width, height = self._out_wh_N2[batch.indices[0]].tolist()
        return 3, height, width

    def _finish(self, turn: int, batch: Batch, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if len(batch.fields.get("copied", ())):
            tensors = tensors | self._masks(batch, tensors)
        fields = super()._finish(turn, batch, tensors)
        if len(batch.fields.get("pasted", ())):
            self._paste(self._pasting(batch, fields), fields["images"])
        kept: dict[str, Tensor] = {name: fields[name] for name in BATCH_FIELDS if name in fields}
        if self._bucket is not None:
            kept["targets"] = self._fill_up(turn, kept["targets"], self._bucket)
        return kept

    def _masks(self, batch: Batch, fields: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of the canvases in which objects are copied, and which sheet has which; read by the render after this."""
        plan = plan_copies(batch["copied"], batch.counts["copied"])
        # Only mosaics have copies, and the canvases of all mosaics are equally large.
        width, height = batch["canvas"][plan.mask_of_B2 >= 0][0].tolist()
        masks = torch.zeros((plan.num_masks, height, width), dtype=torch.uint8, device=self._store.device)
        self._fill(Fills(self._store.send(plan.span_K7), plan.span_K7, fields["copy_points"]), masks)
        return {"masks": masks, "mask_of": self._store.send(plan.mask_of_B2)}

    def _pasting(self, batch: Batch, fields: dict[str, Tensor]) -> Pasting:
        # The render before this has been queued: pictures of its own may be staged over by those of the objects.
        sources = self._store.sources_of(
            batch["pasted"][:, PICTURE_COLUMN], fields["pasted"][:, PICTURE_COLUMN], self._brought(batch, fields)
        )
        num_B, num_points_B = batch.counts["pasted"], batch.counts["outlines"]
        samples = np.flatnonzero(num_B)
        first_B, first_point_B = np.cumsum(num_B) - num_B, np.cumsum(num_points_B) - num_points_B
        spans_S4 = np.stack((samples, first_B[samples], num_B[samples], first_point_B[samples]), 1).astype(np.int32)
        return Pasting(
            sources,
            fields["pasted"],
            fields["outlines"],
            self._store.send(spans_S4),
            batch["pasted"],
            spans_S4,
            fields["flip"],
            self._subsampled,
        )

    def _fill_up(self, turn: int, targets_T6: Tensor, bucket: int) -> Tensor:
        rows = max(1, -(-len(targets_T6) // bucket)) * bucket
        # Kept for every size that occurs: a step may still read what a larger one would replace.
        key = (turn % 2, rows)
        if key not in self._padded:
            self._padded[key] = targets_T6.new_empty((rows, 6))
        padded = self._padded[key].zero_()
        padded[len(targets_T6) :, 0] = -1
        padded[: len(targets_T6)] = targets_T6
        return padded


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
    """Augmented batches on `device`, from `pictures` resized for training at `size` (a Store of ResizedPictures).

    Sampling weights and ranks are the plan's affair; so is the order of rectangular batches, whose shapes `rect` gives.
    A `store` made by `picture_store` before is used again. Shapes in the plan are left out of account.
    """
    config = config or DeviceInputConfig()
    out_wh_N2 = None if rect is None else shapes_of_pictures(rect)
    store = store or picture_store(image_set, pictures, size=size, device=device, plan=plan, config=config)
    source = ParameterSource(
        image_set, augment, size=size, class_aware=class_aware, out_wh_N2=out_wh_N2, bringing=store.bringing()
    )
    render = renderer_for(
        device, mixup=augment.mixup > 0, perspective=augment.perspective > 0, subsampled=config.subsampled
    )
    feed = Feed(source, replace(plan, shapes=None), _feed_config(config, plan))
    largest_hw = (size, size) if rect is None else _largest_hw(rect)
    return DeviceInput(feed, store, render, config, largest_hw=largest_hw, out_wh_N2=out_wh_N2)


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
    feed = Feed(source, replace(plan, shapes=None), _feed_config(config, plan))
    largest_hw = (size, size) if rect is None else _largest_hw(rect)
    return DeviceInput(feed, store, render, config, largest_hw=largest_hw, out_wh_N2=out_wh_N2)


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
    if config.subsampled:
        pictures = Subsampled(pictures, resized_wh(image_set.size_wh_N2, size))
    return DeviceStore(
        pictures, device, budget_bytes=room.device_bytes, batch_items=batch_items, pinned_bytes=room.pinned_bytes
    )


def shapes_of_pictures(rect: RectBatches) -> np.ndarray:
    """Width and height of the batch that each picture is in, int64 [N, 2]; 0 for pictures in no batch."""
    out_wh_N2 = np.zeros((rect.order_N.max() + 1, 2), np.int64)
    out_wh_N2[rect.order_N] = rect.shape_hw_S2[rect.batch_N][:, ::-1]
    return out_wh_N2


def _largest_hw(rect: RectBatches) -> tuple[int, int]:
    height, width = rect.shape_hw_S2.max(0).tolist()
    return height, width


def _feed_config(config: DeviceInputConfig, plan: Plan) -> FeedConfig:
    workers = FeedConfig(workers=config.workers).num_workers
    per_task = max(min(LEAST_TASK, plan.batch_size), -(-plan.batch_size // (2 * max(1, workers))))
    return FeedConfig(workers=config.workers, micro_batch=per_task, epochs=config.epochs)
