"""How a picture lies in the network's input, and where a box of the input lies in the picture.

Dimension key:  B images of a batch   D boxes, each with the number of its image
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

Shape = tuple[tuple[float, float], tuple[tuple[float, float], tuple[float, float]]]
"""Of one picture: (height, width), ((height ratio, width ratio), (pad x, pad y)), as the loader records it."""


class Letterbox(NamedTuple):
    """The pictures of a batch in the network's input; float32, on one device."""

    native_wh_B2: Tensor
    """Width and height of each picture in its own pixels."""

    gain_B: Tensor
    """Input pixels per picture pixel. One number for both axes: YOLOv7 takes the height's for the width as well."""

    pad_xy_B2: Tensor
    """Input pixels left of and above the picture."""

    @classmethod
    def from_shapes(cls, shapes: Sequence[Shape], device: torch.device | str = "cpu") -> Self:
        """From what the loader recorded for each picture."""
        rows = [[width, height, gain, *pad] for (height, width), ((gain, _), pad) in shapes]
        # One copy to the device for everything; the divisions of the ratios were made in double precision.
        numbers_B5 = torch.tensor(rows, dtype=torch.float32).reshape(-1, 5).to(device)
        return cls(numbers_B5[:, :2], numbers_B5[:, 2], numbers_B5[:, 3:])

    @classmethod
    def centred(cls, input_hw: tuple[int, int], native_hw: Sequence[tuple[int, int]], device: str = "cpu") -> Self:
        """Where nothing was recorded: pictures scaled to fit, in the middle of the input."""
        height, width = input_hw
        shapes: list[Shape] = []
        for h0, w0 in native_hw:
            gain = min(height / h0, width / w0)
            shapes.append(((h0, w0), ((gain, gain), ((width - w0 * gain) / 2, (height - h0 * gain) / 2))))
        return cls.from_shapes(shapes, device)


def to_native(box_xyxy_D4: Tensor, image_D: Tensor, letterbox: Letterbox) -> Tensor:
    """Corners in input pixels to corners in picture pixels, clipped to the picture; float32 [D, 4]."""
    pad_D4 = letterbox.pad_xy_B2[image_D].repeat(1, 2)
    native_D4 = (box_xyxy_D4 - pad_D4) / letterbox.gain_B[image_D, None]
    limit_D4 = letterbox.native_wh_B2[image_D].repeat(1, 2)
    return torch.minimum(native_D4.clamp_(min=0), limit_D4)


def norm_to_input(box_cxcywh_norm: Tensor, *, size_wh: tuple[int, int], pad_xy: tuple[float, float] = (0, 0)) -> Tensor:
    """Normalised centre and size to corners in pixels of a picture of `size_wh`, moved by `pad_xy`; [..., 4]."""
    centre, size = box_cxcywh_norm.split(2, -1)
    scale, pad = (torch.tensor(pair, dtype=size.dtype, device=size.device) for pair in (size_wh, pad_xy))
    return torch.cat((scale * (centre - size / 2) + pad, scale * (centre + size / 2) + pad), -1)
