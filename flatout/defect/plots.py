"""Plots of training samples and of results.

Dimension key:  B samples   C planes   H W pixels   G K blocks of an alignment   2 (x, y)
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flatout.defect.compare.align import Alignment
from flatout.defect.data.items import MAX_GREY
from flatout.errors import ResourceError

GAP = 4
"""Pixels between panels."""
GREY = 90
"""Grey level of the gaps."""
OUTLINE_DISTANCE = 4
"""Pixels between a defect and its outline."""
_RED = (40, 40, 230)
ARROWS_PX = 32
"""Distance of the arrows that show shifts."""
MAX_ARROW_SCALE = 8.0
"""Pixels of an arrow for one pixel of shift, at most."""


def examples_png(images_BCHW: np.ndarray, masks_BHW: np.ndarray, path: Path) -> None:
    """Write one row of panels per sample: target, ref1, ref2, what only target has, and the label."""
    rows = []
    for planes_CHW, mask_HW in zip(images_BCHW, masks_BHW, strict=True):
        target, ref1, ref2 = planes_CHW
        panels = [*map(grey, planes_CHW), _signed(both_differences(target, ref1, ref2)), grey(mask_HW * MAX_GREY)]
        rows.append(_joined(panels, 1))
    _write(path, _joined(rows, 0))


def result_png(
    planes_CHW: np.ndarray, heat_HW: np.ndarray, mask_HW: np.ndarray | None, path: Path, *, threshold: float = 0.5
) -> None:
    """Write target, ref1, ref2, target - ref1, target - ref2, the smaller of both, and the heat map over target.

    `threshold`: see `overlay`.
    """
    target, ref1, ref2 = planes_CHW
    panels = [
        *map(grey, planes_CHW),
        _signed(target - ref1),
        _signed(target - ref2),
        _signed(both_differences(target, ref1, ref2)),
        overlay(target, heat_HW, mask_HW, threshold=threshold),
    ]
    _write(path, _joined(panels, axis=int(target.shape[0] >= target.shape[1])))


def shifts_png(target_HW: np.ndarray, reference_HW: np.ndarray, found: Alignment, path: Path) -> None:
    """Write the shifts as arrows over target, their confidence, and the difference before and after the alignment."""
    before, after = (MAX_GREY - np.abs(target_HW - plane_HW) for plane_HW in (reference_HW, found.reference_HW))
    panels = [_arrows(target_HW, found), _confidence(found, target_HW.shape), grey(before), grey(after)]
    _write(path, _joined(panels, 1))


def grey_png(plane_HW: np.ndarray, path: Path) -> None:
    """Write a plane in 0..255 as a grey image."""
    _write(path, np.clip(plane_HW, 0, MAX_GREY).astype(np.uint8))


def both_differences(target_HW: np.ndarray, ref1_HW: np.ndarray, ref2_HW: np.ndarray) -> np.ndarray:
    """The smaller of the differences to both references: the classical way to find what only target has."""
    first, second = target_HW - ref1_HW, target_HW - ref2_HW
    return np.asarray(np.where(np.abs(first) <= np.abs(second), first, second))


def overlay(
    target_HW: np.ndarray, heat_HW: np.ndarray, mask_HW: np.ndarray | None, *, threshold: float = 0.5
) -> np.ndarray:
    """Target in grey, the probability in colour over it, labelled defects outlined in red; uint8 BGR [H, W, 3].

    A `threshold` below 0.5 has the colour that 0.5 has otherwise: what counts as defect can always be seen.
    """
    import cv2

    if 0 < threshold < 0.5:
        heat_HW = heat_HW * np.float32(0.5 / threshold)
    heat = np.clip(heat_HW * MAX_GREY, 0, MAX_GREY).astype(np.uint8)
    colour = cv2.applyColorMap(heat, cv2.COLORMAP_INFERNO).astype(np.float32)
    share = np.clip(heat_HW * 2, 0, 1)[..., None]
    mixed = np.ascontiguousarray((grey(target_HW) * (1 - share) + colour * share).astype(np.uint8))
    if mask_HW is not None and mask_HW.any():
        # Around the defect, not on it: an outline would hide a defect of nine pixels.
        side = 2 * OUTLINE_DISTANCE + 1
        around = cv2.dilate(mask_HW.astype(np.uint8), np.ones((side, side), np.uint8))
        outlines, _ = cv2.findContours(around, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
        cv2.drawContours(mixed, outlines, -1, _RED, 1)
    return mixed


def _arrows(target_HW: np.ndarray, found: Alignment) -> np.ndarray:
    """Target, pale, with arrows from where a block is in target to where the reference shows it; magnified."""
    import cv2

    plot = (grey(target_HW) // 3 + 170).astype(np.uint8)
    rows, columns, _ = found.shift_GK2.shape
    block_y, block_x = -(-target_HW.shape[0] // rows), -(-target_HW.shape[1] // columns)
    step = max(1, ARROWS_PX // block_y)
    scale = min(MAX_ARROW_SCALE, ARROWS_PX / max(float(np.abs(found.shift_GK2).max()), 1e-6))
    for row in range(step // 2, rows, step):
        for column in range(step // 2, columns, step):
            x, y = (column + 0.5) * block_x, (row + 0.5) * block_y
            dx, dy = (found.shift_GK2[row, column] * scale).tolist()
            cv2.arrowedLine(
                plot, (round(x), round(y)), (round(x + dx), round(y + dy)), _RED, 1, cv2.LINE_AA, tipLength=0.3
            )
    return plot


def _confidence(found: Alignment, shape_hw: tuple[int, ...]) -> np.ndarray:
    """The confidence of every block, from dark blue for 0 to yellow for 1."""
    import cv2

    blocks = np.clip(found.confidence_GK * MAX_GREY, 0, MAX_GREY).astype(np.uint8)
    dense = cv2.resize(blocks, (shape_hw[1], shape_hw[0]), interpolation=cv2.INTER_NEAREST)
    return cv2.applyColorMap(dense, cv2.COLORMAP_VIRIDIS)


def grey(plane_HW: np.ndarray) -> np.ndarray:
    """A plane of grey levels as an image, uint8 [H, W, 3]."""
    return np.repeat(np.clip(plane_HW, 0, MAX_GREY).astype(np.uint8)[..., None], 3, axis=2)


def _signed(difference_HW: np.ndarray) -> np.ndarray:
    return grey(difference_HW / 2 + (MAX_GREY + 1) / 2)


def _joined(panels: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """Panels below each other (axis 0) or side by side (axis 1), with gaps."""
    height, width = panels[0].shape[:2]
    gap = np.full((height, GAP, 3) if axis else (GAP, width, 3), GREY, np.uint8)
    return np.concatenate([part for panel in panels for part in (panel, gap)][:-1], axis=axis)


def _write(path: Path, plot: np.ndarray) -> None:
    import cv2

    write_result(path, cv2.imencode(".png", plot)[1].tobytes())


def write_result(path: Path, content: bytes | str) -> None:
    """Write a file of results; ResourceError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # File names in a table may be no UTF-8: they are written as they are.
        path.write_bytes(content.encode(errors="surrogateescape") if isinstance(content, str) else content)
    except OSError as error:
        raise ResourceError(
            f"{path}: cannot be written: {error.strerror}. Make room, or choose another folder."
        ) from None
