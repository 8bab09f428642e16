"""Images of a batch rendered from parameters in plain torch, on any device: one gather per output pixel and corner.

Every output pixel is mapped back to a position on the canvas, the tile there is looked up, and its pixel fetched from
the flat buffer of all images: the canvas itself never exists. Coordinates are rounded to 1/32 pixel and weights are
integers as in OpenCV 4, so the result equals the CPU renderer's to the bit.

The loops below are over the nine tiles and four corners, never over samples, and nothing here makes the host wait for
the device. `render_triton` does the same in one kernel; this is its plain twin, and runs where there is no Triton.

Dimension key:  B samples   S canvases of a sample (2)   K tiles (9)   H W output   C channels, BGR
                J masks of canvases   V the 256 values of a byte
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flatout.feed import Sources
from flatout.yolo.augment.draw import HUES, NINE
from flatout.yolo.augment.gpu.chroma import BLUE_BY_CB, GREEN_BY_CB, GREEN_BY_CR, HALF, RED_BY_CR, SHIFT
from flatout.yolo.data.letterbox import PADDING

# OpenCV's 8-bit HSV in torch: integers one way, float32 back, bit for bit where OpenCV uses vector instructions.

_SHIFT, _HALF = 12, 1 << 11


def color_tables(params: Mapping[str, Tensor]) -> Tensor:
    """`draw.colors` on the device, from `draw.color_parameters`: the new value of every value, uint8 [B, 3, V]."""
    gain_B3 = params["gain"]
    product_B3V = torch.arange(256, dtype=torch.float64, device=gain_B3.device) * gain_B3[..., None]
    hue_B1V, others_B2V = product_B3V[:, :1] % HUES, product_B3V[:, 1:].clamp(0, 255)
    tables_B3V = torch.cat((hue_B1V, others_B2V), 1).to(torch.uint8)
    if "value_table" in params:
        tables_B3V[:, 2] = params["value_table"]
    return tables_B3V


def recolor(bgr_BHW3: Tensor, tables_B3V: Tensor) -> Tensor:
    """Map hue, saturation and value of each sample by its three tables; uint8 [B, H, W, 3], BGR."""
    hsv_BHW3 = bgr_to_hsv(bgr_BHW3)
    start_B1 = torch.arange(len(tables_B3V), device=bgr_BHW3.device)[:, None, None] * (3 * 256)
    flat = tables_B3V.reshape(-1)
    hue, saturation, value = (flat[start_B1 + channel * 256 + hsv_BHW3[..., channel].long()] for channel in range(3))
    return hsv_to_bgr(hue, saturation, value)


def bgr_to_hsv(bgr: Tensor) -> Tensor:
    """Hue 0..179, saturation and value 0..255, int32 [..., 3]."""
    b, g, r = bgr.int().unbind(-1)
    value = torch.maximum(torch.maximum(b, g), r)
    span = value - torch.minimum(torch.minimum(b, g), r)
    saturation = (span * reciprocals(255, bgr.device)[value] + _HALF) >> _SHIFT
    hue = torch.where(value == r, g - b, torch.where(value == g, b - r + 2 * span, r - g + 4 * span))
    hue = (hue * reciprocals(180 / 6, bgr.device)[span] + _HALF) >> _SHIFT
    return torch.stack((torch.where(hue < 0, hue + 180, hue), saturation, value), -1)


def reciprocals(scale: float, device: torch.device) -> Tensor:
    """round(scale * 4096 / x) for x in 0..255, int32; 0 for x = 0."""
    # Computed on the device: a copy from the host would make the host wait.
    x = torch.arange(256, dtype=torch.float64, device=device)
    return torch.where(x > 0, (scale * (1 << _SHIFT) / x).round(), 0.0).int()


def hsv_to_bgr(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """uint8 [..., 3] from 8-bit hue, saturation and value; truncated, as in OpenCV's vector path."""
    h = hue.float() * (6.0 / 180.0)
    s, v = saturation.float() * (1 / 255.0), value.float() * (1 / 255.0)
    sector = h.floor()
    f = h - sector
    p, q, t = v * (1 - s), v * _one_less(s, f), v * _one_less(s, 1 - f)
    sector = sector.long() % 6
    red = _choose(sector, v, q, p, p, t, v)
    green = _choose(sector, t, v, v, q, p, p)
    blue = _choose(sector, p, p, t, v, v, q)
    return (torch.stack((blue, green, red), -1) * 255).to(torch.uint8)


