"""Read a pickle without running it: an interpreter of our own for the opcodes that hold data.

    bytes --opcode by opcode--> stack and memo --STOP--> one object

Python's unpickler imports what a file names and calls it. This one knows no import: a name means what the Vocabulary
says, and only the Vocabulary's functions are ever called.

Opcodes are those of protocols 2 to 5 that torch and Python write for such data; the text opcodes of protocol 0, INST,
OBJ, the extension registry and out-of-band buffers are refused.
"""

from collections.abc import Callable
from struct import Struct

from flatout.engine.checkpoint.pickle_machine import PickleMachine
from flatout.engine.checkpoint.refusal import DAMAGED, SUSPECT, Refusal
from flatout.engine.checkpoint.vocabulary import Vocabulary

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
