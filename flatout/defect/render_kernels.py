"""The Triton kernel of render_triton.py: a program crops a block of pixels of one sample and paints all its defects.

A pixel is held in a register from the crop to the last defect, so saturation happens after each of them, in order, and
nothing but finished patches and masks is written.

Dimension key:  BY BX rows and columns of a block   K places for defects   KP the next power of two   S side of a square
"""

import triton
import triton.language as tl

BLACK, WHITE = tl.constexpr(0.0), tl.constexpr(255.0)


@triton.jit
def add_saturated(pixel, value, amplitude, on):
    """`pixel` after a defect; bits as they were where it does not reach."""
    return tl.where(on, tl.minimum(tl.maximum(pixel + value * amplitude, BLACK), WHITE), pixel)


@triton.jit
def crop_and_paint(
    data, begins, corners, kinds, numbers, centers, kernels, amplitudes, labelled, value_table, label_table,
    images, masks, image_width, plane_size, stride_sample, stride_plane, stride_row, stride_column,
    height, width, across, painted_kind, visible, middle,
    K: tl.constexpr, KP: tl.constexpr, S: tl.constexpr, FULL_SWING: tl.constexpr, BY: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """Into images [B, 3, height, width] of the given strides and masks uint8 [B, 1, height, width] without gaps;
    program (block of pixels, sample)."""
    block, sample = tl.program_id(0), tl.program_id(1)
    y = (block // across) * BY + tl.arange(0, BY)[:, None]
    x = (block % across) * BX + tl.arange(0, BX)[None, :]
    inside = (y < height) & (x < width)
    top, left = tl.load(corners + 2 * sample), tl.load(corners + 2 * sample + 1)
    source = data + tl.load(begins + sample) + top * image_width + left
    pixel = source + y * image_width + x
    target = tl.load(pixel, mask=inside, other=0.0)
    ref1 = tl.load(pixel + plane_size, mask=inside, other=0.0)
    ref2 = tl.load(pixel + 2 * plane_size, mask=inside, other=0.0)
    marks = target < -1.0  # nowhere
    num = tl.where(tl.load(kinds + sample) == painted_kind, tl.load(numbers + sample), 0)
    if FULL_SWING:
        # What lies under the centres of this sample's defects: every program paints these pixels for itself.
        place = tl.arange(0, KP)
        of_place = centers + 2 * (sample * K + place)
        place_x = tl.load(of_place, mask=place < num, other=-1)
        place_y = tl.load(of_place + 1, mask=place < num, other=-1)
        is_seen = (place_x >= 0) & (place_x < width) & (place_y >= 0) & (place_y < height)
        under = tl.load(source + place_y * image_width + place_x, mask=is_seen, other=0.0)
    for k in range(num):
        row = sample * K + k
        # The square's first pixel.
        first_x, first_y = tl.load(centers + 2 * row) - S // 2, tl.load(centers + 2 * row + 1) - S // 2
        table = tl.load(kernels + row) * S * S
        to_target, to_ref1 = tl.load(amplitudes + 3 * row), tl.load(amplitudes + 3 * row + 1)
        to_ref2 = tl.load(amplitudes + 3 * row + 2)
        dx, dy = x - first_x, y - first_y
        on = (dx >= 0) & (dx < S) & (dy >= 0) & (dy < S) & inside
        value = tl.load(value_table + table + dy * S + dx, mask=on, other=0.0)
        before = target
        if FULL_SWING:
            sign = tl.where(tl.sum(tl.where(place == k, under, 0.0)) > middle, -1.0, 1.0)
            to_target, to_ref1, to_ref2 = tl.abs(to_target) * sign, tl.abs(to_ref1) * sign, tl.abs(to_ref2) * sign
            place_dx, place_dy = place_x - first_x, place_y - first_y
            place_on = (place_dx >= 0) & (place_dx < S) & (place_dy >= 0) & (place_dy < S)
            place_value = tl.load(value_table + table + place_dy * S + place_dx, mask=place_on, other=0.0)
            under = add_saturated(under, place_value, to_target, place_on)
        target = add_saturated(target, value, to_target, on)
        ref1 = add_saturated(ref1, value, to_ref1, on)
        ref2 = add_saturated(ref2, value, to_ref2, on)
        if FULL_SWING:
            hit = tl.abs(target - before) > visible
        else:
            hit = tl.load(label_table + table + dy * S + dx, mask=on, other=0) != 0
        marks = marks | (hit & (tl.load(labelled + row) != 0))
    out = images + sample * stride_sample + y * stride_row + x * stride_column
    tl.store(out, target.to(images.dtype.element_ty), mask=inside)
    tl.store(out + stride_plane, ref1.to(images.dtype.element_ty), mask=inside)
    tl.store(out + 2 * stride_plane, ref2.to(images.dtype.element_ty), mask=inside)
    tl.store(masks + (sample * height + y) * width + x, marks.to(tl.uint8), mask=inside)