def _one_less(s: Tensor, f: Tensor) -> Tensor:
    """1 - s * f, rounded once, as by the fused instruction that OpenCV's code compiles to on any recent CPU."""
    return (1 - s.double() * f.double()).float()


def _choose(sector: Tensor, *values: Tensor) -> Tensor:
    """values[sector], without a gather."""
    chosen = values[0]
    for number, value in enumerate(values[1:], start=1):
        chosen = torch.where(sector == number, value, chosen)
    return chosen


# Subsampled pixels back to BGR; the kernels do the same in registers.


def to_bgr(y: Tensor, cb: Tensor, cr: Tensor) -> Tensor:
    """BGR from brightness and colour differences of any shape; int32 [..., 3], 0 to 255."""
    y, cb, cr = y.int(), cb.int() - 128, cr.int() - 128
    blue = y + ((BLUE_BY_CB * cb + HALF) >> SHIFT)
    green = y + ((GREEN_BY_CB * cb + GREEN_BY_CR * cr + HALF) >> SHIFT)
    red = y + ((RED_BY_CR * cr + HALF) >> SHIFT)
    return torch.stack((blue, green, red), -1).clamp(0, 255)


def fetch_bgr(data: Tensor, at: Tensor, colour_at: Tensor) -> Tensor:
    """BGR pixels from subsampled `data`, int32 [..., 3]: `at` and `colour_at` index their brightness and the first of
    their two colour differences."""
    return to_bgr(data[at], data[colour_at], data[colour_at + 1])


COARSE, FINE = 32, 1024
"""Units per pixel to which coordinates are rounded, and in which their parts are computed before."""


class Copies(NamedTuple):
    """The pixels of canvases that are pasted again, mirrored."""

    masks_JHW: Tensor
    """uint8, of the size of a mosaic's canvas."""
    mask_of_B: Tensor
    """int32: number of the mask of each sample's canvas, -1 where nothing is copied."""


SAMPLED = ("tiles", "canvas", "inverse", "mix", "flip")
"""Parameters with a row for each sample, without those of its colours."""


