"""Paint drawn defects and lines into patches, and disturb their planes.

Order matters where defects overlap: 240 + 80 - 60 is 195, 240 - 60 + 80 is 255. A kernel is never rescaled at an edge.

    paint         one patch, defect after defect
    paint_apart   all defects of many patches at once that touch no other one; for them order does not matter

Dimension key:  M patches   C planes   H W patch   h w window   K defects   S side of a square   N painted at once
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from flatout.defect.data.items import MIDDLE, TOP
from flatout.defect.synth.config import SynthConfig
from flatout.defect.synth.draw import NOISE_ROOM
from flatout.defect.synth.pool import Kernels
from flatout.feed import keyed_uniform

VISIBLE = 100.0
"""Grey levels that a full-swing defect must change a pixel of target by to be labelled there."""


MOST_AT_ONCE_PX = 81
"""Pixels of a kernel's square up to which painting many at once is worth its overhead."""


def paint_apart(
    patches_MCHW: np.ndarray, masks_MHW: np.ndarray, draws: Mapping[str, np.ndarray], kernels: Kernels
) -> np.ndarray:
    """Paint those defects of `draws` that lie apart from the others of their patch, all in one go; the result is what
    `paint` gives. Returns which are left, bool [M, K]. Both arrays must be without gaps."""
    num_planes, height, width = patches_MCHW.shape[1:]
    center_MK2, reach = draws["center"], kernels.reach
    used_MK = np.arange(center_MK2.shape[1]) < draws["num"][:, None]
    apart_MK = used_MK & _apart(center_MK2, used_MK, reach) & _whole(center_MK2, reach, (height, width))
    sample_N, place_N = np.nonzero(apart_MK)
    kernel_N = draws["kernel"][sample_N, place_N]
    x_N, y_N = center_MK2[sample_N, place_N].T.astype(np.int64) - reach
    offset_SS = np.arange(2 * reach + 1)[:, None] * width + np.arange(2 * reach + 1)
    pixel_NSS = (sample_N * height + y_N)[:, None, None] * width + x_N[:, None, None] + offset_SS
    # Of the first plane; a patch has `num_planes` times as many values as its mask.
    first_N = (num_planes - 1) * height * width * sample_N
    plane_C = height * width * np.arange(num_planes)
    value_NCSS = (pixel_NSS + first_N[:, None, None])[:, None] + plane_C[:, None, None]
    patches = patches_MCHW.reshape(-1)
    amplitude_NC = draws["amplitude"][sample_N, place_N]
    painted = patches[value_NCSS] + kernels.value_QSS[kernel_N][:, None] * amplitude_NC[:, :, None, None]
    patches[value_NCSS] = np.clip(painted, 0, TOP, out=painted)
    marked_NSS = kernels.label_QSS[kernel_N] & draws["labelled"][sample_N, place_N][:, None, None]
    masks_MHW.reshape(-1)[pixel_NSS[marked_NSS]] = True
    return np.asarray(used_MK & ~apart_MK)


def _apart(center_MK2: np.ndarray, used_MK: np.ndarray, reach: int) -> np.ndarray:
    """Whether a defect's square touches no other one's, bool [M, K]."""
    near_MKK2 = np.abs(center_MK2[:, :, None] - center_MK2[:, None]) <= 2 * reach
    touch_MKK = near_MKK2[..., 0] & near_MKK2[..., 1] & used_MK[:, None]
    return np.asarray(touch_MKK.sum(2) == 1)  # itself


def _whole(center_MK2: np.ndarray, reach: int, shape_hw: tuple[int, int]) -> np.ndarray:
    """Whether a defect's square lies in the patch, bool [M, K]."""
    low_MK = (center_MK2 >= reach).all(2)
    return np.asarray(low_MK & (center_MK2 < np.array([shape_hw[1], shape_hw[0]]) - reach).all(2))


def paint(
    patch_CHW: np.ndarray, mask_HW: np.ndarray, sample: Mapping[str, np.ndarray], kernels: Kernels, *, full_swing: bool
) -> None:
    """Paint the first `num` defects of `sample` (see `draw`) in place, in order, and mark the labelled ones.

    float32, 0..255. With `full_swing`, a defect gets the sign that is visible on what lies under its centre, and the
    label is what it really changes in target.
    """
    num = int(sample["num"])
    number_K, amplitude_KC = sample["kernel"][:num], sample["amplitude"][:num]
    if full_swing:
        amplitude_KC = np.abs(amplitude_KC)
    added_KCSS = kernels.value_QSS[number_K][:, None] * amplitude_KC[:, :, None, None]
    # As Python's own numbers: looking single values up in arrays costs more than painting them.
    facts = zip(
        sample["center"][:num].tolist(), number_K.tolist(), sample["labelled"][:num].tolist(),
        (amplitude_KC[:, 0] > 0).tolist(), strict=True,
    )  # fmt: skip
    for added_CSS, ((x, y), number, labelled, rises) in zip(added_KCSS, facts, strict=True):
        inside = _inside(x, y, kernels.reach, mask_HW.shape)
        if inside is None:
            continue
        window_Chw, part = patch_CHW[:, inside.rows, inside.columns], inside.part
        before_hw = window_Chw[0].copy() if full_swing else None
        if full_swing and patch_CHW[0, y, x] > MIDDLE:
            added_CSS, rises = -added_CSS, False
        np.add(window_Chw, added_CSS if part is None else added_CSS[:, *part], out=window_Chw)
        # All planes go the same way, so one end is enough; and np.clip takes three times as long for so few pixels.
        if rises:
            np.minimum(window_Chw, TOP, out=window_Chw)
        else:
            np.maximum(window_Chw, 0, out=window_Chw)
        if labelled:
            marks_hw = mask_HW[inside.rows, inside.columns]
            label_SS = kernels.label_QSS[number]
            changed_hw = label_SS if part is None else label_SS[part]
            if before_hw is not None:
                changed_hw = np.abs(window_Chw[0] - before_hw) > VISIBLE
            np.logical_or(marks_hw, changed_hw, out=marks_hw)


