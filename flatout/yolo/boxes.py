"""Pure tensor functions on boxes: formats, IoU and its variants, mapping to the image, and operations on groups.

Dimension key:  N, M boxes   4 xyxy corners, or cxcywh centre and size, as the name says
                B images of a batch   D boxes, each with the index of its image
                G lists of different lengths   P entries of all lists, concatenated   A, B members of two sets
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

EPSILON = 1e-7
"""Keeps the paired measures finite for empty boxes. Its value, and where it is added, determine YOLOv7's numbers."""


# Formats, IoU and its variants


def cxcywh_to_xyxy(box_cxcywh: Tensor) -> Tensor:
    """Centre and size to corners, [..., 4]."""
    centre, size = box_cxcywh.split(2, -1)
    return torch.cat((centre - size / 2, centre + size / 2), -1)


def xyxy_to_cxcywh(box_xyxy: Tensor) -> Tensor:
    """Corners to centre and size, [..., 4]."""
    low, high = box_xyxy.split(2, -1)
    return torch.cat(((low + high) / 2, high - low), -1)


def pairwise_iou(box_xyxy_N4: Tensor, box_xyxy_M4: Tensor) -> Tensor:
    """Intersection over union of every pair, [N, M]; no epsilon: two empty boxes give nan."""
    low_NM2 = torch.maximum(box_xyxy_N4[:, None, :2], box_xyxy_M4[None, :, :2])
    high_NM2 = torch.minimum(box_xyxy_N4[:, None, 2:], box_xyxy_M4[None, :, 2:])
    inter_NM = (high_NM2 - low_NM2).clamp(min=0).prod(2)
    area_N, area_M = ((box[:, 2:] - box[:, :2]).prod(1) for box in (box_xyxy_N4, box_xyxy_M4))
    return inter_NM / (area_N[:, None] + area_M[None, :] - inter_NM)


def paired_iou(box_cxcywh_N4: Tensor, other_cxcywh_N4: Tensor) -> Tensor:
    """Intersection over union of box n with the other box n, [N]; 0 if both are empty."""
    (low_N2, high_N2), (other_low_N2, other_high_N2) = (
        cxcywh_to_xyxy(box_N4).split(2, 1) for box_N4 in (box_cxcywh_N4, other_cxcywh_N4)
    )
    common_N = (torch.minimum(high_N2, other_high_N2) - torch.maximum(low_N2, other_low_N2)).clamp(min=0).prod(1)
    area_N, other_area_N = box_cxcywh_N4[:, 2:].prod(1), other_cxcywh_N4[:, 2:].prod(1)
    return common_N / (area_N + other_area_N - common_N).clamp(min=EPSILON)


def paired_ciou(box_cxcywh_N4: Tensor, true_cxcywh_N4: Tensor) -> Tensor:
    """Complete IoU of box n with true box n, [N]: IoU minus penalties for the distance of the centres and for a
    different aspect ratio; the weight of the second has no gradient.
    """
    x1, y1, x2, y2 = cxcywh_to_xyxy(box_cxcywh_N4).unbind(1)
    true_x1, true_y1, true_x2, true_y2 = cxcywh_to_xyxy(true_cxcywh_N4).unbind(1)
    common_w = (torch.minimum(x2, true_x2) - torch.maximum(x1, true_x1)).clamp(min=0)
    common_h = (torch.minimum(y2, true_y2) - torch.maximum(y1, true_y1)).clamp(min=0)
    inter = common_w * common_h
    # Sizes from the corners: heights include an epsilon, widths do not.
    w, h = x2 - x1, y2 - y1 + EPSILON
    true_w, true_h = true_x2 - true_x1, true_y2 - true_y1 + EPSILON
    iou_N = inter / (w * h + true_w * true_h - inter + EPSILON)
    hull_w = torch.maximum(x2, true_x2) - torch.minimum(x1, true_x1)
    hull_h = torch.maximum(y2, true_y2) - torch.minimum(y1, true_y1)
    centres = ((true_x1 + true_x2 - x1 - x2).square() + (true_y1 + true_y2 - y1 - y2).square()) / 4
    distance_N = centres / (hull_w.square() + hull_h.square() + EPSILON)
    angle_N = torch.atan(true_w / (true_h + EPSILON)) - torch.atan(w / (h + EPSILON))
    aspect_N = 4 / math.pi**2 * angle_N.square()
    with torch.no_grad():
        weight_N = aspect_N / (aspect_N - iou_N + (1 + EPSILON))
    return iou_N - (distance_N + aspect_N * weight_N)


# Mapping boxes from the network's input to the image

Shape = tuple[tuple[float, float], tuple[tuple[float, float], tuple[float, float]]]
"""Shape of one image as the loader records it: (height, width), ((height ratio, width ratio), (pad x, pad y))."""


