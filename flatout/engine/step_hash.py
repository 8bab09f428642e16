"""Hashes of what a step is trained on, made on the device and read many steps later.

    inputs of a step --hash_inputs--> int64 [K] on the device --HashLog--> rows on the host, with their steps

A hash is a weighted sum of the 64-bit words of a tensor, modulo 2**64. All weights are odd, so a change of a single
word always changes it; other changes go unnoticed with a probability of about 2**-64. It is made to find differences,
not to withstand somebody who looks for a collision. Integers are added in any order with the same result, so CPU and
GPU agree.

Dimension key:  K tensors of a step   W words   R rows of words   C words of a row   N steps
"""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.engine.meter import DeviceRows
from flatout.kernels import HAS_TRITON, start

ROW_WORDS = 4096
"""Words whose weights are stored; the weight of a word is that of its place in the row times that of the row."""
ROWS_AT_ONCE = 1024
"""Rows that a GPU multiplies at once: 32 MiB of temporary memory, whatever the batch."""


def hash_inputs(inputs: Mapping[str, Tensor]) -> Tensor:
    """One hash per tensor, int64 [K] on their device, in the order of their names. The host does not wait."""
    if HAS_TRITON and all(tensor.is_cuda for tensor in inputs.values()):
        tensors = [inputs[name] for name in sorted(inputs)]
        # Kernels are started on the current GPU, which need not be theirs.
        with torch.cuda.device(tensors[0].device):
            return _hash_by_kernels(tensors)
    return torch.stack([hash_tensor(inputs[name]) for name in sorted(inputs)])


def hash_tensor(tensor: Tensor) -> Tensor:
    """Hash of a tensor's bytes and of how many there are; int64 scalar on its device.

    Bytes are taken in memory order if it is contiguous or channels-last, else in logical order. dtype and shape do not
    count.
    """
    flat = _bytes(tensor)
    num_rows = flat.numel() // (8 * ROW_WORDS)
    rows, rest = flat[: 8 * ROW_WORDS * num_rows], flat[8 * ROW_WORDS * num_rows :]
    words, tail = rest[: rest.numel() // 8 * 8], rest[rest.numel() // 8 * 8 :]
    column_C, row_R = _weights(ROW_WORDS, 1, tensor.device), _weights(_at_least(num_rows + 2), 2, tensor.device)
    # A constant, so nothing is copied to the device: a longer tensor that ends in zeros has another hash.
    total = column_C[0] * flat.numel()
    if num_rows:
        total = total + (_row_sums(rows.view(torch.int64).view(num_rows, ROW_WORDS), column_C) * row_R[:num_rows]).sum()
    if words.numel():
        total = total + (words.view(torch.int64) * column_C[: words.numel() // 8]).sum() * row_R[num_rows]
    if tail.numel():
        total = total + (tail.long() * column_C[: tail.numel()]).sum() * row_R[num_rows + 1]
    return total


def _hash_by_kernels(tensors: Sequence[Tensor]) -> Tensor:
    """`hash_tensor` of each, by a kernel: int64 [K]."""
    from flatout.engine.step_hash_triton import add_words

    device = tensors[0].device
    hash_K = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    for number, flat in enumerate(map(_bytes, tensors)):
        num_words, num_tail = divmod(flat.numel(), 8)
        num_rows = max(1, -(-num_words // ROW_WORDS))
        weights = _weights(ROW_WORDS, 1, device), _weights(_at_least(num_rows + 2), 2, device)
        hash_1 = hash_K[number : number + 1]
        start(add_words, num_rows, flat, *weights, hash_1, num_words, num_tail, COLUMNS=ROW_WORDS)
    return hash_K


def _bytes(tensor: Tensor) -> Tensor:
    """All bytes, uint8, in the order of `_flat`; the first one is at a multiple of eight."""
    flat = _flat(tensor.detach()).view(torch.uint8)
    return flat.clone() if flat.storage_offset() % 8 else flat


def _flat(tensor: Tensor) -> Tensor:
    """All elements: in memory order, without a copy, if contiguous or channels-last; else a copy in logical order."""
    if tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last):
        tensor = tensor.permute(0, 2, 3, 1)
    return tensor.contiguous().view(-1)


def _row_sums(words_RC: Tensor, weight_C: Tensor) -> Tensor:
    """Weighted sum of each row, int64 [R]."""
    if words_RC.device.type == "cpu":
        return torch.mv(words_RC, weight_C)  # needs no temporary memory, but does not exist for integers on a GPU
    return torch.cat([(part_RC * weight_C).sum(1) for part_RC in words_RC.split(ROWS_AT_ONCE)])


def _at_least(number: int) -> int:
    """A power of two that is not smaller: copying weights to a device makes the host wait, so it must be rare."""
    return 1 << max(14, number.bit_length())


@lru_cache(maxsize=32)
def _weights(num: int, seed: int, device: torch.device) -> Tensor:
    """Fixed odd numbers, int64; more of them begin with the same ones."""
    bits = np.random.Generator(np.random.Philox(key=seed)).integers(0, 2**64, num, np.uint64, endpoint=False)
    return torch.from_numpy((bits | np.uint64(1)).view(np.int64)).to(device)


# Hashes of past steps


class HashedStep(NamedTuple):
    """A step and the hashes of its tensors, by name in alphabetical order."""

    epoch: int
    step: int
    hashes: tuple[int, ...]
    """Non-negative, below 2**64."""


class HashLog:
    """Keeps the hashes of steps on the device until the log interval; only `drain` waits for it."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._capacity, self._device = capacity, device
        self._rows: DeviceRows | None = None
        self._steps: deque[tuple[int, int]] = deque()

    def put(self, epoch: int, step: int, inputs: Mapping[str, Tensor]) -> None:
        """Queue the hashes of a step; at most `capacity` between two swaps."""
        row_K = hash_inputs(inputs)
        if self._rows is None:
            self._rows = DeviceRows(len(row_K), self._capacity, self._device, torch.int64)
        self._rows.put(row_K)
        self._steps.append((epoch, step))

    def swap(self) -> list[HashedStep]:
        """The steps of the swap before; starts to copy those since then."""
        return self._named(self._rows.swap() if self._rows is not None else np.zeros((0, 0), np.int64))

    def drain(self) -> list[HashedStep]:
        """All steps that were not returned yet; waits for the device."""
        return self._named(self._rows.drain() if self._rows is not None else np.zeros((0, 0), np.int64))

    def _named(self, rows_NK: np.ndarray) -> list[HashedStep]:
        return [HashedStep(*self._steps.popleft(), tuple(row)) for row in rows_NK.view(np.uint64).tolist()]
