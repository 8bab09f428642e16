"""Read a pickle without running it: our own interpreter for the opcodes that hold data.

    bytes --opcode by opcode--> stack and memo --STOP--> one object

Python's unpickler imports and calls whatever a file names. This one imports nothing: names are looked up in an
`Allowlist` of our own functions, which take the pickled arguments and return data. Other names are refused, and the
error says which. Supported opcodes are those of protocols 2 to 5 that torch and Python write for such data; the text
opcodes of protocol 0, INST, OBJ, the extension registry and out-of-band buffers are refused.

Tensors are views of storages, each an entry of the zip archive that is read once, directly into the memory of its
tensors. Size, offset and stride of a view come from the pickle and are checked against the bytes that are there; a view
never has more elements than its storage, so that a small file cannot describe a large tensor.

Dimension key:  N elements of a storage
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from flatout.safefiles.archive import AGAIN, DAMAGED, SUSPECT, YOURS, Archive, Refusal, WorkLimit, quoted

# Tensors

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
    """A flat array of elements, viewed as tensors."""

    flat_N: Tensor


class Storages:
    """The storages of an archive by key, each read on first use."""

    def __init__(self, archive: Archive, root: str) -> None:
        self._archive = archive
        self._root = root
        self._storages: dict[str, Storage] = {}
        self._tensors = WorkLimit(MAX_TENSORS, "tensors")

    def open(self, key: str, dtype: torch.dtype, num_elements: int) -> Storage:
        """The storage of this key; Refusal if dtype or number of elements do not match its bytes."""
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
        """A tensor over part of a storage, sharing its memory; Refusal if it does not lie inside."""
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
                f"its storage {quoted(key)} has {nbytes:,} bytes, not a whole number of {dtype} elements. {DAMAGED}"
            )
        stored = allocate(nbytes)
        self._archive.read_into(name, stored.numpy().data)
        # A byte other than 0 and 1 would be a bool that is neither True nor False.
        return Storage((stored.clamp_(max=1) if dtype == torch.bool else stored).view(dtype))


def allocate(nbytes: int) -> Tensor:
    """Memory for a storage, uint8 [nbytes], uninitialized."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8)
    except RuntimeError:
        raise Refusal(f"needs {nbytes:,} bytes of memory for one tensor. Read it on a larger machine.") from None


def is_countable(lengths: Sequence[int]) -> bool:
    """Whether torch can multiply these lengths. It does so in 64 bits, and a later 0 does not undo an overflow."""
    return math.prod(length or 1 for length in lengths) < 1 << 63


def _lengths(values: tuple[object, ...]) -> list[int]:
    lengths = [value for value in values if type(value) is int and 0 <= value < _MAX_LENGTH]
    if len(lengths) != len(values):
        raise Refusal(f"a tensor has an invalid size or stride. {DAMAGED}")
    return lengths


def _fits(storage: Storage, offset: int, sizes: list[int], strides: list[int]) -> bool:
    num_elements = storage.flat_N.numel()
    if not 0 <= offset <= num_elements or not is_countable(sizes):
        return False
    if 0 in sizes:
        return True
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return last < num_elements and math.prod(sizes) <= num_elements


# Names

Make = Callable[[tuple[object, ...]], object]
"""Our function for a name: pickled arguments -> data. Refusal for unexpected arguments."""

Family = Callable[[str, str], "Name | None"]
"""Module and name -> a Name if they belong to a family of allowed names, else None."""

MAX_COPIED = 4 << 20
"""Most items and bytes that all functions of a pickle may copy together: one list can be copied a million times."""


@dataclass(frozen=True, slots=True)
class Name:
    """An allowed name on the stack of the unpickler."""

    text: str
    make: Make | None = None
    """None for names that are not called, such as storage types."""

    def __call__(self, arguments: tuple[object, ...]) -> object:
        if self.make is None:
            raise Refusal(f"the file is damaged: its pickle calls {self.text}, which is not a function. {AGAIN}")
        return self.make(arguments)


class Built:
    """An object whose state a pickle sets after creating it (opcode BUILD)."""

    __slots__ = ()

    def build(self, state: object) -> None:
        raise NotImplementedError

    def plain(self) -> object:
        """The object as plain data; Refusal if it has none."""
        raise NotImplementedError


