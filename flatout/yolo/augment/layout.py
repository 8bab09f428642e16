"""Where every tile of every sheet lies, and how the sheet is then warped: numbers in, geometry out.

A sheet is a canvas of one, four or nine pictures. Four and nine differ only in where their tiles begin; from here on
a sheet is a list of tiles on a canvas of twice the output's size, later ones over earlier ones.

Dimension key:  Q sheets   9 tiles of a sheet at most   N pictures of the data set
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from flatout.feed import DecodeError
from flatout.yolo.augment.draw import FOUR, NINE, NONE, PLAIN, AugmentConfig
from flatout.yolo.data.image_set import Labels


class Sheets(NamedTuple):
    """Geometry of Q sheets, in the order of their samples. Points and sizes are x, y and w, h in pixels."""

    sample_Q: np.ndarray
    """int64, number of the sample in its micro-batch."""
    kind_Q: np.ndarray
    picture_Q9: np.ndarray
    """int64, -1 for no tile."""
    origin_Q92: np.ndarray
    """int64, where the tile's first pixel lies on the canvas; may be outside."""
    size_Q92: np.ndarray
    """int64, size of the tile on the canvas."""
    label_origin_Q92: np.ndarray
    """float64, as the origin, but where a single picture is centred with half pixels."""
    label_size_Q92: np.ndarray
    """float64, as the size, but not rounded for a single picture."""
    canvas_Q2: np.ndarray
    """int64."""
    matrix_Q33: np.ndarray
    """float64, canvas pixel to output pixel."""
    scale_Q: np.ndarray
    """float64, how much the warp enlarges."""

    @property
    def slot_Q(self) -> np.ndarray:
        """int64: 0 for a sample's own sheet, 1 for the one mixed in."""
        return np.concatenate(([0], (self.sample_Q[1:] == self.sample_Q[:-1]).astype(np.int64)))[: len(self.sample_Q)]

    def taken(self, chosen_Q: np.ndarray) -> "Sheets":
        """The sheets of these numbers, or where this is True."""
        return Sheets(*(each[chosen_Q] for each in self))


def resized_wh(size_wh_N2: np.ndarray, size: int) -> np.ndarray:
    """Width and height of pictures whose longer side is made `size`, int64 [N, 2].

    `flatout.yolo.data.letterbox.kept_size_hw` for all pictures at once, truncation included.
    """
    ratio_N1 = size / size_wh_N2.max(axis=1, keepdims=True).astype(np.float64)
    return np.asarray((size_wh_N2 * ratio_N1).astype(np.int64).clip(1))


def decoded_bytes(size_wh_N2: np.ndarray, size: int) -> int:
    """What all pictures take, decoded and with their longer side made `size`."""
    return 3 * int(resized_wh(size_wh_N2, size).prod(1).sum())


def as_scanned(image: np.ndarray, wh_2: np.ndarray) -> np.ndarray:
    """The picture, if it has the size that follows from the scan: labels are placed by that."""
    if image.shape != (wh_2[1], wh_2[0], 3):
        raise DecodeError(
            f"the picture is {image.shape[1]} x {image.shape[0]} and not {wh_2[0]} x {wh_2[1]}, as it should be by the "
            "size recorded when the data set was scanned: it has changed since. Scan again."
        )
    return image


def lay_out(
    draws: Mapping[str, np.ndarray],
    resized_wh_N2: np.ndarray,
    *,
    size: int,
    out_wh: tuple[int, int],
    enlarge: bool = True,
) -> Sheets:
    """The sheets of M samples; `size` is the side of a mosaic's output, `out_wh` the output of a single picture.

    A single picture that is smaller than its output is enlarged for training, not for validation.
    """
    sample_Q, slot_Q = np.nonzero(draws["kind"] != NONE)
    kind_Q = draws["kind"][sample_Q, slot_Q].astype(np.int64)
    picture_Q9 = draws["tiles"][sample_Q, slot_Q]
    size_Q92 = np.where(picture_Q9[..., None] >= 0, resized_wh_N2[picture_Q9], 0)
    corner_Q2 = draws["centre"][sample_Q, slot_Q].astype(np.int64)
    origin_Q92 = np.zeros_like(size_Q92)
    four_Q, nine_Q, plain_Q = (kind_Q == kind for kind in (FOUR, NINE, PLAIN))
    origin_Q92[four_Q] = _four_origins(size_Q92[four_Q], corner_Q2[four_Q])
    origin_Q92[nine_Q] = _nine_origins(size_Q92[nine_Q], size) - corner_Q2[nine_Q, None]
    label_origin_Q92, label_size_Q92 = origin_Q92.astype(np.float64), size_Q92.astype(np.float64)
    canvas_Q2 = np.where(plain_Q[:, None], np.array(out_wh), 2 * size)
    if plain_Q.any():
        fitted = fit_all(size_Q92[plain_Q, 0], np.array(out_wh), enlarge=enlarge)
        origin_Q92[plain_Q, 0], size_Q92[plain_Q, 0], label_origin_Q92[plain_Q, 0], label_size_Q92[plain_Q, 0] = fitted
    warp_Q8 = draws["warp"][sample_Q, slot_Q]
    output_Q2 = np.where(plain_Q[:, None], np.array(out_wh), size)
    return Sheets(
        sample_Q,
        kind_Q,
        picture_Q9,
        origin_Q92,
        size_Q92,
        label_origin_Q92,
        label_size_Q92,
        canvas_Q2,
        warp_matrices(warp_Q8, draws["aspect"][sample_Q, slot_Q], canvas_Q2, output_Q2),
        warp_Q8[:, 3],
    )


