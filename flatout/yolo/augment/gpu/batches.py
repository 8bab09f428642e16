"""Batches finished on the device: rendered, with objects pasted, labels finished and targets padded.

Dimension key:  N images   B samples of a batch   T targets   W columns   S samples that are pasted into   K objects
                J masks of canvases   H W height and width
"""

import functools
import logging
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from flatout.clock import clock
from flatout.feed import BackgroundFill, Batch, DeviceFeed, DeviceStore, Feed, Output, Render
from flatout.kernels import HAS_TRITON
from flatout.yolo.augment.gpu.labels_torch import DeviceLabels, TorchLabels
from flatout.yolo.augment.gpu.paste_torch import ObjectsToPaste, PolygonsToFill, fill_polygons, paste_objects
from flatout.yolo.augment.gpu.render_torch import TorchRender
from flatout.yolo.augment.gpu.source import IMAGE_COLUMN, plan_copies

logger = logging.getLogger(__name__)

# What runs on a device: Triton kernels where there is Triton and a GPU, else plain torch. Both give the same bits.


Paste = Callable[[ObjectsToPaste, Tensor], None]
"""Pastes objects over images [B, 3, H, W] in place, on the current stream."""
Fill = Callable[[PolygonsToFill, Tensor], None]
"""Sets masks uint8 [J, H, W] to 1 inside of polygons, in place, on the current stream."""
FinishLabels = Callable[[Tensor, Mapping[str, Tensor], tuple[int, int], Tensor], Tensor]
"""(rows int32 [T, 6], see gpu/source.py; parameters; width and height of the output; count) -> targets float32 [T, 6],
in place, on the current stream."""


def renderer_for(
    device: str | torch.device,
    *,
    mixup: bool,
    perspective: bool = False,
    recolor: bool = True,
    subsampled: bool = False,
) -> Render:
    """The renderer of images from the parameters that gpu/source.py draws: by Triton where possible, else by torch.

    `subsampled`: images are stored as 4:2:0 (gpu/chroma.py).
    """
    if _has_kernels(device):
        from flatout.yolo.augment.gpu.render_triton import TritonRender

        return TritonRender(perspective=perspective, recolor=recolor, subsampled=subsampled)
    return TorchRender(mixup=mixup, perspective=perspective, recolor=recolor, subsampled=subsampled)


def paste_and_fill_for(device: str | torch.device) -> tuple[Paste, Fill]:
    """The functions that paste the objects of a `PastePlan` over finished images, and that fill the polygons of a
    `CopyPlan` into masks; by Triton where possible."""
    if _has_kernels(device):
        from flatout.yolo.augment.gpu import paste_triton

        return paste_triton.paste_objects, paste_triton.fill_polygons
    return paste_objects, fill_polygons


def label_finisher_for(device: str | torch.device, labels: DeviceLabels, *, perspective: bool) -> FinishLabels:
    """The function that finishes labels deferred by workers, by Triton where possible; logs which one it is."""
    finish: FinishLabels = TorchLabels(labels, perspective=perspective)
    if _has_kernels(device):
        from flatout.yolo.augment.gpu.labels_triton import TritonLabels

        finish = TritonLabels(labels, perspective=perspective)
    megabytes = labels.nbytes / 1e6
    logger.info("Labels with polygons are made on %s by %s; they take %.1f MB there.", device, finish, megabytes)
    return finish


def _has_kernels(device: str | torch.device) -> bool:
    """Whether Triton's kernels run on the device; warns once if it is a GPU without them."""
    is_gpu = torch.device(device).type == "cuda"
    if is_gpu and not HAS_TRITON:
        _warn_triton_missing()
    return is_gpu and HAS_TRITON


@functools.cache
def _warn_triton_missing() -> None:
    logger.warning(
        "Triton is not installed: images are augmented on the GPU by hundreds of torch operations instead of one "
        "kernel, many times slower. To fix it: pip install triton"
    )


BATCH_FIELDS: tuple[str, ...] = ("images", "targets", "label_ids", "shapes")


