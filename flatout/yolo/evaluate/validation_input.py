"""Batches for validation: letterboxed images of similar shapes, always in the same order.

    host:    store or files --resized--> worker: letterbox --> slot --> device, one batch ahead
    device:  images kept there --letterboxed there--> batch

A validation input stays open between the epochs of a training. When a pass ends, its workers fill the slots with the
beginning of the next one, so that the next validation starts at once.

Dimension key:  B images of a batch   H W input   T targets   N images of the set   S batches
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from flatout.errors import ConfigError
from flatout.feed import DeviceBatches, Feed, FeedConfig, Plan, Store
from flatout.yolo.augment.samples import ResizedImages
from flatout.yolo.boxes import Letterbox
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.letterbox import rect_batches, step_shapes

PAD = 0.5
"""Padding of YOLOv7's validation, in strides: square images of 640 px are evaluated at 672."""


class ValidationBatch(NamedTuple):
    """Letterboxed images with their targets. Borrowed: the next batch overwrites the tensors."""

    images: Tensor
    """uint8 [B, 3, H, W], RGB."""

    targets_T6: Tensor
    """float32: index of the image in the batch, class, cx, cy, w, h normalised to the input; images ascending."""

    letterbox: Letterbox
    indices: np.ndarray
    """int64 [B] on the host: indices of the images in the image set."""

    counts_B: np.ndarray
    """int32 on the host: targets of each image."""

    paths: tuple[str, ...]
    """Paths of the image files."""

    @property
    def input_hw(self) -> tuple[int, int]:
        return self.images.shape[2], self.images.shape[3]


def together(
    batches: Iterable[ValidationBatch], pixels: int
) -> Iterator[tuple[ValidationBatch, Sequence[ValidationBatch]]]:
    """Consecutive batches of one shape as one batch of at most so many pixels, with those that it consists of.

    A small network takes longer to launch on a GPU than to run there, so fewer passes take less time. Images keep their
    shape and their order. With 0 pixels every batch stays alone, as it is; only batches that may be joined are copied.
    """
    kept: list[ValidationBatch] = []
    for batch in batches:
        if kept and (batch.input_hw != kept[0].input_hw or sum(map(_num_pixels, [*kept, batch])) > pixels):
            yield _joined(kept), kept
            kept = []
        if 2 * _num_pixels(batch) > pixels:
            yield batch, [batch]
        else:
            kept.append(_copied(batch))
    if kept:
        yield _joined(kept), kept


def _num_pixels(batch: ValidationBatch) -> int:
    height, width = batch.input_hw
    return len(batch.indices) * height * width


def _copied(batch: ValidationBatch) -> ValidationBatch:
    return batch._replace(
        images=batch.images.clone(),
        targets_T6=batch.targets_T6.clone(),
        letterbox=Letterbox(*(each.clone() for each in batch.letterbox)),
        indices=batch.indices.copy(),
        counts_B=batch.counts_B.copy(),
    )


def _joined(batches: Sequence[ValidationBatch]) -> ValidationBatch:
    """These batches as one."""
    if len(batches) == 1:
        return batches[0]
    targets, begin = [], 0
    for batch in batches:
        row_T6 = batch.targets_T6.clone()
        row_T6[:, 0] += begin
        targets.append(row_T6)
        begin += len(batch.indices)
    return ValidationBatch(
        images=torch.cat([batch.images for batch in batches]),
        targets_T6=torch.cat(targets),
        letterbox=Letterbox(*map(torch.cat, zip(*(batch.letterbox for batch in batches), strict=True))),
        indices=np.concatenate([batch.indices for batch in batches]),
        counts_B=np.concatenate([batch.counts_B for batch in batches]),
        paths=tuple(path for batch in batches for path in batch.paths),
    )


