# mypy: disable-error-code="no-untyped-def"
"""The loss functions inside GPU kernels, with their derivatives: CIoU and binary cross-entropy, float32.

They restate `paired_ciou` (boxes.py) and `_bce` (terms.py), which autograd differentiates on the CPU.
"""

import math

import triton
import triton.language as tl

from flatout.yolo.boxes import EPSILON

_EPSILON: tl.constexpr = tl.constexpr(EPSILON)
_ASPECT: tl.constexpr = tl.constexpr(4 / math.pi**2)
_QUARTER_TURN: tl.constexpr = tl.constexpr(math.pi / 2)
_EIGHTH_TURN: tl.constexpr = tl.constexpr(math.pi / 4)


@triton.jit
def decode(x, y, w, h, anchor_w, anchor_h):
    """Box logits to a box in cells, relative to the cell's corner: centre and size."""
    wide, high = 2 * tl.sigmoid(w), 2 * tl.sigmoid(h)
    return 2 * tl.sigmoid(x) - 0.5, 2 * tl.sigmoid(y) - 0.5, wide * wide * anchor_w, high * high * anchor_h


@triton.jit
def decode_gradient(x, y, w, h, anchor_w, anchor_h):
    """Derivatives of `decode`, each output by its own logit."""
    sx, sy, sw, sh = tl.sigmoid(x), tl.sigmoid(y), tl.sigmoid(w), tl.sigmoid(h)
    along_x, along_y = 2 * sx * (1 - sx), 2 * sy * (1 - sy)
    return along_x, along_y, 8 * sw * sw * (1 - sw) * anchor_w, 8 * sh * sh * (1 - sh) * anchor_h


@triton.jit
def ciou(x, y, w, h, true_x, true_y, true_w, true_h):
    """CIoU and its derivatives by x, y, w and h of the first box; what is not used costs nothing."""
    x1, x2, y1, y2 = x - w / 2, x + w / 2, y - h / 2, y + h / 2
    u1, u2, v1, v2 = true_x - true_w / 2, true_x + true_w / 2, true_y - true_h / 2, true_y + true_h / 2
    gap_w = tl.minimum(x2, u2) - tl.maximum(x1, u1)
    gap_h = tl.minimum(y2, v2) - tl.maximum(y1, v1)
    common_w, common_h = tl.maximum(gap_w, 0.0), tl.maximum(gap_h, 0.0)
    inter = common_w * common_h
    w1, h1, w2, h2 = x2 - x1, y2 - y1 + _EPSILON, u2 - u1, v2 - v1 + _EPSILON
    union = w1 * h1 + w2 * h2 - inter + _EPSILON
    iou = inter / union
    hull_w = tl.maximum(x2, u2) - tl.minimum(x1, u1)
    hull_h = tl.maximum(y2, v2) - tl.minimum(y1, v1)
    diagonal = hull_w * hull_w + hull_h * hull_h + _EPSILON
    way_x, way_y = u1 + u2 - x1 - x2, v1 + v2 - y1 - y2
    distance = (way_x * way_x + way_y * way_y) / 4 / diagonal
    slope = w1 / (h1 + _EPSILON)
    angle = _arctan(w2 / (h2 + _EPSILON)) - _arctan(slope)
    aspect = _ASPECT * angle * angle
    weight = aspect / (aspect - iou + (1 + _EPSILON))
    value = iou - (distance + aspect * weight)
    # By the corners; a side that is not the inner or outer one of the two has no part, equal sides share it.
    inter_x1, inter_x2 = -_larger(x1, u1) * _touch(gap_w) * common_h, _larger(u2, x2) * _touch(gap_w) * common_h
    inter_y1, inter_y2 = -_larger(y1, v1) * _touch(gap_h) * common_w, _larger(v2, y2) * _touch(gap_h) * common_w
    by_x1 = ((1 + iou) * inter_x1 + iou * h1) / union
    by_x2 = ((1 + iou) * inter_x2 - iou * h1) / union
    by_y1 = ((1 + iou) * inter_y1 + iou * w1) / union
    by_y2 = ((1 + iou) * inter_y2 - iou * w1) / union
    by_x1 += way_x / 2 / diagonal - 2 * distance * hull_w / diagonal * _larger(u1, x1)
    by_x2 += way_x / 2 / diagonal + 2 * distance * hull_w / diagonal * _larger(x2, u2)
    by_y1 += way_y / 2 / diagonal - 2 * distance * hull_h / diagonal * _larger(v1, y1)
    by_y2 += way_y / 2 / diagonal + 2 * distance * hull_h / diagonal * _larger(y2, v2)
    by_slope = weight * 2 * _ASPECT * angle / (1 + slope * slope)
    by_w = (by_x2 - by_x1) / 2 + by_slope / (h1 + _EPSILON)
    by_h = (by_y2 - by_y1) / 2 - by_slope * slope / (h1 + _EPSILON)
    return value, by_x1 + by_x2, by_y1 + by_y2, by_w, by_h


@triton.jit
def _larger(a, b):
    """Derivative of max(a, b) by a."""
    return tl.where(a > b, 1.0, tl.where(a == b, 0.5, 0.0))


@triton.jit
def _touch(gap):
    """Derivative of max(gap, 0)."""
    return tl.where(gap >= 0, 1.0, 0.0)


@triton.jit
def _arctan(x):
    """Arc tangent of x >= 0, good to float32 (Cephes). CUDA's own is not there in Triton's interpreter."""
    steep, middle = x > 2.414213562373095, x > 0.4142135623730950
    rest = tl.where(steep, -1.0 / x, tl.where(middle, (x - 1) / (x + 1), x))
    begin = tl.where(steep, _QUARTER_TURN, tl.where(middle, _EIGHTH_TURN, 0.0))
    s = rest * rest
    series = ((8.05374449538e-2 * s - 1.38776856032e-1) * s + 1.99777106478e-1) * s - 3.33329491539e-1
    return begin + (series * s * rest + rest)


@triton.jit
def bce(z, true, positive_weight, gamma, FOCAL: tl.constexpr):
    """Binary cross-entropy of logits z."""
    small = tl.exp(-tl.abs(z))
    # log(1 + small) would lose the digits of a small `small`, and most cells are sure to be empty.
    series = small * (1 - small * (0.5 - small * (0.33333333 - small * 0.25)))
    soft = tl.where(small < 0.02, series, tl.log(1 + small)) + tl.maximum(-z, 0.0)
    loss = (1 - true) * z + (1 + (positive_weight - 1) * true) * soft
    if FOCAL:
        loss = loss * _focus(true, tl.sigmoid(z), gamma)
    return loss


@triton.jit
def bce_gradient(z, true, positive_weight, gamma, FOCAL: tl.constexpr):
    """Derivative of `bce` by z."""
    sure = tl.sigmoid(z)
    slope = (sure - true) - (positive_weight - 1) * true * (1 - sure)
    if FOCAL:
        wrong = true * (1 - sure) + (1 - true) * sure
        by_wrong = tl.where(wrong > 0, gamma * (1 - 2 * true) * sure * (1 - sure) / wrong, 0.0)
        loss = bce(z, true, positive_weight, gamma, False)
        slope = (slope + loss * by_wrong) * _focus(true, sure, gamma)
    return slope


@triton.jit
def _focus(true, sure, gamma):
    """The focal factor: near 0 where the network is right already."""
    wrong = true * (1 - sure) + (1 - true) * sure
    power = tl.where(wrong > 0, tl.exp(gamma * tl.log(wrong)), 0.0)
    return (0.25 * true + 0.75 * (1 - true)) * power
