"""Pictures that look the same though their files differ: one saved again, shrunk or converted from the other.

A picture's look is one bit per pixel of a thumbnail (deep.py). Saved again at quality 60, photographs of COCO and of
blood cells change up to 12 of 256 bits, at half their size up to 13; two different ones differ in 20 and more.
"""

import numpy as np

MOST_APART = 1 / 8
"""Of the rarer kind of bits: 16 of 256 for a photograph, hardly any for something small on an even ground."""
MOST_COMPARED = 1 << 23
"""Pairs at a time, which bounds the memory."""


def look_alikes(looks_MB: np.ndarray, others_KB: np.ndarray) -> np.ndarray:
    """For each look the number of the nearest of the others, -1 where none is near; int64 [M].

    One matrix product finds them: of 118,000 pictures and 5,000 others in the time it takes to decode some thousand.
    """
    nearest_M = np.full(len(looks_MB), -1)
    if not len(others_KB):
        return nearest_M
    others_KS = _signs(others_KB)
    rows = max(1, MOST_COMPARED // len(others_KS))
    for begin in range(0, len(looks_MB), rows):
        looks_RS = _signs(looks_MB[begin : begin + rows])
        agree_RK = looks_RS @ others_KS.T
        num_bits = looks_RS.shape[1]
        apart_R = (num_bits - agree_RK.max(1)) / 2
        rarer_R = (num_bits - np.abs(looks_RS.sum(1))) / 2
        nearest_M[begin : begin + rows] = np.where(apart_R <= MOST_APART * rarer_R, agree_RK.argmax(1), -1)
    return nearest_M


def _signs(looks_MB: np.ndarray) -> np.ndarray:
    """float32 [M, bits], 1 and -1; whole numbers this small are exact in any order of summing."""
    return np.unpackbits(looks_MB, axis=1).astype(np.float32) * 2 - 1
