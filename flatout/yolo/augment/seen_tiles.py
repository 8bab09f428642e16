"""Which tiles of a mosaic its warp shows at all: about one in four need not be read, decoded or copied to a device.

Dimension key:  M samples   Q sheets   9 tiles of a sheet at most
"""

import numpy as np

from flatout.yolo.augment.config import AugmentConfig
from flatout.yolo.augment.draw import PLAIN
from flatout.yolo.augment.layout import Sheets
from flatout.yolo.data.image_set import Labels

MARGIN_PX = 2
"""On a canvas, around what the corners of the output see: a bilinear pixel reads its neighbours."""


def needs_all_tiles(config: AugmentConfig, labels: Labels) -> bool:
    """Whether tiles are needed that no pixel is read from, and their labels.

    A copy may land where its original is not seen, and must not cover labels that are not seen either; what a warp that
    tilts shows is not worked out.
    """
    return config.perspective > 0 or (config.copy_paste > 0 and len(labels.point_P2) > 0)


def without_unseen(sheets: Sheets, out_wh: tuple[int, int], in_full_M: np.ndarray | None = None) -> Sheets:
    """The sheets, less the pictures of tiles that no pixel of the output is read from; for affine warps.

    Their places stay. Labels need all tiles: a box may reach beyond its picture. Samples where `in_full_M` is True keep
    all pictures (see `DrawnSet.substitute`).
    """
    is_kept_Q9 = are_seen(sheets, out_wh)
    if in_full_M is not None:
        is_kept_Q9 |= in_full_M[sheets.sample_Q, None]
    return sheets._replace(picture_Q9=np.where(is_kept_Q9, sheets.picture_Q9, -1))


def are_seen(sheets: Sheets, out_wh: tuple[int, int]) -> np.ndarray:
    """bool [Q, 9]; single pictures always are."""
    corner_Q42, is_flat_Q = corners_on_canvas(sheets.matrix_Q33, out_wh)
    first_Q12, last_Q12 = corner_Q42.min(1)[:, None] - MARGIN_PX, corner_Q42.max(1)[:, None] + MARGIN_PX
    # What of a tile lies beyond its canvas is not seen either.
    begin_Q92 = np.maximum(sheets.origin_Q92, 0)
    end_Q92 = np.minimum(sheets.origin_Q92 + sheets.size_Q92, sheets.canvas_Q2[:, None])
    reaches_Q9 = ((begin_Q92 < end_Q92) & (begin_Q92 <= last_Q12) & (end_Q92 > first_Q12)).all(2)
    return np.asarray(reaches_Q9 | (is_flat_Q | (sheets.kind_Q == PLAIN))[:, None])


def corners_on_canvas(matrix_Q33: np.ndarray, out_wh: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Where on the canvas the first and last pixels of the output lie, [Q, 4, 2], and which warps leave no area."""
    (a_Q1, b_Q1, c_Q1), (d_Q1, e_Q1, f_Q1) = np.moveaxis(matrix_Q33[:, :2], 0, 2)[..., None]
    determinant_Q1 = a_Q1 * e_Q1 - b_Q1 * d_Q1
    is_flat_Q1 = determinant_Q1 == 0
    x_Q4, y_Q4 = np.array([0, 0, 1, 1]) * (out_wh[0] - 1) - c_Q1, np.array([0, 1, 0, 1]) * (out_wh[1] - 1) - f_Q1
    place_2Q4 = (e_Q1 * x_Q4 - b_Q1 * y_Q4, a_Q1 * y_Q4 - d_Q1 * x_Q4)
    return np.stack(place_2Q4, -1) / np.where(is_flat_Q1, 1, determinant_Q1)[..., None], is_flat_Q1[:, 0]
