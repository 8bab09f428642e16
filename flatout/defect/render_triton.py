"""The renderer as one Triton kernel that crops and paints a batch of patches.

It gives the same bits as render.py, whose roughly two hundred small operations keep the host busy for longer than a GPU
needs for a whole training step (bench/defect_step.py). Lines and disturbances, if the recipe has any, are still
computed by torch beforehand.

A program of the kernel crops a block of pixels of one sample and paints all its defects. A pixel stays in a register
from the crop to the last defect, so values saturate after each defect, in order, and only finished patches and masks
are written.

Dimension key:  B samples   C planes   P patch side   Q kernels   BY BX rows and columns of a block
                K defects per sample at most   KP the next power of two   S side of a kernel's square
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.defect.data.items import MID_GREY, PLANES
from flatout.defect.patches import Grid
from flatout.defect.render import PatchRenderer
from flatout.defect.synth.config import SynthConfig
from flatout.defect.synth.draw import DEFECTS
from flatout.defect.synth.paint import VISIBLE
from flatout.defect.synth.pool import Kernels
from flatout.feed import Sources
from flatout.kernels import is_aligned, launch

BLACK, WHITE = tl.constexpr(0.0), tl.constexpr(255.0)


@triton.jit
def add_saturated(pixel, value, amplitude, on):
    """`pixel` after painting a defect; unchanged bits where `on` is false."""
    return tl.where(on, tl.minimum(tl.maximum(pixel + value * amplitude, BLACK), WHITE), pixel)


@triton.jit
def crop_and_paint(
    data, begins, corners, kinds, numbers, centers, kernels, amplitudes, labelled, value_table, label_table,
    images, masks, image_width, plane_size, stride_sample, stride_plane, stride_row, stride_column,
    height, width, across, painted_kind, visible, middle,
    K: tl.constexpr, KP: tl.constexpr, S: tl.constexpr, FULL_SWING: tl.constexpr, BY: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """Write images [B, 3, height, width] with the given strides, and masks uint8 [B, 1, height, width], contiguous.
    Programs are numbered (block of pixels, sample)."""
    block, sample = tl.program_id(0), tl.program_id(1)
    y = (block // across) * BY + tl.arange(0, BY)[:, None]
    x = (block % across) * BX + tl.arange(0, BX)[None, :]
    inside = (y < height) & (x < width)
    top, left = tl.load(corners + 2 * sample), tl.load(corners + 2 * sample + 1)
    source = data + tl.load(begins + sample) + top * image_width + left
    pixel = source + y * image_width + x
    target = tl.load(pixel, mask=inside, other=0.0)
    ref1 = tl.load(pixel + plane_size, mask=inside, other=0.0)
    ref2 = tl.load(pixel + 2 * plane_size, mask=inside, other=0.0)
    marks = target < -1.0  # nowhere
    num = tl.where(tl.load(kinds + sample) == painted_kind, tl.load(numbers + sample), 0)
    if FULL_SWING:
        # The pixels under the centres of this sample's defects, which every program paints for itself.
        place = tl.arange(0, KP)
        of_place = centers + 2 * (sample * K + place)
        place_x = tl.load(of_place, mask=place < num, other=-1)
        place_y = tl.load(of_place + 1, mask=place < num, other=-1)
        is_seen = (place_x >= 0) & (place_x < width) & (place_y >= 0) & (place_y < height)
        under = tl.load(source + place_y * image_width + place_x, mask=is_seen, other=0.0)
    for k in range(num):
        row = sample * K + k
        # The first pixel of the kernel's square.
        first_x, first_y = tl.load(centers + 2 * row) - S // 2, tl.load(centers + 2 * row + 1) - S // 2
        table = tl.load(kernels + row) * S * S
        to_target, to_ref1 = tl.load(amplitudes + 3 * row), tl.load(amplitudes + 3 * row + 1)
        to_ref2 = tl.load(amplitudes + 3 * row + 2)
        dx, dy = x - first_x, y - first_y
        on = (dx >= 0) & (dx < S) & (dy >= 0) & (dy < S) & inside
        value = tl.load(value_table + table + dy * S + dx, mask=on, other=0.0)
        before = target
        if FULL_SWING:
            sign = tl.where(tl.sum(tl.where(place == k, under, 0.0)) > middle, -1.0, 1.0)
            to_target, to_ref1, to_ref2 = tl.abs(to_target) * sign, tl.abs(to_ref1) * sign, tl.abs(to_ref2) * sign
            place_dx, place_dy = place_x - first_x, place_y - first_y
            place_on = (place_dx >= 0) & (place_dx < S) & (place_dy >= 0) & (place_dy < S)
            place_value = tl.load(value_table + table + place_dy * S + place_dx, mask=place_on, other=0.0)
            under = add_saturated(under, place_value, to_target, place_on)
        target = add_saturated(target, value, to_target, on)
        ref1 = add_saturated(ref1, value, to_ref1, on)
        ref2 = add_saturated(ref2, value, to_ref2, on)
        if FULL_SWING:
            hit = tl.abs(target - before) > visible
        else:
            hit = tl.load(label_table + table + dy * S + dx, mask=on, other=0) != 0
        marks = marks | (hit & (tl.load(labelled + row) != 0))
    out = images + sample * stride_sample + y * stride_row + x * stride_column
    tl.store(out, target.to(images.dtype.element_ty), mask=inside)
    tl.store(out + stride_plane, ref1.to(images.dtype.element_ty), mask=inside)
    tl.store(out + 2 * stride_plane, ref2.to(images.dtype.element_ty), mask=inside)
    tl.store(masks + (sample * height + y) * width + x, marks.to(tl.uint8), mask=inside)


BLOCK_ROWS, BLOCK_COLUMNS = 8, 64
NUM_WARPS = 4


class Crops(NamedTuple):
    """What to crop: images or finished patches in one buffer, plane after plane, and a corner per sample."""

    data: Tensor
    begin_B: Tensor
    corner_B2: Tensor
    width: int
    plane_size: int


class TritonRenderer(PatchRenderer):
    """A `PatchRenderer` that crops and paints with one kernel launch."""

    def __init__(self, grid: Grid, config: SynthConfig, kernels: Kernels, device: torch.device) -> None:
        super().__init__(grid, config, kernels, device)
        self._side = 2 * kernels.reach + 1
        self._zeros = torch.zeros(0, 2, dtype=torch.int32, device=device)

    def __call__(self, sources: Sources, params: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        crops = self._crops(sources, params)
        images, masks = out["images"], out["masks"]
        num, _, height, width = images.shape
        places = params["kernel"].shape[1]
        across, down = -(-width // BLOCK_COLUMNS), -(-height // BLOCK_ROWS)
        self._launch(
            (across * down, num, 1),
            crops.data,
            crops.begin_B,
            crops.corner_B2,
            params["kind"],
            params["num"],
            params["center"],
            params["kernel"],
            params["amplitude"],
            params["labelled"].view(torch.uint8),
            self._value_QSS,
            self._label_QSS.view(torch.uint8),
            images,
            masks,
            crops.width,
            crops.plane_size,
            *images.stride(),
            height,
            width,
            across,
            DEFECTS,
            VISIBLE,
            MID_GREY,
            places,
            1 << (places - 1).bit_length(),
            self._side,
            self._config.sign_from_pixels,
            BLOCK_ROWS,
            BLOCK_COLUMNS,
        )

    def _launch(self, grid: tuple[int, int, int], *args: Any) -> None:
        key = tuple((each.dtype, is_aligned(each)) if isinstance(each, Tensor) else each for each in args)
        # No fused multiply-add: products are rounded before they are added, as on the CPU.
        launch(crop_and_paint, key, grid, *args, num_warps=NUM_WARPS, enable_fp_fusion=False)

    def _crops(self, sources: Sources, params: Mapping[str, Tensor]) -> Crops:
        if not self._config.has_disturbances and not self._config.line_ratio:
            begin_B = sources.offsets.reshape(-1)
            return Crops(sources.data, begin_B, params["corner"], self._width, self._height * self._width)
        patch_BCPP = self._background(sources, params)
        height, width = self._patch_hw
        begin_B = torch.arange(len(patch_BCPP), device=patch_BCPP.device) * (PLANES * height * width)
        if len(self._zeros) < len(patch_BCPP):
            self._zeros = params["corner"].new_zeros(len(patch_BCPP), 2)
        return Crops(patch_BCPP.contiguous(), begin_B, self._zeros, width, height * width)
