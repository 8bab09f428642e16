"""Objects pasted over finished images, and polygons filled into masks, by Triton kernels: the bits of paste_torch.py.

Dimension key:  B samples   J masks   K polygons   BY BX rows and columns of a block
"""

import triton
import triton.language as tl
from torch import Tensor

from flatout.yolo.augment.gpu.paste_torch import ObjectsToPaste, PolygonsToFill
from flatout.yolo.augment.gpu.render_triton import colour_at, fetch_bgr, pixel_at, store_value

# Pasting: a program handles a block of pixels of one sample, object by object.
#
# An object is the inside of a polygon on a mosaic of four, scaled bilinearly. All arithmetic is in integers, so plain
# torch gives the same bits (paste_torch.py).

OBJECT_COLUMNS = tl.constexpr(12)


@triton.jit
def _scaled(d, cut, pasted):
    """First pixel of the cut-out for pasted pixel number d, and the weight of the next one in 1/2048."""
    doubled = tl.maximum((2 * d + 1) * cut - pasted, 0)
    first = doubled // (2 * pasted)
    return first, ((doubled - first * 2 * pasted) * 2048) // (2 * pasted)


@triton.jit
def test_edge(u, v, ax, ay, bx, by, odd, on):
    """`odd`: a ray from (u, v) to the right crosses an odd number of edges. `on`: (u, v) lies on an edge."""
    dx, dy = bx - ax, by - ay
    cross = dx * (v - ay) - (u - ax) * dy
    odd = odd ^ (((ay > v) != (by > v)) & tl.where(dy > 0, cross > 0, cross <= 0))
    near = 2 * tl.abs(cross) <= tl.maximum(tl.abs(dx), tl.abs(dy))
    beside = (u >= tl.minimum(ax, bx)) & (u <= tl.maximum(ax, bx))
    beside = beside & (v >= tl.minimum(ay, by)) & (v <= tl.maximum(ay, by))
    return odd, on | (near & beside)


@triton.jit
def _inside_polygon(points, num_points, u0, u1, v0, v1):
    """Whether (u0, v0), (u1, v0), (u0, v1) and (u1, v1) lie in the polygon or on one of its edges."""
    odd00 = u0 < u0
    odd10, odd01, odd11 = odd00, odd00, odd00
    on00, on10, on01, on11 = odd00, odd00, odd00, odd00
    for k in range(num_points):
        after = tl.where(k + 1 < num_points, k + 1, 0)
        ax, ay = tl.load(points + 2 * k), tl.load(points + 2 * k + 1)
        bx, by = tl.load(points + 2 * after), tl.load(points + 2 * after + 1)
        odd00, on00 = test_edge(u0, v0, ax, ay, bx, by, odd00, on00)
        odd10, on10 = test_edge(u1, v0, ax, ay, bx, by, odd10, on10)
        odd01, on01 = test_edge(u0, v1, ax, ay, bx, by, odd01, on01)
        odd11, on11 = test_edge(u1, v1, ax, ay, bx, by, odd11, on11)
    return odd00 | on00, odd10 | on10, odd01 | on01, odd11 | on11


@triton.jit
def _add(
    data, begin, kept_w, kept_h, column, row, in_polygon, weight, blue, green, red, SUBSAMPLED: tl.constexpr
):  # fmt: skip
    """Add one weighted pixel of an object to the sums: nothing outside its polygon, grey where that leaves the image.

    A value of 0 inside becomes 255, because 0 means that nothing covers the pixel.
    """
    in_picture = in_polygon & (column >= 0) & (column < kept_w) & (row >= 0) & (row < kept_h)
    at = pixel_at(begin, kept_w, row, column, SUBSAMPLED)
    b, g, r = fetch_bgr(data, at, colour_at(begin, kept_w, kept_h, row, column), in_picture, SUBSAMPLED)
    blue += tl.where(in_polygon, tl.where(b == 0, 255, b), 0) * weight
    green += tl.where(in_polygon, tl.where(g == 0, 255, g), 0) * weight
    red += tl.where(in_polygon, tl.where(r == 0, 255, r), 0) * weight
    return blue, green, red


