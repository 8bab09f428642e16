"""Deferred labels turned into targets by one Triton kernel: the bits of labels_torch.py, timed by bench/augment_gpu.py.

Dimension key:  T rows   X points along a polygon: a thousand, and some unused ones
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.yolo.augment import draw, labels
from flatout.yolo.augment.gpu.labels_torch import DeviceLabels

# The Triton kernel: a program turns one deferred label into a target.
#
#     row -> label, tile -> box on the canvas -> warped corners, or 1000 points along the warped polygon -> box inside
#     of the output -> kept? -> flipped and normalised, or padding
#
# All rounding is NumPy's: float32 on the canvas, float64 in the warp, products not fused with sums
# (enable_fp_fusion=False), float32 quotients correctly rounded. So the bits are those of the CPU.

NINE, PLAIN = tl.constexpr(draw.NINE), tl.constexpr(draw.PLAIN)
STEPS = tl.constexpr(labels.RESAMPLED - 1)
LEAST_AREA = tl.constexpr(labels.MIN_AREA)
LEAST_AREA_POLYGONS = tl.constexpr(labels.MIN_AREA_POLYGONS)


@triton.jit
def _on_canvas(share, size, origin, least, most):
    """Canvas pixels of a coordinate relative to the image's side, float32."""
    return tl.minimum(tl.maximum(size * share + origin, least), most)


@triton.jit
def _warped(x, y, matrix, PERSPECTIVE: tl.constexpr):
    across = tl.load(matrix) * x + tl.load(matrix + 1) * y + tl.load(matrix + 2)
    down = tl.load(matrix + 3) * x + tl.load(matrix + 4) * y + tl.load(matrix + 5)
    if PERSPECTIVE:
        away = tl.load(matrix + 6) * x + tl.load(matrix + 7) * y + tl.load(matrix + 8)
        across = across / away
        down = down / away
    return across, down


@triton.jit
def _corner(points, number, there, is_bare, x1, y1, x2, y2, tile, least, most_x, most_y):
    """Canvas x and y of a polygon's corners, float64 [X]; those of the box if a label has no polygon."""
    there = there & (is_bare == 0)
    x = tl.load(points + 2 * number, mask=there, other=0.0)
    y = tl.load(points + 2 * number + 1, mask=there, other=0.0)
    x = _on_canvas(x, tl.load(tile), tl.load(tile + 2), least, most_x)
    y = _on_canvas(y, tl.load(tile + 1), tl.load(tile + 3), least, most_y)
    x = tl.where(is_bare, tl.where((number == 0) | (number == 3), x1, x2), x)
    y = tl.where(is_bare, tl.where(number < 2, y1, y2), y)
    return x.to(tl.float64), y.to(tl.float64)


@triton.jit
def _box_of_points(
    points, num, x1, y1, x2, y2, tile, least, most_x, most_y, matrix, width, height,
    PERSPECTIVE: tl.constexpr, X: tl.constexpr,
):  # fmt: skip
    """Box around the points along a polygon that are inside the output; zeros if none is right of x = 0.

    As in polygons.c, a point belongs to the edges between whose ends it lies. A point on a corner belongs to two, and
    rounding may shift the edge by one, so three edges are checked.
    """
    is_bare = num == 0
    num = tl.where(is_bare, 4, num).to(tl.int32)
    sample = tl.arange(0, X)
    along = sample.to(tl.float64)
    per_sample, per_edge = num.to(tl.float64) / STEPS, STEPS / num.to(tl.float64)
    near = (along * per_sample).to(tl.int32)
    low_x = tl.full((X,), float("inf"), tl.float64)
    low_y, high_x, high_y = low_x, -low_x, -low_x
    for shift in tl.static_range(3):
        edge = near + (shift - 1)
        number = edge.to(tl.float64)
        on = (sample <= STEPS) & (edge >= 0) & (edge < num)
        on = on & (number * per_edge <= along) & ((number + 1) * per_edge >= along)
        after = tl.where(edge + 1 < num, edge + 1, 0)
        ax, ay = _corner(points, edge, on, is_bare, x1, y1, x2, y2, tile, least, most_x, most_y)
        bx, by = _corner(points, after, on, is_bare, x1, y1, x2, y2, tile, least, most_x, most_y)
        if not PERSPECTIVE:
            ax, ay = _warped(ax, ay, matrix, False)
            bx, by = _warped(bx, by, matrix, False)
            on = on & ~(((ax < 0) & (bx < 0)) | ((ax > width) & (bx > width)))
            on = on & ~(((ay < 0) & (by < 0)) | ((ay > height) & (by > height)))
        share = along * per_sample - number
        x, y = ax + share * (bx - ax), ay + share * (by - ay)
        if PERSPECTIVE:
            x, y = _warped(x, y, matrix, True)
        on = on & (x >= 0) & (x <= width) & (y >= 0) & (y <= height)
        low_x, low_y = tl.where(on, tl.minimum(low_x, x), low_x), tl.where(on, tl.minimum(low_y, y), low_y)
        high_x, high_y = tl.where(on, tl.maximum(high_x, x), high_x), tl.where(on, tl.maximum(high_y, y), high_y)
    left, above, right, below = tl.min(low_x, 0), tl.min(low_y, 0), tl.max(high_x, 0), tl.max(high_y, 0)
    is_seen = right > 0
    return (
        tl.where(is_seen, left, 0.0),
        tl.where(is_seen, above, 0.0),
        tl.where(is_seen, right, 0.0),
        tl.where(is_seen, below, 0.0),
    )


