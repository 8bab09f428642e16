"""Judge a network on whole images: heat maps against masks, one image at a time.

Dimension key:  H W image
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.defect.data.find import Judged
from flatout.defect.data.items import TOP, read_canonical, read_mask
from flatout.defect.evaluate.scores import (
    DetectConfig,
    Detection,
    ImageRow,
    Located,
    Outcome,
    PixelCounts,
    detect,
    rank,
    silence_dead_pixels,
    truth_in_name,
)
from flatout.defect.model import GRID
from flatout.defect.patches import Grid
from flatout.errors import DataError
from flatout.feed import DecodeError

FINE = DetectConfig(mask_radius=6, max_per_image=50)
"""For recall of defects that may lie side by side; recall@K has its own, coarser rule."""
MATCH_RADIUS = 3
"""Pixels by which a detection may miss a defect."""


class Seen(NamedTuple):
    """An image after the network; what watchers get."""

    judged: Judged
    planes_CHW: np.ndarray
    heat_HW: np.ndarray
    mask_HW: np.ndarray | None
    detections: list[Detection]


Watcher = Callable[[Seen], None]
MakeMap = Callable[[np.ndarray], np.ndarray]
Read = Callable[[Path], np.ndarray]


def judge(
    make_map: MakeMap,
    images: Iterable[Judged],
    *,
    read: Read = read_canonical,
    use_masks: bool = True,
    dead_xy_K2: np.ndarray | None = None,
    threshold: float | None = None,
    watchers: Iterable[Watcher] = (),
) -> Outcome:
    """Run every image through `make_map` and count. DataError names an image or mask that cannot be used."""
    pixels, tally = PixelCounts(), _Tally()
    began_s = time.monotonic()
    for judged in images:
        planes_CHW, mask_HW = _read(judged, read, use_masks=use_masks)
        heat_HW = make_map(planes_CHW)
        if dead_xy_K2 is not None:
            silence_dead_pixels(heat_HW, dead_xy_K2)
        found = detect(heat_HW, FINE)
        if mask_HW is not None:
            pixels.add(mask_HW, heat_HW)
        tally.add(judged, heat_HW, mask_HW, found)
        for watcher in watchers:
            watcher(Seen(judged, planes_CHW, heat_HW, mask_HW, found))
    known = [row for row in tally.rows if row.is_defective is not None]
    return Outcome(
        pixels=pixels.ranking(),
        images=rank(np.array([row.is_defective for row in known], np.bool_), np.array([row.peak for row in known])),
        rows=tally.rows,
        located=tally.located,
        hits=tally.hits,
        num_judged=len(known),
        seconds=time.monotonic() - began_s,
        chosen_threshold=threshold,
    )


class _Tally:
    """Counts that grow with every image."""

    def __init__(self) -> None:
        self.rows: list[ImageRow] = []
        self.located: list[Located] = []
        self.hits: list[tuple[float, int | None]] = []
        self._num_defects = 0

    def add(self, judged: Judged, heat_HW: np.ndarray, mask_HW: np.ndarray | None, found: list[Detection]) -> None:
        number_HW, num_defects = (np.zeros(heat_HW.shape, np.int64), 0) if mask_HW is None else number_defects(mask_HW)
        on = [defect_at(number_HW, each) for each in found]
        if mask_HW is not None:
            self.hits += [
                (each.score, None if defect is None else self._num_defects + defect)
                for each, defect in zip(found, on, strict=True)
            ]
        self._num_defects += num_defects
        if (truth_xy := truth_in_name(judged.path.stem)) is not None or judged.is_good:
            self.located.append(Located(detect(heat_HW), truth_xy))
        self.rows.append(
            ImageRow(
                name=judged.path.name,
                is_defective=None if mask_HW is None else bool(mask_HW.any()),
                peak=float(heat_HW.max()),
                num_defects=num_defects,
                num_found=len({defect for defect in on if defect is not None}),
                num_detections=len(found),
            )
        )


def number_defects(mask_HW: np.ndarray) -> tuple[np.ndarray, int]:
    """Connected defects of a mask, numbered from 1 on and widened by MATCH_RADIUS, and how many there are."""
    import cv2

    count, number_HW = cv2.connectedComponents(mask_HW.astype(np.uint8), connectivity=8)
    side = 2 * MATCH_RADIUS + 1
    widened = cv2.dilate(number_HW.astype(np.float32), cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (side, side)))
    return np.where(number_HW > 0, number_HW, widened.astype(np.int64)), count - 1


def defect_at(number_HW: np.ndarray, found: Detection) -> int | None:
    """Which defect a detection lies on, from 0; None if on none."""
    number = int(number_HW[found.y, found.x])
    return number - 1 if number else None


def _read(judged: Judged, read: Read, *, use_masks: bool) -> tuple[np.ndarray, np.ndarray | None]:
    try:
        planes_CHW = read(judged.path)
        mask_HW = None
        if judged.is_good:
            mask_HW = np.zeros(planes_CHW.shape[1:], np.bool_)
        elif judged.mask is not None and use_masks:
            mask_HW = read_mask(judged.mask)
    except (OSError, DecodeError) as error:
        raise DataError(str(error)) from None
    if mask_HW is not None and mask_HW.shape != planes_CHW.shape[1:]:
        raise DataError(
            f"{judged.mask}: it measures {' x '.join(map(str, mask_HW.shape))}, its image "
            f"{' x '.join(map(str, planes_CHW.shape[1:]))}."
        )
    return planes_CHW, mask_HW


# A whole image through the network: its patches as one batch, stitched so that every pixel has one owner.
#
# Dimension key:  C planes   H W image   T tiles   P patch side

TILES_AT_ONCE = 64
"""More at a time gain nothing, and a large image would not fit."""


class HeatMapper:
    """Probability of a defect at every pixel of images of one size."""

    def __init__(
        self,
        network: nn.Module,
        grid: Grid,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        untiled: bool = False,
    ) -> None:
        """`network` in evaluation mode on `device`; `dtype` it computes in. `untiled`: one pass over the image."""
        self._network, self._device, self._dtype, self._untiled = network, device, dtype, untiled
        self._shape_hw = grid.shape_hw
        row_TP = (torch.tensor(grid.ys)[:, None] + torch.arange(grid.patch_hw[0])).to(device)
        column_TP = (torch.tensor(grid.xs)[:, None] + torch.arange(grid.patch_hw[1])).to(device)
        place = row_TP[:, None, :, None] * grid.shape_hw[1] + column_TP[None, :, None, :]
        self._tile_pixels_TPP = place.reshape(grid.per_image, *grid.patch_hw)
        self._owner_HW = torch.from_numpy(grid.owners()).to(device)

    @torch.inference_mode()
    def __call__(self, planes_CHW: np.ndarray) -> np.ndarray:
        """float32 [H, W] of an image in 0..255; waits for the device."""
        image_CHW = torch.from_numpy(np.array(planes_CHW, np.float32)).to(self._device) / TOP
        probability_HW = self._whole(image_CHW) if self._untiled else self._stitched(image_CHW)
        return np.asarray(probability_HW.cpu().numpy())

    def _stitched(self, image_CHW: Tensor) -> Tensor:
        tiles = image_CHW.flatten(1)[:, self._tile_pixels_TPP].transpose(0, 1)
        parts = [self._probability(part) for part in tiles.split(TILES_AT_ONCE)]
        return torch.cat(parts).reshape(-1)[self._owner_HW]

    def _whole(self, image_CHW: Tensor) -> Tensor:
        height, width = self._shape_hw
        padding = (0, -width % GRID, 0, -height % GRID)
        padded = F.pad(image_CHW[None], padding, mode="replicate")
        return self._probability(padded)[0, :height, :width]

    def _probability(self, x: Tensor) -> Tensor:
        """[B, H, W], float32."""
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            logits = self._network(x.contiguous(memory_format=torch.channels_last))
        return torch.softmax(logits.float(), 1)[:, 1]