class Letterbox(NamedTuple):
    """Where the images of a batch lie in the network's input; float32, on one device."""

    native_wh_B2: Tensor
    """Width and height of each image in its own pixels."""

    gain_B: Tensor
    """Input pixels per image pixel. One number for both axes: YOLOv7 uses the ratio of the heights for widths too."""

    pad_xy_B2: Tensor
    """Input pixels left of and above the image."""

    @classmethod
    def from_shapes(cls, shapes: Sequence[Shape], device: torch.device | str = "cpu") -> Self:
        """From the shapes that the loader recorded."""
        rows = [[width, height, gain, *pad] for (height, width), ((gain, _), pad) in shapes]
        # One copy to the device for everything. The ratios were computed in double precision.
        numbers_B5 = torch.tensor(rows, dtype=torch.float32).reshape(-1, 5).to(device)
        return cls(numbers_B5[:, :2], numbers_B5[:, 2], numbers_B5[:, 3:])

    @classmethod
    def centred(cls, input_hw: tuple[int, int], native_hw: Sequence[tuple[int, int]], device: str = "cpu") -> Self:
        """For images that were scaled to fit and centred in the input, without recorded shapes."""
        height, width = input_hw
        shapes: list[Shape] = []
        for h0, w0 in native_hw:
            gain = min(height / h0, width / w0)
            shapes.append(((h0, w0), ((gain, gain), ((width - w0 * gain) / 2, (height - h0 * gain) / 2))))
        return cls.from_shapes(shapes, device)


def to_native(box_xyxy_D4: Tensor, image_D: Tensor, letterbox: Letterbox) -> Tensor:
    """Map corners in input pixels to corners in image pixels, clipped to the image; float32 [D, 4]."""
    pad_D4 = letterbox.pad_xy_B2[image_D].repeat(1, 2)
    native_D4 = (box_xyxy_D4 - pad_D4) / letterbox.gain_B[image_D, None]
    limit_D4 = letterbox.native_wh_B2[image_D].repeat(1, 2)
    return torch.minimum(native_D4.clamp_(min=0), limit_D4)


# Lists of different lengths, concatenated in one tensor: operations without a Python loop


def expand_ranges(begin_G: Tensor, count_G: Tensor) -> tuple[Tensor, Tensor]:
    """List index and position of every entry, int64 [P] each; list g has the count_G[g] positions from begin_G[g] on.

    On a GPU the host waits for the total number of entries.
    """
    end_G = count_G.cumsum(0)
    total = int(end_G[-1]) if len(end_G) else 0
    list_P = torch.repeat_interleave(torch.arange(len(count_G), device=count_G.device), count_G, output_size=total)
    position_P = torch.arange(total, device=count_G.device) + (begin_G - end_G + count_G)[list_P]
    return list_P, position_P


def pairs_of_equal_key(key_A: Tensor, key_B: Tensor) -> tuple[Tensor, Tensor]:
    """Every (a, b) with key_A[a] == key_B[b], as two int64 [P]: a ascending, then b ascending."""
    sorted_B, order_B = torch.sort(key_B, stable=True)
    begin_A = torch.searchsorted(sorted_B, key_A)
    count_A = torch.searchsorted(sorted_B, key_A, right=True) - begin_A
    a_P, position_P = expand_ranges(begin_A, count_A)
    return a_P, order_B[position_P]


def max_per_list(value_P: Tensor, list_P: Tensor, num_lists: int) -> Tensor:
    """Largest value of each list, [G]; 0 for a list without entries or without a positive value."""
    return value_P.new_zeros(num_lists).scatter_reduce_(0, list_P, value_P, "amax")


def first_per_list(member_P: Tensor, list_P: Tensor, num_lists: int, *, absent: int) -> Tensor:
    """Smallest member of each list, int64 [G]; `absent` (larger than any member) for a list without entries."""
    return member_P.new_full((num_lists,), absent).scatter_reduce_(0, list_P, member_P, "amin")


def positions(mark: Tensor) -> Tensor:
    """Positions in the flattened mask where it is set, ascending int64. On a GPU the host waits."""
    if not mark.is_cpu:
        return mark.reshape(-1).nonzero().flatten()
    # Five times as fast as torch if few are set.
    return torch.from_numpy(np.flatnonzero(mark.numpy()))


# Sorting by group and score, which NMS, matching and average precision are based on

SCORE_BITS = 32


def best_first(group_M: Tensor, score_M: Tensor, num_groups: int) -> Tensor:
    """Indices that sort M rows by group, then by descending float32 score, then by position; int64 [M].

    Group, score and row number fit into one 64-bit key (up to two million rows in a thousand groups), and sorting plain
    integers is several times faster than a stable sort of indices.
    """
    number_bits = len(score_M).bit_length()
    if (num_groups - 1).bit_length() + SCORE_BITS + number_bits > 63:
        order_M = torch.sort(score_M, descending=True, stable=True).indices
        return order_M[torch.sort(group_M[order_M], stable=True).indices]
    # The bits of positive floats sort like the numbers, those of negative ones in reverse; -0.0 becomes 0.0 first.
    bits_M = (score_M + 0.0).view(torch.int32)
    rising_M = bits_M ^ ((bits_M >> 31) & 0x7FFFFFFF)
    falling_M = 0x7FFFFFFF - rising_M.long()
    number_M = torch.arange(len(score_M), device=score_M.device)
    key_M = (group_M << (SCORE_BITS + number_bits)) | (falling_M << number_bits) | number_M
    return _sorted(key_M) & ((1 << number_bits) - 1)


def _sorted(key_M: Tensor) -> Tensor:
    # On the CPU NumPy sorts integers ten times faster than torch, with vector instructions.
    return torch.from_numpy(np.sort(key_M.numpy())) if key_M.is_cpu else torch.sort(key_M).values
