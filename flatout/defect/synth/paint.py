"""Paints defects and lines into patches, and crops patches with disturbed planes.

The order of overlapping defects matters, because values saturate at 255: 240 + 80 - 60 is 195, but 240 - 60 + 80 is
255. A kernel is never rescaled at an edge.

    paint            one patch, defect after defect
    paint_isolated   all defects of many patches that touch no other defect, at once; their order does not matter

Dimension key:  M patches   C planes   H W patch, or image where a patch is P P   h w window   K defects per sample
                Q kernels   S side of a kernel's square   N defects painted at once
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from flatout.defect.data.items import MAX_GREY, MID_GREY
from flatout.defect.synth.config import SynthConfig
from flatout.defect.synth.draw import NOISE_POSITIONS
from flatout.defect.synth.pool import Kernels
from flatout.feed import keyed_uniform

# Defects

VISIBLE = 100.0
"""Change of a pixel of target, in grey levels, from which on a full-swing defect is labelled there."""
MAX_BATCHED_PX = 81
"""Pixels of a kernel's square up to which painting many defects at once is faster."""


def paint_isolated(
    patches_MCHW: np.ndarray, masks_MHW: np.ndarray, draws: Mapping[str, np.ndarray], kernels: Kernels
) -> np.ndarray:
    """Paint the defects of `draws` that touch no other defect of their patch, all at once and in place.

    The result is the same as that of `paint`. Both arrays must be contiguous. Returns the defects that are left to
    paint, bool [M, K].
    """
    num_planes, height, width = patches_MCHW.shape[1:]
    center_MK2, reach = draws["center"], kernels.reach
    used_MK = np.arange(center_MK2.shape[1]) < draws["num"][:, None]
    isolated_MK = used_MK & _is_isolated(center_MK2, used_MK, reach) & _is_inside(center_MK2, reach, (height, width))
    sample_N, defect_N = np.nonzero(isolated_MK)
    kernel_N = draws["kernel"][sample_N, defect_N]
    x_N, y_N = center_MK2[sample_N, defect_N].T.astype(np.int64) - reach
    offset_SS = np.arange(2 * reach + 1)[:, None] * width + np.arange(2 * reach + 1)
    pixel_NSS = (sample_N * height + y_N)[:, None, None] * width + x_N[:, None, None] + offset_SS
    # Offset from mask to patch indices: a patch has `num_planes` times as many values as its mask.
    first_N = (num_planes - 1) * height * width * sample_N
    plane_C = height * width * np.arange(num_planes)
    value_NCSS = (pixel_NSS + first_N[:, None, None])[:, None] + plane_C[:, None, None]
    patches = patches_MCHW.reshape(-1)
    amplitude_NC = draws["amplitude"][sample_N, defect_N]
    painted = patches[value_NCSS] + kernels.value_QSS[kernel_N][:, None] * amplitude_NC[:, :, None, None]
    patches[value_NCSS] = np.clip(painted, 0, MAX_GREY, out=painted)
    marked_NSS = kernels.label_QSS[kernel_N] & draws["labelled"][sample_N, defect_N][:, None, None]
    masks_MHW.reshape(-1)[pixel_NSS[marked_NSS]] = True
    return np.asarray(used_MK & ~isolated_MK)


def _is_isolated(center_MK2: np.ndarray, used_MK: np.ndarray, reach: int) -> np.ndarray:
    """Whether the square of a defect touches no other one, bool [M, K]."""
    near_MKK2 = np.abs(center_MK2[:, :, None] - center_MK2[:, None]) <= 2 * reach
    touch_MKK = near_MKK2[..., 0] & near_MKK2[..., 1] & used_MK[:, None]
    return np.asarray(touch_MKK.sum(2) == 1)  # itself


def _is_inside(center_MK2: np.ndarray, reach: int, shape_hw: tuple[int, int]) -> np.ndarray:
    """Whether the square of a defect lies inside the patch, bool [M, K]."""
    low_MK = (center_MK2 >= reach).all(2)
    return np.asarray(low_MK & (center_MK2 < np.array([shape_hw[1], shape_hw[0]]) - reach).all(2))


