"""Where the parts of a batch lie in a slot's body.

    image   row 0 | row 1 | ... | row N-1     each leaf is one tensor [N, *shape], without gaps,
    label   row 0 | row 1 | ... | row N-1     so that workers write rows side by side

A layout follows from the samples and the size of the batch alone: workers that read alike samples
come to the same layout without asking each other.

Dimension key:  N samples of the batch   M samples of a micro-batch
"""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.feed.ring import CACHE_LINE

PYTHON_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


class Leaf(NamedTuple):
    """One tensor of a batch: equal parts of all samples, stacked."""

    kind: str
    """What the part of one sample is: 'tensor', 'ndarray', 'scalar' (of numpy), or 'bool', 'int', 'float'."""

    dtype: str
    """Of the stacked tensor, a name in torch."""

    shape: tuple[int, ...]
    """Of one row."""

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]


class Placed(NamedTuple):
    """Where each leaf of a batch begins, and the bytes of all of them."""

    offsets: list[int]
    nbytes: int


def place(leaves: Sequence[Leaf], num_rows: int) -> Placed:
    """Lay leaves out one after another, each on a cache line of its own."""
    offsets, end = [], 0
    for leaf in leaves:
        offsets.append(end)
        end += -(-leaf.row_bytes * num_rows // CACHE_LINE) * CACHE_LINE
    return Placed(offsets, end)


def fingerprint(leaves: Sequence[Leaf], structure: str = "") -> int:
    """A number that stands for a layout, never 0."""
    digest = hashlib.blake2b(f"{leaves} {structure}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") + 1


def view(memory: np.ndarray, offset: int, leaf: Leaf, num_rows: int) -> tuple[Tensor, np.ndarray]:
    """A leaf as a tensor [N, *shape] over `memory`, and the array that lives exactly as long as a view of it."""
    nbytes = leaf.row_bytes * num_rows
    # A buffer of its own, not a slice: numpy would let views of views point past a slice to its owner.
    array: np.ndarray = np.ndarray((nbytes,), np.uint8, memory.data, offset if nbytes else 0)
    return torch.from_numpy(array).view(leaf.torch_dtype).view(num_rows, *leaf.shape), array


def leaf_of(values: Sequence[Any]) -> Leaf | str:
    """How equal parts of M samples are stacked; or why they cannot be written side by side."""
    first = values[0]
    if isinstance(first, Tensor):
        return _tensor_leaf(values)
    if isinstance(first, np.ndarray):
        return _array_leaf(values)
    kinds = {type(value) for value in values}
    if len(kinds) > 1:
        return f"its type changes ({_names(kinds)})"
    if type(first) in PYTHON_DTYPES:
        return Leaf(type(first).__name__, _name(PYTHON_DTYPES[type(first)]), ())
    if isinstance(first, np.bool_ | np.number):
        return Leaf("scalar", _name(torch.as_tensor([first]).dtype), ())
    return f"a {type(first).__name__} has no fixed size"


def write_rows(leaf: Leaf, values: Sequence[Any], rows: Tensor) -> None:
    """Stack the parts of M samples into `rows` [M, *shape]."""
    if leaf.kind == "tensor":
        torch.stack(list(values), out=rows)
    elif leaf.kind == "ndarray":
        np.stack(values, out=rows.numpy())
    else:
        rows.copy_(torch.tensor(values, dtype=leaf.torch_dtype))


def row_value(leaf: Leaf, rows: Tensor, row: int) -> Any:
    """What a sample had before it was stacked."""
    value = rows[row]
    if leaf.kind == "tensor":
        return value
    if leaf.kind == "ndarray":
        return value.numpy()
    return value.numpy()[()] if leaf.kind == "scalar" else value.item()


def _tensor_leaf(values: Sequence[Any]) -> Leaf | str:
    first = values[0]
    for value in values:
        if type(value) is not Tensor:
            return f"a {type(value).__name__} is more than its numbers"
        if value.is_nested:  # asked for its shape, one would raise
            return "a nested tensor has no single shape"
        if value.dtype != first.dtype or value.shape != first.shape:
            return f"its shape or dtype changes ({_tensor_text(first)}, then {_tensor_text(value)})"
    if first.layout != torch.strided or first.device.type != "cpu" or first.is_quantized:
        return f"a tensor with layout {first.layout} on {first.device} cannot lie in a slot"
    if any(value.requires_grad or value.is_conj() or value.is_neg() for value in values):
        return "a tensor that requires grad, or a conjugate view, is more than its numbers"
    return Leaf("tensor", _name(first.dtype), tuple(first.shape))


def _array_leaf(values: Sequence[Any]) -> Leaf | str:
    first = values[0]
    for value in values:
        if not isinstance(value, np.ndarray) or value.dtype != first.dtype or value.shape != first.shape:
            return "its shape or dtype changes from sample to sample"
    dtype = numpy_to_torch(first.dtype)
    return f"torch has no dtype {first.dtype}" if dtype is None else Leaf("ndarray", _name(dtype), first.shape)


def numpy_to_torch(dtype: np.dtype) -> torch.dtype | None:
    """The same dtype in torch, None if there is none."""
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):
        return None


def _tensor_text(tensor: Any) -> str:
    return f"{_name(tensor.dtype)} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__


def _names(types: set[type]) -> str:
    return ", ".join(sorted(each.__name__ for each in types))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