class Allowlist:
    """The names that a pickle may use: a table, and a function for families of names."""

    def __init__(self, names: Mapping[str, Make | None], family: Family | None = None) -> None:
        self._names = {text: Name(text, make) for text, make in names.items()}
        self._family = family

    def look_up(self, module: str, name: str) -> Name:
        # Protocol 2 uses the module names of Python 2.
        text = f"{'builtins' if module == '__builtin__' else module}.{name}"
        found = self._names.get(text) or (self._family and self._family(module, name))
        if not found:
            raise Refusal(
                f"its pickle refers to {quoted(text)}, which weights do not need; nothing was run. {YOURS} If "
                "not, it may have been made to run code when it is loaded: do not open it with torch.load. Get the "
                "weights from a source you trust, as safetensors if possible."
            )
        return found


def plain_allowlist(storages: Storages) -> Allowlist:
    """The names that container files use: tensors and containers."""
    return Allowlist(plain_names(storages))


def plain_names(storages: Storages) -> dict[str, Make | None]:
    budget = WorkLimit(MAX_COPIED, "copied items")

    def make_dict(arguments: tuple[object, ...]) -> object:
        # Since Python 3 pickled as an empty one whose items follow.
        return {} if arguments == () else _unexpected("collections.OrderedDict")

    def make_set(arguments: tuple[object, ...]) -> object:
        match arguments:
            case (list(items),):
                # Counted before it is checked: the next call may pass the same list again.
                budget.spend(len(items))
                if all(type(item) is str for item in items):
                    return set(items)
                raise Refusal(f"its pickle has a builtins.set of other things than text. {YOURS}")
        return _unexpected("builtins.set")

    def make_size(arguments: tuple[object, ...]) -> object:
        match arguments:
            case (tuple(size),):
                return size
        return _unexpected("torch.Size")

    def make_tensor(arguments: tuple[object, ...]) -> object:
        match arguments:
            # What follows: requires_grad, backward hooks, and in newer files metadata.
            case (Storage() as storage, int(offset), tuple(size), tuple(stride), *_) if type(offset) is int:
                return storages.view(storage, offset, size, stride)
        return _unexpected("torch._utils._rebuild_tensor_v2")

    def make_parameter(arguments: tuple[object, ...]) -> object:
        match arguments:
            # The remaining arguments are backward hooks and, in _with_state, a state of Python attributes.
            case (Tensor() as data, bool(requires_grad), *_):
                return data.detach().requires_grad_(requires_grad and data.is_floating_point())
        raise Refusal(f"its pickle creates a parameter in a way torch never does. {DAMAGED}")

    return {
        "collections.OrderedDict": make_dict,
        "builtins.set": make_set,
        "torch.Size": make_size,
        "torch._utils._rebuild_tensor_v2": make_tensor,
        "torch._utils._rebuild_parameter": make_parameter,
        "torch._utils._rebuild_parameter_with_state": make_parameter,
        **dict.fromkeys(DTYPES),
    }


def _unexpected(name: str) -> object:
    raise Refusal(f"its pickle calls {name} with arguments that torch never writes. {DAMAGED}")


# The interpreter
#
# It builds lists, dicts, tuples, sets, numbers, text, tensors and the objects of the allowlist. Work and memory are
# proportional to the length of the pickle: nothing here copies, hashes or compares a container, and nothing recurses.
# Depth and cycles do no harm until the result is walked, which `PlainReader` does within a budget.

MAX_MARKS = 1_000
MAX_NAME_BYTES = 256


