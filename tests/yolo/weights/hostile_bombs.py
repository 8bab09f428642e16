"""Pickles that would exhaust the machine, and tensors with false descriptions."""

import struct
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
    TUPLE,
    again,
    call,
    checkpoint,
    dict_of,
    keep,
    list_of,
    module,
    name,
    network,
    number,
    storage,
    tensor,
    text,
    torch_file,
    tuple_of,
)

Case = tuple[str, bytes, list[str]]
"""Name, file content, and words that the error message must contain."""

STORAGES = {"0": bytes(16), "1": bytes(4 << 18), "odd": bytes(15)}


def bombs() -> Iterator[Case]:
    """Small files that would take much time or memory."""
    cases = _shared() | _deep() | _many() | _lengths()
    for case, (body, word) in cases.items():
        yield f"bomb-{case}", torch_file(checkpoint(body), STORAGES), [word]
    big = keep(0, tensor((1 << 18,), key="1", num_elements=1 << 18))
    twice = dict_of({f"k{i}": again(0) if i else big for i in range(2_000)})
    yield "bomb-same-tensor-in-all-keys", torch_file(twice, STORAGES), ["overlap far more"]
    optimizer = list_of(big, *[again(0)] * 2_000)
    yield "bomb-same-tensor-in-optimizer", torch_file(checkpoint(optimizer=optimizer), STORAGES), ["overlap far more"]


def _shared() -> dict[str, tuple[bytes, str]]:
    """Values that are written once and referred to many times."""
    lists = keep(0, list_of(text("lol"))) + b"".join(keep(i, list_of(again(i - 1) * 2)) for i in range(1, 60))
    tuples = keep(0, EMPTY_TUPLE) + b"".join(keep(i, again(i - 1) * 2 + b"\x86") for i in range(1, 60))
    family = keep(0, network())
    for i in range(1, 30):
        family += b"0" + keep(i, module(modules=dict_of({"a": again(i - 1), "b": again(i - 1)})))
    often = [again(0)] * 999
    long_list, long_text = keep(0, list_of(*[text("a")] * 100_000)), keep(0, text("a" * 1_000_000))
    encode = call("_codecs.encode", again(0), text("latin1"))
    return {
        "billion-laughs": (network(yaml=tuple_of(lists)), "values"),
        "wide-tuple-key": (EMPTY_DICT + tuple_of(tuples) + NONE + b"s", "as a key"),
        "module-family": (family, "modules and tensors"),
        "copied-sets": (long_list + (call("builtins.set", again(0)) + b"0") * 500, "copied items"),
        "copied-text": (long_text + (encode + b"0") * 50, "copied items"),
        "long-text-often": (network(yaml=list_of(long_text, *often)), "values"),
        "long-key-often": (network(yaml=list_of(keep(0, dict_of({"x" * 1_000_000: NONE})), *often)), "values"),
    }


def _deep() -> dict[str, tuple[bytes, str]]:
    itself = keep(0, name("models.yolo.Model") + EMPTY_TUPLE + NEWOBJ)
    return {
        "deep-tuple-key": (EMPTY_DICT + EMPTY_TUPLE + b"\x85" * 100_000 + NONE + b"s", "as a key"),
        "deep-lists": (network(yaml=EMPTY_LIST * 200_000 + b"a" * 199_999), "nested deeper"),
        "deep-marks": (MARK * 500_000, "nested deeper"),
        "list-in-itself": (network(yaml=keep(0, EMPTY_LIST) + again(0) + b"a"), "contains itself"),
        "dict-in-itself": (network(hyp=keep(0, EMPTY_DICT) + text("a") + again(0) + b"s"), "contains itself"),
        "module-in-itself": (itself + dict_of({"_modules": dict_of({"a": again(0)})}) + BUILD, "contains itself"),
        "wrapped-in-itself": (
            itself + dict_of({"_modules": dict_of({"module": again(0)})}) + BUILD,
            "more than 32 wrappers",
        ),
    }