class DeviceInput(DeviceFeed):
    """Batches of the detection job: `images` [B, 3, H, W], `targets` [T, 6], for validation `shapes` [B, 6].

    Borrowed, as all batches of a `DeviceFeed`; counts, indices and positions are on the host. A context manager;
    `close()` ends the workers.

    Where the device finishes labels (gpu/source.py), those that are not kept become rows of image -1. Only the device
    knows how many are left: `num_targets`, int32 [1], which is not borrowed; `counts` includes all rows.
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
        fill: BackgroundFill | None = None,
    ) -> None:
        """`out_wh_N2`: width and height of each image's batch, none larger than that of `images`.

        `finish_labels` turns the labels that the feed's source defers into targets. With `target_bucket`, targets are
        padded to a multiple of it with rows of image -1. `subsampled`: the store keeps images as `chroma` describes.
        """
        super().__init__(feed, store, render, {"images": images}, fill=fill)
        self._out_wh_N2 = out_wh_N2
        self._bucket = target_bucket
        self._subsampled = subsampled
        self._padded: dict[tuple[str, int, int], Tensor] = {}
        self._paste, self._fill = paste_and_fill_for(store.device)
        self._finish_labels = finish_labels

    def __enter__(self) -> "DeviceInput":
        self.feed.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self.close_fill()
        self.feed.close()

    def shape_of(self, name: str, batch: Batch) -> tuple[int, ...]:
        if self._out_wh_N2 is None:
            return super().shape_of(name, batch)
        # From the canvas, since the substitute of an unreadable image belongs to another batch.
        width, height = batch["canvas"][0, 0].tolist()
        return 3, height, width

    def _finish(self, turn: int, batch: Batch, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if len(batch.fields.get("copied", ())):
            tensors = tensors | self._masks(batch, tensors)
        fields = super()._finish(turn, batch, tensors)
        if len(batch.fields.get("pasted", ())):
            self._paste(self._objects_to_paste(batch, fields), fields["images"])
        kept: dict[str, Tensor] = {name: fields[name] for name in BATCH_FIELDS if name in fields}
        if self._finish_labels is not None:
            height, width = fields["images"].shape[2:]
            kept["num_targets"] = torch.zeros(1, dtype=torch.int32, device=self._store.device)
            with clock.stage("render"):
                kept["targets"] = self._finish_labels(fields["targets"], fields, (width, height), kept["num_targets"])
        if self._bucket is not None:
            for name in ("targets", "label_ids"):
                if name in kept:
                    kept[name] = self._pad(name, turn, kept[name], self._bucket)
        return kept

    def _masks(self, batch: Batch, fields: dict[str, Tensor]) -> dict[str, Tensor]:
        """Masks of the canvases in which objects are copied, and which canvas has which; the renderer reads them."""
        plan = plan_copies(batch["copied"], batch.counts["copied"])
        # Only mosaics have copies, and the canvases of all mosaics have the same size.
        width, height = batch["canvas"][plan.mask_of_B2 >= 0][0].tolist()
        masks = torch.zeros((plan.num_masks, height, width), dtype=torch.uint8, device=self._store.device)
        self._fill(PolygonsToFill(self._store.send(plan.span_K7), plan.span_K7, fields["copy_points"]), masks)
        return {"masks": masks, "mask_of": self._store.send(plan.mask_of_B2)}

    def _objects_to_paste(self, batch: Batch, fields: dict[str, Tensor]) -> ObjectsToPaste:
        # The render is queued already, so the images of the objects may be staged over those that it reads.
        sources = self._store.sources_of(
            batch["pasted"][:, IMAGE_COLUMN], fields["pasted"][:, IMAGE_COLUMN], self._streamed(batch, fields)
        )
        num_B, num_points_B = batch.counts["pasted"], batch.counts["outlines"]
        samples = np.flatnonzero(num_B)
        first_B, first_point_B = np.cumsum(num_B) - num_B, np.cumsum(num_points_B) - num_points_B
        spans_S4 = np.stack((samples, first_B[samples], num_B[samples], first_point_B[samples]), 1).astype(np.int32)
        return ObjectsToPaste(
            sources,
            fields["pasted"],
            fields["outlines"],
            self._store.send(spans_S4),
            batch["pasted"],
            spans_S4,
            fields["flip"],
            self._subsampled,
        )

    def _pad(self, name: str, turn: int, row_TW: Tensor, bucket: int) -> Tensor:
        num_rows = max(1, -(-len(row_TW) // bucket)) * bucket
        # Kept for every size that occurs: a step may still read what a larger one would replace.
        key = (name, turn % 2, num_rows)
        if key not in self._padded:
            self._padded[key] = row_TW.new_empty((num_rows, row_TW.shape[1]))
        padded = self._padded[key].zero_()
        padded[len(row_TW) :, 0] = -1
        padded[: len(row_TW)] = row_TW
        return padded
