"""Objects pasted over finished images, and polygons filled into masks, in plain torch: the twins of paste_triton.py.

Dimension key:  S samples that are pasted into   K objects or polygons   C columns of an object   P points
                h w height and width of an object in the output, or of a polygon's box   B samples   J masks
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.feed import Sources
from flatout.yolo.augment.gpu.render_torch import fetch_bgr
from flatout.yolo.data.letterbox import PADDING

ONE = 2048
"""Weights are integers in units of 1 / ONE."""


class ObjectsToPaste(NamedTuple):
    """The objects that are pasted into a batch; see OBJECT_COLUMNS in gpu/source.py for their columns."""

    sources: Sources
    """The images of the objects: offsets [K], shapes [K, 3]."""
    object_KC: Tensor
    """int32."""
    point_P2: Tensor
    """int32."""
    spans_S4: Tensor
    """int32: number of the sample, its first object, number of objects, its first point."""
    host_object_KC: np.ndarray
    host_spans_S4: np.ndarray
    flip_B2: Tensor
    subsampled: bool = False
    """Whether images are stored as `chroma` describes."""


def paste_objects(objects: ObjectsToPaste, images: Tensor) -> None:
    """Paste into images [B, 3, H, W] RGB: uint8, or a float dtype with values from 0 to 1; any memory format.

    A dozen operations per object, in a loop on the host: slow on a GPU, where the kernel should be used.
    """
    up_down, left_right = objects.flip_B2.unbind(1)
    for sample, first, num, point in objects.host_spans_S4.tolist():
        canvas = torch.zeros((*images.shape[2:], 3), dtype=torch.int32, device=images.device)
        for number in range(first, first + num):
            row = objects.host_object_KC[number].tolist()
            _paste_one(canvas, row, objects, number, objects.point_P2[point : point + row[11]])
            point += row[11]
        canvas = torch.where(up_down[sample], canvas.flip(0), canvas)
        canvas = torch.where(left_right[sample], canvas.flip(1), canvas)
        values = canvas.flip(2).permute(2, 0, 1)
        # By a tensor, as in render_torch: CUDA multiplies by the reciprocal of a Python number.
        whole = torch.full((), 255.0, device=images.device)
        new = (values / whole if images.is_floating_point() else values).to(images.dtype)
        images[sample] = torch.where(values > 0, new, images[sample])


def _paste_one(canvas: Tensor, row: list[int], objects: ObjectsToPaste, number: int, point_P2: Tensor) -> None:
    """Paste over the canvas int32 [H, W, 3], BGR, in place; it is 0 where nothing is pasted."""
    x, y, w, h, _, tile_x, tile_y, cut_x, cut_y, cut_w, cut_h, _ = row
    (u, fu), (v, fv) = _scaled(w, cut_w, canvas.device), _scaled(h, cut_h, canvas.device)
    total = torch.full((h, w, 3), 1 << 21, dtype=torch.int32, device=canvas.device)
    for down in range(2):
        for right in range(2):
            column, line = cut_x + (u + right).clamp(max=cut_w - 1), cut_y + (v + down).clamp(max=cut_h - 1)
            weight = (fu if right else ONE - fu) * (fv if down else ONE - fv)[:, None]
            inside = inside_polygon(point_P2, column, line)
            pixel = _fetch(objects, number, column - tile_x, line - tile_y)
            pixel = torch.where(pixel == 0, 255, pixel)
            total += torch.where(inside[..., None], pixel, 0) * weight[..., None]
    value = total >> 22
    place = canvas[y : y + h, x : x + w]
    place.copy_(torch.where(value > 0, value, place))


def _scaled(pasted: int, cut: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each pasted pixel, the first pixel of the cut-out and the weight of the next one in 1/2048."""
    doubled = ((2 * torch.arange(pasted, dtype=torch.int32, device=device) + 1) * cut - pasted).clamp(min=0)
    first = doubled // (2 * pasted)
    return first, ((doubled - first * 2 * pasted) * ONE) // (2 * pasted)


def inside_polygon(point_P2: Tensor, u_w: Tensor, v_h: Tensor) -> Tensor:
    """Whether pixels lie in a polygon or on one of its edges, bool [h, w]."""
    (ax, ay), (bx, by) = (points.T[..., None, None] for points in (point_P2, point_P2.roll(-1, 0)))
    v = v_h[:, None]
    cross = (bx - ax) * (v - ay) - (u_w - ax) * (by - ay)
    # Inside: a ray to the right crosses edges an odd number of times.
    crosses = ((ay > v) != (by > v)) & torch.where(by > ay, cross > 0, cross <= 0)
    # On an edge: at most half a pixel away, as when lines are drawn.
    near = 2 * cross.abs() <= torch.maximum((bx - ax).abs(), (by - ay).abs())
    beside = (u_w >= torch.minimum(ax, bx)) & (u_w <= torch.maximum(ax, bx))
    beside = beside & (v >= torch.minimum(ay, by)) & (v <= torch.maximum(ay, by))
    is_odd = crosses.sum(0).bitwise_and(1).bool()
    return torch.logical_or(is_odd, (near & beside).any(0))


def _fetch(objects: ObjectsToPaste, number: int, column_w: Tensor, row_h: Tensor) -> Tensor:
    """Pixels of an object's image, int32 [h, w, 3]; grey outside of it."""
    sources = objects.sources
    height, width = sources.shapes[number, 0], sources.shapes[number, 1]
    if objects.subsampled:
        height = height * 2 // 3
    there = ((row_h >= 0) & (row_h < height))[:, None] & ((column_w >= 0) & (column_w < width))
    if objects.subsampled:
        at = sources.offsets[number] + row_h[:, None] * width + column_w
        colour_at = sources.offsets[number] + (height + (row_h[:, None] >> 1)) * width + (column_w & -2)
        pixel = fetch_bgr(sources.data, torch.where(there, at, 0), torch.where(there, colour_at, 0))
        return torch.where(there[..., None], pixel, PADDING)
    at = sources.offsets[number] + (row_h[:, None] * width + column_w) * 3
    pixel = sources.data[torch.where(there, at, 0)[..., None] + torch.arange(3, device=column_w.device)]
    return torch.where(there[..., None], pixel, PADDING).int()


# Polygons filled into masks, one after the other.


class PolygonsToFill(NamedTuple):
    """The polygons to fill; see SPAN_COLUMNS in gpu/source.py for the columns of a span."""

    span_K7: Tensor
    """int32."""
    host_span_K7: np.ndarray
    point_P2: Tensor
    """int32."""


def fill_polygons(polygons: PolygonsToFill, masks: Tensor) -> None:
    """Set masks uint8 [J, H, W] to 1 inside of polygons and on their edges, in place.

    A dozen operations per polygon, in a loop on the host: slow on a GPU, where the kernel should be used.
    """
    for mask, first, num, x1, y1, x2, y2 in polygons.host_span_K7.tolist():
        columns, rows = (
            torch.arange(begin, end + 1, dtype=torch.int32, device=masks.device) for begin, end in ((x1, x2), (y1, y2))
        )
        masks[mask, y1 : y2 + 1, x1 : x2 + 1] |= inside_polygon(polygons.point_P2[first : first + num], columns, rows)
