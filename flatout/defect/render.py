"""Crops and paints a whole batch on the device that holds the images, without a host-device wait.

The k-th defects of all samples are painted in one pass. No two of them touch the same sample, so values saturate after
each defect, in order, as on the CPU. The canvas is the patch with a rim that takes what falls outside of it.

Dimension key:  B samples   C planes   P patch side   K defects per sample at most   Q kernels
                S side of a kernel's square   E pixels of a flat canvas or square   R W rows and columns to gather
"""

import functools
import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from flatout.defect.data.items import MAX_GREY, MID_GREY, PLANES
from flatout.defect.patches import Grid
from flatout.defect.synth.config import SynthConfig
from flatout.defect.synth.draw import DEFECTS, HARD_NEGATIVE, LINES
from flatout.defect.synth.paint import MAX_LINE_AMPLITUDE, MIN_LINE_AMPLITUDE, REF_SCALE, VISIBLE, noise_table
from flatout.defect.synth.pool import Kernels
from flatout.feed import Sources
from flatout.kernels import HAS_TRITON

logger = logging.getLogger(__name__)


class PatchRenderer:
    """Renderer in plain torch for a `DeviceFeed`: `images` [B, 3, P, P] in 0..255 and `masks` uint8 [B, 1, P, P]."""

    def __init__(self, grid: Grid, config: SynthConfig, kernels: Kernels, device: torch.device) -> None:
        self._config = config
        self._height, self._width = grid.shape_hw
        self._patch_hw = grid.patch_hw
        self._reach = kernels.reach
        # Centres are clamped to at most reach + 1 outside of the patch, and a square extends reach farther.
        self._rim = 2 * kernels.reach + 1
        self._value_QSS = torch.from_numpy(kernels.value_QSS).to(device)
        self._label_QSS = torch.from_numpy(kernels.label_QSS).to(device)
        self._noise = torch.from_numpy(noise_table(grid.patch_hw)).to(device) if config.has_disturbances else None
        self._line_scale_C = torch.tensor([1.0, REF_SCALE, REF_SCALE], device=device)
        self._row_P = torch.arange(grid.patch_hw[0], device=device)
        self._column_P = torch.arange(grid.patch_hw[1], device=device)
        side = torch.arange(2 * kernels.reach + 1, device=device) - kernels.reach
        self._square_SS = side[:, None] * self._canvas_width + side
        """Offsets from an anchor to the pixels of its square on the flat canvas."""

    @property
    def _canvas_width(self) -> int:
        return self._patch_hw[1] + 2 * self._rim

    def __call__(self, sources: Sources, params: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        canvas, marks = self._painted(self._background(sources, params), params)
        inner = (..., slice(self._rim, -self._rim), slice(self._rim, -self._rim))
        out["images"].copy_(canvas[inner])
        out["masks"].copy_(marks[inner])

    # The background: crops with disturbances and lines

    def _background(self, sources: Sources, params: Mapping[str, Tensor]) -> Tensor:
        """Crops [B, C, P, P], with disturbances and lines if the recipe has any."""
        patch_BCPP = self._cropped(sources, params)
        return _with_lines(patch_BCPP, params, self._line_scale_C) if self._config.line_ratio else patch_BCPP

    def _cropped(self, sources: Sources, params: Mapping[str, Tensor]) -> Tensor:
        corner_B2 = params["corner"].long()
        begin_B = sources.offsets.reshape(-1)
        plain = self._gathered(sources.data, begin_B, corner_B2)
        if not self._config.has_disturbances:
            return plain
        disturbed = self._disturbed(self._moved(sources.data, begin_B, corner_B2, params["shift"]), params)
        is_hard = (params["kind"] == HARD_NEGATIVE)[:, None, None, None]
        return torch.where(is_hard, plain, disturbed)

    def _gathered(self, data: Tensor, begin_B: Tensor, corner_B2: Tensor) -> Tensor:
        row_BP = corner_B2[:, :1] + self._row_P
        column_BP = corner_B2[:, 1:] + self._column_P
        return self._pixels(data, begin_B, row_BP[:, None], column_BP[:, None])

    def _pixels(self, data: Tensor, begin_B: Tensor, row_BCR: Tensor, column_BCW: Tensor) -> Tensor:
        """Pixels of all planes at rows and columns, which have the shape [B, C or 1, n]."""
        plane_C = torch.arange(PLANES, device=data.device) * (self._height * self._width)
        first_BC = begin_B[:, None] + plane_C
        index = first_BC[:, :, None, None] + row_BCR[..., None] * self._width + column_BCW[:, :, None]
        return data[index]

    def _moved(self, data: Tensor, begin_B: Tensor, corner_B2: Tensor, shift_BC2: Tensor) -> Tensor:
        """Crops of planes shifted by fractional pixels (x, y), interpolated bilinearly; edges are repeated."""
        whole_BC2 = shift_BC2.floor()
        fraction_BC2 = shift_BC2 - whole_BC2
        row_R = torch.arange(self._patch_hw[0] + 1, device=data.device)
        column_W = torch.arange(self._patch_hw[1] + 1, device=data.device)
        row = (corner_B2[:, None, :1] + whole_BC2[:, :, 1:].long() + row_R).clamp(0, self._height - 1)
        column = (corner_B2[:, None, 1:] + whole_BC2[:, :, :1].long() + column_W).clamp(0, self._width - 1)
        window = self._pixels(data, begin_B, row, column)
        fx, fy = (fraction_BC2[:, :, axis, None, None] for axis in (0, 1))
        mixed = window[:, :, :-1] + (window[:, :, 1:] - window[:, :, :-1]) * fy
        return mixed[..., :-1] + (mixed[..., 1:] - mixed[..., :-1]) * fx

    def _disturbed(self, patch_BCPP: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        assert self._noise is not None
        patch_BCPP = patch_BCPP * params["gain"][..., None, None] + params["offset"][..., None, None]
        at_BC2 = params["noise_at"].long()
        noise = self._noise[(at_BC2[..., :1] + self._row_P)[..., None], (at_BC2[..., 1:] + self._column_P)[:, :, None]]
        strength: Tensor | float = self._config.noise
        if self._config.edge_noise:
            strength = self._config.noise + self._config.edge_noise * _steepness(patch_BCPP)
        patch_BCPP = patch_BCPP + noise * strength
        if self._config.steepness != 1:
            patch_BCPP = (patch_BCPP - MID_GREY) * self._config.steepness + MID_GREY
        return patch_BCPP.clamp(0, MAX_GREY)

    # Painting of defects

    def _painted(self, patch_BCPP: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The canvas [B, C, P + 2 rim, P + 2 rim] and its label, bool [B, 1, P + 2 rim, P + 2 rim]."""
        rim = self._rim
        canvas = torch.nn.functional.pad(patch_BCPP, (rim, rim, rim, rim))
        marks = torch.zeros_like(canvas[:, :1], dtype=torch.bool)
        flat_BCE, marks_BE = canvas.flatten(2), marks.flatten(1)
        num_B = params["num"] * (params["kind"] == DEFECTS)
        for k in range(params["kernel"].shape[1]):
            self._paint_kth(flat_BCE, marks_BE, params, k, num_B > k)
        return canvas, marks

    def _paint_kth(
        self, flat_BCE: Tensor, marks_BE: Tensor, params: Mapping[str, Tensor], k: int, is_used_B: Tensor
    ) -> None:
        """Paint the k-th defect of every sample; `is_used_B` says which samples have one."""
        anchor_B = self._anchors(params["center"][:, k])
        pixel_BE = (anchor_B[:, None, None] + self._square_SS).flatten(1)
        number_B = params["kernel"][:, k].long()
        amplitude_BC = params["amplitude"][:, k] * is_used_B[:, None]
        if self._config.sign_from_pixels:
            under_B = flat_BCE[:, 0].gather(1, anchor_B[:, None])
            amplitude_BC = amplitude_BC.abs() * torch.where(under_B > MID_GREY, -1.0, 1.0)
        pixel_BCE = pixel_BE[:, None].expand(-1, PLANES, -1)
        before_BCE = flat_BCE.gather(2, pixel_BCE)
        added_BCE = self._value_QSS[number_B].flatten(1)[:, None] * amplitude_BC[..., None]
        after_BCE = (before_BCE + added_BCE).clamp(0, MAX_GREY)
        flat_BCE.scatter_(2, pixel_BCE, after_BCE)
        if self._config.sign_from_pixels:
            hit_BE = (after_BCE[:, 0] - before_BCE[:, 0]).abs() > VISIBLE
        else:
            hit_BE = self._label_QSS[number_B].flatten(1)
        hit_BE = hit_BE & (params["labelled"][:, k] & is_used_B)[:, None]
        marks_BE.scatter_(1, pixel_BE, marks_BE.gather(1, pixel_BE) | hit_BE)

    def _anchors(self, center_B2: Tensor) -> Tensor:
        """Indices of centres (x, y) on the flat canvas; those too far outside to be visible stay in the rim."""
        height, width = self._patch_hw
        x_B = center_B2[:, 0].long().clamp(-self._reach - 1, width + self._reach)
        y_B = center_B2[:, 1].long().clamp(-self._reach - 1, height + self._reach)
        return (y_B + self._rim) * self._canvas_width + x_B + self._rim


def _with_lines(patch_BCPP: Tensor, params: Mapping[str, Tensor], scale_C: Tensor) -> Tensor:
    """Add lines to the samples that have them; the headroom of each line is that of the patch without lines."""
    is_lined_B = params["kind"] == LINES
    added = torch.zeros_like(patch_BCPP)
    for number in range(params["lines"].shape[1]):
        wanted_B = is_lined_B & (params["num_lines"] > number)
        on_B1PP, amplitude_B = _line(patch_BCPP, params["lines"][:, number])
        added = added + on_B1PP * ((amplitude_B * wanted_B)[:, None] * scale_C)[..., None, None]
    return (patch_BCPP + added).clamp(0, MAX_GREY)


def _line(patch_BCPP: Tensor, numbers_B5: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels of one line per sample, bool [B, 1, P, P], and its amplitude [B]; see `synth.paint.choose_line`."""
    height, width = patch_BCPP.shape[2:]
    flag_B, thick_B, position_B, dark_B, strength_B = numbers_B5.unbind(1)
    horizontal_B = flag_B < 0.5
    side_B = torch.where(horizontal_B, float(height), float(width))
    first_B = (position_B * (side_B - thick_B + 1)).floor()
    row_P = torch.arange(height, device=patch_BCPP.device)
    column_P = torch.arange(width, device=patch_BCPP.device)
    across_BPP = torch.where(horizontal_B[:, None, None], row_P[:, None], column_P[None])
    on_BPP = (across_BPP >= first_B[:, None, None]) & (across_BPP < (first_B + thick_B)[:, None, None])
    on_B1PP = on_BPP[:, None]
    up_B = (MAX_GREY - torch.where(on_B1PP, patch_BCPP, -torch.inf).amax((1, 2, 3))).clamp(max=MAX_LINE_AMPLITUDE)
    down_B = (-torch.where(on_B1PP, patch_BCPP, torch.inf).amin((1, 2, 3))).clamp(min=-MAX_LINE_AMPLITUDE)
    bright_B, allows_dark_B = up_B >= MIN_LINE_AMPLITUDE, down_B <= -MIN_LINE_AMPLITUDE
    is_dark_B = allows_dark_B & (~bright_B | (dark_B < 0.5))
    amplitude_B = torch.where(
        is_dark_B,
        down_B + strength_B * (-MIN_LINE_AMPLITUDE - down_B),
        MIN_LINE_AMPLITUDE + strength_B * (up_B - MIN_LINE_AMPLITUDE),
    ) * (is_dark_B | bright_B)
    return on_B1PP, amplitude_B


def _steepness(patch_BCPP: Tensor) -> Tensor:
    steep = torch.zeros_like(patch_BCPP)
    steep[..., 1:-1] += (patch_BCPP[..., 2:] - patch_BCPP[..., :-2]).abs() / 2
    steep[..., 1:-1, :] += (patch_BCPP[..., 2:, :] - patch_BCPP[..., :-2, :]).abs() / 2
    return steep


# Choice of the renderer: the Triton kernel on a GPU if Triton is installed, else plain torch


def renderer_for(grid: Grid, config: SynthConfig, kernels: Kernels, device: torch.device) -> PatchRenderer:
    """A renderer for the parameters of `source.ParameterSource`; all renderers give the same bits."""
    if device.type == "cuda":
        if HAS_TRITON:
            from flatout.defect.render_triton import TritonRenderer

            return TritonRenderer(grid, config, kernels, device)
        warn_without_triton()
    return PatchRenderer(grid, config, kernels, device)


@functools.cache
def warn_without_triton() -> None:
    """Warn once that there is a GPU but no Triton."""
    logger.warning(
        "Triton is not installed: patches are painted on the GPU by about two hundred torch operations instead of one "
        "kernel, which slows small batches down. Install it with: pip install triton"
    )
