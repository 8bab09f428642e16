"""OpenCV's 8-bit HSV in torch: integers one way, float32 back, bit for bit where OpenCV uses vector instructions.

Dimension key:  B samples   H W height and width   V the 256 values of a byte
"""

import torch
from torch import Tensor

from flatout.yolo.augment.color import HUES

_SHIFT, _HALF = 12, 1 << 11


def color_tables(gain_B3: Tensor) -> Tensor:
    """`color.colors` on the device: what every value becomes, uint8 [B, 3, V]."""
    product_B3V = torch.arange(256, dtype=torch.float64, device=gain_B3.device) * gain_B3[..., None]
    hue_B1V, others_B2V = product_B3V[:, :1] % HUES, product_B3V[:, 1:].clamp(0, 255)
    return torch.cat((hue_B1V, others_B2V), 1).to(torch.uint8)


def recolor(bgr_BHW3: Tensor, tables_B3V: Tensor) -> Tensor:
    """Hue, saturation and value of each sample through its three tables, uint8 [B, H, W, 3], BGR."""
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
    """round(scale * 4096 / x) for x in 0..255, int32; 0 for 0."""
    # Made on the device: a copy from the host would make it wait.
    x = torch.arange(256, dtype=torch.float64, device=device)
    return torch.where(x > 0, (scale * (1 << _SHIFT) / x).round(), 0.0).int()


def hsv_to_bgr(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """uint8 [..., 3] from 8-bit hue, saturation and value; truncated, as OpenCV's vector path does."""
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
    """1 - s * f, rounded once, as by the fused instruction that OpenCV's code becomes on any recent CPU."""
    return (1 - s.double() * f.double()).float()


def _choose(sector: Tensor, *values: Tensor) -> Tensor:
    """values[sector], without a gather."""
    chosen = values[0]
    for number, value in enumerate(values[1:], start=1):
        chosen = torch.where(sector == number, value, chosen)
    return chosen
