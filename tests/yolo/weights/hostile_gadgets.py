"""Pickles that try to run code.

The commands are harmless if one should run after all: they create the file `ran`.
"""

import pickle
from collections.abc import Iterator

from tests.yolo.weights.pickle_bytes import (
    BUILD,
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_TUPLE,
    MARK,
    NEWOBJ,
    NONE,
    REDUCE,
    call,
    checkpoint,
    dict_of,
    keep,
    list_of,
    name,
    network,
    number,
    storage,
    tensor,
    text,
    torch_file,
    tuple_of,
)

COMMAND = "touch ran"
PYTHON = "open('ran', 'w')"

CALLED = {
    "os.system": [text(COMMAND)],
    "posix.system": [text(COMMAND)],
    "os.popen": [text(COMMAND)],
    "subprocess.Popen": [text(COMMAND), number(-1), NONE, NONE],
    "subprocess.check_output": [list_of(text("touch"), text("ran"))],
    "builtins.eval": [text(PYTHON)],
    "builtins.exec": [text(PYTHON)],
    "builtins.compile": [text(PYTHON), text(""), text("exec")],
    "builtins.open": [text("ran"), text("w")],
    "builtins.__import__": [text("antigravity")],
    "builtins.getattr": [name("builtins.dict"), text("get")],
    "builtins.globals": [],
    "importlib.import_module": [text("antigravity")],
    "runpy._run_code": [text(PYTHON), EMPTY_DICT],
    "code.InteractiveInterpreter": [],
    "timeit.timeit": [text(PYTHON)],
    "cProfile.run": [text(PYTHON)],
    "pdb.run": [text(PYTHON)],
    "webbrowser.open": [text("http://example.invalid")],
    "socket.create_connection": [tuple_of(text("127.0.0.1"), number(9))],
    "shutil.rmtree": [text("/nonexistent")],
    "ctypes.CDLL": [text("libc.so.6")],
    "marshal.loads": [text("x")],
    "types.FunctionType": [NONE],
    "functools.partial": [name("builtins.set")],
    "operator.attrgetter": [text("system")],
    "copyreg._reconstructor": [name("builtins.set"), name("builtins.set"), NONE],
    "copyreg.add_extension": [text("os"), text("system"), number(1)],
    "pickle.loads": [text("cos\nsystem\n")],
    "_pickle.loads": [text("cos\nsystem\n")],
    "torch.load": [text("ran")],
    "torch.hub.load": [text("ran"), text("ran")],
    "torch.jit.load": [text("ran")],
    "torch.storage._load_from_bytes": [text("x")],
    "torch._utils._rebuild_from_type_v2": [name("collections.OrderedDict")],
    "numpy.load": [text("ran")],
    "numpy.testing._private.utils.runstring": [text(PYTHON), EMPTY_DICT],
    "sys.exit": [],
    "os._exit": [number(0)],
    "models.common.__builtins__": [],
    "models.experimental.attempt_load": [text("ran")],
    "torch.nn.modules.conv.os.system": [text(COMMAND)],
    "__main__.main": [],
}
"""Name -> arguments with which Python's unpickler would call it."""


def gadgets() -> Iterator[tuple[str, bytes, list[str]]]:
    """Case name, file content, and words that the error message must contain."""
    for dotted, arguments in CALLED.items():
        yield f"call-{dotted}", torch_file(checkpoint(call(dotted, *arguments))), [dotted]
    yield from _other_opcodes()
    yield from _nested()
    yield from _through_the_allowed()


def _other_opcodes() -> Iterator[tuple[str, bytes, list[str]]]:
    command = text(COMMAND)
    two = text("os") + text("system")
    bodies = {
        "stack-global": (two + b"\x93" + command + b"\x85" + REDUCE, ["os.system"]),
        "memo-global": (keep(0, text("os")) + text("system") + b"\x93" + EMPTY_TUPLE + REDUCE, ["os.system"]),
        "inst": (MARK + command + b"ios\nsystem\n", ["os.system"]),
        "inst-allowed": (MARK + b"imodels.common\nConv\n", ["models.common.Conv", "INST"]),
        "obj": (MARK + name("os.system") + command + b"o", ["os.system"]),
        "obj-allowed": (MARK + name("models.common.Conv") + command + b"o", ["opcode b'o'"]),
        "newobj": (name("subprocess.Popen") + tuple_of(command) + NEWOBJ, ["subprocess.Popen"]),
        "newobj-ex": (name("subprocess.Popen") + tuple_of(command) + EMPTY_DICT + b"\x92", ["subprocess.Popen"]),
        "newobj-ex-allowed": (name("models.common.Conv") + EMPTY_TUPLE + EMPTY_DICT + b"\x92", ["opcode b'\\x92'"]),
        "python-2-name": (call("__builtin__.eval", text(PYTHON)), ["builtins.eval"]),
        "ext-1": (b"\x82\x01" + EMPTY_TUPLE + REDUCE, ["opcode b'\\x82'"]),
        "ext-2": (b"\x83\x01\x00" + EMPTY_TUPLE + REDUCE, ["opcode b'\\x83'"]),
        "ext-4": (b"\x84\x01\x00\x00\x00" + EMPTY_TUPLE + REDUCE, ["opcode b'\\x84'"]),
        "text-string": (b"S'touch ran'\n", ["opcode b'S'"]),
        "text-persistent-id": (b"Pos.system\n", ["opcode b'P'"]),
        "out-of-band": (b"\x97", ["opcode b'\\x97'"]),
        "protocol-0-put": (b"]p0\n", ["opcode b'p'"]),
        "name-with-newlines": (text("os\n\x1b[31m") + text("system") + b"\x93", [r"'os\n\x1b[31m.system'"]),
        "name-without-end": (b"c" + b"o" * 10_000, ["unterminated name"]),
        "setstate": (
            name("models.common.Conv") + EMPTY_TUPLE + NEWOBJ + dict_of({"__setstate__": name("os.system")}) + BUILD,
            ["os.system"],
        ),
    }
    for case, (body, words) in bodies.items():
        yield f"opcode-{case}", torch_file(checkpoint(body)), words
    yield "opcode-protocol-9", torch_file(checkpoint(), protocol=b"\x80\x09"), ["protocol 9"]


