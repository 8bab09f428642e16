"""NumPy values in a pickle (scores, learning rates), rebuilt without NumPy's unpickling.

NumPy pickles an array as a call, a dtype and raw bytes. The dtypes of plain numbers are accepted; arrays of Python
objects, which would contain more pickled content, are refused.
"""

import math
from contextlib import suppress

import numpy as np

from flatout.safefiles.archive import DAMAGED, Refusal, WorkLimit
from flatout.safefiles.unpickle import MAX_COPIED, Built, Make, Name

_NUMBER_TYPES = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"}
_MAX_DIMS = 8
_MAX_BYTES = 1 << 20


class NumpyDtype(Built):
    """A dtype: its number type from the call, its byte order from the state."""

    def __init__(self, number_type: str) -> None:
        self._number_type = number_type
        self._byte_order = "="

    def build(self, state: object) -> None:
        match state:
            case (int(), "<" | ">" | "|" | "=" as byte_order, None, None, None, *_):
                self._byte_order = byte_order
            case _:
                raise _damaged("dtype")

    def values(self, raw: bytes) -> np.ndarray:
        """The bytes as numbers of this dtype, [N]."""
        dtype = np.dtype(self._byte_order + self._number_type)
        if len(raw) % dtype.itemsize:
            raise _damaged("array")
        return np.frombuffer(raw, dtype)

    def plain(self) -> object:
        return f"numpy {self._number_type}"


class NumpyArray(Built):
    """An array, empty until its state arrives."""

    def __init__(self) -> None:
        self._values = np.empty(0)

    def build(self, state: object) -> None:
        match state:
            case (int(), tuple(shape), NumpyDtype() as dtype, bool(is_fortran), bytes(raw)):
                self.fill(raw, dtype, shape, is_fortran=is_fortran)
            case _:
                raise _damaged("array")

    def fill(self, raw: bytes, dtype: NumpyDtype, shape: tuple[object, ...], *, is_fortran: bool) -> None:
        values = dtype.values(raw)
        lengths = [length for length in shape if type(length) is int and 0 <= length <= len(raw)]
        if len(lengths) != len(shape) or len(shape) > _MAX_DIMS or math.prod(lengths) != len(values):
            raise _damaged("array")
        if len(raw) > _MAX_BYTES:
            raise Refusal(f"it contains a NumPy array of {len(raw):,} bytes besides its tensors. {DAMAGED}")
        self._values = values.reshape(lengths, order="F" if is_fortran else "C")

    def plain(self) -> object:
        """The numbers as nested lists."""
        return self._values.tolist()


def numpy_names() -> dict[str, Make | None]:
    """Constructors for the names in NumPy's pickles, with both names of its core package, which NumPy 2 renamed."""
    budget = WorkLimit(MAX_COPIED, "copied items")

    def make_array(arguments: tuple[object, ...]) -> object:
        match arguments:
            case (Name(text="numpy.ndarray"), *_):
                return NumpyArray()
        raise _damaged("array")

    def make_array_of_bytes(arguments: tuple[object, ...]) -> object:
        match arguments:
            case (bytes(raw), NumpyDtype() as dtype, tuple(shape), "C" | "F" as order):
                array = NumpyArray()
                array.fill(raw, dtype, shape, is_fortran=order == "F")
                return array
        raise _damaged("array")

    def make_dtype(arguments: tuple[object, ...]) -> object:
        match arguments:
            case (str(number_type), *_) if number_type in _NUMBER_TYPES:
                return NumpyDtype(number_type)
        raise Refusal(f"it contains a NumPy array of other things than numbers, which weights do not need. {DAMAGED}")

    def make_scalar(arguments: tuple[object, ...]) -> object:
        match arguments:
            case (NumpyDtype() as dtype, bytes(raw)) if len(values := dtype.values(raw)) == 1:
                return values.tolist()[0]
        raise _damaged("number")

    def make_bytes(arguments: tuple[object, ...]) -> object:
        match arguments:
            case (str(text), "latin1" | "latin-1"):
                budget.spend(len(text))
                with suppress(UnicodeEncodeError):
                    return text.encode("latin1")
            case ():
                return b""
        raise _damaged("bytes")

    core = {
        "multiarray._reconstruct": make_array,
        "multiarray.scalar": make_scalar,
        # How protocol 5 writes arrays.
        "numeric._frombuffer": make_array_of_bytes,
    }
    return {
        **{f"numpy.{package}.{name}": make for package in ("core", "_core") for name, make in core.items()},
        "numpy.ndarray": None,
        "numpy.dtype": make_dtype,
        # How protocol 2 writes bytes.
        "_codecs.encode": make_bytes,
        "builtins.bytes": make_bytes,
    }


def _damaged(what: str) -> Refusal:
    return Refusal(f"its pickle creates a NumPy {what} in a way NumPy never does. {DAMAGED}")
