"""Images of a batch rendered from parameters by one Triton kernel, directly into the network's input.

The bits are those of render_torch.py; bench/augment_gpu.py measures the speed.

Dimension key:  B samples   H W output   BY BX rows and columns of a block
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.feed import Sources
from flatout.yolo.augment.gpu import chroma
from flatout.yolo.augment.gpu.render_torch import color_tables, reciprocals

# The Triton kernel: a program paints a block of output pixels of one sample.
#
#     output pixel -> flip -> position on the canvas in 1/32 pixel -> tile there -> four pixels of its image, weighted
#                  -> mixed with the second canvas, if there is one -> hue, saturation, value by tables -> RGB in out
#
# Everything in between is in registers: twelve bytes are read and three values written per pixel and canvas. The
# rounding is that of render_torch.py, step by step, so the bits are the same; products must not be fused with sums
# (enable_fp_fusion=False), since torch rounds between them.

ROUNDER = tl.constexpr(1.5 * 2.0**52)
"""Added to a double and subtracted again, it leaves the nearest integer, halves to even."""
FARTHEST = tl.constexpr(2.0**31 - 128)
GREY = tl.constexpr(114)
RED_BY_CR, GREEN_BY_CR = tl.constexpr(chroma.RED_BY_CR), tl.constexpr(chroma.GREEN_BY_CR)
GREEN_BY_CB, BLUE_BY_CB = tl.constexpr(chroma.GREEN_BY_CB), tl.constexpr(chroma.BLUE_BY_CB)
SHIFT, HALF = tl.constexpr(chroma.SHIFT), tl.constexpr(chroma.HALF)


@triton.jit
def _rounded(x):
    return ((x + ROUNDER) - ROUNDER).to(tl.int32)


@triton.jit
def _place(inverse, x, y, PERSPECTIVE: tl.constexpr):
    """Canvas x and y of output pixels (x [1, BX], y [BY, 1], float64), in 1/32 pixel, int32 [BY, BX]."""
    a, b, c = tl.load(inverse), tl.load(inverse + 1), tl.load(inverse + 2)
    d, e, f = tl.load(inverse + 3), tl.load(inverse + 4), tl.load(inverse + 5)
    if PERSPECTIVE:
        w = tl.load(inverse + 6) * x + tl.load(inverse + 7) * y + tl.load(inverse + 8)
        scale = tl.where(w != 0, 32.0 / tl.where(w != 0, w, 1.0), 0.0)
        across = tl.minimum(tl.maximum((a * x + b * y + c) * scale, -FARTHEST), FARTHEST)
        down = tl.minimum(tl.maximum((d * x + e * y + f) * scale, -FARTHEST), FARTHEST)
        return _rounded(across), _rounded(down)
    # The parts of columns and rows are rounded separately, to 1/1024, as in OpenCV.
    across = (_rounded((b * y + c) * 1024) + 16) + _rounded(a * x * 1024)
    down = (_rounded((e * y + f) * 1024) + 16) + _rounded(d * x * 1024)
    return across >> 5, down >> 5


@triton.jit
def pixel_at(begin, kept_w, row, column, SUBSAMPLED: tl.constexpr):
    return begin + row * kept_w + column if SUBSAMPLED else begin + (row * kept_w + column) * 3


@triton.jit
def colour_at(begin, kept_w, kept_h, row, column):
    """Offset of a pixel's colour in an image that is stored as chroma.py describes."""
    return begin + (kept_h + (row >> 1)) * kept_w + (column & -2)


