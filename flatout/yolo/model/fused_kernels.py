"""Triton kernels of fused.py, pooling.py and copies.py: batch norm with its activation, max-pooling, copies and sums.

All work on channels_last maps. Batch norm in training and the activation after it, on [M, C] rows of channels:

    forward    x -> sums per block -> mean, scale, shift; running statistics -> z = act(x * scale + shift)
    backward   x, dz -> sums per block -> weight and bias gradients, two factors -> dx

Each direction reads the maps twice and writes one, which is the minimum unless the convolution itself computes the
sums. It reads them backwards the second time, because the L2 cache still has their ends. Sums are taken block by block
in a fixed order, so the same input gives the same bits. Rows of x and dz may be slices of wider ones, x_stride and
dz_stride apart. Aligned maps are read with wide loads; parameters and running statistics need no alignment and may be
parts of one flat buffer.

Max-pooling: where torch stores 8-byte indices, the position of the maximum is recomputed from the input (2 x 2) or
stored in a byte (5 x 5).

Dimension key:  M = images x height x width   C channels   P blocks of rows
                H, W height and width of the input   h, w height and width of the output
"""

import triton
import triton.language as tl


@triton.jit
def _sigmoid(t, BY_TANH: tl.constexpr):
    if BY_TANH:
        # One instruction, with an error below 0.001: less than the resolution of a half precision map.
        tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [t * 0.5], tl.float32, True, 1)
        s = tanh * 0.5 + 0.5
    else:
        s = tl.sigmoid(t)
    return s


@triton.jit
def _activate(t, slope, ACT: tl.constexpr, BY_TANH: tl.constexpr):
    if ACT == 1:
        t = t * _sigmoid(t, BY_TANH)
    elif ACT == 2:
        t = tl.where(t > 0, t, t * slope)
    return t


@triton.jit
def _activate_backward(gradient, t, slope, ACT: tl.constexpr, BY_TANH: tl.constexpr):
    """Gradient with respect to the activation's input t."""
    if ACT == 1:
        s = _sigmoid(t, BY_TANH)
        gradient = gradient * (s + t * s * (1 - s))
    elif ACT == 2:
        gradient = tl.where(t > 0, gradient, gradient * slope)
    return gradient


@triton.jit(do_not_specialize=["M", "P", "rows_per_block"], do_not_specialize_on_alignment=["pivot"])
def sum_rows(x, pivot, sums, M, C, P, x_stride, rows_per_block, BM: tl.constexpr, BC: tl.constexpr):
    """Write sums [2, P, C]: the sums of x - pivot and of its square over the rows of a block.

    The pivot is any number near the mean, which keeps the difference of squares well conditioned.
    """
    block = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    near = tl.load(pivot + c, mask=c < C, other=0.0).to(tl.float32)
    total = tl.zeros((BM, BC), tl.float32)
    squares = tl.zeros((BM, BC), tl.float32)
    begin = block * rows_per_block
    x += begin.to(tl.int64) * x_stride
    num_rows = tl.minimum(rows_per_block, M - begin)
    for first in range(0, num_rows, BM):
        m = first + tl.arange(0, BM)
        inside = (m < num_rows)[:, None] & (c < C)[None, :]
        value = tl.load(x + m[:, None] * x_stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value - near[None, :], 0.0)
        total += value
        squares += value * value
    tl.store(sums + block * C + c, tl.sum(total, 0), mask=c < C)
    tl.store(sums + (P + block) * C + c, tl.sum(squares, 0), mask=c < C)