@triton.jit
def paste(
    data, offsets, shapes, objects, points, spans, flip,
    out, stride_b, stride_c, stride_y, stride_x, height, width, blocks_x,
    SUBSAMPLED: tl.constexpr, AS_FLOAT: tl.constexpr, BY: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """Paste over out [B, 3, height, width], RGB; program (block of pixels, sample that is pasted into)."""
    block, span = tl.program_id(0), spans + tl.program_id(1) * 4
    sample, first, num = tl.load(span).to(tl.int64), tl.load(span + 1), tl.load(span + 2)
    points += tl.load(span + 3) * 2
    out_x = (block % blocks_x) * BX + tl.arange(0, BX)[None, :]
    out_y = (block // blocks_x) * BY + tl.arange(0, BY)[:, None]
    x = tl.where(tl.load(flip + sample * 2 + 1) != 0, width - 1 - out_x, out_x)
    y = tl.where(tl.load(flip + sample * 2) != 0, height - 1 - out_y, out_y)
    blue = tl.zeros((BY, BX), tl.int32)
    green, red = blue, blue
    for number in range(first, first + num):
        row = objects + number * OBJECT_COLUMNS
        px, py, pw, ph = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
        num_points = tl.load(row + 11)
        covered = (x >= px) & (x < px + pw) & (y >= py) & (y < py + ph)
        if tl.max(tl.max(covered.to(tl.int32), 1), 0) > 0:
            cut_x, cut_y, cut_w, cut_h = tl.load(row + 7), tl.load(row + 8), tl.load(row + 9), tl.load(row + 10)
            u, fu = _scaled(x - px, cut_w, pw)
            v, fv = _scaled(y - py, cut_h, ph)
            u0, u1 = cut_x + u + 0 * v, cut_x + tl.minimum(u + 1, cut_w - 1) + 0 * v
            v0, v1 = cut_y + v + 0 * u, cut_y + tl.minimum(v + 1, cut_h - 1) + 0 * u
            in00, in10, in01, in11 = _inside_polygon(points, num_points, u0, u1, v0, v1)
            in00, in10, in01, in11 = in00 & covered, in10 & covered, in01 & covered, in11 & covered
            begin = tl.load(offsets + number)
            kept_h, kept_w = tl.load(shapes + 3 * number).to(tl.int32), tl.load(shapes + 3 * number + 1).to(tl.int32)
            if SUBSAMPLED:
                kept_h = kept_h * 2 // 3
            u0, u1, v0, v1 = u0 - tl.load(row + 5), u1 - tl.load(row + 5), v0 - tl.load(row + 6), v1 - tl.load(row + 6)
            b = tl.full((BY, BX), 1 << 21, tl.int32)
            g, r = b, b
            b, g, r = _add(data, begin, kept_w, kept_h, u0, v0, in00, (2048 - fu) * (2048 - fv), b, g, r, SUBSAMPLED)
            b, g, r = _add(data, begin, kept_w, kept_h, u1, v0, in10, fu * (2048 - fv), b, g, r, SUBSAMPLED)
            b, g, r = _add(data, begin, kept_w, kept_h, u0, v1, in01, (2048 - fu) * fv, b, g, r, SUBSAMPLED)
            b, g, r = _add(data, begin, kept_w, kept_h, u1, v1, in11, fu * fv, b, g, r, SUBSAMPLED)
            # Later objects cover earlier ones, channel by channel, where they are not zero.
            blue = tl.where((b >> 22) > 0, b >> 22, blue)
            green = tl.where((g >> 22) > 0, g >> 22, green)
            red = tl.where((r >> 22) > 0, r >> 22, red)
        points += num_points * 2
    out += sample * stride_b + out_y.to(tl.int64) * stride_y + out_x * stride_x
    inside = (out_x < width) & (out_y < height)
    store_value(out, red, inside & (red > 0), AS_FLOAT)
    store_value(out + stride_c, green, inside & (green > 0), AS_FLOAT)
    store_value(out + 2 * stride_c, blue, inside & (blue > 0), AS_FLOAT)


BLOCK_ROWS = BLOCK_COLUMNS = 16
"""Pixels of a program: a small block, since most objects are small."""


def paste_objects(objects: ObjectsToPaste, images: Tensor) -> None:
    """As `paste_torch.paste_objects`, in one kernel."""
    _, _, height, width = images.shape
    across, down = -(-width // BLOCK_COLUMNS), -(-height // BLOCK_ROWS)
    paste[across * down, len(objects.host_spans_S4)](
        objects.sources.data,
        objects.sources.offsets,
        objects.sources.shapes,
        objects.object_KC,
        objects.point_P2,
        objects.spans_S4,
        objects.flip_B2,
        images,
        *images.stride(),
        height,
        width,
        across,
        objects.subsampled,
        images.is_floating_point(),
        BLOCK_ROWS,
        BLOCK_COLUMNS,
        num_warps=4,
    )


# Filling: a program handles a block of pixels of one polygon's box.

SPAN_COLUMNS = tl.constexpr(7)


@triton.jit
def fill(spans, points, masks, height, width, BY: tl.constexpr, BX: tl.constexpr):
    """Set masks [J, height, width] to 1 inside of polygons; program (block of pixels, polygon)."""
    block, row = tl.program_id(0), spans + tl.program_id(1) * SPAN_COLUMNS
    x1, y1, x2, y2 = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)
    across, down = (x2 - x1) // BX + 1, (y2 - y1) // BY + 1
    # There are as many blocks as the largest polygon has; smaller polygons need fewer.
    if block < across * down:
        x = x1 + (block % across) * BX + tl.arange(0, BX)[None, :]
        y = y1 + (block // across) * BY + tl.arange(0, BY)[:, None]
        u, v = x + 0 * y, y + 0 * x
        odd = u < u
        on = odd
        num = tl.load(row + 2)
        points += tl.load(row + 1) * 2
        for k in range(num):
            after = tl.where(k + 1 < num, k + 1, 0)
            ax, ay = tl.load(points + 2 * k), tl.load(points + 2 * k + 1)
            bx, by = tl.load(points + 2 * after), tl.load(points + 2 * after + 1)
            odd, on = test_edge(u, v, ax, ay, bx, by, odd, on)
        masks += tl.load(row).to(tl.int64) * height * width
        tl.store(masks + v * width + u, (u - u + 1).to(tl.uint8), mask=(odd | on) & (u <= x2) & (v <= y2))


FILL_ROWS = FILL_COLUMNS = 32
"""Pixels of a program."""


def fill_polygons(polygons: PolygonsToFill, masks: Tensor) -> None:
    """As `paste_torch.fill_polygons`, in one kernel."""
    sides_K2 = polygons.host_span_K7[:, 5:] - polygons.host_span_K7[:, 3:5]
    blocks_K2 = sides_K2 // [FILL_COLUMNS, FILL_ROWS] + 1
    fill[int(blocks_K2.prod(1).max()), len(sides_K2)](
        polygons.span_K7,
        polygons.point_P2,
        masks,
        *masks.shape[1:],
        FILL_ROWS,
        FILL_COLUMNS,
        num_warps=4,
    )
