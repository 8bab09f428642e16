"""A plain reference for painting: every defect on the full frame in float64, one plane after the other."""

from typing import Any

import numpy as np

from flatout.defect.synth.pool import gaussian_kernel

GROUPS = ("T", "R1", "R2", "B")
PLANES = {"T": (0,), "R1": (0, 1), "R2": (0, 2), "B": (0, 1, 2)}


def paint_plain(patch_CHW: np.ndarray, defects: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """The painted patch in its own dtype (uint8 truncates after every defect), and the mask, uint8 [H, W]."""
    out_CHW = patch_CHW.copy()
    mask_HW = np.zeros(patch_CHW.shape[1:], np.uint8)
    for defect in defects:
        frame_HW = full_frame(defect, (patch_CHW.shape[1], patch_CHW.shape[2]))
        amplitudes = dict.fromkeys(PLANES[defect["group"]], defect["amp"])
        if "leak_ref" in defect:
            amplitudes[defect["leak_ref"]] = defect["amp"] * defect["leak_scale"]
        for plane, amplitude in amplitudes.items():
            painted = np.clip(out_CHW[plane].astype(np.float64) + frame_HW * amplitude, 0, 255)
            out_CHW[plane] = painted.astype(out_CHW.dtype)
        if defect["group"] == "T":
            mask_HW |= (frame_HW > 0.1).astype(np.uint8)
    return out_CHW, mask_HW


def full_frame(defect: dict[str, Any], shape_hw: tuple[int, int]) -> np.ndarray:
    """The kernel of a defect at its position on an otherwise empty frame, float64 [H, W]."""
    kernel = gaussian_kernel(defect["kernel"])
    reach = max(kernel.shape)
    height, width = shape_hw
    padded = np.zeros((height + 4 * reach, width + 4 * reach))
    top, left = defect["cy"] - kernel.shape[0] // 2 + 2 * reach, defect["cx"] - kernel.shape[1] // 2 + 2 * reach
    if 0 <= top <= padded.shape[0] - kernel.shape[0] and 0 <= left <= padded.shape[1] - kernel.shape[1]:
        padded[top : top + kernel.shape[0], left : left + kernel.shape[1]] = kernel
    return padded[2 * reach : 2 * reach + height, 2 * reach : 2 * reach + width]
