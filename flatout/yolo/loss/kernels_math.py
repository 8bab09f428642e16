# mypy: disable-error-code="no-untyped-def"
"""Functions used by the GPU kernels: loss functions with their derivatives, and the location of cells in the maps.

CIoU and binary cross-entropy, in float32, restate `paired_ciou` (boxes.py) and `_bce` (losses.py), which autograd
differentiates on the CPU.

Kernels get up to four maps as pointers p0 to p3 and their shapes as a table (kernel_support.py). A `place` is a packed
cell (matches.pack_cells). Function arguments that end in _p are pointers; the others are blocks of numbers.
"""

import math

import triton
import triton.language as tl

from flatout.yolo.boxes import EPSILON
from flatout.yolo.loss.kernel_support import FIELDS, MAX_KERNEL_LAYERS
from flatout.yolo.loss.matches import ANCHOR_BITS, LAYER_BITS, SIDE_BITS
from flatout.yolo.multihead.head_config import OBJECTNESS

# Loss functions and their derivatives

_EPSILON: tl.constexpr = tl.constexpr(EPSILON)
_ASPECT: tl.constexpr = tl.constexpr(4 / math.pi**2)
_QUARTER_TURN: tl.constexpr = tl.constexpr(math.pi / 2)
_EIGHTH_TURN: tl.constexpr = tl.constexpr(math.pi / 4)


@triton.jit
def decode(x, y, w, h, anchor_w, anchor_h):
    """Box from its logits, in cells, relative to the cell's corner: centre and size."""
    wide, high = 2 * tl.sigmoid(w), 2 * tl.sigmoid(h)
    return 2 * tl.sigmoid(x) - 0.5, 2 * tl.sigmoid(y) - 0.5, wide * wide * anchor_w, high * high * anchor_h


@triton.jit
def decode_gradient(x, y, w, h, anchor_w, anchor_h):
    """Derivatives of `decode`, each output with respect to its own logit."""
    sx, sy, sw, sh = tl.sigmoid(x), tl.sigmoid(y), tl.sigmoid(w), tl.sigmoid(h)
    along_x, along_y = 2 * sx * (1 - sx), 2 * sy * (1 - sy)
    return along_x, along_y, 8 * sw * sw * (1 - sw) * anchor_w, 8 * sh * sh * (1 - sh) * anchor_h


@triton.jit
def overlap(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2):
    """Intersection over union; 0 for two empty boxes."""
    wide = tl.maximum(tl.minimum(ax2, bx2) - tl.maximum(ax1, bx1), 0.0)
    high = tl.maximum(tl.minimum(ay2, by2) - tl.maximum(ay1, by1), 0.0)
    inter = wide * high
    union = (ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1) - inter
    return tl.where(union > 0, inter / union, 0.0)


@triton.jit
def ciou(x, y, w, h, true_x, true_y, true_w, true_h):
    """CIoU and its derivatives with respect to x, y, w and h of the first box; unused results cost nothing."""
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
    # Derivatives by the corners: only the inner or outer one of two sides contributes, equal sides half each.
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
    """Derivative of max(a, b) with respect to a."""
    return tl.where(a > b, 1.0, tl.where(a == b, 0.5, 0.0))


@triton.jit
def _touch(gap):
    """Derivative of max(gap, 0)."""
    return tl.where(gap >= 0, 1.0, 0.0)


@triton.jit
def _arctan(x):
    """Arc tangent of x >= 0 with float32 accuracy (Cephes). Triton's interpreter does not have CUDA's function."""
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
    # log(1 + small) would lose the digits of `small`, and most cells are confidently empty.
    series = small * (1 - small * (0.5 - small * (0.33333333 - small * 0.25)))
    soft = tl.where(small < 0.02, series, tl.log(1 + small)) + tl.maximum(-z, 0.0)
    loss = (1 - true) * z + (1 + (positive_weight - 1) * true) * soft
    if FOCAL:
        loss = loss * _focus(true, tl.sigmoid(z), gamma)
    return loss


@triton.jit
def bce_gradient(z, true, positive_weight, gamma, FOCAL: tl.constexpr):
    """Derivative of `bce` with respect to z."""
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
    """The focal factor: near 0 where the prediction is already correct."""
    wrong = true * (1 - sure) + (1 - true) * sure
    power = tl.where(wrong > 0, tl.exp(gamma * tl.log(wrong)), 0.0)
    return (0.25 * true + 0.75 * (1 - true)) * power


# Location of cells in the maps