@triton.jit
def _find(offsets, shapes, tiles, canvas, num_tiles, x, y, SUBSAMPLED: tl.constexpr):
    """Offsets in the data of the canvas pixels (x, y), (x + 1, y), (x, y + 1) and (x + 1, y + 1), int64; -1: no tile.

    Then, in the same order, the offsets of their colours, if these are subsampled.
    """
    width, height = tl.load(canvas), tl.load(canvas + 1)
    at = tl.full(x.shape, -1, tl.int64)
    at_right, at_below, at_both = at, at, at
    colour, colour_right, colour_below, colour_both = at, at, at, at
    for k in range(num_tiles):
        tile_x, tile_y = tl.load(tiles + 4 * k), tl.load(tiles + 4 * k + 1)
        # The part of the tile on the canvas; these are scalars, so they cost next to nothing.
        begin_x, end_x = tl.maximum(tile_x, 0), tl.minimum(tile_x + tl.load(tiles + 4 * k + 2), width)
        begin_y, end_y = tl.maximum(tile_y, 0), tl.minimum(tile_y + tl.load(tiles + 4 * k + 3), height)
        in_x, in_x1 = (x >= begin_x) & (x < end_x), (x >= begin_x - 1) & (x < end_x - 1)
        in_y, in_y1 = (y >= begin_y) & (y < end_y), (y >= begin_y - 1) & (y < end_y - 1)
        # A single image may be laid out one pixel larger than it is stored: its last row or column is then repeated.
        kept_h, kept_w = tl.load(shapes + 3 * k).to(tl.int32), tl.load(shapes + 3 * k + 1).to(tl.int32)
        if SUBSAMPLED:
            kept_h = kept_h * 2 // 3
        row, row1 = tl.minimum(y - tile_y, kept_h - 1), tl.minimum(y - tile_y + 1, kept_h - 1)
        column, column1 = tl.minimum(x - tile_x, kept_w - 1), tl.minimum(x - tile_x + 1, kept_w - 1)
        begin = tl.load(offsets + k)
        at = tl.where(in_x & in_y, pixel_at(begin, kept_w, row, column, SUBSAMPLED), at)
        at_right = tl.where(in_x1 & in_y, pixel_at(begin, kept_w, row, column1, SUBSAMPLED), at_right)
        at_below = tl.where(in_x & in_y1, pixel_at(begin, kept_w, row1, column, SUBSAMPLED), at_below)
        at_both = tl.where(in_x1 & in_y1, pixel_at(begin, kept_w, row1, column1, SUBSAMPLED), at_both)
        if SUBSAMPLED:
            colour = tl.where(in_x & in_y, colour_at(begin, kept_w, kept_h, row, column), colour)
            colour_right = tl.where(in_x1 & in_y, colour_at(begin, kept_w, kept_h, row, column1), colour_right)
            colour_below = tl.where(in_x & in_y1, colour_at(begin, kept_w, kept_h, row1, column), colour_below)
            colour_both = tl.where(in_x1 & in_y1, colour_at(begin, kept_w, kept_h, row1, column1), colour_both)
    return at, at_right, at_below, at_both, colour, colour_right, colour_below, colour_both


@triton.jit
def _within(value):
    return tl.minimum(tl.maximum(value, 0), 255)


@triton.jit
def fetch_bgr(data, at, colour, there, SUBSAMPLED: tl.constexpr):
    """Blue, green and red of the pixels at offsets `at`, int32; grey where `there` is false.

    SUBSAMPLED: brightness is at `at`, Cb and Cr are at `colour`.
    """
    if SUBSAMPLED:
        y = tl.load(data + at, mask=there, other=GREY).to(tl.int32)
        cb = tl.load(data + colour, mask=there, other=128).to(tl.int32) - 128
        cr = tl.load(data + colour + 1, mask=there, other=128).to(tl.int32) - 128
        blue = _within(y + ((BLUE_BY_CB * cb + HALF) >> SHIFT))
        green = _within(y + ((GREEN_BY_CB * cb + GREEN_BY_CR * cr + HALF) >> SHIFT))
        red = _within(y + ((RED_BY_CR * cr + HALF) >> SHIFT))
    else:
        blue = tl.load(data + at, mask=there, other=GREY).to(tl.int32)
        green = tl.load(data + at + 1, mask=there, other=GREY).to(tl.int32)
        red = tl.load(data + at + 2, mask=there, other=GREY).to(tl.int32)
    return blue, green, red


@triton.jit
def _add(data, at, colour, weight, blue, green, red, SUBSAMPLED: tl.constexpr):
    b, g, r = fetch_bgr(data, at, colour, at >= 0, SUBSAMPLED)
    return blue + b * weight, green + g * weight, red + r * weight


@triton.jit
def _is_copied(mask, number, width, height, x, y):
    """Whether the canvas pixel (x, y) is pasted again, mirrored."""
    there = (number >= 0) & (x >= 0) & (x < width) & (y >= 0) & (y < height)
    return tl.load(mask + y * width + x, mask=there, other=0) > 0


@triton.jit
def _add_copied(
    data, at, colour, over, over_colour, copied, weight, blue, green, red, SUBSAMPLED: tl.constexpr
):  # fmt: skip
    """Add the mirrored pixel's value where it is copied and not zero, else the pixel's own."""
    b, g, r = fetch_bgr(data, at, colour, at >= 0, SUBSAMPLED)
    other_b, other_g, other_r = fetch_bgr(data, over, over_colour, (over >= 0) & copied, SUBSAMPLED)
    blue += tl.where(copied & (other_b > 0), other_b, b) * weight
    green += tl.where(copied & (other_g > 0), other_g, g) * weight
    red += tl.where(copied & (other_r > 0), other_r, r) * weight
    return blue, green, red


