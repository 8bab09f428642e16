"""Geometry of canvases: where every tile lies, how the canvas is warped, and which tiles the warp shows.

A canvas has one, four or nine tiles. Mosaics of four and nine differ only in the origins of their tiles; from here on
a mosaic is a list of tiles on a canvas of twice the output's size, later ones over earlier ones.

Dimension key:  M samples   N images of the data set   Q canvases   9 tiles of a canvas at most
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from flatout.feed import DecodeError
from flatout.yolo.augment.draw import FOUR, NINE, NONE, PLAIN, AugmentConfig
from flatout.yolo.data.image_set import Labels


class Canvases(NamedTuple):
    """Geometry of Q canvases, in the order of their samples. Points and sizes are x, y and w, h in pixels."""

    sample_Q: np.ndarray
    """int64, number of the sample in its micro-batch."""
    kind_Q: np.ndarray
    """int64: PLAIN, FOUR or NINE, the number of tiles."""
    image_Q9: np.ndarray
    """int64, number of the tile's image in the data set, -1 for no tile."""
    origin_Q92: np.ndarray
    """int64, position of the tile's first pixel on the canvas; may be outside of it."""
    size_Q92: np.ndarray
    """int64, size of the tile on the canvas."""
    label_origin_Q92: np.ndarray
    """float64, the origin for labels: as `origin_Q92`, but with half pixels where a single image is centred."""
    label_size_Q92: np.ndarray
    """float64, the size for labels: as `size_Q92`, but not rounded for a single image."""
    canvas_wh_Q2: np.ndarray
    """int64."""
    matrix_Q33: np.ndarray
    """float64, canvas pixel to output pixel."""
    scale_Q: np.ndarray
    """float64, scale factor of the warp."""

    @property
    def layer_Q(self) -> np.ndarray:
        """int64: 0 for a sample's own canvas, 1 for the one mixed in."""
        return np.concatenate(([0], (self.sample_Q[1:] == self.sample_Q[:-1]).astype(np.int64)))[: len(self.sample_Q)]

    def select(self, chosen_Q: np.ndarray) -> "Canvases":
        """The canvases with these numbers, or where a mask is True."""
        return Canvases(*(each[chosen_Q] for each in self))


def resized_wh(size_wh_N2: np.ndarray, size: int) -> np.ndarray:
    """Width and height of images whose longer side is resized to `size`, int64 [N, 2].

    `flatout.yolo.data.letterbox.resized_hw` for all images at once, truncation included.
    """
    ratio_N1 = size / size_wh_N2.max(axis=1, keepdims=True).astype(np.float64)
    return np.asarray((size_wh_N2 * ratio_N1).astype(np.int64).clip(1))


def decoded_bytes(size_wh_N2: np.ndarray, size: int) -> int:
    """Bytes of all images, decoded, with their longer side resized to `size`."""
    return 3 * int(resized_wh(size_wh_N2, size).prod(1).sum())


def check_scanned_size(image: np.ndarray, wh_2: np.ndarray) -> np.ndarray:
    """Return the image if it has the size that follows from the scan, by which labels are placed; else DecodeError."""
    if image.shape != (wh_2[1], wh_2[0], 3):
        raise DecodeError(
            f"the image is {image.shape[1]} x {image.shape[0]} and not {wh_2[0]} x {wh_2[1]}, as its size in the data "
            "set's scan requires: the file has changed since. Run the command again: it scans changed files."
        )
    return image


