"""The messages between trainer and workers of a Loader: batch requests, batch parts, layouts, exceptions.

    trainer --BatchRequest--> worker: keys of the dataset, and the seed of its random numbers
    trainer <--BatchPart----- worker: one micro-batch, besides the rows written into the slot's body

A batch part is a pickle with holes: tensors are stored in the body, and the pickle has the numbers of their leaves in
their places. Everything else in a sample (containers, strings, objects of any class) is in the pickle itself.

The body of a slot has one leaf per tensor of the batch, without gaps, so that workers write rows next to each other:

    image   row 0 | row 1 | ... | row N-1     each leaf is one tensor [N, *shape]
    label   row 0 | row 1 | ... | row N-1

A layout depends only on the samples and the size of the batch: workers that read samples of the same structure arrive
at the same layout independently.

Dimension key:  N samples of the batch   M samples of a micro-batch
"""

import hashlib
import io
import math
import pickle
import traceback
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.feed.plan import Purpose, keyed_bits
from flatout.feed.processes import RemoteError
from flatout.feed.ring import Layout, pack

# Batch requests


class BatchRequest(NamedTuple):
    """The dataset's keys of one batch, and the seed, epoch and position of its random numbers."""

    keys: list[Any]
    micro_batch: int
    """Keys per part: part p is made of keys[p * micro_batch : (p + 1) * micro_batch]."""

    seed: int
    epoch: int
    position: int
    """Number of samples before the first key in this epoch."""

    probe: int = 0
    """If not 0, the batch is discarded: it is only read to find out how much room a batch of `probe` samples takes."""

    @property
    def num_parts(self) -> int:
        """Number of parts; an empty batch has one part too, because collate_fn must be called for it."""
        return max(1, -(-len(self.keys) // self.micro_batch))

    def seeds(self, begin: int, end: int) -> list[int]:
        """One seed for each of the keys [begin, end)."""
        positions = self.position + np.arange(begin, end)
        return [_as_seed(bits) for bits in keyed_bits(self.seed, self.epoch, positions, 1)[:, 0]]

    def step_seed(self) -> int:
        """The seed of random numbers that are drawn once per batch."""
        return _as_seed(keyed_bits(self.seed, self.epoch, np.array([self.position]), 1, purpose=Purpose.STEP)[0, 0])


def decode_request(memory: np.ndarray) -> BatchRequest:
    """The batch request at the beginning of `memory`, where `LoaderRuntime.publish` wrote it."""
    return BatchRequest(*pickle.loads(memory.data))


def _as_seed(bits: np.uint64) -> int:
    """A seed below 2**63, as in torch: a dataset may return torch.initial_seed(), and a batch of ints is int64."""
    return int(bits) & (2**63 - 1)


# Exceptions on their way from a worker to the trainer: the same class and arguments, and where they came from


def pack_error(error: Exception, *, worker: int, doing: str) -> bytes:
    """Everything that the trainer needs to raise `error` again, pickled."""
    where = f"In worker {worker}, {doing}"
    text = "".join(traceback.format_exception(error))
    return pickle.dumps((_pickled_or_none(error), f"{type(error).__name__}: {error}", where, text))


def raise_packed(packed: bytes) -> None:
    """Raise what `pack_error` packed; the worker's traceback is the `__cause__`."""
    pickled, summary, where, text = pickle.loads(packed)
    cause = RemoteError(f"{where}\n{text}")
    if pickled is None:
        # As in torch: an exception that cannot be pickled is raised as a RuntimeError with its text.
        raise RuntimeError(f"{summary} ({where})") from cause
    error = pickle.loads(pickled)
    error.add_note(where)
    raise error from cause


def _pickled_or_none(error: Exception) -> bytes | None:
    """The exception pickled, if it can also be unpickled."""
    try:
        pickled = pickle.dumps(error)
        back: Any = pickle.loads(pickled)
    except Exception:  # the user's exception class may raise anything when it is rebuilt
        return None
    return pickled if type(back) is type(error) else None


# Layout of the tensors of a batch in a slot's body

PYTHON_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


class Leaf(NamedTuple):
    """Layout of one tensor of a batch: kind of value, dtype, shape of a row."""

    kind: str
    """Type of a sample's value: 'tensor', 'ndarray', 'scalar' (of NumPy), or 'bool', 'int', 'float'."""

    dtype: str
    """Name in torch of the stacked tensor's dtype."""

    shape: tuple[int, ...]
    """Shape of one row."""

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]


def layout_of(leaves: Sequence[Leaf], num_rows: int) -> Layout:
    """The bytes of each leaf in the body, by its number as text."""
    return pack([(str(number), np.uint8, (leaf.row_bytes * num_rows,)) for number, leaf in enumerate(leaves)])


def fingerprint(leaves: Sequence[Leaf | None], structure: str = "") -> int:
    """A hash of a layout, never 0; None stands for a value that is not stored in the slot."""
    digest = hashlib.blake2b(f"{leaves} {structure}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") + 1


def views(body: np.ndarray, leaves: Sequence[Leaf], num_rows: int) -> tuple[list[Tensor], list[np.ndarray]]:
    """Leaves as tensors [N, *shape] over `body`, and the arrays that live exactly as long as any view of each."""
    # Separate arrays, not slices: NumPy lets views of a slice refer directly to the slice's owner.
    arrays = list(layout_of(leaves, num_rows).views(body).values())
    flat = [torch.from_numpy(array).view(leaf.torch_dtype) for leaf, array in zip(leaves, arrays, strict=True)]
    return [tensor.view(num_rows, *leaf.shape) for leaf, tensor in zip(leaves, flat, strict=True)], arrays


def leaf_of(values: Sequence[Any]) -> Leaf | str:
    """The leaf for the values of M samples, or the reason why they cannot be stacked."""
    first = values[0]
    if isinstance(first, Tensor):
        return _tensor_leaf(values)
    if isinstance(first, np.ndarray):
        return _array_leaf(values)
    kinds = {type(value) for value in values}
    if len(kinds) > 1:
        return f"its type changes ({', '.join(sorted(each.__name__ for each in kinds))})"
    if type(first) in PYTHON_DTYPES:
        return Leaf(type(first).__name__, _name(PYTHON_DTYPES[type(first)]), ())
    if isinstance(first, np.bool_ | np.number):
        return Leaf("scalar", _name(torch.as_tensor([first]).dtype), ())
    return f"a {type(first).__name__} has no fixed size"


def write_rows(leaf: Leaf, values: Sequence[Any], rows: Tensor) -> None:
    """Stack the values of M samples into `rows` [M, *shape]."""
    if leaf.kind == "tensor":
        torch.stack(list(values), out=rows)
    elif leaf.kind == "ndarray":
        np.stack(values, out=rows.numpy())
    else:
        rows.copy_(torch.tensor(values, dtype=leaf.torch_dtype))


def row_value(leaf: Leaf, rows: Tensor, row: int) -> Any:
    """The value of one sample as it was before it was stacked."""
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
            return f"a {type(value).__name__} is more than its values"
        if value.is_nested:  # its `shape` would raise
            return "a nested tensor has no single shape"
        if value.dtype != first.dtype or value.shape != first.shape:
            return f"its shape or dtype changes ({_tensor_text(first)}, then {_tensor_text(value)})"
    if first.layout != torch.strided or first.device.type != "cpu" or first.is_quantized:
        return f"a tensor with layout {first.layout} on {first.device} cannot be stored in a slot"
    if any(value.requires_grad or value.is_conj() or value.is_neg() for value in values):
        return "a tensor that requires grad, or a conjugate view, is more than its values"
    return Leaf("tensor", _name(first.dtype), tuple(first.shape))


def _array_leaf(values: Sequence[Any]) -> Leaf | str:
    first = values[0]
    for value in values:
        if not isinstance(value, np.ndarray) or value.dtype != first.dtype or value.shape != first.shape:
            return "its shape or dtype changes from sample to sample"
    try:
        return Leaf("ndarray", _name(torch.from_numpy(np.empty(0, first.dtype)).dtype), first.shape)
    except (TypeError, ValueError):
        return f"torch has no dtype {first.dtype}"


def _tensor_text(tensor: Any) -> str:
    return f"{_name(tensor.dtype)} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Batch parts


class PartKind(IntEnum):
    """Kind of a batch part."""

    ROWS = 0
    """Rows of a batch under the default collate, already in place."""
    SAMPLES = 1
    """Samples that do not fit the layout; the trainer collates the batch."""
    COLLATED = 2
    """The result of a custom collate_fn."""
    ERROR = 3
    """An exception."""


class PartHead(NamedTuple):
    """What parts of the same structure have in common."""

    leaves: tuple[Leaf | None, ...]
    """None: this value of the samples is pickled in the part."""

    skeleton: bytes
    """ROWS: the collated containers, with holes."""

    messages: tuple[str, ...]
    """Log messages about values that are not stored in the slot, with the reason."""


class BatchPart(NamedTuple):
    """One micro-batch, as a worker hands it over."""

    kind: PartKind
    head: bytes
    """A pickled PartHead; the trainer unpickles each distinct one only once."""

    content: bytes
    """ROWS: the pickled values. SAMPLES: the samples. COLLATED: the result, with holes. ERROR: the exception."""

    body_bytes: int = 0
    """Size of the body that this batch needs to be stored there completely."""

    took_s: float = 0.0
    """Seconds from fetching the first sample to the finished part."""


class Hole(NamedTuple):
    """Placeholder of leaf `number` in a skeleton."""

    number: int
    in_tuple: bool
    """Whether the values came as a tuple: the default collate returns strings in the same type of sequence."""


class TensorHole(NamedTuple):
    """Placeholder of a tensor in the result of a collate_fn."""

    number: int
    back: tuple[int, ...]
    """Permutation that restores the order of the leaf's dimensions; () for none."""


def dump_with_holes(value: Any, hole_for: Callable[[Any], Any]) -> bytes:
    """Pickle `value`, replacing every object for which `hole_for(object)` is not None by that hole."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.persistent_id = hole_for  # type: ignore[method-assign]
    pickler.dump(value)
    return file.getvalue()


def load_filled(pickled: bytes, fill: Callable[[Any], Any]) -> Any:
    """Unpickle, replacing every hole by `fill(hole)`."""
    unpickler = pickle.Unpickler(io.BytesIO(pickled))
    unpickler.persistent_load = fill  # type: ignore[method-assign]
    return unpickler.load()