@triton.jit
def _box_of_corners(x1, y1, x2, y2, matrix, width, height, PERSPECTIVE: tl.constexpr):
    """Box around the four warped corners of a box, clipped to the output."""
    x1, y1, x2, y2 = x1.to(tl.float64), y1.to(tl.float64), x2.to(tl.float64), y2.to(tl.float64)
    ax, ay = _warped(x1, y1, matrix, PERSPECTIVE)
    bx, by = _warped(x2, y1, matrix, PERSPECTIVE)
    cx, cy = _warped(x1, y2, matrix, PERSPECTIVE)
    dx, dy = _warped(x2, y2, matrix, PERSPECTIVE)
    left, right = tl.minimum(tl.minimum(ax, bx), tl.minimum(cx, dx)), tl.maximum(tl.maximum(ax, bx), tl.maximum(cx, dx))
    above, below = (
        tl.minimum(tl.minimum(ay, by), tl.minimum(cy, dy)),
        tl.maximum(tl.maximum(ay, by), tl.maximum(cy, dy)),
    )
    return _clipped(left, width), _clipped(above, height), _clipped(right, width), _clipped(below, height)


@triton.jit
def _clipped(x, most):
    return tl.minimum(tl.maximum(x, 0.0), most)


@triton.jit
def _is_candidate(x1, y1, x2, y2, scale, left, above, right, below, by_polygons):
    """`labels.are_trainable`; the box before the warp is float32, the one after it float64."""
    w1 = x2.to(tl.float64) * scale - x1.to(tl.float64) * scale
    h1 = y2.to(tl.float64) * scale - y1.to(tl.float64) * scale
    w2, h2 = right - left, below - above
    aspect = tl.maximum(w2 / (h2 + 1e-16), h2 / (w2 + 1e-16))
    share = w2 * h2 / (w1 * h1 + 1e-16)
    # Subtracted instead of compared: Triton rounds constants in a comparison to float32.
    enough = tl.where(by_polygons, share - LEAST_AREA_POLYGONS > 0, share - LEAST_AREA > 0)
    return (w2 > 2) & (h2 > 2) & enough & (aspect < 20)


@triton.jit
def _normalised(low, high, side, is_flipped):
    """Centre and size relative to a side, float32."""
    low, high = low.to(tl.float32), high.to(tl.float32)
    centre = tl.div_rn((low + high) * 0.5, side)
    return tl.where(is_flipped, 1 - centre, centre), tl.div_rn(high - low, side)