def _nested() -> Iterator[tuple[str, bytes, list[str]]]:
    inner = b"\x80\x02" + call("os.system", text(COMMAND)) + b"."
    raw = inner.decode("latin1")
    as_bytes = call("_codecs.encode", text(raw), text("latin1"))
    array = call("numpy._core.multiarray._reconstruct", name("numpy.ndarray"), tuple_of(number(0)), as_bytes)
    objects = call("numpy.dtype", text("O8"), b"\x89", b"\x88")
    yield "nested-loads", torch_file(checkpoint(call("pickle.loads", as_bytes))), ["pickle.loads"]
    yield "nested-in-storage", torch_file(checkpoint(tensor(key="0"), x=storage("1", 1)), {"0": inner}), ["storage"]
    yield "nested-second-pickle", torch_file(checkpoint() + b"." + inner), ["left over"]
    yield (
        "nested-numpy-objects",
        torch_file(checkpoint(best_fitness=array + tuple_of(objects) + BUILD)),
        ["other things than numbers"],
    )
    yield "nested-file", torch_file(checkpoint(), {"0": torch_file(inner[:-1])}), ["storage"]


def _through_the_allowed() -> Iterator[tuple[str, bytes, list[str]]]:
    """Allowed names in a wrong use."""
    conv = keep(1, name("models.common.Conv") + EMPTY_TUPLE + NEWOBJ)
    bodies = {
        "encode-zip": (call("_codecs.encode", text("x"), text("zip")), "NumPy bytes"),
        "encode-rot13": (call("_codecs.encode", text("x"), text("rot13")), "NumPy bytes"),
        "reconstruct-class": (
            call("numpy._core.multiarray._reconstruct", name("torch.FloatStorage"), tuple_of(number(0)), NONE),
            "NumPy array",
        ),
        "ordered-dict-argument": (call("collections.OrderedDict", list_of(text("a"))), "collections.OrderedDict"),
        "set-of-lists": (call("builtins.set", list_of(EMPTY_LIST)), "builtins.set"),
        "call-a-dtype": (call("torch.FloatStorage", number(4)), "torch.FloatStorage"),
        "call-a-list": (EMPTY_LIST + EMPTY_TUPLE + REDUCE, "calls list"),
        "call-a-module": (conv + EMPTY_TUPLE + REDUCE, "calls PickledModule"),
        "arguments-in-a-list": (name("builtins.set") + EMPTY_LIST + REDUCE, "arguments"),
        "append-to-module": (conv + number(1) + b"a", "appends"),
        "items-of-module": (conv + number(1) + number(2) + b"s", "sets items"),
        "build-a-list": (EMPTY_LIST + EMPTY_DICT + BUILD, "state of list"),
        "build-a-name": (name("builtins.set") + EMPTY_DICT + BUILD, "state of builtins.set"),
        "build-twice": (conv + dict_of({"a": NONE}) + BUILD + dict_of({"a": NONE}) + BUILD, "twice"),
        "name-as-key": (EMPTY_DICT + name("builtins.set") + NONE + b"s", "as a key"),
        "tensor-as-key": (EMPTY_DICT + tensor() + NONE + b"s", "as a key"),
        "persistent-name": (name("models.common.Conv") + b"Q", "storage"),
        "persistent-tensor": (tuple_of(tensor(), tensor()) + b"Q", "storage"),
        "storage-of-a-name": (
            tuple_of(text("storage"), name("models.common.Conv"), text("0"), text("cpu"), number(4)) + b"Q",
            "storage",
        ),
        "parameter-of-a-list": (call("torch._utils._rebuild_parameter", EMPTY_LIST, b"\x88", EMPTY_DICT), "parameter"),
        "module-as-config": (network(yaml=conv), "models.common.Conv"),
        "name-as-config": (network(yaml=list_of(name("builtins.set"))), "builtins.set"),
    }
    for case, (body, word) in bodies.items():
        yield f"allowed-{case}", torch_file(checkpoint(body)), [word]


def gadget_for_python() -> bytes:
    """A plain pickle that Python itself would run, to check the audit hook."""
    return pickle.PROTO + b"\x02" + call("os.system", text(COMMAND)) + b"."
