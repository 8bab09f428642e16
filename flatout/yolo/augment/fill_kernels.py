"""The Triton kernel of fill_triton.py: a program looks at a block of pixels of one polygon's box.

Dimension key:  BY BX rows and columns of a block
"""

import triton
import triton.language as tl

from flatout.yolo.augment.paste_kernels import test_edge

COLUMNS = tl.constexpr(7)


@triton.jit
def fill(spans, points, masks, height, width, BY: tl.constexpr, BX: tl.constexpr):
    """Into masks [J, height, width]; program (block of pixels, polygon)."""
    block, row = tl.program_id(0), spans + tl.program_id(1) * COLUMNS
    x1, y1, x2, y2 = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)
    across, down = (x2 - x1) // BX + 1, (y2 - y1) // BY + 1
    # As many blocks as the largest polygon has; the others are done early.
    if block < across * down:
        x = x1 + (block % across) * BX + tl.arange(0, BX)[None, :]
        y = y1 + (block // across) * BY + tl.arange(0, BY)[:, None]
        u, v = x + 0 * y, y + 0 * x
        odd = u < u
        on = odd
        num = tl.load(row + 2)
        points += tl.load(row + 1) * 2
        for k in range(num):
            after = tl.where(k + 1 < num, k + 1, 0)
            ax, ay = tl.load(points + 2 * k), tl.load(points + 2 * k + 1)
            bx, by = tl.load(points + 2 * after), tl.load(points + 2 * after + 1)
            odd, on = test_edge(u, v, ax, ay, bx, by, odd, on)
        masks += tl.load(row).to(tl.int64) * height * width
        tl.store(masks + v * width + u, (u - u + 1).to(tl.uint8), mask=(odd | on) & (u <= x2) & (v <= y2))
