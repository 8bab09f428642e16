"""The names that YOLOv7's pickled checkpoints contain, and the harmless things they mean here.

Modules of the network become placeholders that keep their attributes and can do nothing. NumPy's few names are
implemented again below.
"""

import math
import re
from functools import lru_cache

import numpy as np
from torch import Tensor

from flatout.safefiles import DAMAGED, MAX_COPIED, Budget, Built, Make, Name, Refusal, Storages, Vocabulary, plain_names

# The NumPy values inside a checkpoint (best_fitness, learning rates), rebuilt without NumPy's unpickling.
#
# NumPy pickles an array as a call, a dtype and raw bytes. The dtypes of plain numbers are understood; arrays of Python
# objects, which would carry more pickled content, are refused.

_KINDS = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"}
_MAX_DIMS = 8
_MAX_BYTES = 1 << 20


class NumpyDtype(Built):
    """A dtype: its kind from the call, its byte order from the state."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._byte_order = "="

    def build(self, state: object) -> None:
        match state:
            case (int(), "<" | ">" | "|" | "=" as byte_order, None, None, None, *_):
                self._byte_order = byte_order
            case _:
                raise _damaged("dtype")

    def values(self, raw: bytes) -> np.ndarray:
        """The bytes as numbers of this dtype, [N]."""
        dtype = np.dtype(self._byte_order + self._kind)
        if len(raw) % dtype.itemsize:
            raise _damaged("array")
        return np.frombuffer(raw, dtype)

    def plain(self) -> object:
        return f"numpy {self._kind}"


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
            raise Refusal(f"it holds a NumPy array of {len(raw):,} bytes beside its tensors. {DAMAGED}")
        self._values = values.reshape(lengths, order="F" if is_fortran else "C")

    def plain(self) -> object:
        """Numbers in nested lists."""
        return self._values.tolist()


def numpy_names(budget: Budget) -> dict[str, Make | None]:
    """What the names of NumPy's pickles make; both spellings of its core, which was renamed in NumPy 2."""

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
            case (str(kind), *_) if kind in _KINDS:
                return NumpyDtype(kind)
        raise Refusal(
            f"it holds a NumPy array of something else than plain numbers, which weights do not need. {DAMAGED}"
        )

    def make_scalar(arguments: tuple[object, ...]) -> object:
        match arguments:
            case (NumpyDtype() as dtype, bytes(raw)) if len(values := dtype.values(raw)) == 1:
                return values.tolist()[0]
        raise _damaged("number")

    def make_bytes(arguments: tuple[object, ...]) -> object:
        match arguments:
            case (str(text), "latin1" | "latin-1"):
                budget.spend(len(text))
                return _latin1(text)
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


def _latin1(text: str) -> bytes:
    try:
        return text.encode("latin1")
    except UnicodeEncodeError:
        raise _damaged("bytes") from None


def _damaged(what: str) -> Refusal:
    return Refusal(f"its pickle makes a NumPy {what} in a way NumPy never does. {DAMAGED}")


# Whatever the name: nothing of these packages is looked up or imported, so forks with blocks of their own load too.
_MODULE_PACKAGES = re.compile(r"models\.(common|experimental|yolo)|torch\.nn\.modules\.\w+|torch\.nn\.parallel\.\w+")
_CLASS_NAME = re.compile(r"[A-Za-z]\w*")
_MAX_NAME = 100
HEAD_CONFIG = "utils.head_config.HeadConfig"
"""What 1B4H networks keep beside their modules; legacy.py reads its attributes."""


class ModuleStandIn(Built):
    """A pickled nn.Module without its class: the attribute dict and nothing else."""

    __slots__ = ("attributes", "type_name")

    def __init__(self, type_name: str) -> None:
        self.type_name = type_name
        """Such as models.common.Conv."""
        self.attributes: dict[object, object] = {}
        """As pickled, to be read only: it may be shared, cyclic or huge."""

    def build(self, state: object) -> None:
        if type(state) is not dict or self.attributes:
            raise Refusal(f"its {self.type_name} has no attributes, or has them twice. {DAMAGED}")
        self.attributes = state

    def plain(self) -> object:
        raise Refusal(f"a {self.type_name} is where plain data should be. {DAMAGED}")


def legacy_vocabulary(storages: Storages) -> Vocabulary:
    """All names of YOLOv7 checkpoints, those of our own files included."""
    budget = Budget(MAX_COPIED, "copied items")
    names = plain_names(storages) | numpy_names(budget) | _torch_names()
    return Vocabulary(names, family=_module_name)


# A network names the same few classes a thousand times.
@lru_cache(maxsize=256)
def _module_name(module: str, name: str) -> Name | None:
    type_name = f"{module}.{name}"
    if len(type_name) > _MAX_NAME:
        return None
    if not (_MODULE_PACKAGES.fullmatch(module) and _CLASS_NAME.fullmatch(name)) and type_name != HEAD_CONFIG:
        return None
    return Name(type_name, lambda arguments: ModuleStandIn(type_name))


def _torch_names() -> dict[str, Make | None]:
    def make_parameter(arguments: tuple[object, ...]) -> object:
        match arguments:
            # Then: backward hooks, and in _with_state a state of Python attributes.
            case (Tensor() as data, bool(requires_grad), *_):
                return data.detach().requires_grad_(requires_grad and data.is_floating_point())
        raise Refusal(f"its pickle makes a parameter in a way torch never does. {DAMAGED}")

    return {
        "torch._utils._rebuild_parameter": make_parameter,
        "torch._utils._rebuild_parameter_with_state": make_parameter,
        # Attributes of wrappers for several GPUs, and where a head configuration came from; nothing here reads them.
        "torch.device": lambda arguments: None,
        "pathlib.PosixPath": lambda arguments: None,
        "pathlib.WindowsPath": lambda arguments: None,
    }
