"""Read a pickle without running it: an interpreter of our own for the opcodes that hold data.

    bytes --opcode by opcode--> stack and memo --STOP--> one object

Python's unpickler imports what a file names and calls it. This one knows no import: a name means what the Vocabulary
says, and only the Vocabulary's functions are ever called.

Opcodes are those of protocols 2 to 5 that torch and Python write for such data; the text opcodes of protocol 0, INST,
OBJ, the extension registry and out-of-band buffers are refused.
"""

from collections.abc import Callable
from struct import Struct
from typing import Any

from flatout.safefiles.allowlist import Built, Name, Vocabulary
from flatout.safefiles.refusal import DAMAGED, SUSPECT, Refusal, quoted

# The machine behind `unpickle.py`: what an opcode can do, and nothing beyond.
#
# What it builds are lists, dicts, tuples, sets, numbers, text, tensors and the Vocabulary's own objects. Work and
# memory grow with the length of the pickle only: nothing here copies, hashes or compares a container, and nothing
# recurses, so depth and cycles do no harm until somebody walks the result (`PlainReader` does, and counts).

MAX_MARKS = 1_000
MAX_NAME_BYTES = 256


class PickleMachine:
    """One reading of one pickle: the bytes, the stack, the memo, and what each opcode may do to them."""

    def __init__(self, data: bytes, vocabulary: Vocabulary, persistent: Callable[[object], object]) -> None:
        """`persistent` turns a persistent id, which torch uses for storages, into an object."""
        self._data = data
        self._vocabulary = vocabulary
        self._persistent = persistent
        self._at = 0
        self._stack: list[object] = []
        self._stacks_below: list[list[object]] = []
        self._memo: dict[int, object] = {}

    def result(self) -> object:
        """The one object left when the pickle has come to its end."""
        if len(self._stack) != 1 or self._stacks_below or self._at != len(self._data):
            raise Refusal(f"its pickle ends with things left over. {DAMAGED}")
        return self._stack[0]

    # The bytes.

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
        """The next number, as wide as `form`; an int unless the form is a float's."""
        at = self._at
        if form.size > len(self._data) - at:
            raise _too_early()
        self._at = at + form.size
        return form.unpack_from(self._data, at)[0]

    def text(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise Refusal(f"its pickle has text that is not UTF-8. {DAMAGED}") from None

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + MAX_NAME_BYTES)
        if end < 0:
            raise Refusal(f"its pickle has a name without an end. {DAMAGED}")
        return self.text(self.take(end + 1 - self._at)[:-1])

    # The stack.

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

    # Containers. Exact types: only what this class made is changed.

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

    # The memo.

    def remember(self, index: int) -> None:
        self._memo[index] = self.top()

    def recall(self, index: int) -> None:
        if index not in self._memo:
            raise Refusal(f"its pickle refers to something it does not hold. {DAMAGED}")
        self.push(self._memo[index])

    def memoize(self) -> None:
        self.remember(len(self._memo))

    # Names and what they make.

    def global_name(self) -> None:
        module, name = self._line(), self._line()
        self.push(self._vocabulary.look_up(module, name))

    def stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        if type(module) is not str or type(name) is not str:
            raise _wrong("takes as a name", name)
        self.push(self._vocabulary.look_up(module, name))

    def instance(self) -> None:
        # Looked up only to tell which name the file is after.
        self.global_name()
        raise Refusal(f"its pickle makes {self._name().text} by opcode INST, which torch never writes. {DAMAGED}")

    def call(self) -> None:
        """REDUCE and NEWOBJ: the difference matters only to real classes."""
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
        # A state_dict is a dict with an attribute `_metadata`, which nothing of ours reads.

    def persistent_id(self) -> None:
        self.push(self._persistent(self.pop()))

    def _name(self) -> Name:
        value = self.pop()
        if not isinstance(value, Name):
            raise _wrong("calls", value)
        return value

    # The frame of the file.

    def protocol(self) -> None:
        version = self.take(1)[0]
        if not 2 <= version <= 5:
            raise Refusal(f"its pickle has protocol {version}; torch writes 2. {DAMAGED}")


def _checked_key(key: object) -> object:
    """A key that hashes in constant time: tuples may be as deep or as wide as an attacker likes."""
    if type(key) is int and not -(1 << 63) <= key < 1 << 63:
        raise _wrong("uses as a key", key)
    if type(key) not in (str, int, float, bool, bytes, type(None)):
        raise _wrong("uses as a key", key)
    return key


def _wrong(what: str, value: object) -> Refusal:
    kind = value.text if isinstance(value, Name) else type(value).__name__
    return Refusal(f"its pickle {what} {quoted(kind)}, which torch never does. {DAMAGED}")


def _too_early() -> Refusal:
    return Refusal(f"its pickle ends too early, or claims more bytes than it has. {DAMAGED}")


def _underflow() -> Refusal:
    return Refusal(f"its pickle takes from an empty stack. {DAMAGED}")


MAX_OPCODES = 1_000_000
"""The largest network of the YOLOv7 family, saved in training, needs about 400,000."""
MAX_LONG_BYTES = 255

Step = Callable[[PickleMachine], object]
"""What an opcode does; its return value means nothing."""

_U8, _U32, _U64 = Struct("<B"), Struct("<I"), Struct("<Q")


def unpickle(data: bytes, vocabulary: Vocabulary, persistent: Callable[[object], object]) -> object:
    """The object of a pickle that fills `data` to its end; `persistent` turns persistent ids into objects."""
    machine = PickleMachine(data, vocabulary, persistent)
    for _ in range(MAX_OPCODES):
        opcode = machine.byte()
        if opcode == _STOP:
            return machine.result()
        step = _STEPS.get(opcode)
        if step is None:
            raise Refusal(f"its pickle uses opcode {bytes([opcode])!r}, which torch never writes. {DAMAGED}")
        step(machine)
    raise Refusal(f"its pickle has more than {MAX_OPCODES:,} opcodes, far beyond any known network. {SUSPECT}")


def _pushes(value: object) -> Step:
    return lambda machine: machine.push(value)


def _pushes_new(kind: type) -> Step:
    return lambda machine: machine.push(kind())


def _pushes_number(form: Struct) -> Step:
    return lambda machine: machine.push(machine.number(form))


def _pushes_text(form: Struct) -> Step:
    return lambda machine: machine.push(machine.text(machine.take(machine.number(form))))


def _pushes_bytes(form: Struct) -> Step:
    return lambda machine: machine.push(machine.take(machine.number(form)))


def _pushes_long(form: Struct) -> Step:
    def step(machine: PickleMachine) -> None:
        nbytes = machine.number(form)
        if nbytes > MAX_LONG_BYTES:
            raise Refusal(f"its pickle has a number of {nbytes:,} bytes. {DAMAGED}")
        machine.push(int.from_bytes(machine.take(nbytes), "little", signed=True))

    return step


_STOP = ord(".")
_STEPS: dict[int, Step] = {
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
    0x96: _pushes_bytes(_U64),  # BYTEARRAY8: nobody here writes into it
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
