"""Deferred labels turned into targets in plain torch, on any device: the twin of labels_triton.py.

It runs where there is no Triton. The arithmetic is that of flatout/yolo/augment/labels.py, in the same precision and
order: the same labels are kept, in the same order, and their boxes are the same to the bit. Nothing here makes the host
wait for the device; so rows of labels that are not kept cannot be removed, and become padding instead: image -1, which
losses ignore.

Dimension key:  B samples   T rows   P points of all labels   L labels of the data set   X points along a polygon
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from flatout.yolo.augment.draw import NINE, PLAIN
from flatout.yolo.augment.labels import MIN_AREA, MIN_AREA_POLYGONS, RESAMPLED
from flatout.yolo.data.image_set import Labels

Pair = tuple[Tensor, Tensor]
"""x and y."""


class DeviceLabels(NamedTuple):
    """The labels of a data set on a device, in the layout of `Labels`."""

    class_box_L5: Tensor
    first_point_L: Tensor
    """int64 [L + 1]."""
    point_P2: Tensor

    @classmethod
    def of(cls, labels: Labels, device: str | torch.device) -> "DeviceLabels":
        arrays = (labels.class_box_T5, labels.first_point_T, labels.point_P2)
        return cls(*(torch.from_numpy(array).to(device) for array in arrays))

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self)


class TorchLabels:
    """Turns rows int32 [T, 6] (see gpu/source.py) into targets float32 [T, 6] in the same memory.

    A hundred operations on [T, 1000] numbers; bench/augment_gpu.py measures them.
    """

    def __init__(self, labels: DeviceLabels, *, perspective: bool) -> None:
        self._labels = labels
        self._perspective = perspective

    def __str__(self) -> str:
        return "torch"

    def __call__(self, row_T6: Tensor, params: Mapping[str, Tensor], out_wh: tuple[int, int], count: Tensor) -> Tensor:
        """The targets. The number of them that are not padding is added to `count`, int32 [1]."""
        is_deferred_T = row_T6[:, 0] < 0
        flat_tile_T = torch.where(is_deferred_T, -1 - row_T6[:, 0], 0).long()
        label_T = torch.where(is_deferred_T, row_T6[:, 1], 0).long()
        tile, canvas_T = _Tile.of(flat_tile_T, params), flat_tile_T // NINE
        class_box_T5 = self._labels.class_box_L5[label_T]
        low, high = tile.corners(class_box_T5[:, 1:])
        matrix_T33 = params["matrix"].view(-1, 3, 3)[canvas_T]
        by_polygons_T = params["by_polygons"].view(-1)[canvas_T]
        by_corners = self._box_of_corners(low, high, matrix_T33, out_wh)
        by_points = self._box_of_points(label_T, tile, (low, high), matrix_T33, out_wh)
        box_4T = torch.where(by_polygons_T, torch.stack(by_points), torch.stack(by_corners))
        scale_T = params["scale"].view(-1)[canvas_T]
        before = [(b.double() * scale_T - a.double() * scale_T) for a, b in zip(low, high, strict=True)]
        kept_T = _are_trainable(before, box_4T, by_polygons_T)
        target_T6 = _targets(canvas_T // 2, class_box_T5[:, 0], box_4T.float(), params["flip"], out_wh)
        padding_T6 = torch.zeros_like(target_T6)
        padding_T6[:, 0] = -1
        target_T6 = torch.where(kept_T[:, None], target_T6, padding_T6)
        done_T6 = row_T6.view(torch.float32)
        done_T6.copy_(torch.where(is_deferred_T[:, None], target_T6, done_T6))
        count += (kept_T | ~is_deferred_T).sum()
        return done_T6

    def _box_of_corners(self, low: Pair, high: Pair, matrix_T33: Tensor, out_wh: tuple[int, int]) -> list[Tensor]:
        """x1, y1, x2, y2 around the four warped corners of a box, clipped to the output."""
        x_T4 = torch.stack((low[0], high[0], low[0], high[0]), 1).double()
        y_T4 = torch.stack((low[1], high[1], high[1], low[1]), 1).double()
        warped = [each.clamp(0, side) for each, side in zip(self._warped(x_T4, y_T4, matrix_T33), out_wh, strict=True)]
        return [*(each.amin(1) for each in warped), *(each.amax(1) for each in warped)]

    def _box_of_points(
        self, label_T: Tensor, tile: "_Tile", box: tuple[Pair, Pair], matrix_T33: Tensor, out_wh: tuple[int, int]
    ) -> list[Tensor]:
        """x1, y1, x2, y2 around the points along a polygon, of 1000, that are inside the output; zeros if none is.

        As in polygons.c, a point belongs to the edges between whose ends it lies. A point on a corner belongs to two,
        and rounding may shift the edge by one, so three edges are checked.
        """
        begin_T1 = self._labels.first_point_L[label_T, None]
        own_T1 = self._labels.first_point_L[label_T + 1, None] - begin_T1
        num_T1 = torch.where(own_T1 > 0, own_T1, 4)
        sample_X = torch.arange(RESAMPLED, device=label_T.device)
        # Tensors on both sides: torch rounds a division by a Python number, or of one by a tensor, differently.
        steps_T1 = torch.full_like(num_T1, RESAMPLED - 1, dtype=torch.float64)
        per_sample_T1, per_edge_T1 = num_T1 / steps_T1, steps_T1 / num_T1
        near_TX = (sample_X * per_sample_T1).long()
        extremes = []
        for shift in (-1, 0, 1):
            edge_TX = near_TX + shift
            is_on_TX = (edge_TX >= 0) & (edge_TX < num_T1)
            is_on_TX &= (edge_TX * per_edge_T1 <= sample_X) & ((edge_TX + 1) * per_edge_T1 >= sample_X)
            edge_TX = torch.where(is_on_TX, edge_TX, 0)
            after_TX = torch.where(edge_TX + 1 < num_T1, edge_TX + 1, 0)
            x1, y1 = self._corner(begin_T1, own_T1, edge_TX, tile, box)
            x2, y2 = self._corner(begin_T1, own_T1, after_TX, tile, box)
            if not self._perspective:
                x1, y1 = self._warped(x1, y1, matrix_T33)
                x2, y2 = self._warped(x2, y2, matrix_T33)
                is_on_TX &= ~_both_beyond((x1, y1), (x2, y2), out_wh)
            share_TX = sample_X * per_sample_T1 - edge_TX
            x, y = x1 + share_TX * (x2 - x1), y1 + share_TX * (y2 - y1)
            if self._perspective:
                x, y = self._warped(x, y, matrix_T33)
            is_on_TX &= (x >= 0) & (x <= out_wh[0]) & (y >= 0) & (y <= out_wh[1])
            maxima = [torch.where(is_on_TX, each, -torch.inf).amax(1) for each in (x, y)]
            extremes.append([*(torch.where(is_on_TX, each, torch.inf).amin(1) for each in (x, y)), *maxima])
        x1, y1, x2, y2 = (torch.stack(each) for each in zip(*extremes, strict=True))
        box_4 = [x1.amin(0), y1.amin(0), x2.amax(0), y2.amax(0)]
        return [torch.where(box_4[2] > 0, each, 0.0) for each in box_4]

    def _corner(
        self, begin_T1: Tensor, own_T1: Tensor, number_TX: Tensor, tile: "_Tile", box: tuple[Pair, Pair]
    ) -> Pair:
        """Corner `number` of a polygon on the canvas, float64; that of its box if a label has no polygon."""
        (low_x, low_y), (high_x, high_y) = ((x[:, None], y[:, None]) for x, y in box)
        is_left, is_above = (number_TX == 0) | (number_TX == 3), number_TX < 2
        bare = (torch.where(is_left, low_x, high_x), torch.where(is_above, low_y, high_y))
        at_TX = torch.where(own_T1 > 0, begin_T1 + number_TX, 0)
        points = tile.to_canvas(self._labels.point_P2[at_TX])
        x, y = (torch.where(own_T1 > 0, point, corner).double() for point, corner in zip(points, bare, strict=True))
        return x, y

    def _warped(self, x: Tensor, y: Tensor, matrix_T33: Tensor) -> Pair:
        """Points [T, n] warped by the matrix of each row."""
        across, down, away = (
            row[:, 0, None] * x + row[:, 1, None] * y + row[:, 2, None] for row in matrix_T33.unbind(1)
        )
        return (across / away, down / away) if self._perspective else (across, down)


class _Tile(NamedTuple):
    """From coordinates relative to an image to pixels of its canvas, one for each row; float32."""

    size_T2: Tensor
    origin_T2: Tensor
    low_T2: Tensor
    high_T2: Tensor

    @classmethod
    def of(cls, flat_tile_T: Tensor, params: Mapping[str, Tensor]) -> "_Tile":
        size_origin_T4, canvas_T = params["label_tiles"].view(-1, 4)[flat_tile_T], flat_tile_T // NINE
        is_plain_T1 = (params["num_tiles"].view(-1)[canvas_T] == PLAIN)[:, None]
        canvas_wh_T2 = params["canvas"].view(-1, 2)[canvas_T].float()
        low_T2 = torch.where(is_plain_T1, -torch.inf, torch.zeros_like(canvas_wh_T2))
        return cls(
            size_origin_T4[:, :2], size_origin_T4[:, 2:], low_T2, torch.where(is_plain_T1, torch.inf, canvas_wh_T2)
        )

    def to_canvas(self, point_TX2: Tensor) -> Pair:
        size, origin, low, high = (each[:, None] for each in self)
        x, y = (size * point_TX2 + origin).maximum(low).minimum(high).unbind(-1)
        return x, y

    def corners(self, cxcywh_T4: Tensor) -> tuple[Pair, Pair]:
        """Lower and upper x and y of boxes, [T] each."""
        centre_T2, half_T2 = cxcywh_T4[:, :2], cxcywh_T4[:, 2:] / 2
        x_T2, y_T2 = self.to_canvas(torch.stack((centre_T2 - half_T2, centre_T2 + half_T2), 1))
        return (x_T2[:, 0], y_T2[:, 0]), (x_T2[:, 1], y_T2[:, 1])


def _both_beyond(begin: Pair, end: Pair, out_wh: tuple[int, int]) -> Tensor:
    """Whether both ends of an edge lie beyond the same side of the output."""
    sides = zip(begin, end, out_wh, strict=True)
    x, y = (((a < 0) & (b < 0)) | ((a > side) & (b > side)) for a, b, side in sides)
    return x | y


def _are_trainable(before: list[Tensor], box_4T: Tensor, by_polygons_T: Tensor) -> Tensor:
    """`labels.are_trainable`; `before` are width and height before the warp, times its scale."""
    (w1, h1), (w2, h2) = before, box_4T[2:] - box_4T[:2]
    epsilon = 1e-16
    aspect = torch.maximum(w2 / (h2 + epsilon), h2 / (w2 + epsilon))
    share = w2 * h2 / (w1 * h1 + epsilon)
    enough = torch.where(by_polygons_T, share > MIN_AREA_POLYGONS, share > MIN_AREA)
    kept: Tensor = (w2 > 2) & (h2 > 2) & enough & (aspect < 20)
    return kept


def _targets(sample_T: Tensor, class_T: Tensor, box_4T: Tensor, flip_B2: Tensor, out_wh: tuple[int, int]) -> Tensor:
    """`labels.to_targets` for boxes x1, y1, x2, y2, float32."""
    side_2T = torch.stack([torch.full_like(class_T, side) for side in out_wh])
    centre_2T = (box_4T[:2] + box_4T[2:]) / 2 / side_2T
    # flip is up-down, left-right, while centres are x, y.
    centre_2T = torch.where(flip_B2[sample_T].T.flip(0), 1 - centre_2T, centre_2T)
    size_2T = (box_4T[2:] - box_4T[:2]) / side_2T
    return torch.stack((sample_T.float(), class_T, *centre_2T, *size_2T), 1)
