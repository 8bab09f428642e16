"""Batches finished on the device: which renderer paints, what is pasted, labels judged, targets filled up.

Dimension key:  N pictures   B samples of a batch   T targets   S samples that are pasted into
"""

import functools
import logging
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from flatout.clock import clock
from flatout.feed import Batch, DeviceFeed, DeviceStore, Feed, Output, Render
from flatout.kernels import HAS_TRITON
from flatout.yolo.augment.gpu.labels_torch import DeviceLabels, TorchLabels
from flatout.yolo.augment.gpu.paste_torch import Fills, Pasting, TorchFill, TorchPaste
from flatout.yolo.augment.gpu.render_torch import TorchRender
from flatout.yolo.augment.gpu.source import PICTURE_COLUMN, plan_copies

logger = logging.getLogger(__name__)

# Which renderer paints on a device: one Triton kernel where there is Triton and a GPU, else plain torch.


class Paste(Protocol):
    """Pastes objects over images [B, 3, H, W] in place, on the current stream."""

    def __call__(self, pasting: Pasting, images: Tensor) -> None: ...


class Fill(Protocol):
    """Sets masks uint8 [J, H, W] to 1 inside of polygons, in place, on the current stream."""

    def __call__(self, fills: Fills, masks: Tensor) -> None: ...


class FinishLabels(Protocol):
    """Makes targets float32 [T, 6] of rows int32 [T, 6] (see `can_open`), in place, on the current stream."""

    def __call__(
        self, row_T6: Tensor, params: Mapping[str, Tensor], out_wh: tuple[int, int], count: Tensor
    ) -> Tensor: ...


def renderer_for(
    device: str | torch.device,
    *,
    mixup: bool,
    perspective: bool = False,
    recolor: bool = True,
    subsampled: bool = False,
) -> Render:
    """A renderer of the parameters of gpu/source.py; all give the same bits. `subsampled`: kept as in `chroma`."""
    if torch.device(device).type == "cuda":
        if HAS_TRITON:
            from flatout.yolo.augment.gpu.render_triton import TritonRender

            return TritonRender(perspective=perspective, recolor=recolor, subsampled=subsampled)
        _say_what_is_missing()
    return TorchRender(mixup=mixup, perspective=perspective, recolor=recolor, subsampled=subsampled)


def paster_for(device: str | torch.device) -> Paste:
    """What pastes the objects of `device_paste` over finished pictures; all give the same bits."""
    if torch.device(device).type == "cuda":
        if HAS_TRITON:
            from flatout.yolo.augment.gpu.paste_triton import TritonPaste

            return TritonPaste()
        _say_what_is_missing()
    return TorchPaste()


def filler_for(device: str | torch.device) -> Fill:
    """What fills the polygons of `device_copy`; all give the same bits."""
    if torch.device(device).type == "cuda":
        if HAS_TRITON:
            from flatout.yolo.augment.gpu.paste_triton import TritonFill

            return TritonFill()
        _say_what_is_missing()
    return TorchFill()


def label_finisher_for(device: str | torch.device, labels: DeviceLabels, *, perspective: bool) -> FinishLabels:
    """What finishes labels that workers leave open; all give the same bits. The log says which it is."""
    finish: FinishLabels | None = None
    if torch.device(device).type == "cuda":
        if HAS_TRITON:
            from flatout.yolo.augment.gpu.labels_triton import TritonLabels

            finish = TritonLabels(labels, perspective=perspective)
        else:
            _say_what_is_missing()
    finish = finish or TorchLabels(labels, perspective=perspective)
    megabytes = labels.nbytes / 1e6
    logger.info("Labels with polygons are made on %s by %s; all there are take %.1f MB.", device, finish, megabytes)
    return finish


@functools.cache
def _say_what_is_missing() -> None:
    logger.warning(
        "Triton is not installed: pictures are augmented on the GPU by some hundred torch operations instead of one "
        "kernel, many times slower. `pip install triton` mends it."
    )


BATCH_FIELDS: tuple[str, ...] = ("images", "targets", "shapes")


class DeviceInput(DeviceFeed):
    """Batches of the detection job: `images` [B, 3, H, W], `targets` [T, 6], for validation `shapes` [B, 6].

    Borrowed, as all batches of a `DeviceFeed`; counts, indices and positions are on the host. A context manager;
    `close()` ends the workers.

    Where the device finishes labels (gpu/source.py), those that are not worth learning become rows of image -1. Only
    the device knows how many are left, `num_targets` int32 [1], which is not borrowed; `counts` includes all rows.
    """

    def __init__(
        self,
        feed: Feed,
        store: DeviceStore,
        render: Render,
        images: Output,
        *,
        out_wh_N2: np.ndarray | None = None,
        finish_labels: FinishLabels | None = None,
        target_bucket: int | None = None,
        subsampled: bool = False,
    ) -> None:
        """`out_wh_N2` says in which shape a picture's batch is, none larger than that of `images`.

        `finish_labels` makes targets of what the feed's source leaves open. With `target_bucket` rows of image -1 fill
        targets up to a multiple of it. `subsampled`: the store keeps pictures as `chroma` describes it.
        """
        super().__init__(feed, store, render, {"images": images})
        self._out_wh_N2 = out_wh_N2
        self._bucket = target_bucket
        self._subsampled = subsampled
        self._padded: dict[tuple[int, int], Tensor] = {}
        self._paste = paster_for(store.device)
        self._fill = filler_for(store.device)
        self._finish_labels = finish_labels

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
        # Of the canvas: a picture that stands in for another one is from another batch.
        width, height = batch["canvas"][0, 0].tolist()
        return 3, height, width

    def _finish(self, turn: int, batch: Batch, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if len(batch.fields.get("copied", ())):
            tensors = tensors | self._masks(batch, tensors)
        fields = super()._finish(turn, batch, tensors)
        if len(batch.fields.get("pasted", ())):
            self._paste(self._pasting(batch, fields), fields["images"])
        kept: dict[str, Tensor] = {name: fields[name] for name in BATCH_FIELDS if name in fields}
        if self._finish_labels is not None:
            height, width = fields["images"].shape[2:]
            kept["num_targets"] = torch.zeros(1, dtype=torch.int32, device=self._store.device)
            with clock.stage("render"):
                kept["targets"] = self._finish_labels(fields["targets"], fields, (width, height), kept["num_targets"])
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
            batch["pasted"][:, PICTURE_COLUMN], fields["pasted"][:, PICTURE_COLUMN], self._streamed(batch, fields)
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