def lay_out(
    draws: Mapping[str, np.ndarray],
    resized_wh_N2: np.ndarray,
    *,
    size: int,
    out_wh: tuple[int, int],
    enlarge: bool = True,
) -> Canvases:
    """Lay out the canvases of M samples; `size` is the output side of a mosaic, `out_wh` the output of a single image.

    With `enlarge`, a single image smaller than its output is enlarged; for training, not for validation.
    """
    sample_Q, layer_Q = np.nonzero(draws["kind"] != NONE)
    kind_Q = draws["kind"][sample_Q, layer_Q].astype(np.int64)
    image_Q9 = draws["tiles"][sample_Q, layer_Q]
    size_Q92 = np.where(image_Q9[..., None] >= 0, resized_wh_N2[image_Q9], 0)
    corner_Q2 = draws["centre"][sample_Q, layer_Q].astype(np.int64)
    origin_Q92 = np.zeros_like(size_Q92)
    four_Q, nine_Q, plain_Q = (kind_Q == kind for kind in (FOUR, NINE, PLAIN))
    origin_Q92[four_Q] = _four_origins(size_Q92[four_Q], corner_Q2[four_Q])
    origin_Q92[nine_Q] = _nine_origins(size_Q92[nine_Q], size) - corner_Q2[nine_Q, None]
    label_origin_Q92, label_size_Q92 = origin_Q92.astype(np.float64), size_Q92.astype(np.float64)
    canvas_wh_Q2 = np.where(plain_Q[:, None], np.array(out_wh), 2 * size)
    if plain_Q.any():
        fitted = fit_all(size_Q92[plain_Q, 0], np.array(out_wh), enlarge=enlarge)
        origin_Q92[plain_Q, 0], size_Q92[plain_Q, 0], label_origin_Q92[plain_Q, 0], label_size_Q92[plain_Q, 0] = fitted
    warp_Q8 = draws["warp"][sample_Q, layer_Q]
    output_Q2 = np.where(plain_Q[:, None], np.array(out_wh), size)
    return Canvases(
        sample_Q,
        kind_Q,
        image_Q9,
        origin_Q92,
        size_Q92,
        label_origin_Q92,
        label_size_Q92,
        canvas_wh_Q2,
        warp_matrices(warp_Q8, draws["aspect"][sample_Q, layer_Q], canvas_wh_Q2, output_Q2),
        warp_Q8[:, 3],
    )


