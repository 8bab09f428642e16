# mypy: disable-error-code="no-untyped-def"
"""How a GPU kernel finds a cell: its place unpacked, its layer's map, its offset there.

Kernels get up to four maps as pointers p0 to p3 and their shapes as a table (kernel_support.py). Function arguments
that end in _p are pointers; the rest are blocks of numbers.
"""

import triton
import triton.language as tl

from flatout.yolo.loss.kernel_support import FIELDS, MAX_KERNEL_LAYERS
from flatout.yolo.loss.matches import ANCHOR_BITS, LAYER_BITS, SIDE_BITS
from flatout.yolo.multihead.head_config import OBJECTNESS

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
    """The pointer of each element's layer."""
    return tl.where(layer < 2, tl.where(layer == 0, p0, p1), tl.where(layer == 2, p2, p3))


@triton.jit
def pack(layer, anchor, row, column):
    """Like matches.pack_place."""
    side = (row << _SIDE_BITS) | column
    return (((side << _ANCHOR_BITS) | anchor) << _LAYER_BITS) | layer


@triton.jit
def unpack(place):
    """Layer, anchor, row and column of a packed place, int32."""
    side = place >> _PLACE_BITS
    return place & _LAYER_MASK, (place >> _LAYER_BITS) & _ANCHOR_MASK, side >> _SIDE_BITS, side & _SIDE_MASK


@triton.jit
def layer_sides(table_p, layer):
    """Columns and rows of a layer's map, int32."""
    row_p = table_p + layer * _WIDTH
    return tl.load(row_p + _COLUMNS).to(tl.int32), tl.load(row_p + _ROWS).to(tl.int32)


@triton.jit
def cell_offsets(table_p, layer, image, anchor, row, column, ANCHORS: tl.constexpr, HEADS: tl.constexpr):
    """Where a cell's box lies in its layer's map, and how far behind it its objectness, in elements, int64;
    `first_class` says of classes.

    With HEADS (0: maps of a single head) the maps are joined, and image v is head v % HEADS of picture v // HEADS.
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
    """How many channels after a cell's box its classes begin: joined maps have no objectness in between."""
    return _OBJECTNESS + 1 if HEADS == 0 else _OBJECTNESS


@triton.jit
def is_own_class(heads_p, image, one_class, there, HEADS: tl.constexpr, CLASSES: tl.constexpr):
    """Which of the classes count for the head of each image: a block [image, class] from rows and columns of them."""
    if HEADS > 0:
        own_p = heads_p + (image % HEADS)[:, None] * (2 + CLASSES) + 2 + one_class
        there = there & (tl.load(own_p, mask=there, other=0.0) > 0)
    return there


@triton.jit
def channel_stride(table_p, layer):
    """Elements from one channel of a cell to the next, int64."""
    return tl.load(table_p + layer * _WIDTH + _CHANNEL)
