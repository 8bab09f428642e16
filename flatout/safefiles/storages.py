"""The tensors of a torch file: one entry of the zip per storage, views of it as tensors.

A storage is read once, straight into the memory its tensors will use. Size, offset and stride of a view come from the
pickle and are checked against the bytes that are really there; a view never has more elements than its storage, so
that a small file cannot stand for a large tensor.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flatout.safefiles.archive import Archive
from flatout.safefiles.refusal import DAMAGED, Budget, Refusal, quoted

DTYPES = {
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}
MAX_TENSORS = 50_000
MAX_DIMS = 16
_MAX_LENGTH = 1 << 40


@dataclass(frozen=True, slots=True)
class Storage:
    """Elements in a row, to be viewed as tensors."""

    flat_N: Tensor


class Storages:
    """Storages of an archive by key, each read at its first use."""

    def __init__(self, archive: Archive, root: str) -> None:
        self._archive = archive
        self._root = root
        self._storages: dict[str, Storage] = {}
        self._tensors = Budget(MAX_TENSORS, "tensors")

    def open(self, key: str, dtype: torch.dtype, num_elements: int) -> Storage:
        """The storage of this key; dtype and number of elements must be what its bytes hold."""
        if key not in self._storages:
            self._storages[key] = self._read(key, dtype)
        storage = self._storages[key]
        if storage.flat_N.dtype != dtype or storage.flat_N.numel() != num_elements:
            raise Refusal(
                f"its storage {quoted(key)} should hold {num_elements:,} elements of {dtype} but has "
                f"{storage.flat_N.numel():,} of {storage.flat_N.dtype}. {DAMAGED}"
            )
        return storage

    def view(self, storage: Storage, offset: int, size: tuple[object, ...], stride: tuple[object, ...]) -> Tensor:
        """A tensor over part of a storage; it shares the storage's memory."""
        self._tensors.spend(1)
        sizes, strides = _lengths(size), _lengths(stride)
        if len(sizes) != len(strides) or len(sizes) > MAX_DIMS or not _fits(storage, offset, sizes, strides):
            raise Refusal(
                f"a tensor of size {quoted(str(sizes))}, stride {quoted(str(strides))} and offset {offset} does not "
                f"lie inside its storage of {storage.flat_N.numel():,} elements. {DAMAGED}"
            )
        return storage.flat_N.as_strided(sizes, strides, offset)

    def _read(self, key: str, dtype: torch.dtype) -> Storage:
        name = f"{self._root}/data/{key}"
        nbytes = self._archive.nbytes(name)
        if nbytes % dtype.itemsize:
            raise Refusal(
                f"its storage {quoted(key)} has {nbytes:,} bytes, which are no elements of {dtype}. {DAMAGED}"
            )
        stored = allocate(nbytes)
        self._archive.read_into(name, stored.numpy().data)
        # Any byte but 0 and 1 would be a bool that is neither True nor False.
        return Storage((stored.clamp_(max=1) if dtype == torch.bool else stored).view(dtype))


def allocate(nbytes: int) -> Tensor:
    """Memory for a storage, uint8 [nbytes], not filled."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8)
    except RuntimeError:
        raise Refusal(f"needs {nbytes:,} bytes of memory for one tensor. Read it on a larger machine.") from None


def is_countable(lengths: Sequence[int]) -> bool:
    """Can torch multiply them? It does so in 64 bits, and a later 0 does not undo an overflow."""
    return math.prod(length or 1 for length in lengths) < 1 << 63


def _lengths(values: tuple[object, ...]) -> list[int]:
    lengths = [value for value in values if type(value) is int and 0 <= value < _MAX_LENGTH]
    if len(lengths) != len(values):
        raise Refusal(f"a tensor has a size or stride that is no length. {DAMAGED}")
    return lengths


def _fits(storage: Storage, offset: int, sizes: list[int], strides: list[int]) -> bool:
    num_elements = storage.flat_N.numel()
    if not 0 <= offset <= num_elements or not is_countable(sizes):
        return False
    if 0 in sizes:
        return True
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return last < num_elements and math.prod(sizes) <= num_elements