class PickleMachine:
    """The state of reading one pickle (bytes, stack and memo) and the operations of its opcodes."""

    def __init__(self, data: bytes, allowlist: Allowlist, persistent: Callable[[object], object]) -> None:
        """`persistent` turns a persistent id, which torch uses for storages, into an object."""
        self._data = data
        self._allowlist = allowlist
        self._persistent = persistent
        self._at = 0
        self._stack: list[object] = []
        self._stacks_below: list[list[object]] = []
        self._memo: dict[int, object] = {}

    def result(self) -> object:
        """The one object on the stack at the end of the pickle."""
        if len(self._stack) != 1 or self._stacks_below or self._at != len(self._data):
            raise Refusal(f"its pickle has objects or bytes left over at its end. {DAMAGED}")
        return self._stack[0]

    # Bytes

    def byte(self) -> int:
        at = self._at
        if at == len(self._data):
            raise _too_early()
        self._at = at + 1
        return self._data[at]

    def take(self, nbytes: int) -> bytes:
        at = self._at
        if nbytes > len(self._data) - at:
            raise _too_early()
        self._at = at + nbytes
        return self._data[at : at + nbytes]

    def number(self, form: Struct) -> Any:
        """The next number in the format `form`; an int unless that is the format of a float."""
        return form.unpack(self.take(form.size))[0]

    def text(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise Refusal(f"its pickle has text that is not UTF-8. {DAMAGED}") from None

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + MAX_NAME_BYTES)
        if end < 0:
            raise Refusal(f"its pickle has an unterminated name. {DAMAGED}")
        return self.text(self.take(end + 1 - self._at)[:-1])

    # Stack

    def push(self, value: object) -> None:
        self._stack.append(value)

    def pop(self) -> object:
        if not self._stack:
            raise _underflow()
        return self._stack.pop()

    def top(self) -> object:
        if not self._stack:
            raise _underflow()
        return self._stack[-1]

    def pop_mark(self) -> list[object]:
        """Everything above the last mark."""
        if not self._stacks_below:
            raise _underflow()
        items, self._stack = self._stack, self._stacks_below.pop()
        return items

    def mark(self) -> None:
        if len(self._stacks_below) == MAX_MARKS:
            raise Refusal(f"its pickle is nested deeper than {MAX_MARKS:,} levels. {SUSPECT}")
        self._stacks_below.append(self._stack)
        self._stack = []

    # Containers; exact types, because only objects that this class created are changed

    def append(self, items: list[object]) -> None:
        target = self.top()
        if type(target) is not list:
            raise _wrong("appends to", target)
        target.extend(items)

    def set_items(self, items: list[object]) -> None:
        target = self.top()
        if type(target) is not dict or len(items) % 2:
            raise _wrong("sets items of", target)
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_checked_key(key)] = value

    def add_items(self) -> None:
        items, target = self.pop_mark(), self.top()
        if type(target) is not set:
            raise _wrong("adds to", target)
        target.update(map(_checked_key, items))

    def push_tuple(self, num_items: int) -> None:
        items = tuple(self.pop() for _ in range(num_items))
        self.push(items[::-1])

    # Memo

    def remember(self, index: int) -> None:
        self._memo[index] = self.top()

    def recall(self, index: int) -> None:
        if index not in self._memo:
            raise Refusal(f"its pickle refers to an object that it does not contain. {DAMAGED}")
        self.push(self._memo[index])

    def memoize(self) -> None:
        self.remember(len(self._memo))

    # Names and calls

    def global_name(self) -> None:
        module, name = self._line(), self._line()
        self.push(self._allowlist.look_up(module, name))

    def stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        if type(module) is not str or type(name) is not str:
            raise _wrong("takes as a name", name)
        self.push(self._allowlist.look_up(module, name))

    def instance(self) -> None:
        # Looked up only to report the name.
        self.global_name()
        raise Refusal(f"its pickle creates {self._name().text} by opcode INST, which torch never writes. {DAMAGED}")

    def call(self) -> None:
        """REDUCE and NEWOBJ, which differ only for real classes."""
        arguments, name = self.pop(), self._name()
        if type(arguments) is not tuple:
            raise _wrong("takes as arguments", arguments)
        self.push(name(arguments))

    def build(self) -> None:
        state, target = self.pop(), self.top()
        if isinstance(target, Built):
            target.build(state)
        elif type(target) is not dict:
            raise _wrong("sets the state of", target)
        # A state_dict is a dict with an attribute `_metadata`, which we do not need.

    def persistent_id(self) -> None:
        self.push(self._persistent(self.pop()))

    def _name(self) -> Name:
        value = self.pop()
        if not isinstance(value, Name):
            raise _wrong("calls", value)
        return value

    # Protocol

    def protocol(self) -> None:
        version = self.take(1)[0]
        if not 2 <= version <= 5:
            raise Refusal(f"its pickle has protocol {version}; torch writes 2. {DAMAGED}")


def _checked_key(key: object) -> object:
    """The key if it is text, bytes, a float, a bool, None or a 64-bit integer; else Refusal.

    Hashing a tuple could take as long as an attacker likes.
    """
    if type(key) is int and not -(1 << 63) <= key < 1 << 63:
        raise _wrong("uses as a key", key)
    if type(key) not in (str, int, float, bool, bytes, type(None)):
        raise _wrong("uses as a key", key)
    return key


def _wrong(what: str, value: object) -> Refusal:
    kind = value.text if isinstance(value, Name) else type(value).__name__
    return Refusal(f"its pickle {what} {quoted(kind)}, which torch never does. {DAMAGED}")


def _too_early() -> Refusal:
    return Refusal(f"its pickle ends too early or claims more bytes than it has. {DAMAGED}")


def _underflow() -> Refusal:
    return Refusal(f"its pickle pops from an empty stack. {DAMAGED}")


# Opcodes

MAX_OPCODES = 1_000_000
"""The largest network of the YOLOv7 family, saved during training, needs about 400,000."""
MAX_LONG_BYTES = 255

