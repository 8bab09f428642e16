"""Triton kernels of pooling.py, on channels_last maps. What torch's kernels store as 8-byte indices is found again
from the input (2 x 2) or stored in a byte (5 x 5).

Dimension key:  B pictures   H, W height and width of the input   h, w of the output   C channels
"""

import triton
import triton.language as tl


@triton.jit
def _corner(m, H, W, C, h, w):
    """Offset of the upper left input pixel of output pixel m."""
    y = (m // w) % h
    return (((m // (h * w)) * H + 2 * y) * W + 2 * (m % w)).to(tl.int64) * C


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def halve(x, z, num_pixels, H, W, C, h, w, BM: tl.constexpr, BC: tl.constexpr):
    """z = the largest of each 2 x 2 square."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (m < num_pixels)[:, None] & (c < C)[None, :]
    at = _corner(m, H, W, C, h, w)[:, None] + c[None, :]
    top = _largest(tl.load(x + at, mask=inside), tl.load(x + at + C, mask=inside))
    below = _largest(tl.load(x + at + W * C, mask=inside), tl.load(x + at + W * C + C, mask=inside))
    tl.store(z + m[:, None].to(tl.int64) * C + c[None, :], _largest(top, below), mask=inside)


@triton.jit
def halve_backward(x, dz, dx, num_pixels, H, W, C, h, w, dz_stride, BM: tl.constexpr, BC: tl.constexpr):
    """The gradient goes to the first of the largest, in reading order, as in torch."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (m < num_pixels)[:, None] & (c < C)[None, :]
    at = _corner(m, H, W, C, h, w)[:, None] + c[None, :]
    below = at + W * C
    v0, v1 = tl.load(x + at, mask=inside), tl.load(x + at + C, mask=inside)
    v2, v3 = tl.load(x + below, mask=inside), tl.load(x + below + C, mask=inside)
    gradient = tl.load(dz + m[:, None].to(tl.int64) * dz_stride + c[None, :], mask=inside)
    best = _largest(_largest(v0, v1), _largest(v2, v3))
    is0 = v0 == best
    is1 = (v1 == best) & ~is0
    is2 = (v2 == best) & ~(is0 | is1)
    is3 = ~(is0 | is1 | is2)
    tl.store(dx + at, tl.where(is0, gradient, 0.0), mask=inside)
    tl.store(dx + at + C, tl.where(is1, gradient, 0.0), mask=inside)
    tl.store(dx + below, tl.where(is2, gradient, 0.0), mask=inside)
    tl.store(dx + below + C, tl.where(is3, gradient, 0.0), mask=inside)


@triton.jit
def window(x, z, tap, num_pixels, H, W, C, K: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """z = the largest of the K x K window around each pixel; tap = its place in the window, a byte."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (m < num_pixels)[:, None] & (c < C)[None, :]
    column = m % W
    row = (m // W) % H
    best = tl.full((BM, BC), -float("inf"), tl.float32)
    where = tl.zeros((BM, BC), tl.int32)
    for dy in tl.static_range(K):
        for dx in tl.static_range(K):
            y, x_column = row + dy - K // 2, column + dx - K // 2
            there = (y >= 0) & (y < H) & (x_column >= 0) & (x_column < W)
            pixel = (m + (dy - K // 2) * W + dx - K // 2).to(tl.int64)
            value = tl.load(x + pixel[:, None] * C + c[None, :], mask=inside & there[:, None], other=-float("inf")).to(
                tl.float32
            )
            better = (value > best) | (value != value)
            best = tl.where(better, value, best)
            where = tl.where(better, dy * K + dx, where)
    at = m[:, None].to(tl.int64) * C + c[None, :]
    tl.store(z + at, best.to(z.dtype.element_ty), mask=inside)
    tl.store(tap + at, where.to(tl.uint8), mask=inside)


@triton.jit
def window_backward(
    dz, tap, dx_out, num_pixels, H, W, C, dz_stride, K: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr
):
    """Every pixel gathers from the windows that chose it: no atomics, so the same bits every time."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (m < num_pixels)[:, None] & (c < C)[None, :]
    column = m % W
    row = (m // W) % H
    total = tl.zeros((BM, BC), tl.float32)
    for dy in tl.static_range(K):
        for dx in tl.static_range(K):
            # The window around the pixel at (-dy, -dx) from here sees this one at (dy, dx) of its taps.
            y, x_column = row - (dy - K // 2), column - (dx - K // 2)
            there = inside & ((y >= 0) & (y < H) & (x_column >= 0) & (x_column < W))[:, None]
            pixel = (m - (dy - K // 2) * W - (dx - K // 2)).to(tl.int64)[:, None]
            chose = tl.load(tap + pixel * C + c[None, :], mask=there, other=255).to(tl.int32) == dy * K + dx
            gradient = tl.load(dz + pixel * dz_stride + c[None, :], mask=there & chose, other=0.0)
            total += gradient.to(tl.float32)
    tl.store(dx_out + m[:, None].to(tl.int64) * C + c[None, :], total.to(dx_out.dtype.element_ty), mask=inside)