class Inside(NamedTuple):
    """What of a kernel's square lies in the patch."""

    rows: slice
    columns: slice
    part: tuple[slice, slice] | None
    """Of the square; None: all of it, as nearly always."""


def _inside(x: int, y: int, reach: int, shape_hw: tuple[int, ...]) -> Inside | None:
    top, bottom, left, right = y - reach, y + reach + 1, x - reach, x + reach + 1
    height, width = shape_hw
    if top >= 0 and left >= 0 and bottom <= height and right <= width:
        return Inside(slice(top, bottom), slice(left, right), None)
    rows, columns = slice(max(top, 0), min(bottom, height)), slice(max(left, 0), min(right, width))
    if rows.stop <= rows.start or columns.stop <= columns.start:
        return None
    part = slice(rows.start - top, rows.stop - top), slice(columns.start - left, columns.stop - left)
    return Inside(rows, columns, part)


# Lines that are brighter or darker in target than in the references: what a network must learn not to report.
#
# Dimension key:  C planes   H W patch   L lines

LEAST, MOST = 30.0, 50.0
"""Amplitudes of lines, in grey levels."""
REF_SCALE = 0.6
"""What the references get of it."""


class Room(NamedTuple):
    """How far a line may go up and down before it saturates anywhere."""

    up: float
    down: float

    @property
    def allows_bright(self) -> bool:
        return self.up >= LEAST

    @property
    def allows_dark(self) -> bool:
        return self.down <= -LEAST


class Line(NamedTuple):
    """A line across the whole patch."""

    horizontal: bool
    place: int
    width: int
    amplitude: float

    def area(self) -> tuple[slice, slice, slice]:
        along, across = slice(None), slice(self.place, self.place + self.width)
        return (along, across, along) if self.horizontal else (along, along, across)


def room_of(area: np.ndarray) -> Room:
    """From the pixels of all three planes under a line."""
    return Room(min(TOP - float(area.max()), MOST), max(-float(area.min()), -MOST))


def add_line(patch_CHW: np.ndarray, line: Line, ref_scale: float = REF_SCALE) -> None:
    """Target gets the amplitude, the references a share of it; not clipped."""
    patch_CHW[line.area()] += np.array([line.amplitude, *[line.amplitude * ref_scale] * 2], np.float32)[:, None, None]


def paint_lines(patch_CHW: np.ndarray, sample: Mapping[str, np.ndarray]) -> None:
    """The lines of a sample (see `draw`), in place; one that has no room is left out."""
    lines = [choose_line(patch_CHW, numbers_5) for numbers_5 in sample["lines"][: int(sample["num_lines"])]]
    for line in lines:
        if line is not None:
            add_line(patch_CHW, line)
    np.clip(patch_CHW, 0, TOP, out=patch_CHW)


def choose_line(patch_CHW: np.ndarray, numbers_5: np.ndarray) -> Line | None:
    """A line from uniform numbers and the room that the pixels under it leave; None if there is none."""
    horizontal, width = bool(numbers_5[0] < 0.5), int(numbers_5[1])
    side = patch_CHW.shape[1 if horizontal else 2]
    line = Line(horizontal, int(numbers_5[2] * (side - width + 1)), width, 0.0)
    room = room_of(patch_CHW[line.area()])
    dark = room.allows_dark and (not room.allows_bright or numbers_5[3] < 0.5)
    if not dark and not room.allows_bright:
        return None
    strength = float(numbers_5[4])
    amplitude = room.down + strength * (-LEAST - room.down) if dark else LEAST + strength * (room.up - LEAST)
    return line._replace(amplitude=amplitude)


# A crop, as it is or disturbed: planes moved against each other, of other contrast, noisy, ragged at edges.
#
# Dimension key:  C planes   H W image   P patch side


def crop(planes_CHW: np.ndarray, corner_yx: tuple[int, int], out_CPP: np.ndarray) -> None:
    """Copy a patch; what is kept in a store must never be painted on."""
    y, x = corner_yx
    height, width = out_CPP.shape[1:]
    np.copyto(out_CPP, planes_CHW[:, y : y + height, x : x + width])


def noise_table(patch_hw: tuple[int, int]) -> np.ndarray:
    """Standard normal numbers float32 [room + P, room + P]; the same in every run: samples choose where they begin."""
    height, width = (NOISE_ROOM + side for side in patch_hw)
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
    """As `crop`, with the disturbances of `sample` (see `draw`)."""
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
            patch_PP = (patch_PP - MIDDLE) * config.steepness + MIDDLE
        np.clip(patch_PP, 0, TOP, out=out_CPP[plane])


def moved_crop(
    plane_HW: np.ndarray, corner_yx: tuple[int, int], shift_xy: np.ndarray, patch_hw: tuple[int, int]
) -> np.ndarray:
    """A patch of a plane that is moved by a fraction of a pixel, float32 [P, P]; outside, its edge repeats."""
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
    """Half the difference between the neighbours of each pixel, in x plus in y; float32 [P, P]."""
    steep = np.zeros_like(patch_PP)
    steep[:, 1:-1] += np.abs(patch_PP[:, 2:] - patch_PP[:, :-2]) / 2
    steep[1:-1] += np.abs(patch_PP[2:] - patch_PP[:-2]) / 2
    return steep