def paint(
    patch_CHW: np.ndarray, mask_HW: np.ndarray, sample: Mapping[str, np.ndarray], kernels: Kernels, *, full_swing: bool
) -> None:
    """Paint the first `num` defects of `sample` (see `draw_samples`) in order and in place, and mark the labelled ones.

    The patch is float32 in 0..255. With `full_swing`, a defect gets the sign that is visible on the pixel under its
    centre, and the label is where it visibly changes target.
    """
    num = int(sample["num"])
    number_K, amplitude_KC = sample["kernel"][:num], sample["amplitude"][:num]
    if full_swing:
        amplitude_KC = np.abs(amplitude_KC)
    added_KCSS = kernels.value_QSS[number_K][:, None] * amplitude_KC[:, :, None, None]
    # As Python numbers: accessing single array elements costs more than painting.
    facts = zip(
        sample["center"][:num].tolist(), number_K.tolist(), sample["labelled"][:num].tolist(),
        (amplitude_KC[:, 0] > 0).tolist(), strict=True,
    )  # fmt: skip
    for added_CSS, ((x, y), number, labelled, rises) in zip(added_KCSS, facts, strict=True):
        clipped = _clip_window(x, y, kernels.reach, mask_HW.shape)
        if clipped is None:
            continue
        window_Chw, part = patch_CHW[:, clipped.rows, clipped.columns], clipped.part
        before_hw = window_Chw[0].copy() if full_swing else None
        if full_swing and patch_CHW[0, y, x] > MID_GREY:
            added_CSS, rises = -added_CSS, False
        np.add(window_Chw, added_CSS if part is None else added_CSS[:, *part], out=window_Chw)
        # All planes change in the same direction, so one bound is enough; np.clip takes three times as long here.
        if rises:
            np.minimum(window_Chw, MAX_GREY, out=window_Chw)
        else:
            np.maximum(window_Chw, 0, out=window_Chw)
        if labelled:
            marks_hw = mask_HW[clipped.rows, clipped.columns]
            label_SS = kernels.label_QSS[number]
            changed_hw = label_SS if part is None else label_SS[part]
            if before_hw is not None:
                changed_hw = np.abs(window_Chw[0] - before_hw) > VISIBLE
            np.logical_or(marks_hw, changed_hw, out=marks_hw)


class ClippedWindow(NamedTuple):
    """The part of a kernel's square that lies inside the patch."""

    rows: slice
    columns: slice
    part: tuple[slice, slice] | None
    """Rows and columns of the square; None: all of it, which is nearly always the case."""


def _clip_window(x: int, y: int, reach: int, shape_hw: tuple[int, ...]) -> ClippedWindow | None:
    top, bottom, left, right = y - reach, y + reach + 1, x - reach, x + reach + 1
    height, width = shape_hw
    if top >= 0 and left >= 0 and bottom <= height and right <= width:
        return ClippedWindow(slice(top, bottom), slice(left, right), None)
    rows, columns = slice(max(top, 0), min(bottom, height)), slice(max(left, 0), min(right, width))
    if rows.stop <= rows.start or columns.stop <= columns.start:
        return None
    part = slice(rows.start - top, rows.stop - top), slice(columns.start - left, columns.stop - left)
    return ClippedWindow(rows, columns, part)


# Lines that are brighter or darker in target than in the references, which a network must learn not to report

MIN_LINE_AMPLITUDE, MAX_LINE_AMPLITUDE = 30.0, 50.0
"""In grey levels."""
REF_SCALE = 0.6
"""Amplitude in the references, as a share of that in target."""


class Headroom(NamedTuple):
    """How much brighter (`up`) and darker (`down`, negative) a line can be before any of its pixels saturates."""

    up: float
    down: float

    @property
    def allows_bright(self) -> bool:
        return self.up >= MIN_LINE_AMPLITUDE

    @property
    def allows_dark(self) -> bool:
        return self.down <= -MIN_LINE_AMPLITUDE


class PatchLine(NamedTuple):
    """A horizontal or vertical line across the whole patch, a disturbance that is no defect."""

    horizontal: bool
    position: int
    width: int
    amplitude: float

    def area(self) -> tuple[slice, slice, slice]:
        along, across = slice(None), slice(self.position, self.position + self.width)
        return (along, across, along) if self.horizontal else (along, along, across)


def headroom_of(area: np.ndarray) -> Headroom:
    """The headroom of the pixels of all three planes under a line, limited to MAX_LINE_AMPLITUDE."""
    return Headroom(min(MAX_GREY - float(area.max()), MAX_LINE_AMPLITUDE), max(-float(area.min()), -MAX_LINE_AMPLITUDE))


def add_line(patch_CHW: np.ndarray, line: PatchLine, ref_scale: float = REF_SCALE) -> None:
    """Add the amplitude to target and `ref_scale` of it to the references, in place; values are not clipped."""
    patch_CHW[line.area()] += np.array([line.amplitude, *[line.amplitude * ref_scale] * 2], np.float32)[:, None, None]


def paint_lines(patch_CHW: np.ndarray, sample: Mapping[str, np.ndarray]) -> None:
    """Paint the lines of a sample (see `draw_samples`) in place; a line without headroom is left out."""
    lines = [choose_line(patch_CHW, numbers_5) for numbers_5 in sample["lines"][: int(sample["num_lines"])]]
    for line in lines:
        if line is not None:
            add_line(patch_CHW, line)
    np.clip(patch_CHW, 0, MAX_GREY, out=patch_CHW)