_LAYER_BITS: tl.constexpr = tl.constexpr(LAYER_BITS)
_ANCHOR_BITS: tl.constexpr = tl.constexpr(ANCHOR_BITS)
_SIDE_BITS: tl.constexpr = tl.constexpr(SIDE_BITS)
_PLACE_BITS: tl.constexpr = tl.constexpr(LAYER_BITS + ANCHOR_BITS)
_LAYER_MASK: tl.constexpr = tl.constexpr((1 << LAYER_BITS) - 1)
_ANCHOR_MASK: tl.constexpr = tl.constexpr((1 << ANCHOR_BITS) - 1)
_SIDE_MASK: tl.constexpr = tl.constexpr((1 << SIDE_BITS) - 1)
_OBJECTNESS: tl.constexpr = tl.constexpr(OBJECTNESS)
_HEAD_ROWS: tl.constexpr = tl.constexpr(MAX_KERNEL_LAYERS)
_WIDTH: tl.constexpr = tl.constexpr(len(FIELDS))
_COLUMNS: tl.constexpr = tl.constexpr(FIELDS.index("columns"))
_ROWS: tl.constexpr = tl.constexpr(FIELDS.index("rows"))
_IMAGE: tl.constexpr = tl.constexpr(FIELDS.index("image_stride"))
_ANCHOR: tl.constexpr = tl.constexpr(FIELDS.index("anchor_stride"))
_ROW: tl.constexpr = tl.constexpr(FIELDS.index("row_stride"))
_COLUMN: tl.constexpr = tl.constexpr(FIELDS.index("column_stride"))
_CHANNEL: tl.constexpr = tl.constexpr(FIELDS.index("channel_stride"))


@triton.jit
def of_layer(layer, p0, p1, p2, p3):
    """Pointer to the map of each element's layer."""
    return tl.where(layer < 2, tl.where(layer == 0, p0, p1), tl.where(layer == 2, p2, p3))


@triton.jit
def pack(layer, anchor, row, column):
    """Like matches.pack_cells."""
    side = (row << _SIDE_BITS) | column
    return (((side << _ANCHOR_BITS) | anchor) << _LAYER_BITS) | layer


@triton.jit
def unpack(place):
    """Layer, anchor, row and column of a packed cell, int32."""
    side = place >> _PLACE_BITS
    return place & _LAYER_MASK, (place >> _LAYER_BITS) & _ANCHOR_MASK, side >> _SIDE_BITS, side & _SIDE_MASK


@triton.jit
def layer_sides(table_p, layer):
    """Columns and rows of a layer's map, int32."""
    row_p = table_p + layer * _WIDTH
    return tl.load(row_p + _COLUMNS).to(tl.int32), tl.load(row_p + _ROWS).to(tl.int32)


@triton.jit
def cell_offsets(table_p, layer, image, anchor, row, column, ANCHORS: tl.constexpr, HEADS: tl.constexpr):
    """Offset of a cell's box in its layer's map, and distance from there to its objectness, in elements, int64; see
    `first_class` for the classes.

    With HEADS > 0 the maps are joined, and head image v is head v % HEADS of image v // HEADS; 0 is for maps of a
    single head.
    """
    row_p = table_p + layer * _WIDTH
    if HEADS == 0:
        box = image.to(tl.int64) * tl.load(row_p + _IMAGE) + anchor * tl.load(row_p + _ANCHOR)
        box = box + row * tl.load(row_p + _ROW) + column * tl.load(row_p + _COLUMN)
        to_objectness = _OBJECTNESS * tl.load(row_p + _CHANNEL)
    else:
        head_p = table_p + (_HEAD_ROWS + image % HEADS) * _WIDTH
        channel = tl.load(head_p) + anchor * tl.load(head_p + 1)
        box = (image // HEADS).to(tl.int64) * tl.load(row_p + _IMAGE) + channel * tl.load(row_p + _CHANNEL)
        box = box + row * tl.load(row_p + _ROW) + column * tl.load(row_p + _COLUMN)
        to_objectness = (tl.load(head_p + 2) + anchor - channel) * tl.load(row_p + _CHANNEL)
    return box, to_objectness


@triton.jit
def first_class(HEADS: tl.constexpr):
    """Channels from a cell's box to its first class: joined maps have no objectness in between."""
    return _OBJECTNESS + 1 if HEADS == 0 else _OBJECTNESS


@triton.jit
def is_own_class(heads_p, image, one_class, there, HEADS: tl.constexpr, CLASSES: tl.constexpr):
    """Which classes belong to the head of each image, as a block [image, class]; also false where `there` is false."""
    if HEADS > 0:
        own_p = heads_p + (image % HEADS)[:, None] * (2 + CLASSES) + 2 + one_class
        there = there & (tl.load(own_p, mask=there, other=0.0) > 0)
    return there


@triton.jit
def channel_stride(table_p, layer):
    """Stride between the channels of a cell in elements, int64."""
    return tl.load(table_p + layer * _WIDTH + _CHANNEL)