@triton.jit
def _add_up(sums, c, C, P, BP: tl.constexpr, BC: tl.constexpr):
    """Both sums over all blocks. In float64, because they are few and their difference matters."""
    first = tl.zeros((BP, BC), tl.float64)
    second = tl.zeros((BP, BC), tl.float64)
    for begin in range(0, P, BP):
        p = begin + tl.arange(0, BP)
        inside = (p < P)[:, None] & (c < C)[None, :]
        at = p[:, None] * C + c[None, :]
        first += tl.load(sums + at, mask=inside, other=0.0).to(tl.float64)
        second += tl.load(sums + P * C + at, mask=inside, other=0.0).to(tl.float64)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit(
    do_not_specialize=["M", "P"],
    do_not_specialize_on_alignment=["running_mean", "running_var", "counter", "weight", "bias"],
)
def finish_forward(
    sums, running_mean, running_var, counter, weight, bias, saved, M, C, P, eps, momentum,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write saved [4, C]: mean, 1 / deviation, scale, shift.

    Also updates the running mean and (unbiased) variance by momentum, and counts the batch. The running mean is the
    pivot of `sum_rows`; no other program reads the values that this one overwrites.
    """
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = c < C
    first, second = _add_up(sums, c, C, P, BP, BC)
    pivot = tl.load(running_mean + c, mask=inside, other=0.0).to(tl.float32)
    away = first / M
    var = second / M - away * away
    var = tl.where(var > 0, var, 0.0)
    mean = (pivot.to(tl.float64) + away).to(tl.float32)
    inverse = (1 / tl.sqrt(var + eps)).to(tl.float32)
    scale = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32) * inverse
    shift = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32) - mean * scale
    tl.store(saved + c, mean, mask=inside)
    tl.store(saved + C + c, inverse, mask=inside)
    tl.store(saved + 2 * C + c, scale, mask=inside)
    tl.store(saved + 3 * C + c, shift, mask=inside)
    old_var = tl.load(running_var + c, mask=inside, other=0.0).to(tl.float32)
    unbiased = (var * (M / (M - 1.0))).to(tl.float32)
    tl.store(running_mean + c, pivot + momentum * (mean - pivot), mask=inside)
    tl.store(running_var + c, old_var + momentum * (unbiased - old_var), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(counter, tl.load(counter) + 1)


@triton.jit(do_not_specialize=["M", "rows_per_block"])
def apply_forward(
    x, saved, z, M, C, x_stride, rows_per_block, slope,
    ACT: tl.constexpr, BY_TANH: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write z = act(x * scale + shift)."""
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    scale = tl.load(saved + 2 * C + c, mask=c < C, other=0.0)
    shift = tl.load(saved + 3 * C + c, mask=c < C, other=0.0)
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * rows_per_block
    x += begin.to(tl.int64) * x_stride
    z += begin.to(tl.int64) * C
    num_rows = tl.minimum(rows_per_block, M - begin)
    last = (num_rows - 1) // BM * BM
    for done in range(0, num_rows, BM):
        m = last - done + tl.arange(0, BM)
        inside = (m < num_rows)[:, None] & (c < C)[None, :]
        t = tl.load(x + m[:, None] * x_stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
        t = t * scale[None, :] + shift[None, :]
        tl.store(z + m[:, None] * C + c[None, :], _activate(t, slope, ACT, BY_TANH).to(z.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "P", "rows_per_block"])
def sum_gradients(
    x, dz, saved, sums, M, C, P, x_stride, dz_stride, rows_per_block, slope,
    ACT: tl.constexpr, BY_TANH: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write sums [2, P, C]: the sums of g = dz * act' and of g * (x - mean)."""
    block = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mean = tl.load(saved + c, mask=c < C, other=0.0)
    scale = tl.load(saved + 2 * C + c, mask=c < C, other=0.0)
    shift = tl.load(saved + 3 * C + c, mask=c < C, other=0.0)
    total = tl.zeros((BM, BC), tl.float32)
    products = tl.zeros((BM, BC), tl.float32)
    begin = block * rows_per_block
    x += begin.to(tl.int64) * x_stride
    dz += begin.to(tl.int64) * dz_stride
    num_rows = tl.minimum(rows_per_block, M - begin)
    for first in range(0, num_rows, BM):
        m = first + tl.arange(0, BM)
        inside = (m < num_rows)[:, None] & (c < C)[None, :]
        value = tl.load(x + m[:, None] * x_stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(dz + m[:, None] * dz_stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
        gradient = _activate_backward(gradient, value * scale[None, :] + shift[None, :], slope, ACT, BY_TANH)
        total += gradient
        products += gradient * (value - mean[None, :])
    tl.store(sums + block * C + c, tl.sum(total, 0), mask=c < C)
    tl.store(sums + (P + block) * C + c, tl.sum(products, 0), mask=c < C)


@triton.jit(do_not_specialize=["M", "P"])
def finish_backward(sums, saved, dweight, dbias, factors, M, C, P, BP: tl.constexpr, BC: tl.constexpr):
    """Write the weight and bias gradients, and factors [2, C]: dx = scale * g + factors[0] * x + factors[1]."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = c < C
    first, second = _add_up(sums, c, C, P, BP, BC)
    mean = tl.load(saved + c, mask=inside, other=0.0)
    inverse = tl.load(saved + C + c, mask=inside, other=0.0)
    scale = tl.load(saved + 2 * C + c, mask=inside, other=0.0)
    of_x = -scale * inverse * inverse * (second / M)
    tl.store(dbias + c, first.to(tl.float32), mask=inside)
    tl.store(dweight + c, (second * inverse).to(tl.float32), mask=inside)
    tl.store(factors + c, of_x.to(tl.float32), mask=inside)
    tl.store(factors + C + c, (-scale * (first / M) - of_x * mean).to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["M", "rows_per_block"])
def apply_backward(
    x, dz, saved, factors, dx, M, C, x_stride, dz_stride, rows_per_block, slope,
    ACT: tl.constexpr, BY_TANH: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write dx, whose rows are as far apart as those of x."""
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    scale = tl.load(saved + 2 * C + c, mask=c < C, other=0.0)
    shift = tl.load(saved + 3 * C + c, mask=c < C, other=0.0)
    of_x = tl.load(factors + c, mask=c < C, other=0.0)
    constant = tl.load(factors + C + c, mask=c < C, other=0.0)
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * rows_per_block
    x += begin.to(tl.int64) * x_stride
    dx += begin.to(tl.int64) * x_stride
    dz += begin.to(tl.int64) * dz_stride
    num_rows = tl.minimum(rows_per_block, M - begin)
    last = (num_rows - 1) // BM * BM
    for done in range(0, num_rows, BM):
        m = last - done + tl.arange(0, BM)
        inside = (m < num_rows)[:, None] & (c < C)[None, :]
        at = m[:, None] * x_stride + c[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(dz + m[:, None] * dz_stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
        gradient = _activate_backward(gradient, value * scale[None, :] + shift[None, :], slope, ACT, BY_TANH)
        result = gradient * scale[None, :] + (value * of_x[None, :] + constant[None, :])
        tl.store(dx + at, result.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _corner(m, H, W, C, h, w):
    """Offset of the upper left input pixel for output pixel m."""
    y = (m // w) % h
    return (((m // (h * w)) * H + 2 * y) * W + 2 * (m % w)).to(tl.int64) * C


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["num_pixels"])
def halve(x, z, num_pixels, H, W, C, h, w, BM: tl.constexpr, BC: tl.constexpr):
    """Write z: the maximum of each 2 x 2 square."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (m < num_pixels)[:, None] & (c < C)[None, :]
    at = _corner(m, H, W, C, h, w)[:, None] + c[None, :]
    top = _largest(tl.load(x + at, mask=inside), tl.load(x + at + C, mask=inside))
    below = _largest(tl.load(x + at + W * C, mask=inside), tl.load(x + at + W * C + C, mask=inside))
    tl.store(z + m[:, None].to(tl.int64) * C + c[None, :], _largest(top, below), mask=inside)


@triton.jit(do_not_specialize=["num_pixels"])
def halve_backward(x, dz, dx, num_pixels, H, W, C, h, w, dz_stride, BM: tl.constexpr, BC: tl.constexpr):
    """Write dx: the gradient goes to the first of equal maxima, in reading order, as in torch."""
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


@triton.jit(do_not_specialize=["num_pixels"])
def window(x, z, tap, num_pixels, LENGTH, STEP, C, K: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """Write z: the maximum of the K pixels around each one on a line; and tap: which of them it is, a byte.

    A line has LENGTH pixels that are STEP apart: 1 along rows. The maximum of a window is that of a column of maxima
    of rows, and the first of equal ones in reading order is found in the first row that has it.
    """
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (m < num_pixels)[:, None] & (c < C)[None, :]
    place = (m // STEP) % LENGTH
    at = m[:, None].to(tl.int64) * C + c[None, :]
    best = tl.full((BM, BC), -float("inf"), tl.float32)
    where = tl.zeros((BM, BC), tl.int32)
    for d in tl.static_range(K):
        there = inside & ((place + d - K // 2 >= 0) & (place + d - K // 2 < LENGTH))[:, None]
        value = tl.load(x + at + (d - K // 2) * STEP * C, mask=there, other=-float("inf")).to(tl.float32)
        better = (value > best) | (value != value)
        best = tl.where(better, value, best)
        where = tl.where(better, d, where)
    tl.store(z + at, best.to(z.dtype.element_ty), mask=inside)
    tl.store(tap + at, where.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["num_pixels"])
def window_backward(
    dz, tap, dx, num_pixels, LENGTH, STEP, C, dz_stride, K: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr
):
    """Write dx: each pixel gathers the gradients of the maxima that chose it. No atomics, so the same bits."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (m < num_pixels)[:, None] & (c < C)[None, :]
    place = (m // STEP) % LENGTH
    total = tl.zeros((BM, BC), tl.float32)
    for d in tl.static_range(K):
        # Around the pixel that is K // 2 - d from here, this pixel is number d.
        there = inside & ((place - d + K // 2 >= 0) & (place - d + K // 2 < LENGTH))[:, None]
        pixel = (m.to(tl.int64) - (d - K // 2) * STEP)[:, None]
        chose = tl.load(tap + pixel * C + c[None, :], mask=there, other=255).to(tl.int32) == d
        total += tl.load(dz + pixel * dz_stride + c[None, :], mask=there & chose, other=0.0).to(tl.float32)
    tl.store(dx + m[:, None].to(tl.int64) * C + c[None, :], total.to(dx.dtype.element_ty), mask=inside)


# Copies and sums


@triton.jit(do_not_specialize=["num_pixels"])
def double(x, z, num_pixels, W, C, BM: tl.constexpr, BC: tl.constexpr):
    """Write each pixel of x into a 2 x 2 square of z. The sizes are those of x."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (m < num_pixels)[:, None] & (c < C)[None, :]
    value = tl.load(x + m[:, None].to(tl.int64) * C + c[None, :], mask=inside)
    square = z + ((m // W).to(tl.int64) * 4 * W + 2 * (m % W))[:, None] * C + c[None, :]
    tl.store(square, value, mask=inside)
    tl.store(square + C, value, mask=inside)
    tl.store(square + 2 * W * C, value, mask=inside)
    tl.store(square + 2 * W * C + C, value, mask=inside)


@triton.jit(do_not_specialize=["num_pixels"])
def double_backward(dz, dx, num_pixels, W, C, dz_stride, BM: tl.constexpr, BC: tl.constexpr):
    """Write dx: the sum of each 2 x 2 square."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (m < num_pixels)[:, None] & (c < C)[None, :]
    square = dz + ((m // W).to(tl.int64) * 4 * W + 2 * (m % W))[:, None] * dz_stride + c[None, :]
    below = square + 2 * W * dz_stride
    total = tl.load(square, mask=inside).to(tl.float32) + tl.load(square + dz_stride, mask=inside).to(tl.float32)
    total += tl.load(below, mask=inside).to(tl.float32) + tl.load(below + dz_stride, mask=inside).to(tl.float32)
    tl.store(dx + m[:, None].to(tl.int64) * C + c[None, :], total.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _copy_columns(x, z, m, M, block, C, z_stride, BC: tl.constexpr):
    c = block * BC + tl.arange(0, BC)
    inside = (m < M)[:, None] & (c < C)[None, :]
    value = tl.load(x + m[:, None].to(tl.int64) * C + c[None, :], mask=inside)
    tl.store(z + m[:, None].to(tl.int64) * z_stride + c[None, :], value, mask=inside)


@triton.jit(do_not_specialize=["M"])
def join(x0, x1, x2, x3, z, M, C0, C1, C2, C3, z_stride, BM: tl.constexpr, BC: tl.constexpr):
    """Write the rows of up to four maps side by side into rows of z; a map that is missing has no channels."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    block = tl.program_id(1)
    end0 = tl.cdiv(C0, BC)
    end1 = end0 + tl.cdiv(C1, BC)
    end2 = end1 + tl.cdiv(C2, BC)
    if block < end0:
        _copy_columns(x0, z, m, M, block, C0, z_stride, BC)
    elif block < end1:
        _copy_columns(x1, z + C0, m, M, block - end0, C1, z_stride, BC)
    elif block < end2:
        _copy_columns(x2, z + C0 + C1, m, M, block - end1, C2, z_stride, BC)
    else:
        _copy_columns(x3, z + C0 + C1 + C2, m, M, block - end2, C3, z_stride, BC)


@triton.jit(do_not_specialize=["M"])
def add(
    x0, x1, x2, x3, z, M, C, stride0, stride1, stride2, stride3, NUM: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr
):
    """Write the sum of NUM maps, whose rows may be slices of wider ones."""
    m = (tl.program_id(0) * BM + tl.arange(0, BM))[:, None].to(tl.int64)
    c = (tl.program_id(1) * BC + tl.arange(0, BC))[None, :]
    inside = (m < M) & (c < C)
    total = tl.load(x0 + m * stride0 + c, mask=inside).to(tl.float32)
    total += tl.load(x1 + m * stride1 + c, mask=inside).to(tl.float32)
    if NUM > 2:
        total += tl.load(x2 + m * stride2 + c, mask=inside).to(tl.float32)
    if NUM > 3:
        total += tl.load(x3 + m * stride3 + c, mask=inside).to(tl.float32)
    tl.store(z + m * C + c, total.to(z.dtype.element_ty), mask=inside)