def _many() -> dict[str, tuple[bytes, str]]:
    memo = b"".join(b"r" + struct.pack("<I", i * 4099) for i in range(200_000))
    # All of them have the hash 0, so a dict would compare each with every other.
    colliding = b"".join(number(i * ((1 << 61) - 1)) + NONE for i in range(1, 50_000))
    conv = keep(0, name("models.common.Conv")) + (again(0) + EMPTY_TUPLE + NEWOBJ) * 300_000
    return {
        "memo": (NONE + memo, "contains no network"),
        "opcodes": (b"N0" * 600_000 + NONE, "opcodes"),
        "modules": (MARK + conv + TUPLE, "its model holds a models.common.Conv"),
        "colliding-keys": (EMPTY_DICT + MARK + colliding + b"u", "as a key"),
        "tensors": (MARK + _many_tensors(60_000) + TUPLE, "tensors"),
    }


def _lengths() -> dict[str, tuple[bytes, str]]:
    too_long = "more bytes than it has"
    return {
        "huge-long": (b"\x8b" + struct.pack("<I", 0x7FFFFFFF) + bytes(100), "a number of"),
        "text-length-lie": (b"X" + struct.pack("<I", 0xFFFFFFFF) + b"x", too_long),
        "text-length-lie-8": (b"\x8d" + struct.pack("<Q", 1 << 62) + b"x", too_long),
        "bytes-length-lie-8": (b"\x8e" + struct.pack("<Q", (1 << 64) - 1) + b"x", too_long),
    }


def _many_tensors(count: int) -> bytes:
    parts = (storage("0", 4), name("torch._utils._rebuild_tensor_v2"), tuple_of(number(4)), tuple_of(number(1)))
    kept = b"".join(keep(index, part) for index, part in enumerate(parts))
    return kept + (again(1) + MARK + again(0) + number(0) + again(2) + again(3) + TUPLE + REDUCE) * count


def tensor_lies() -> Iterator[Case]:
    """Tensors and storages with false descriptions."""
    inside, damaged = "does not lie inside", "should hold"
    cases = {
        "offset-beyond": (tensor(offset=1), inside),
        "offset-negative": (tensor(offset=-1), inside),
        "offset-overflow": (tensor(offset=(1 << 63) - 1), inside),
        "offset-bool": (tensor().replace(number(0) + tuple_of(number(4)), b"\x89" + tuple_of(number(4))), "_v2"),
        "size-beyond": (tensor(size=(5,)), inside),
        "size-negative": (tensor(size=(-4,)), "invalid size or stride"),
        "size-overflow": (tensor((1 << 39, 1 << 39), (0, 0)), inside),
        "size-overflow-then-zero": (tensor((1 << 39, 1 << 39, 0), (1, 1, 1)), inside),
        "size-huge": (tensor((1 << 62,), (0,)), "invalid size or stride"),
        "size-of-text": (tensor().replace(tuple_of(number(4)), tuple_of(text("4"))), "invalid size or stride"),
        "stride-zero-expanded": (tensor((1000, 1000), (0, 0)), inside),
        "stride-negative": (tensor(stride=(-1,)), "invalid size or stride"),
        "stride-overflow": (tensor((2,), ((1 << 62) - 1,)), "invalid size or stride"),
        "stride-missing": (tensor((2, 2), (1,)), inside),
        "dimensions": (tensor((1,) * 1000, (1,) * 1000), inside),
        "storage-larger": (tensor(num_elements=1 << 40), damaged),
        "storage-smaller": (tensor((2,), num_elements=2), damaged),
        "storage-negative": (tensor(num_elements=-4), damaged),
        "storage-other-type": (list_of(tensor(), tensor(kind="IntStorage")), damaged),
        "storage-odd-bytes": (tensor(key="odd"), "not a whole number of"),
        "storage-missing": (tensor(key="7"), "is missing"),
        "storage-outside": (tensor(key="../../../etc/passwd"), "is missing"),
        "storage-unknown-type": (tensor(kind="QInt8Storage"), "torch.QInt8Storage"),
    }
    for case, (body, word) in cases.items():
        network = module(parameters=dict_of({"weight": body}))
        yield f"tensor-{case}", torch_file(checkpoint(network), STORAGES), [word]
