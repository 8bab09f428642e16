"""What a worker hands over for a micro-batch, beside the rows it has written into the body.

A piece is a pickle with holes: tensors lie in the body, and in their places the pickle has the
numbers of their leaves. Whatever else a sample holds (containers, strings, objects of any class)
travels in the pickle itself.
"""

import io
import pickle
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

from flatout.feed.loader.layout import Leaf


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