@triton.jit
def _paint(
    data, offsets, shapes, tiles, canvas, inverse, num_tiles, masks, mask_of, x, y,
    PERSPECTIVE: tl.constexpr, COPIES: tl.constexpr, SUBSAMPLED: tl.constexpr,
):  # fmt: skip
    """Blue, green and red of one canvas, int32 [BY, BX] each."""
    across, down = _place(inverse, x, y, PERSPECTIVE)
    fx, fy = across & 31, down & 31
    across, down = across >> 5, down >> 5
    at, at_r, at_b, at_br, hue, hue_r, hue_b, hue_br = _find(
        offsets, shapes, tiles, canvas, num_tiles, across, down, SUBSAMPLED
    )
    blue = tl.full(fx.shape, 512, tl.int32)
    green, red = blue, blue
    if COPIES:
        width, height = tl.load(canvas), tl.load(canvas + 1)
        number = tl.load(mask_of)
        mask = masks + number.to(tl.int64) * width * height
        # The mirror image of the pixel to the right is to the left.
        left = width - 2 - across
        over, over_r, over_b, over_br = at, at_r, at_b, at_br
        tint, tint_r, tint_b, tint_br = hue, hue_r, hue_b, hue_br
        if number >= 0:
            over_r, over, over_br, over_b, tint_r, tint, tint_br, tint_b = _find(
                offsets, shapes, tiles, canvas, num_tiles, left, down, SUBSAMPLED
            )
        copied = _is_copied(mask, number, width, height, left + 1, down)
        copied_r = _is_copied(mask, number, width, height, left, down)
        copied_b = _is_copied(mask, number, width, height, left + 1, down + 1)
        copied_br = _is_copied(mask, number, width, height, left, down + 1)
        weight, weight_r, weight_b, weight_br = (32 - fx) * (32 - fy), fx * (32 - fy), (32 - fx) * fy, fx * fy
        blue, green, red = _add_copied(
            data, at, hue, over, tint, copied, weight, blue, green, red, SUBSAMPLED
        )  # fmt: skip
        blue, green, red = _add_copied(
            data, at_r, hue_r, over_r, tint_r, copied_r, weight_r, blue, green, red, SUBSAMPLED
        )
        blue, green, red = _add_copied(
            data, at_b, hue_b, over_b, tint_b, copied_b, weight_b, blue, green, red, SUBSAMPLED
        )
        blue, green, red = _add_copied(
            data, at_br, hue_br, over_br, tint_br, copied_br, weight_br, blue, green, red, SUBSAMPLED
        )
    else:
        blue, green, red = _add(data, at, hue, (32 - fx) * (32 - fy), blue, green, red, SUBSAMPLED)
        blue, green, red = _add(data, at_r, hue_r, fx * (32 - fy), blue, green, red, SUBSAMPLED)
        blue, green, red = _add(data, at_b, hue_b, (32 - fx) * fy, blue, green, red, SUBSAMPLED)
        blue, green, red = _add(data, at_br, hue_br, fx * fy, blue, green, red, SUBSAMPLED)
    return blue >> 10, green >> 10, red >> 10


@triton.jit
def _mixed(own, other, share):
    """own * share + other * (1 - share), truncated."""
    return (own.to(tl.float64) * share + other.to(tl.float64) * (1 - share)).to(tl.int32)


@triton.jit
def _one_less(s, f):
    """1 - s * f, rounded once."""
    return (1 - s.to(tl.float64) * f.to(tl.float64)).to(tl.float32)


@triton.jit
def _recolored(blue, green, red, reciprocals, tables):
    """To OpenCV's 8-bit HSV, through the three tables, and back: as in render_torch.py, in registers."""
    value = tl.maximum(tl.maximum(blue, green), red)
    span = value - tl.minimum(tl.minimum(blue, green), red)
    saturation = (span * tl.load(reciprocals + value) + 2048) >> 12
    hue = tl.where(value == green, blue - red + 2 * span, red - green + 4 * span)
    hue = tl.where(value == red, green - blue, hue)
    hue = (hue * tl.load(reciprocals + 256 + span) + 2048) >> 12
    hue = tl.where(hue < 0, hue + 180, hue)
    h = tl.load(tables + hue).to(tl.float32) * (6.0 / 180.0)
    s = tl.load(tables + 256 + saturation).to(tl.float32) * (1 / 255.0)
    v = tl.load(tables + 512 + value).to(tl.float32) * (1 / 255.0)
    sector = h.to(tl.int32)
    f = h - sector.to(tl.float32)
    p, q, t = v * (1 - s), v * _one_less(s, f), v * _one_less(s, 1 - f)
    r = tl.where((sector == 0) | (sector == 5), v, tl.where(sector == 1, q, tl.where(sector == 4, t, p)))
    g = tl.where((sector == 1) | (sector == 2), v, tl.where(sector == 0, t, tl.where(sector == 3, q, p)))
    b = tl.where((sector == 3) | (sector == 4), v, tl.where(sector == 2, t, tl.where(sector == 5, q, p)))
    return (b * 255).to(tl.int32), (g * 255).to(tl.int32), (r * 255).to(tl.int32)


