"""Lists of different lengths, one behind the other in one tensor: how to walk over them without a loop.

Dimension key:  G lists   P entries of all lists together   A, B members of two sets   (a, b) a pair of them
"""

import numpy as np
import torch
from torch import Tensor


def expand_ranges(begin_G: Tensor, count_G: Tensor) -> tuple[Tensor, Tensor]:
    """Number of the list and position of every entry, int64 [P] each: list g is begin, begin + 1, ..., count of them.

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
    """Largest value of each list, [G]; 0 for a list without entries or with nothing above 0."""
    return value_P.new_zeros(num_lists).scatter_reduce_(0, list_P, value_P, "amax")


def first_per_list(member_P: Tensor, list_P: Tensor, num_lists: int, *, absent: int) -> Tensor:
    """Smallest member of each list, int64 [G]; `absent` (larger than any member) for a list without entries."""
    return member_P.new_full((num_lists,), absent).scatter_reduce_(0, list_P, member_P, "amin")


# The best of each group first: an order that NMS, matching and average precision all rest on.
#
# Dimension key:  M rows, each with a group and a score

SCORE_BITS = 32


def best_first(group_M: Tensor, score_M: Tensor, num_groups: int) -> Tensor:
    """Order by group, then by descending float32 score, then as they came; int64 [M].

    Group, score and row number fit one 64-bit key (up to two million rows in a thousand groups), and sorting plain
    integers is several times faster than a stable sort of indices.
    """
    number_bits = len(score_M).bit_length()
    if (num_groups - 1).bit_length() + SCORE_BITS + number_bits > 63:
        order_M = torch.sort(score_M, descending=True, stable=True).indices
        return order_M[torch.sort(group_M[order_M], stable=True).indices]
    # The bits of floats order like the numbers, those of negative ones the other way round; -0.0 becomes 0.0 first.
    bits_M = (score_M + 0.0).view(torch.int32)
    rising_M = bits_M ^ ((bits_M >> 31) & 0x7FFFFFFF)
    falling_M = 0x7FFFFFFF - rising_M.long()
    number_M = torch.arange(len(score_M), device=score_M.device)
    key_M = (group_M << (SCORE_BITS + number_bits)) | (falling_M << number_bits) | number_M
    return _sorted(key_M) & ((1 << number_bits) - 1)


def _sorted(key_M: Tensor) -> Tensor:
    # On the host NumPy sorts integers ten times faster than torch, with vector instructions.
    return torch.from_numpy(np.sort(key_M.numpy())) if key_M.is_cpu else torch.sort(key_M).values