def fit_all(
    wh_Q2: np.ndarray, out_wh_2: np.ndarray, *, enlarge: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """`flatout.yolo.data.letterbox.fit` for many pictures: origin and size of their pixels, and of their labels."""
    ratio_Q1 = (out_wh_2 / wh_Q2).min(1, keepdims=True)
    ratio_Q1 = ratio_Q1 if enlarge else np.minimum(ratio_Q1, 1.0)
    inner_Q2 = np.maximum(np.rint(wh_Q2 * ratio_Q1), 1)
    pad_Q2 = (out_wh_2 - inner_Q2) / 2
    return np.rint(pad_Q2 - 0.1), inner_Q2, pad_Q2, ratio_Q1 * wh_Q2


def _four_origins(size_Q92: np.ndarray, centre_Q2: np.ndarray) -> np.ndarray:
    """Four tiles that meet in one point: above left, above right, below left, below right."""
    origin_Q92 = np.zeros_like(size_Q92)
    ends_at_centre_42 = np.array([[1, 1], [0, 1], [1, 0], [0, 0]])
    origin_Q92[:, :4] = centre_Q2[:, None] - ends_at_centre_42 * size_Q92[:, :4]
    return origin_Q92


def _nine_origins(size_Q92: np.ndarray, size: int) -> np.ndarray:
    """Nine tiles in a spiral around the first: above it, then clockwise; each fits to the one before it."""
    w, h = size_Q92[..., 0].T, size_Q92[..., 1].T
    s = np.full_like(w[0], size) if len(size_Q92) else w[0]
    x = (s, s, s + w[1], s + w[0], s + w[0], s + w[0] - w[5], s + w[0] - w[5] - w[6], s - w[7], s - w[8])
    y = (s, s - h[1], s - h[2], s, s + h[3], s + h[0], s + h[0], s + h[0] - h[7], s + h[0] - h[7] - h[8])
    return np.stack((np.stack(x, -1), np.stack(y, -1)), -1)


def warp_matrices(
    warp_Q8: np.ndarray, aspect_Q: np.ndarray, canvas_Q2: np.ndarray, output_Q2: np.ndarray
) -> np.ndarray:
    """Canvas pixel to output pixel, float64 [Q, 3, 3]: centre, tilt, stretch, turn and scale, shear, move, in order."""
    tilt_Q2, angle_Q, scale_Q = warp_Q8[:, :2], np.deg2rad(warp_Q8[:, 2]), warp_Q8[:, 3]
    centre, tilt, turn, shear, move = (np.tile(np.eye(3), (len(warp_Q8), 1, 1)) for _ in range(5))
    centre[:, :2, 2] = -canvas_Q2 / 2
    tilt[:, 2, :2] = tilt_Q2
    cos_Q, sin_Q = scale_Q * np.cos(angle_Q), scale_Q * np.sin(angle_Q)
    turn[:, :2, :2] = np.stack((cos_Q, sin_Q, -sin_Q, cos_Q), -1).reshape(-1, 2, 2)
    # Stretched before it is turned; a factor of 1 leaves every bit as it is.
    turn[:, :2, 0] *= np.sqrt(aspect_Q)[:, None]
    turn[:, :2, 1] /= np.sqrt(aspect_Q)[:, None]
    shear[:, 0, 1], shear[:, 1, 0] = np.tan(np.deg2rad(warp_Q8[:, 4])), np.tan(np.deg2rad(warp_Q8[:, 5]))
    move[:, :2, 2] = warp_Q8[:, 6:] * output_Q2
    return np.asarray(move @ shear @ turn @ tilt @ centre)


# Which tiles of a mosaic its warp shows at all: about one in four need not be read, decoded or copied to a device.
#
# Dimension key:  M samples   Q sheets   9 tiles of a sheet at most

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