def choose_line(patch_CHW: np.ndarray, numbers_5: np.ndarray) -> PatchLine | None:
    """A line from uniform numbers and the headroom of the pixels under it; None without headroom."""
    horizontal, width = bool(numbers_5[0] < 0.5), int(numbers_5[1])
    side = patch_CHW.shape[1 if horizontal else 2]
    line = PatchLine(horizontal, int(numbers_5[2] * (side - width + 1)), width, 0.0)
    headroom = headroom_of(patch_CHW[line.area()])
    dark = headroom.allows_dark and (not headroom.allows_bright or numbers_5[3] < 0.5)
    if not dark and not headroom.allows_bright:
        return None
    strength = float(numbers_5[4])
    amplitude = (
        headroom.down + strength * (-MIN_LINE_AMPLITUDE - headroom.down)
        if dark
        else MIN_LINE_AMPLITUDE + strength * (headroom.up - MIN_LINE_AMPLITUDE)
    )
    return line._replace(amplitude=amplitude)


# Crops, unchanged or disturbed: planes shifted against each other, rescaled, noisy, ragged at edges


def crop(planes_CHW: np.ndarray, corner_yx: tuple[int, int], out_CPP: np.ndarray) -> None:
    """Copy a patch, so that images in a store are never painted on."""
    y, x = corner_yx
    height, width = out_CPP.shape[1:]
    np.copyto(out_CPP, planes_CHW[:, y : y + height, x : x + width])


def noise_table(patch_hw: tuple[int, int]) -> np.ndarray:
    """Standard normal numbers, float32 [NOISE_POSITIONS + P, NOISE_POSITIONS + P], the same in every run."""
    height, width = (NOISE_POSITIONS + side for side in patch_hw)
    uniform = keyed_uniform(0, 0, np.arange(height), 2 * width)
    radius, angle = np.sqrt(-2 * np.log1p(-uniform[:, :width])), 2 * np.pi * uniform[:, width:]
    return np.asarray(radius * np.cos(angle), np.float32)


def crop_disturbed(
    planes_CHW: np.ndarray,
    corner_yx: tuple[int, int],
    sample: Mapping[str, np.ndarray],
    config: SynthConfig,
    table: np.ndarray,
    out_CPP: np.ndarray,
) -> None:
    """As `crop`, with the disturbances of `sample` (see `draw_samples`); `table` is the noise table."""
    height, width = out_CPP.shape[1:]
    for plane in range(len(out_CPP)):
        patch_PP = moved_crop(planes_CHW[plane], corner_yx, sample["shift"][plane], (height, width))
        patch_PP = patch_PP * sample["gain"][plane] + sample["offset"][plane]
        y, x = sample["noise_at"][plane]
        strength: np.ndarray | float = config.noise
        if config.edge_noise:
            strength = config.noise + config.edge_noise * steepness(patch_PP)
        patch_PP = patch_PP + table[y : y + height, x : x + width] * strength
        if config.steepness != 1:
            patch_PP = (patch_PP - MID_GREY) * config.steepness + MID_GREY
        np.clip(patch_PP, 0, MAX_GREY, out=out_CPP[plane])


def moved_crop(
    plane_HW: np.ndarray, corner_yx: tuple[int, int], shift_xy: np.ndarray, patch_hw: tuple[int, int]
) -> np.ndarray:
    """A patch of a plane shifted by fractional pixels, float32 [P, P]; the edge of the plane is repeated."""
    whole_xy = np.floor(shift_xy)
    fx, fy = (shift_xy - whole_xy).astype(np.float32)
    rows, columns = (
        np.clip(corner + int(whole) + np.arange(side + 1), 0, length - 1)
        for corner, whole, side, length in zip(corner_yx, whole_xy[::-1], patch_hw, plane_HW.shape, strict=True)
    )
    window = plane_HW[rows[:, None], columns]
    mixed = window[:-1] + (window[1:] - window[:-1]) * fy
    return np.asarray(mixed[:, :-1] + (mixed[:, 1:] - mixed[:, :-1]) * fx)


def steepness(patch_PP: np.ndarray) -> np.ndarray:
    """Half the difference between the neighbours of each pixel, summed over x and y; float32 [P, P]."""
    steep = np.zeros_like(patch_PP)
    steep[:, 1:-1] += np.abs(patch_PP[:, 2:] - patch_PP[:, :-2]) / 2
    steep[1:-1] += np.abs(patch_PP[2:] - patch_PP[:-2]) / 2
    return steep
