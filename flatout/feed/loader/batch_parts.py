"""What a worker hands over for a micro-batch, beside the rows it has written into the body.

A piece is a pickle with holes: tensors lie in the body, and in their places the pickle has the
numbers of their leaves. Whatever else a sample holds (containers, strings, objects of any class)
travels in the pickle itself.
"""

import hashlib
import io
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
from flatout.feed.ring import CACHE_LINE

# What a batch is to be made of, as the trainer writes it down for the workers. Pure: values in, bytes out.
#
# header | sample indices as int64, or, where keys are anything else, the pickled list of them

_HEADER = np.dtype(
    [(name, np.int64) for name in ("num_keys", "micro_batch", "seed", "epoch", "position", "pickled_bytes", "probe")]
)


class Order(NamedTuple):
    """One batch, or a part of it: the dataset's keys, and what random numbers follow from."""

    keys: list[Any]
    micro_batch: int
    """Keys per piece: piece p is made of keys[p * micro_batch : (p + 1) * micro_batch]."""

    seed: int
    epoch: int
    position: int
    """How many samples came before the first key in this epoch."""

    probe: int = 0
    """If not 0, nobody wants this batch: it is read to learn how much room a batch of `probe` samples takes."""

    @property
    def num_pieces(self) -> int:
        """An empty batch is one piece too: collating it is the dataset's owner's business."""
        return max(1, -(-len(self.keys) // self.micro_batch))

    def seeds(self, begin: int, end: int) -> list[int]:
        """A seed for each of the keys [begin, end)."""
        positions = self.position + np.arange(begin, end)
        return [_as_seed(bits) for bits in keyed_bits(self.seed, self.epoch, positions, 1)[:, 0]]

    def step_seed(self) -> int:
        """A seed for what happens once per batch."""
        return _as_seed(keyed_bits(self.seed, self.epoch, np.array([self.position]), 1, purpose=Purpose.STEP)[0, 0])


def encode(order: Order) -> bytes:
    """An order as bytes."""
    pickled = b"" if _fits_table(order.keys) else pickle.dumps(order.keys)
    keys = pickled or np.array(order.keys, np.int64).tobytes()
    header = np.array(
        (len(order.keys), order.micro_batch, order.seed, order.epoch, order.position, len(pickled), order.probe),
        _HEADER,
    )
    return header.tobytes() + keys


def decode(memory: np.ndarray) -> Order:
    """The order that `memory` begins with."""
    header = memory[: _HEADER.itemsize].view(_HEADER)[0]
    num_keys, micro_batch, seed, epoch, position, pickled_bytes, probe = map(int, header)
    rest = memory[_HEADER.itemsize :]
    if pickled_bytes:
        keys = pickle.loads(rest[:pickled_bytes].tobytes())
    else:
        keys = rest[: 8 * num_keys].view(np.int64).tolist()
    return Order(keys, micro_batch, seed, epoch, position, probe)


def _as_seed(bits: np.uint64) -> int:
    """Below 2**63, as torch's are: a dataset may return torch.initial_seed(), and a batch of ints is int64."""
    return int(bits) & (2**63 - 1)


def _fits_table(keys: list[Any]) -> bool:
    """Plain integers only: a dataset may tell a NumPy integer or a tensor from an int."""
    return all(type(key) is int and -(2**63) <= key < 2**63 for key in keys)


# An exception on its way from a worker to the trainer: the same class and arguments, with where it came from.


def pack_error(error: Exception, *, worker: int, doing: str) -> bytes:
    """Everything the trainer needs to raise `error` itself."""
    where = f"In worker {worker}, {doing}"
    text = "".join(traceback.format_exception(error))
    return pickle.dumps((_pickled_or_none(error), f"{type(error).__name__}: {error}", where, text))


def raise_packed(packed: bytes) -> None:
    """Raise what `pack_error` packed; the worker's traceback is the `__cause__`."""
    pickled, summary, where, text = pickle.loads(packed)
    cause = RemoteError(f"{where}\n{text}")
    if pickled is None:
        # Torch does the same: an exception that cannot travel arrives as a RuntimeError with its text.
        raise RuntimeError(f"{summary} ({where})") from cause
    error = pickle.loads(pickled)
    error.add_note(where)
    raise error from cause


def _pickled_or_none(error: Exception) -> bytes | None:
    """The exception pickled, if it also comes back."""
    try:
        pickled = pickle.dumps(error)
        back: Any = pickle.loads(pickled)
    except Exception:  # whatever an exception class of someone else does when it is rebuilt
        return None
    return pickled if type(back) is type(error) else None


# Where the parts of a batch lie in a slot's body.
#
#     image   row 0 | row 1 | ... | row N-1     each leaf is one tensor [N, *shape], without gaps,
#     label   row 0 | row 1 | ... | row N-1     so that workers write rows side by side
#
# A layout follows from the samples and the size of the batch alone: workers that read alike samples
# come to the same layout without asking each other.
#
# Dimension key:  N samples of the batch   M samples of a micro-batch

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


class Form(IntEnum):
    """What a piece is."""

    ROWS = 0
    """Rows of a batch under the default collate, in place."""
    SAMPLES = 1
    """Samples that do not fit the layout; the trainer collates the batch."""
    PART = 2
    """What a custom collate made."""
    ERROR = 3
    """What came of trying."""


class Head(NamedTuple):
    """What alike pieces share."""

    leaves: tuple[Leaf | None, ...]
    """None: this part of the samples is carried in the piece."""

    skeleton: bytes
    """ROWS: the collated containers, with holes."""

    told: tuple[str, ...]
    """Sentences about what could not be laid out, and why."""


class Piece(NamedTuple):
    """One micro-batch, as handed over."""

    form: Form
    head: bytes
    """A pickled Head; equal bytes say the same, so the trainer looks into each only once."""

    content: bytes
    """ROWS: the carried parts. SAMPLES: the samples. PART: the part, with holes. ERROR: the exception."""

    body_bytes: int = 0
    """Room in the body that this batch takes if it is laid out whole."""

    took_s: float = 0.0
    """From fetching the first sample to here."""


class Hole(NamedTuple):
    """Stands for leaf `number` in a skeleton."""

    number: int
    in_tuple: bool
    """The default collate leaves strings in the kind of sequence they came in."""


class TensorHole(NamedTuple):
    """Stands for a tensor of what a collate_fn made."""

    number: int
    back: tuple[int, ...]
    """How to permute the leaf's dimensions; () leaves them."""


def dump_with_holes(value: Any, hole_for: Callable[[Any], Any]) -> bytes:
    """Pickle `value`; where `hole_for(object)` is not None, that takes the object's place."""
    file = io.BytesIO()
    _HolePickler(file, hole_for).dump(value)
    return file.getvalue()


def load_filled(pickled: bytes, fill: Callable[[Any], Any]) -> Any:
    """Unpickle with `fill(hole)` in every hole."""
    return _FillingUnpickler(io.BytesIO(pickled), fill).load()


class _HolePickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, hole_for: Callable[[Any], Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._hole_for = hole_for

    def persistent_id(self, obj: Any) -> Any:
        return self._hole_for(obj)


class _FillingUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, fill: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._fill = fill

    def persistent_load(self, pid: Any) -> Any:
        return self._fill(pid)