class TorchRender:
    """Fills out["images"], [B, 3, H, W] RGB: uint8, or a float dtype with values from 0 to 1; any memory format."""

    def __init__(
        self,
        *,
        mixup: bool,
        perspective: bool = False,
        recolor: bool = True,
        subsampled: bool = False,
        chunk: int = 32,
    ) -> None:
        """`mixup`: whether any sample has a second canvas. `chunk`: samples at a time, which bounds the memory.

        Without `recolor` colours stay as they are; gains of 1 would still round them, as in OpenCV. `subsampled`: the
        images are stored as `chroma` describes.
        """
        self._mixup = mixup
        self._perspective = perspective
        self._recolor = recolor
        self._subsampled = subsampled
        self._chunk = chunk

    def __call__(self, sources: Sources, params: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        images = out["images"]
        tables_B3V = color_tables(params) if self._recolor else None
        for begin in range(0, len(images), self._chunk):
            rows = slice(begin, begin + self._chunk)
            part = {name: params[name][rows] for name in SAMPLED}
            copies = [Copies(params["masks"], of_B) for of_B in params["mask_of"][rows].T] if "masks" in params else []
            pixels = self._paint(
                sources.data, sources.offsets[rows], sources.shapes[rows], part, copies, images.shape[2:]
            )
            if tables_B3V is not None:
                pixels = recolor(pixels, tables_B3V[rows])
            deliver(pixels, part["flip"], images[rows])

    def _paint(
        self,
        data: Tensor,
        offsets: Tensor,
        shapes: Tensor,
        part: Mapping[str, Tensor],
        copies: Sequence[Copies],
        hw: torch.Size,
    ) -> Tensor:
        """Warped and mixed pixels, uint8 [B, H, W, 3], BGR."""
        num = len(offsets)
        offset_BSK, tile_BSK4 = offsets.view(num, 2, NINE), part["tiles"].view(num, 2, NINE, 4)
        height_BSK, wide_BSK = shapes.view(num, 2, NINE, 3)[..., :2].unbind(-1)
        if self._subsampled:
            height_BSK = height_BSK * 2 // 3
        wh_BSK2 = torch.stack((wide_BSK, height_BSK), -1)
        own, *other = (
            paint_canvas(
                data,
                offset_BSK[:, layer],
                wh_BSK2[:, layer],
                tile_BSK4[:, layer],
                part["canvas"][:, layer],
                back_to_canvas(part["inverse"][:, layer], hw, perspective=self._perspective),
                copies[layer] if copies else None,
                subsampled=self._subsampled,
            )
            for layer in range(1 + self._mixup)
        )
        if not other:
            return own
        share_B = part["mix"][:, None, None, None].double()
        return (own * share_B + other[0] * (1 - share_B)).to(torch.uint8)


def back_to_canvas(inverse_B33: Tensor, hw: torch.Size, *, perspective: bool) -> tuple[Tensor, Tensor]:
    """x and y of every output pixel on the canvas, in 1/32 pixel, int32 [B, H, W], rounded as in OpenCV 4."""
    y_H, x_W = (torch.arange(side, dtype=torch.float64, device=inverse_B33.device) for side in hw)
    m = inverse_B33[..., None, None]
    if perspective:
        x_BHW, y_BHW, w_BHW = (m[:, row, 0] * x_W + m[:, row, 1] * y_H[:, None] + m[:, row, 2] for row in range(3))
        scale_BHW = torch.where(w_BHW != 0, COARSE / w_BHW, 0.0)
        limit = 2.0**31 - 128
        return tuple((axis * scale_BHW).clamp(-limit, limit).round().int() for axis in (x_BHW, y_BHW))  # type: ignore[return-value]
    # An affine map is the sum of a column part and a row part; OpenCV rounds the two separately.
    half = FINE // COARSE // 2
    columns = ((m[:, row, 0] * x_W * FINE).round().int() for row in range(2))
    rows = (((m[:, row, 1] * y_H[:, None] + m[:, row, 2]) * FINE).round().int() + half for row in range(2))
    x_BHW, y_BHW = ((row + column) >> 5 for row, column in zip(rows, columns, strict=True))
    return x_BHW, y_BHW


def paint_canvas(
    data: Tensor,
    offset_BK: Tensor,
    wh_BK2: Tensor,
    tile_BK4: Tensor,
    canvas_B2: Tensor,
    position: tuple[Tensor, Tensor],
    copies: Copies | None,
    *,
    subsampled: bool = False,
) -> Tensor:
    """Bilinear pixels at positions on the canvas, uint8 [B, H, W, 3]; grey where there is no tile."""
    canvas = (data, offset_BK, wh_BK2, tile_BK4, canvas_B2)
    x_BHW, y_BHW = position
    left, top, fx, fy = x_BHW >> 5, y_BHW >> 5, x_BHW & 31, y_BHW & 31
    total = torch.full((*x_BHW.shape, 3), FINE // 2, dtype=torch.int32, device=data.device)
    for down in range(2):
        for right in range(2):
            weight = (fx if right else COARSE - fx) * (fy if down else COARSE - fy)
            pixel = fetch(*canvas, left + right, top + down, subsampled=subsampled)
            if copies is not None:
                across = canvas_B2[:, 0, None, None] - 1 - (left + right)
                mirrored = fetch(*canvas, across, top + down, subsampled=subsampled)
                # Zero values do not cover, channel by channel, as on the CPU.
                pixel = torch.where(copied_at(copies, across, top + down) & (mirrored > 0), mirrored, pixel)
            total += pixel.int() * weight[..., None]
    return (total >> 10).to(torch.uint8)


def fetch(
    data: Tensor,
    offset_BK: Tensor,
    wh_BK2: Tensor,
    tile_BK4: Tensor,
    canvas_B2: Tensor,
    x: Tensor,
    y: Tensor,
    *,
    subsampled: bool = False,
) -> Tensor:
    """Canvas pixels at integer coordinates [B, H, W], uint8 [B, H, W, 3]."""
    width, height = canvas_B2[:, 0, None, None], canvas_B2[:, 1, None, None]
    on_canvas = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    at = torch.full(x.shape, -1, dtype=torch.int64, device=x.device)
    colour_at = at
    for k in range(NINE):
        tile_x, tile_y, tile_w, tile_h = (tile_BK4[:, k, i, None, None] for i in range(4))
        column, row = x - tile_x, y - tile_y
        inside = on_canvas & (column >= 0) & (column < tile_w) & (row >= 0) & (row < tile_h)
        # A single image may be laid out one pixel larger than it is stored: its last row or column is then repeated.
        kept_w, kept_h = wh_BK2[:, k, 0, None, None], wh_BK2[:, k, 1, None, None]
        column, row = torch.minimum(column, kept_w - 1), torch.minimum(row, kept_h - 1)
        begin, channels_kept = offset_BK[:, k, None, None], 1 if subsampled else 3
        at = torch.where(inside, begin + (row * kept_w + column) * channels_kept, at)
        if subsampled:
            offset = (kept_h + (row >> 1)) * kept_w + (column & -2)
            colour_at = torch.where(inside, begin + offset, colour_at)
    if subsampled:
        pixel = fetch_bgr(data, at.clamp(min=0), colour_at.clamp(min=0)).to(torch.uint8)
        return torch.where(at[..., None] >= 0, pixel, PADDING)
    channels = torch.arange(3, device=x.device)
    pixel = data[(at.clamp(min=0)[..., None] + channels).clamp(max=len(data) - 1)]
    return torch.where(at[..., None] >= 0, pixel, PADDING)


def copied_at(copies: Copies, x: Tensor, y: Tensor) -> Tensor:
    """Whether canvas pixels at integer coordinates [B, H, W] are copied, bool [B, H, W, 1]."""
    height, width = copies.masks_JHW.shape[1:]
    mask_B11 = copies.mask_of_B[:, None, None]
    there = (mask_B11 >= 0) & (x >= 0) & (x < width) & (y >= 0) & (y < height)
    found = copies.masks_JHW[mask_B11.clamp(min=0), y.clamp(0, height - 1), x.clamp(0, width - 1)]
    return (there & (found > 0))[..., None]


def deliver(pixels_BHWC: Tensor, flip_B2: Tensor, out_BCHW: Tensor) -> None:
    """Flip, and convert to RGB planes of the dtype of `out_BCHW`."""
    up_down, left_right = (flip_B2[:, axis, None, None, None] for axis in range(2))
    pixels_BHWC = torch.where(up_down, pixels_BHWC.flip(1), pixels_BHWC)
    pixels_BHWC = torch.where(left_right, pixels_BHWC.flip(2), pixels_BHWC)
    planes = pixels_BHWC.flip(3).permute(0, 3, 1, 2)
    # By a tensor: CUDA multiplies by the reciprocal of a Python number, which differs in the last bit.
    whole = torch.full((), 255.0, device=planes.device)
    out_BCHW.copy_(planes / whole if out_BCHW.is_floating_point() else planes)