@triton.jit
def store_value(out, value, inside, AS_FLOAT: tl.constexpr):
    result = tl.div_rn(value.to(tl.float32), 255.0) if AS_FLOAT else value
    tl.store(out, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def render(
    data, offsets, shapes, tiles, canvas, num_tiles, inverse, mix, flip, reciprocals, tables, masks, mask_of,
    out, stride_b, stride_c, stride_y, stride_x, height, width, blocks_x,
    PERSPECTIVE: tl.constexpr, COPIES: tl.constexpr, SUBSAMPLED: tl.constexpr, RECOLOR: tl.constexpr,
    AS_FLOAT: tl.constexpr, BY: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """Render into out [B, 3, height, width], RGB; program (block of pixels, sample)."""
    block, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    out_x = (block % blocks_x) * BX + tl.arange(0, BX)[None, :]
    out_y = (block // blocks_x) * BY + tl.arange(0, BY)[:, None]
    x = tl.where(tl.load(flip + sample * 2 + 1) != 0, width - 1 - out_x, out_x).to(tl.float64)
    y = tl.where(tl.load(flip + sample * 2) != 0, height - 1 - out_y, out_y).to(tl.float64)
    offsets += sample * 18
    shapes += sample * 54
    tiles += sample * 72
    canvas += sample * 4
    inverse += sample * 18
    own_tiles = tl.load(num_tiles + sample * 2)
    other_tiles = tl.load(num_tiles + sample * 2 + 1)
    mask_of += sample * 2
    blue, green, red = _paint(
        data, offsets, shapes, tiles, canvas, inverse, own_tiles, masks, mask_of, x, y, PERSPECTIVE, COPIES, SUBSAMPLED,
    )  # fmt: skip
    if other_tiles > 0:
        share = tl.load(mix + sample)
        b, g, r = _paint(
            data, offsets + 9, shapes + 27, tiles + 36, canvas + 2, inverse + 9, other_tiles, masks, mask_of + 1, x, y,
            PERSPECTIVE, COPIES, SUBSAMPLED,
        )  # fmt: skip
        blue, green, red = _mixed(blue, b, share), _mixed(green, g, share), _mixed(red, r, share)
    if RECOLOR:
        blue, green, red = _recolored(blue, green, red, reciprocals, tables + sample * 768)
    out += sample * stride_b + out_y.to(tl.int64) * stride_y + out_x * stride_x
    inside = (out_x < width) & (out_y < height)
    store_value(out, red, inside, AS_FLOAT)
    store_value(out + stride_c, green, inside, AS_FLOAT)
    store_value(out + 2 * stride_c, blue, inside, AS_FLOAT)


GEOMETRY = ("tiles", "canvas", "num_tiles", "inverse", "mix", "flip")
"""Parameters of the kernel, in its order."""
BLOCK_ROWS, BLOCK_COLUMNS = 8, 32
"""Output pixels of a program: in a compact block, most of the pixels that are read are shared."""
NUM_WARPS = 4


class TritonRender:
    """As `render_torch.TorchRender`: fills out["images"], [B, 3, H, W] RGB, of any dtype and memory format."""

    def __init__(self, *, perspective: bool = False, recolor: bool = True, subsampled: bool = False) -> None:
        self._perspective = perspective
        self._recolor = recolor
        self._subsampled = subsampled
        self._reciprocals: Tensor | None = None

    def __call__(self, sources: Sources, params: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        images = out["images"]
        num, _, height, width = images.shape
        if self._reciprocals is None:
            self._reciprocals = torch.stack([reciprocals(scale, images.device) for scale in (255, 180 / 6)])
        across, down = -(-width // BLOCK_COLUMNS), -(-height // BLOCK_ROWS)
        render[across * down, num](
            sources.data,
            sources.offsets,
            sources.shapes,
            *(params[name] for name in GEOMETRY),
            self._reciprocals,
            color_tables(params) if self._recolor else self._reciprocals,
            # Any memory will do where nothing is copied: it is not read.
            params.get("masks", sources.data),
            params.get("mask_of", params["num_tiles"]),
            images,
            *images.stride(),
            height,
            width,
            across,
            self._perspective,
            "masks" in params,
            self._subsampled,
            self._recolor,
            images.is_floating_point(),
            BLOCK_ROWS,
            BLOCK_COLUMNS,
            num_warps=NUM_WARPS,
            # Products are rounded before they are added, as on the CPU.
            enable_fp_fusion=False,
        )
