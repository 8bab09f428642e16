"""torch files built by hand, opcode by opcode, including content that no normal program writes."""

import io
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

MARK, TUPLE, REDUCE, NEWOBJ, BUILD, STOP = b"(", b"t", b"R", b"\x81", b"b", b"."
EMPTY_TUPLE, EMPTY_LIST, EMPTY_DICT, NONE = b")", b"]", b"}", b"N"
PROTOCOL = b"\x80\x02"


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def name(dotted: str) -> bytes:
    """A GLOBAL opcode: everything before the last dot is the module."""
    module, _, attribute = dotted.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def tuple_of(*items: bytes) -> bytes:
    return MARK + b"".join(items) + TUPLE


def list_of(*items: bytes) -> bytes:
    return EMPTY_LIST + MARK + b"".join(items) + b"e"


def dict_of(pairs: Mapping[str, bytes]) -> bytes:
    return EMPTY_DICT + MARK + b"".join(text(key) + value for key, value in pairs.items()) + b"u"


def call(dotted: str, *arguments: bytes) -> bytes:
    return name(dotted) + tuple_of(*arguments) + REDUCE


def keep(index: int, value: bytes) -> bytes:
    """The value, stored in the memo under an index."""
    return value + b"r" + struct.pack("<I", index)


def again(index: int) -> bytes:
    """The value in the memo under an index."""
    return b"j" + struct.pack("<I", index)


def storage(key: str, num_elements: int, kind: str = "FloatStorage") -> bytes:
    items = (text("storage"), name(f"torch.{kind}"), text(key), text("cuda:7"), number(num_elements))
    return tuple_of(*items) + b"Q"


def tensor(
    size: tuple[int, ...] = (4,),
    stride: tuple[int, ...] = (1,),
    offset: int = 0,
    *,
    key: str = "0",
    num_elements: int = 4,
    kind: str = "FloatStorage",
) -> bytes:
    """A view of a storage; by default of four float32."""
    return call(
        "torch._utils._rebuild_tensor_v2",
        storage(key, num_elements, kind),
        number(offset),
        tuple_of(*map(number, size)),
        tuple_of(*map(number, stride)),
        b"\x89",
        call("collections.OrderedDict"),
    )


def module(
    type_name: str = "models.yolo.Model",
    *,
    parameters: bytes = EMPTY_DICT,
    modules: bytes = EMPTY_DICT,
    attributes: Mapping[str, bytes] | None = None,
) -> bytes:
    """A pickled network module."""
    state = {"_parameters": parameters, "_buffers": EMPTY_DICT, "_modules": modules} | dict(attributes or {})
    return name(type_name) + EMPTY_TUPLE + NEWOBJ + dict_of(state) + BUILD


def network(**attributes: bytes) -> bytes:
    """A network of one tensor."""
    return module(parameters=dict_of({"w": tensor()}), attributes=attributes)


def checkpoint(model: bytes | None = None, **entries: bytes) -> bytes:
    """The dict of a stripped checkpoint with this network."""
    model = network() if model is None else model
    return dict_of({"epoch": number(-1), "model": model, "ema": NONE, "optimizer": NONE} | entries)


def entries_of(
    body: bytes, storages: Mapping[str, bytes] | None = None, *, root: str = "last", protocol: bytes = PROTOCOL
) -> dict[str, bytes]:
    """Entries of the zip that torch would write for a pickle: name -> content."""
    contents = {"data.pkl": protocol + body + STOP, "byteorder": b"little", "version": b"3\n"}
    blobs = {"0": bytes(16)} if storages is None else storages
    contents |= {f"data/{key}": blob for key, blob in blobs.items()}
    return {f"{root}/{entry}": content for entry, content in contents.items()}


def zip_bytes(entries: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for entry, content in entries.items():
            archive.writestr(entry, content)
    return buffer.getvalue()


def unzip_bytes(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {entry: archive.read(entry) for entry in archive.namelist()}


def torch_file(body: bytes, storages: Mapping[str, bytes] | None = None, **options: str | bytes) -> bytes:
    """A complete file with a pickle."""
    return zip_bytes(entries_of(body, storages, **options))  # type: ignore[arg-type]