class ValidationInput:
    """Repeated passes over an image set. Holds workers and slots: a context manager; `close()` may be called twice."""

    def __init__(self, image_set: ImageSet, batches: DeviceBatches | None) -> None:
        """Use `open_validation`. `batches` is None if this rank gets none."""
        self.image_set = image_set
        self._batches = batches
        self._passes = 0

    def __enter__(self) -> Self:
        if self._batches is not None:
            self._batches.feed.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Batches per pass."""
        return 0 if self._batches is None else len(self._batches)

    @property
    def num_images(self) -> int:
        return len(self.image_set)

    def close(self) -> None:
        if self._batches is not None:
            self._batches.feed.log_replaced()
            self._batches.feed.close()

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[ValidationBatch]:
        """One pass over all images of this rank, the same for every epoch. Ends any other pass."""
        # Passes have their own numbers: the feed reads ahead into its next epoch, which has to be the next pass.
        number, self._passes = self._passes, self._passes + 1
        if self._batches is None:
            return
        for batch in self._batches.epoch(number, start):
            yield ValidationBatch(
                batch["images"],
                batch["targets"],
                _letterbox(batch["shapes"]),
                batch.indices,
                batch.counts["targets"],
                tuple(self.image_set.paths[index] for index in batch.indices.tolist()),
            )


def open_validation(
    image_set: ImageSet,
    *,
    size: int,
    batch_size: int,
    device: torch.device | str,
    stride: int = 32,
    workers: int | str = "auto",
    store: Store | None = None,
    on_device: bool = False,
    persistent_workers: bool = True,
    single_cls: bool = False,
    rank: int = 0,
    num_ranks: int = 1,
) -> ValidationInput:
    """Open a validation input; workers start with the first pass, or in a `with` block.

    With several ranks each gets every `num_ranks`-th batch, unchanged; the last ranks may get none.

    `store` holds `ResizedImages(image_set, size=size, augment=False)`; without one, every pass decodes every image.
    `on_device` copies the images to the device now, where they stay. Otherwise workers letterbox them, and one that can
    no longer be read is replaced by another, with a warning. `persistent_workers=False` ends them after each pass.
    """
    if store is not None and len(store) != len(image_set):
        raise ConfigError(
            f"The store holds {len(store)} images, but the image set has {len(image_set)}: open the store of this set."
        )
    if single_cls:
        image_set = _as_one_class(image_set)
    batch_size = min(batch_size, len(image_set))
    rect = rect_batches(image_set.size_wh_N2, batch_size=batch_size, img_size=size, stride=stride, pad=PAD)
    if (own := rect.share(rank, num_ranks)) is None:
        return ValidationInput(image_set, None)
    provider = ResizedImages(image_set, size=size, augment=False) if store is None else store
    plan = Plan(num_samples=len(image_set), batch_size=batch_size, shuffle=False, last="short", order=own.order_N)
    if on_device:
        from flatout.yolo.augment.gpu.input import DeviceInputConfig, validation_input

        config = DeviceInputConfig(dtype=torch.uint8, workers=workers, persistent_workers=persistent_workers)
        kept = validation_input(image_set, provider, plan, size=size, device=device, config=config, rect=own)
        return ValidationInput(image_set, kept)
    from flatout.yolo.augment.source import ValidationSource  # imports OpenCV

    largest_h, largest_w = own.shape_hw_S2.max(0).tolist()
    source = ValidationSource(image_set, provider, size=size, largest_hw=(largest_h, largest_w))
    feed_config = FeedConfig(workers=workers, persistent_workers=persistent_workers, on_error="substitute")
    feed = Feed(source, replace(plan, shapes=step_shapes(own.shape_hw_S2)), feed_config)
    return ValidationInput(image_set, feed.to_device(device))


def _as_one_class(image_set: ImageSet) -> ImageSet:
    class_box_T5 = image_set.labels.class_box_T5.copy()
    class_box_T5[:, 0] = 0
    return replace(image_set, labels=replace(image_set.labels, class_box_T5=class_box_T5))


def _letterbox(shapes_B6: Tensor) -> Letterbox:
    """The letterbox from h0, w0, ratio h, ratio w, pad x, pad y of each image, on the device."""
    numbers_B6 = shapes_B6.float()
    return Letterbox(numbers_B6[:, :2].flip(1), numbers_B6[:, 2], numbers_B6[:, 4:])
