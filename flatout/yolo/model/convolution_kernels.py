"""Triton kernels of convolutions.py: convolutions of channels_last maps for which cuDNN has no fast ones.

Products are summed in float32. Weight gradients are summed per program, and the programs' sums in a fixed order, so the
same input gives the same bits.

Dimension key:  M = images x height x width of the output   N output channels
                H, W height and width of the input   h, w of the output   S stride
"""

import triton
import triton.language as tl

from flatout.yolo.model.fused_kernels import _activate_backward

# The first convolution: 3 x 3 on three colours. The 27 values around a pixel are a row of a matrix, padded to 32.

_VALUES: tl.constexpr = tl.constexpr(27)
_ALL: tl.constexpr = tl.constexpr(0x7FFFFFF)
_BELOW_TOP: tl.constexpr = tl.constexpr(0x7FFFE00)
_ABOVE_BOTTOM: tl.constexpr = tl.constexpr(0x3FFFF)
_RIGHT_OF_EDGE: tl.constexpr = tl.constexpr(0x7E3F1F8)
_LEFT_OF_EDGE: tl.constexpr = tl.constexpr(0x0FC7E3F)
"""A bit for each of the 27 values, in the order row, column, colour: which ones are inside the image at an edge."""


@triton.jit
def _windows(x, m, M, H, W, h, w, S: tl.constexpr):
    """[BM, 32]: the values around the output pixels m; zeros outside of the image."""
    k = tl.arange(0, 32)
    column = m % w
    row = (m // w) % h
    top = ((m // (h * w)) * H + row * S - 1).to(tl.int64)
    first = (top * W + column * S - 1) * 3
    bits = tl.where(m < M, _ALL, 0)
    bits = tl.where(row == 0, bits & _BELOW_TOP, bits)
    bits = tl.where(row * S + 1 >= H, bits & _ABOVE_BOTTOM, bits)
    bits = tl.where(column == 0, bits & _RIGHT_OF_EDGE, bits)
    bits = tl.where(column * S + 1 >= W, bits & _LEFT_OF_EDGE, bits)
    inside = ((bits[:, None] >> k[None, :]) & 1) != 0
    return tl.load(x + first[:, None] + ((k // 9) * W * 3 + k % 9)[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["M"])
def stem(x, weight, y, M, H, W, h, w, S: tl.constexpr, N: tl.constexpr, BM: tl.constexpr):
    """Write y. The weight is [N, 3, 3, 3] in memory: channel, row, column, colour."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, N)
    k = tl.arange(0, 32)
    b = tl.load(weight + n[None, :] * _VALUES + k[:, None], mask=(k < _VALUES)[:, None], other=0.0)
    z = tl.dot(_windows(x, m, M, H, W, h, w, S), b)
    tl.store(y + m[:, None].to(tl.int64) * N + n[None, :], z.to(y.dtype.element_ty), mask=(m < M)[:, None])


@triton.jit(do_not_specialize=["M", "blocks"])
def stem_weight_gradient(x, dy, sums, M, H, W, h, w, blocks, S: tl.constexpr, N: tl.constexpr, BM: tl.constexpr):
    """Write sums [programs, N, 32]: the weight's gradient from `blocks` blocks of BM pixels."""
    n = tl.arange(0, N)
    total = tl.zeros((N, 32), tl.float32)
    for block in range(blocks):
        m = (tl.program_id(0) * blocks + block) * BM + tl.arange(0, BM)
        gradient = tl.load(dy + m[:, None].to(tl.int64) * N + n[None, :], mask=(m < M)[:, None], other=0.0)
        total = tl.dot(tl.trans(gradient), _windows(x, m, M, H, W, h, w, S), total)
    at = n[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(sums + tl.program_id(0) * N * 32 + at, total)


@triton.jit(do_not_specialize=["M", "blocks"])
def stem_weight_gradient_of_norm(
    x, y, dz, saved, factors, sums, M, H, W, h, w, blocks, dz_stride, slope,
    ACT: tl.constexpr, BY_TANH: tl.constexpr, S: tl.constexpr, N: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The same from the gradient dz of batch norm and activation: dy is computed as by `apply_backward`, not read."""
    n = tl.arange(0, N)
    scale = tl.load(saved + 2 * N + n)[None, :]
    shift = tl.load(saved + 3 * N + n)[None, :]
    of_y = tl.load(factors + n)[None, :]
    constant = tl.load(factors + N + n)[None, :]
    total = tl.zeros((N, 32), tl.float32)
    for block in range(blocks):
        m = (tl.program_id(0) * blocks + block) * BM + tl.arange(0, BM)
        inside = (m < M)[:, None]
        value = tl.load(y + m[:, None].to(tl.int64) * N + n[None, :], mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(dz + m[:, None].to(tl.int64) * dz_stride + n[None, :], mask=inside, other=0.0).to(tl.float32)
        gradient = _activate_backward(gradient, value * scale + shift, slope, ACT, BY_TANH)
        gradient = tl.where(inside, gradient * scale + (value * of_y + constant), 0.0).to(y.dtype.element_ty)
        total = tl.dot(tl.trans(gradient), _windows(x, m, M, H, W, h, w, S), total)
    at = n[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(sums + tl.program_id(0) * N * 32 + at, total)


# Predictions: 1 x 1 with a bias, where the number of output channels is odd for cuDNN (255 for the 80 classes of COCO)


@triton.jit(do_not_specialize=["M"])
def predictions(x, weight, bias, y, M, N, K, BK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr):
    """Write y [M, N] = x [M, K] * weight [N, K] + bias."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        a = tl.load(x + m[:, None].to(tl.int64) * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(weight + n[None, :] * K + k[:, None], mask=(n < N)[None, :] & (k < K)[:, None], other=0.0)
        total = tl.dot(a, b, total)
    total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    tl.store(y + m[:, None].to(tl.int64) * N + n[None, :], total.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def predictions_backward(dy, weight, dx, M, N, K, BK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr):
    """Write dx [M, K] = dy [M, N] * weight [N, K]. Programs of the same rows follow each other and share dy."""
    columns = tl.cdiv(K, BK)
    m = (tl.program_id(0) // columns) * BM + tl.arange(0, BM)
    k = (tl.program_id(0) % columns) * BK + tl.arange(0, BK)
    total = tl.zeros((BM, BK), tl.float32)
    for first in range(0, N, BN):
        n = first + tl.arange(0, BN)
        inside = (m < M)[:, None] & (n < N)[None, :]
        a = tl.load(dy + m[:, None].to(tl.int64) * N + n[None, :], mask=inside, other=0.0)
        b = tl.load(weight + n[:, None] * K + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
        total = tl.dot(a, b, total)
    inside = (m < M)[:, None] & (k < K)[None, :]
    tl.store(dx + m[:, None].to(tl.int64) * K + k[None, :], total.to(dx.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "blocks"])
def predictions_weight_gradient(
    x, dy, sums, bias_sums, M, N, K, blocks, BK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr
):
    """Write sums [programs, N, K] and bias_sums [programs, N]: the gradients from `blocks` blocks of BM pixels."""
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    program = tl.program_id(1)
    n = tl.arange(0, BN)
    total = tl.zeros((BN, BK), tl.float32)
    of_bias = tl.zeros((BN,), tl.float32)
    for block in range(blocks):
        m = (program * blocks + block) * BM + tl.arange(0, BM)
        inside = (m < M)[:, None] & (n < N)[None, :]
        gradient = tl.load(dy + m[:, None].to(tl.int64) * N + n[None, :], mask=inside, other=0.0)
        inside = (m < M)[:, None] & (k < K)[None, :]
        a = tl.load(x + m[:, None].to(tl.int64) * K + k[None, :], mask=inside, other=0.0)
        total = tl.dot(tl.trans(gradient), a, total)
        of_bias += tl.sum(gradient.to(tl.float32), 0)
    inside = (n < N)[:, None] & (k < K)[None, :]
    tl.store(sums + program.to(tl.int64) * N * K + n[:, None] * K + k[None, :], total, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(bias_sums + program * N + n, of_bias, mask=n < N)