Handler = Callable[[PickleMachine], object]
"""The function of an opcode; its return value is ignored."""

_U8, _U32, _U64 = Struct("<B"), Struct("<I"), Struct("<Q")


def unpickle(data: bytes, allowlist: Allowlist, persistent: Callable[[object], object]) -> object:
    """The object of the pickle in `data`, which must end with it; `persistent` turns persistent ids into objects."""
    machine = PickleMachine(data, allowlist, persistent)
    for _ in range(MAX_OPCODES):
        opcode = machine.byte()
        if opcode == _STOP:
            return machine.result()
        handler = _HANDLERS.get(opcode)
        if handler is None:
            raise Refusal(f"its pickle uses opcode {bytes([opcode])!r}, which torch never writes. {DAMAGED}")
        handler(machine)
    raise Refusal(f"its pickle has more than {MAX_OPCODES:,} opcodes, far beyond any known network. {SUSPECT}")


def _pushes(value: object) -> Handler:
    return lambda machine: machine.push(value)


def _pushes_new(kind: type) -> Handler:
    return lambda machine: machine.push(kind())


def _pushes_number(form: Struct) -> Handler:
    return lambda machine: machine.push(machine.number(form))


def _pushes_text(form: Struct) -> Handler:
    return lambda machine: machine.push(machine.text(machine.take(machine.number(form))))


def _pushes_bytes(form: Struct) -> Handler:
    return lambda machine: machine.push(machine.take(machine.number(form)))


def _pushes_long(form: Struct) -> Handler:
    def handle(machine: PickleMachine) -> None:
        nbytes = machine.number(form)
        if nbytes > MAX_LONG_BYTES:
            raise Refusal(f"its pickle has a number of {nbytes:,} bytes. {DAMAGED}")
        machine.push(int.from_bytes(machine.take(nbytes), "little", signed=True))

    return handle


_STOP = ord(".")
_HANDLERS: dict[int, Handler] = {
    0x80: PickleMachine.protocol,
    0x95: lambda machine: machine.take(8),  # FRAME: a hint for buffered readers
    ord("("): PickleMachine.mark,
    ord("0"): PickleMachine.pop,
    ord("1"): PickleMachine.pop_mark,
    ord("2"): lambda machine: machine.push(machine.top()),
    ord("N"): _pushes(None),
    0x88: _pushes(True),
    0x89: _pushes(False),
    ord("K"): lambda machine: machine.push(machine.byte()),
    ord("M"): _pushes_number(Struct("<H")),
    ord("J"): _pushes_number(Struct("<i")),
    ord("G"): _pushes_number(Struct(">d")),
    0x8A: _pushes_long(_U8),
    0x8B: _pushes_long(_U32),
    0x8C: _pushes_text(_U8),
    ord("X"): _pushes_text(_U32),
    0x8D: _pushes_text(_U64),
    ord("C"): _pushes_bytes(_U8),
    ord("B"): _pushes_bytes(_U32),
    0x8E: _pushes_bytes(_U64),
    0x96: _pushes_bytes(_U64),  # BYTEARRAY8, as bytes: nothing here modifies it
    ord("]"): _pushes_new(list),
    ord("}"): _pushes_new(dict),
    0x8F: _pushes_new(set),
    ord(")"): _pushes(()),
    ord("t"): lambda machine: machine.push(tuple(machine.pop_mark())),
    0x85: lambda machine: machine.push_tuple(1),
    0x86: lambda machine: machine.push_tuple(2),
    0x87: lambda machine: machine.push_tuple(3),
    ord("a"): lambda machine: machine.append([machine.pop()]),
    ord("e"): lambda machine: machine.append(machine.pop_mark()),
    ord("s"): lambda machine: machine.set_items([machine.pop(), machine.pop()][::-1]),
    ord("u"): lambda machine: machine.set_items(machine.pop_mark()),
    0x90: PickleMachine.add_items,
    ord("q"): lambda machine: machine.remember(machine.byte()),
    ord("r"): lambda machine: machine.remember(machine.number(_U32)),
    0x94: PickleMachine.memoize,
    ord("h"): lambda machine: machine.recall(machine.byte()),
    ord("j"): lambda machine: machine.recall(machine.number(_U32)),
    ord("c"): PickleMachine.global_name,
    0x93: PickleMachine.stack_global,
    ord("i"): PickleMachine.instance,
    ord("R"): PickleMachine.call,
    0x81: PickleMachine.call,
    ord("b"): PickleMachine.build,
    ord("Q"): PickleMachine.persistent_id,
}
