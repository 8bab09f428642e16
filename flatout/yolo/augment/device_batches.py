"""Batches of the detection job, finished on the device: rendered, pasted into, their labels judged, targets filled up.

Dimension key:  N pictures   B samples of a batch   T targets   S samples that are pasted into
"""

import numpy as np
import torch
from torch import Tensor

from flatout.feed.batch import Batch
from flatout.feed.device_feed import DeviceFeed, Output, Render
from flatout.feed.device_store import DeviceStore
from flatout.feed.feed import Feed
from flatout.profiler import clock
from flatout.yolo.augment.choose_render import FinishLabels, filler_for, paster_for
from flatout.yolo.augment.device_copy import plan_copies
from flatout.yolo.augment.device_paste import PICTURE_COLUMN
from flatout.yolo.augment.fill_torch import Fills
from flatout.yolo.augment.paste_torch import Pasting

BATCH_FIELDS: tuple[str, ...] = ("images", "targets", "shapes")


class DeviceInput(DeviceFeed):
    """Batches of the detection job: `images` [B, 3, H, W], `targets` [T, 6], for validation `shapes` [B, 6].

    Borrowed, as all batches of a `DeviceFeed`; counts, indices and positions are on the host. A context manager;
    `close()` ends the workers.

    Where the device finishes labels (`open_labels`), those that are not worth learning become rows of image -1. Only
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
