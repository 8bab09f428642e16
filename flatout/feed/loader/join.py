"""The second half of a (collate_fn, join_fn) pair: from micro-batches to a batch, without copying where it can be."""

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor


def cat_rows(parts: Sequence[Tensor]) -> Tensor:
    """torch.cat along the first dimension; without a copy if the parts lie one after another already.

    Tensors with a row per sample do, if every micro-batch has the same dtype and row shape.
    """
    first, end = parts[0], int(parts[0].storage_offset())
    for part in parts:
        if not _continues(part, first, end):
            return torch.cat(list(parts))
        end += part.numel()
    num_rows = sum(len(part) for part in parts)
    return first.as_strided((num_rows, *first.shape[1:]), first.stride())


def join_rows(parts: Sequence[Any]) -> Any:
    """Join collated micro-batches: tensors by `cat_rows`, lists of anything else end to end, through containers."""
    first = parts[0]
    if isinstance(first, Tensor):
        return cat_rows(parts)
    if isinstance(first, Mapping):
        joined = {key: join_rows([part[key] for part in parts]) for key in first}
        if isinstance(first, MutableMapping):
            clone = copy.copy(first)
            clone.update(joined)
            return clone
        return type(first)(joined)  # type: ignore[call-arg]
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(join_rows(each) for each in zip(*parts, strict=True)))
    if isinstance(first, list | tuple):
        if _holds_tensors(first):
            return type(first)(join_rows(each) for each in zip(*parts, strict=True))
        return type(first)(each for part in parts for each in part)
    raise TypeError(
        f"join_rows cannot join {type(first).__name__} objects: give Loader a join_fn of your own, "
        "which takes the list of what collate_fn made."
    )


def _continues(part: Tensor, first: Tensor, at: int) -> bool:
    return (
        part.is_contiguous()
        and part.dtype == first.dtype
        and part.shape[1:] == first.shape[1:]
        and part.storage_offset() == at
        and part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and type(part) is Tensor
        and not part.requires_grad
    )


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensors(each) for each in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_tensors(each) for each in value)
    return isinstance(value, Tensor)