def fit_all(
    wh_Q2: np.ndarray, out_wh_2: np.ndarray, *, enlarge: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """`flatout.yolo.data.letterbox.fit` for many images: origin and size of their pixels, and of their labels."""
    ratio_Q1 = (out_wh_2 / wh_Q2).min(1, keepdims=True)
    ratio_Q1 = ratio_Q1 if enlarge else np.minimum(ratio_Q1, 1.0)
    inner_Q2 = np.maximum(np.rint(wh_Q2 * ratio_Q1), 1)
    pad_Q2 = (out_wh_2 - inner_Q2) / 2
    return np.rint(pad_Q2 - 0.1), inner_Q2, pad_Q2, ratio_Q1 * wh_Q2


def _four_origins(size_Q92: np.ndarray, centre_Q2: np.ndarray) -> np.ndarray:
    """Four tiles that meet in one point: top left, top right, bottom left, bottom right."""
    origin_Q92 = np.zeros_like(size_Q92)
    ends_at_centre_42 = np.array([[1, 1], [0, 1], [1, 0], [0, 0]])
    origin_Q92[:, :4] = centre_Q2[:, None] - ends_at_centre_42 * size_Q92[:, :4]
    return origin_Q92


def _nine_origins(size_Q92: np.ndarray, size: int) -> np.ndarray:
    """Nine tiles in a spiral around the first: above it, then clockwise, each adjacent to the one before it."""
    w, h = size_Q92[..., 0].T, size_Q92[..., 1].T
    s = np.full_like(w[0], size) if len(size_Q92) else w[0]
    x = (s, s, s + w[1], s + w[0], s + w[0], s + w[0] - w[5], s + w[0] - w[5] - w[6], s - w[7], s - w[8])
    y = (s, s - h[1], s - h[2], s, s + h[3], s + h[0], s + h[0], s + h[0] - h[7], s + h[0] - h[7] - h[8])
    return np.stack((np.stack(x, -1), np.stack(y, -1)), -1)


def warp_matrices(
    warp_Q8: np.ndarray, aspect_Q: np.ndarray, canvas_wh_Q2: np.ndarray, output_Q2: np.ndarray
) -> np.ndarray:
    """Canvas pixel to output pixel, float64 [Q, 3, 3]: centre, perspective, aspect, rotate and scale, shear,
    translate.
    """
    perspective_Q2, angle_Q, scale_Q = warp_Q8[:, :2], np.deg2rad(warp_Q8[:, 2]), warp_Q8[:, 3]
    centre, perspective, rotation, shear, translation = (np.tile(np.eye(3), (len(warp_Q8), 1, 1)) for _ in range(5))
    centre[:, :2, 2] = -canvas_wh_Q2 / 2
    perspective[:, 2, :2] = perspective_Q2
    cos_Q, sin_Q = scale_Q * np.cos(angle_Q), scale_Q * np.sin(angle_Q)
    rotation[:, :2, :2] = np.stack((cos_Q, sin_Q, -sin_Q, cos_Q), -1).reshape(-1, 2, 2)
    # The aspect changes before the rotation; a factor of 1 leaves every bit as it is.
    rotation[:, :2, 0] *= np.sqrt(aspect_Q)[:, None]
    rotation[:, :2, 1] /= np.sqrt(aspect_Q)[:, None]
    shear[:, 0, 1], shear[:, 1, 0] = np.tan(np.deg2rad(warp_Q8[:, 4])), np.tan(np.deg2rad(warp_Q8[:, 5]))
    translation[:, :2, 2] = warp_Q8[:, 6:] * output_Q2
    return np.asarray(translation @ shear @ rotation @ perspective @ centre)


# Tiles that the warp shows. About one tile of a mosaic in four is invisible and need not be read, decoded or copied to
# a device.

MARGIN_PX = 2
"""Margin on the canvas around the area that the output shows: a bilinear pixel reads its neighbours."""


def needs_all_tiles(config: AugmentConfig, labels: Labels) -> bool:
    """Whether even tiles of which no pixel is visible are needed, with their labels.

    With copy_paste a copy may be visible where its original is not, and must not cover invisible labels either. With
    perspective the visible tiles are not computed.
    """
    return config.perspective > 0 or (config.copy_paste > 0 and len(labels.point_P2) > 0)


def without_invisible(canvases: Canvases, out_wh: tuple[int, int], in_full_M: np.ndarray | None = None) -> Canvases:
    """The canvases without the images of tiles that no pixel of the output is read from; for affine warps.

    The geometry of these tiles stays. Labels need all tiles, since a box may reach beyond its image. Samples where
    `in_full_M` is True keep all images (see `TrainingSourceBase.substitute`).
    """
    is_kept_Q9 = visible_tiles(canvases, out_wh)
    if in_full_M is not None:
        is_kept_Q9 |= in_full_M[canvases.sample_Q, None]
    return canvases._replace(image_Q9=np.where(is_kept_Q9, canvases.image_Q9, -1))


def visible_tiles(canvases: Canvases, out_wh: tuple[int, int]) -> np.ndarray:
    """Whether the output shows a tile, bool [Q, 9]; always True for single images."""
    corner_Q42, is_singular_Q = corners_on_canvas(canvases.matrix_Q33, out_wh)
    first_Q12, last_Q12 = corner_Q42.min(1)[:, None] - MARGIN_PX, corner_Q42.max(1)[:, None] + MARGIN_PX
    # The part of a tile beyond its canvas is invisible, too.
    begin_Q92 = np.maximum(canvases.origin_Q92, 0)
    end_Q92 = np.minimum(canvases.origin_Q92 + canvases.size_Q92, canvases.canvas_wh_Q2[:, None])
    reaches_Q9 = ((begin_Q92 < end_Q92) & (begin_Q92 <= last_Q12) & (end_Q92 > first_Q12)).all(2)
    return np.asarray(reaches_Q9 | (is_singular_Q | (canvases.kind_Q == PLAIN))[:, None])


def corners_on_canvas(matrix_Q33: np.ndarray, out_wh: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the output's corner pixels on the canvas, [Q, 4, 2], and which matrices are singular, bool [Q]."""
    (a_Q1, b_Q1, c_Q1), (d_Q1, e_Q1, f_Q1) = np.moveaxis(matrix_Q33[:, :2], 0, 2)[..., None]
    determinant_Q1 = a_Q1 * e_Q1 - b_Q1 * d_Q1
    is_singular_Q1 = determinant_Q1 == 0
    x_Q4, y_Q4 = np.array([0, 0, 1, 1]) * (out_wh[0] - 1) - c_Q1, np.array([0, 1, 0, 1]) * (out_wh[1] - 1) - f_Q1
    point_2Q4 = (e_Q1 * x_Q4 - b_Q1 * y_Q4, a_Q1 * y_Q4 - d_Q1 * x_Q4)
    return np.stack(point_2Q4, -1) / np.where(is_singular_Q1, 1, determinant_Q1)[..., None], is_singular_Q1[:, 0]