@triton.jit
def finish(
    rows, targets, count, class_box, first_point, points,
    label_tiles, num_tiles, canvas, matrices, scales, by_polygons, flip, width, height,
    PERSPECTIVE: tl.constexpr, X: tl.constexpr,
):  # fmt: skip
    """Turn rows int32 [T, 6] into targets float32 [T, 6], which may share their memory; program (row)."""
    row = tl.program_id(0).to(tl.int64) * 6
    code, label = tl.load(rows + row), tl.load(rows + row + 1).to(tl.int64)
    is_kept = code >= 0
    if code < 0:
        place = -1 - code
        sheet = place // NINE
        sample = sheet // 2
        tile, matrix = label_tiles + place.to(tl.int64) * 4, matrices + sheet.to(tl.int64) * 9
        is_plain = tl.load(num_tiles + sheet) == PLAIN
        least = tl.where(is_plain, float("-inf"), 0.0)
        most_x = tl.where(is_plain, float("inf"), tl.load(canvas + 2 * sheet).to(tl.float32))
        most_y = tl.where(is_plain, float("inf"), tl.load(canvas + 2 * sheet + 1).to(tl.float32))
        own = class_box + label * 5
        x, y = tl.load(own + 1), tl.load(own + 2)
        half_w, half_h = tl.load(own + 3) * 0.5, tl.load(own + 4) * 0.5
        x1 = _on_canvas(x - half_w, tl.load(tile), tl.load(tile + 2), least, most_x)
        x2 = _on_canvas(x + half_w, tl.load(tile), tl.load(tile + 2), least, most_x)
        y1 = _on_canvas(y - half_h, tl.load(tile + 1), tl.load(tile + 3), least, most_y)
        y2 = _on_canvas(y + half_h, tl.load(tile + 1), tl.load(tile + 3), least, most_y)
        wide, high = width.to(tl.float64), height.to(tl.float64)
        goes_by_polygons = tl.load(by_polygons + sheet) != 0
        if goes_by_polygons:
            begin = tl.load(first_point + label)
            left, above, right, below = _box_of_points(
                points + begin * 2, tl.load(first_point + label + 1) - begin, x1, y1, x2, y2,
                tile, least, most_x, most_y, matrix, wide, high, PERSPECTIVE, X,
            )  # fmt: skip
        else:
            left, above, right, below = _box_of_corners(x1, y1, x2, y2, matrix, wide, high, PERSPECTIVE)
        is_kept = _is_candidate(x1, y1, x2, y2, tl.load(scales + sheet), left, above, right, below, goes_by_polygons)
        cx, w = _normalised(left, right, width.to(tl.float32), tl.load(flip + 2 * sample + 1) != 0)
        cy, h = _normalised(above, below, height.to(tl.float32), tl.load(flip + 2 * sample) != 0)
        tl.store(targets + row, tl.where(is_kept, sample.to(tl.float32), -1.0))
        tl.store(targets + row + 1, tl.where(is_kept, tl.load(own), 0.0))
        tl.store(targets + row + 2, tl.where(is_kept, cx, 0.0))
        tl.store(targets + row + 3, tl.where(is_kept, cy, 0.0))
        tl.store(targets + row + 4, tl.where(is_kept, w, 0.0))
        tl.store(targets + row + 5, tl.where(is_kept, h, 0.0))
    tl.atomic_add(count, is_kept.to(tl.int32))


GEOMETRY = ("label_tiles", "num_tiles", "canvas", "matrix", "scale", "by_polygons", "flip")
"""Parameters of the kernel, in its order."""
POINTS_OF_PROGRAM = 1024
"""The smallest power of two that is not below the number of points along a polygon."""
NUM_WARPS = 8


class TritonLabels:
    """As `labels_torch.TorchLabels`, in one kernel."""

    def __init__(self, labels: DeviceLabels, *, perspective: bool) -> None:
        self._labels = labels
        self._perspective = perspective

    def __str__(self) -> str:
        return "one kernel"

    def __call__(self, row_T6: Tensor, params: Mapping[str, Tensor], out_wh: tuple[int, int], count: Tensor) -> Tensor:
        target_T6 = row_T6.view(torch.float32)
        if not len(row_T6):
            return target_T6
        finish[(len(row_T6),)](
            row_T6,
            target_T6,
            count,
            *self._labels,
            *(params[name] for name in GEOMETRY),
            *out_wh,
            self._perspective,
            POINTS_OF_PROGRAM,
            num_warps=NUM_WARPS,
            # Products are rounded before they are added, as on the CPU.
            enable_fp_fusion=False,
        )
        return target_T6
