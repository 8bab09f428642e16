"""A crop, as it is or disturbed: planes moved against each other, of other contrast, noisy, ragged at edges.

Dimension key:  C planes   H W image   P patch side
"""

from collections.abc import Mapping

import numpy as np

from flatout.defect.strips.canonical import MIDDLE, TOP
from flatout.defect.synth.config import SynthConfig
from flatout.defect.synth.draw import NOISE_ROOM
from flatout.feed.philox import keyed_uniform


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
