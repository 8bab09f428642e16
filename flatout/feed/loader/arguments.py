"""What the arguments of a Loader mean, and which of them cannot be obeyed."""

import multiprocessing
from typing import Any

from torch.utils.data import IterableDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from flatout.errors import ConfigError

_LAID_OUT = frozenset(default_collate_fn_map) - {str, bytes}


def check_arguments(
    dataset: object, micro_batch: int | str, join_fn: object, collate_fn: object, batch_size: int | None
) -> None:
    """Refuse what torch's own checks do not know."""
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"{type(dataset).__name__} is an IterableDataset, which decides by itself what each worker reads: Loader "
            "needs dataset[index]. Give the dataset a __getitem__, or use torch.utils.data.DataLoader."
        )
    if micro_batch != "auto" and (not isinstance(micro_batch, int) or micro_batch < 1):
        raise ConfigError(f"micro_batch={micro_batch!r} must be 'auto', or 1 or more.")
    if join_fn is not None and (collate_fn is None or batch_size is None):
        raise ConfigError(
            "join_fn is the second half of a pair: it joins what collate_fn made of micro-batches. "
            "Give collate_fn too (the default collate is joined by itself), and a batch_size."
        )


def collates_as_torch_does() -> bool:
    """Whether nobody has replaced how the default collate treats tensors, arrays and numbers."""
    return all(
        getattr(function, "__module__", "") == default_collate.__module__
        for kind, function in default_collate_fn_map.items()
        if kind in _LAID_OUT
    )


def start_method_of(context: Any) -> str:
    """The feed's start method for torch's `multiprocessing_context`: 'fork', or 'spawn' for a fresh interpreter."""
    if context is not None:
        method = context.get_start_method()
    else:
        # The first is the default; asking for it directly would fix it for the whole process.
        method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return "fork" if method == "fork" else "spawn"
