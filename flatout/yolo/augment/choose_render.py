"""Which renderer paints on a device: one Triton kernel where there is Triton and a GPU, else plain torch."""

import functools
import logging
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from flatout.engine.launch import HAS_TRITON
from flatout.feed.device_feed import Render
from flatout.yolo.augment.fill_torch import Fills, TorchFill
from flatout.yolo.augment.labels_torch import DeviceLabels, TorchLabels
from flatout.yolo.augment.paste_torch import Pasting, TorchPaste
from flatout.yolo.augment.render_torch import TorchRender

logger = logging.getLogger(__name__)


class Paste(Protocol):
    """Pastes objects over images [B, 3, H, W] in place, on the current stream."""

    def __call__(self, pasting: Pasting, images: Tensor) -> None: ...


class Fill(Protocol):
    """Sets masks uint8 [J, H, W] to 1 inside of polygons, in place, on the current stream."""

    def __call__(self, fills: Fills, masks: Tensor) -> None: ...


class FinishLabels(Protocol):
    """Makes targets float32 [T, 6] of rows int32 [T, 6] (see `open_labels`), in place, on the current stream."""

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
    """A renderer of the parameters of `device_source`; all give the same bits. `subsampled`: kept as in `chroma`."""
    if torch.device(device).type == "cuda":
        if HAS_TRITON:
            from flatout.yolo.augment.render_triton import TritonRender

            return TritonRender(perspective=perspective, recolor=recolor, subsampled=subsampled)
        _say_what_is_missing()
    return TorchRender(mixup=mixup, perspective=perspective, recolor=recolor, subsampled=subsampled)


def paster_for(device: str | torch.device) -> Paste:
    """What pastes the objects of `device_paste` over finished pictures; all give the same bits."""
    if torch.device(device).type == "cuda":
        if HAS_TRITON:
            from flatout.yolo.augment.paste_triton import TritonPaste

            return TritonPaste()
        _say_what_is_missing()
    return TorchPaste()


def filler_for(device: str | torch.device) -> Fill:
    """What fills the polygons of `device_copy`; all give the same bits."""
    if torch.device(device).type == "cuda":
        if HAS_TRITON:
            from flatout.yolo.augment.fill_triton import TritonFill

            return TritonFill()
        _say_what_is_missing()
    return TorchFill()


def label_finisher_for(device: str | torch.device, labels: DeviceLabels, *, perspective: bool) -> FinishLabels:
    """What finishes labels that workers leave open; all give the same bits. The log says which it is."""
    finish: FinishLabels | None = None
    if torch.device(device).type == "cuda":
        if HAS_TRITON:
            from flatout.yolo.augment.labels_triton import TritonLabels

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
