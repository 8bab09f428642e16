"""A corpus of bad weights files, written by script: fixed cases with the words of their refusal, and mutations.

python -m tests.yolo.weights.hostile_checkpoints FOLDER     to look at them
"""

import json
import os
import random
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.yolo.weights.hostile_bombs import bombs, tensor_lies
from tests.yolo.weights.hostile_gadgets import gadgets
from tests.yolo.weights.hostile_zips import zips
from tests.yolo.weights.pickle_bytes import (
    BUILD,
    EMPTY_TUPLE,
    NEWOBJ,
    checkpoint,
    dict_of,
    list_of,
    module,
    name,
    network,
    number,
    tensor,
    text,
    torch_file,
    unzip_bytes,
    zip_bytes,
)


def fixed_cases() -> Iterator[tuple[str, bytes | Callable[[Path], object], list[str]]]:
    """Case name, what to write (or what makes the path), and words that the refusal must contain."""
    yield from gadgets()
    yield from bombs()
    yield from tensor_lies()
    yield from zips()
    yield from _wrong_values()
    yield from _safetensors()
    yield from _strangers()
    yield from _no_files()


def write_corpus(folder: Path) -> dict[str, list[str]]:
    """Write the fixed cases; returns the words of each one's refusal by file name."""
    words = {}
    for case, content, expected in fixed_cases():
        path = folder / f"{case}.pt"
        assert path.name not in words, f"two cases are called {case}"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            content(path)
        words[path.name] = expected
    return words


def write_mutations(folder: Path, real: Path, *, count: int, seed: int) -> list[str]:
    """Write mutated copies of a real file: half changed anywhere, half in the pickle of a zip that is in order."""
    generator = random.Random(seed)
    whole, entries = real.read_bytes(), unzip_bytes(real)
    pickle_name = next(entry for entry in entries if entry.endswith("/data.pkl"))
    names = []
    for index in range(count):
        if index % 2:
            content = zip_bytes(entries | {pickle_name: mutated(entries[pickle_name], generator)})
        else:
            content = mutated(whole, generator)
        names.append(f"mutation-{real.stem}-{index:03}.pt")
        (folder / names[-1]).write_bytes(content)
    return names


def mutated(content: bytes, generator: random.Random) -> bytes:
    """One to four of: changed bytes, a stretch removed, repeated, moved, or overwritten with extremes."""
    changed = bytearray(content)
    for _ in range(generator.randint(1, 4)):
        at, length = generator.randrange(len(changed)), generator.randint(1, 64)
        stretch = bytes(changed[at : at + length])
        match generator.randrange(6):
            case 0:
                changed[at] ^= 1 << generator.randrange(8)
            case 1:
                changed[at] = generator.randrange(256)
            case 2:
                del changed[at : at + length]
            case 3:
                changed[at:at] = stretch
            case 4:
                place = generator.randrange(len(changed))
                changed[place : place + length] = stretch
            case _:
                changed[at : at + 4] = generator.choice((b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff", bytes(4)))
    return bytes(changed)


def _wrong_values() -> Iterator[tuple[str, bytes, list[str]]]:
    """Files that hold a network, but say impossible things about it."""
    yield "value-names", torch_file(checkpoint(network(names=list_of(list_of(number(1)))))), ["names are not all text"]
    yield "value-nc", torch_file(checkpoint(network(nc=text("80")))), ["its nc is of type str"]
    yield "value-hyp", torch_file(checkpoint(network(hyp=text("x")))), ["its hyp is of type str"]
    yield "value-epoch", torch_file(checkpoint(epoch=text("x"))), ["its epoch is of type str"]
    yield "value-fitness", torch_file(checkpoint(best_fitness=text("x"))), ["its best_fitness is of type str"]
    yield "value-optimizer", torch_file(checkpoint(optimizer=number(3))), ["its optimizer is of type int"]
    yield "value-model", torch_file(checkpoint(number(3))), ["its model is of type int"]
    yield "value-parameters", torch_file(checkpoint(module(parameters=number(3)))), ["_parameters that are no dict"]
    yield "value-child", torch_file(checkpoint(module(modules=dict_of({"a": number(3)})))), ["no module"]
    yield "value-tensor", torch_file(checkpoint(module(parameters=dict_of({"a": number(3)})))), ["no tensor"]
    yield "value-no-tensors", torch_file(checkpoint(module())), ["its model holds no tensors"]
    long_name = text("models.common") + text("A" * 1_000_000) + b"\x93" + EMPTY_TUPLE + NEWOBJ + number(3) + BUILD
    yield "value-long-name", torch_file(checkpoint(long_name)), ["models.common.AAA", "..., which weights do not need"]
    twice = module(parameters=dict_of({"a.w": tensor()}), modules=dict_of({"a": network()}))
    yield "value-two-of-one-key", torch_file(checkpoint(twice)), ["two tensors called a.w"]
    for case, version, words in (("newer", number(9), "newer flatout"), ("no-schema", text("x"), "no schema number")):
        own = dict_of({"flatout": dict_of({"schema": version}), "weights": dict_of({})})
        yield f"own-{case}", torch_file(own), [words]
    for case, section, words in (
        ("no-state", dict_of({}), "its state is of type NoneType"),
        ("no-section", number(3), "without weights"),
        ("module-inside", dict_of({"state": network()}), "models.yolo.Model"),
        ("name-inside", dict_of({"state": name("builtins.set")}), "builtins.set"),
        ("unknown-kind", dict_of({"state": dict_of({"w": tensor()}), "kind": text("evil")}), "claims to be evil"),
    ):
        own = dict_of({"flatout": dict_of({"schema": number(1)}), "weights": section})
        yield f"own-{case}", torch_file(own), [words]


def _safetensors() -> Iterator[tuple[str, bytes, list[str]]]:
    good = {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    other = {"v": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}
    whole = _safetensors_bytes(good)
    misfit = "do not fit together"
    for case, changes, words in (
        ("dtype", {"dtype": "F8_E4M3"}, "of type F8_E4M3. Save it as one of F16"),
        ("shape", {"shape": [5]}, misfit),
        ("shape-negative", {"shape": [-1, -4]}, misfit),
        ("shape-overflow", {"shape": [1 << 39, 1 << 39]}, misfit),
        ("shape-overflow-then-zero", {"shape": [1 << 39, 1 << 39, 0], "data_offsets": [0, 0]}, misfit),
        ("shape-text", {"shape": ["4"]}, misfit),
        ("offsets-swapped", {"data_offsets": [16, 0]}, misfit),
        ("offsets-negative", {"data_offsets": [-16, 0]}, misfit),
        ("offsets-beyond", {"data_offsets": [1 << 50, (1 << 50) + 16]}, "outside the file"),
    ):
        yield f"safetensors-{case}", _safetensors_bytes({"w": good["w"] | changes}), [words]
    yield "safetensors-key-twice", _safetensors_bytes(whole[8:-17] + b"," + whole[9:-16]), ["two entries called w"]
    many = {f"w{index}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for index in range(50_001)}
    yield "safetensors-many", _safetensors_bytes(many), ["more than 50,000 tensors"]
    yield "safetensors-key", _safetensors_bytes({"\x1b[31m\n": good["w"]}), ["no named tensor"]
    yield "safetensors-overlap", _safetensors_bytes(good | other, bytes(24)), ["overlaps"]
    yield "safetensors-header-lie", struct.pack("<Q", 1 << 62) + whole[8:], ["claims a safetensors header"]
    yield "safetensors-header-beyond", struct.pack("<Q", len(whole)) + whole[8:], ["claims a safetensors header"]
    yield "safetensors-cut", whole[:-1], ["outside the file"]
    yield "safetensors-no-json", whole.replace(b":", b";"), ["not valid JSON"]
    yield "safetensors-deep", _safetensors_bytes(b'{"a":' + b"[" * 100_000), ["not valid JSON"]
    yield "safetensors-digits", _safetensors_bytes(b'{"a":' + b"9" * 100_000 + b"}"), ["not valid JSON"]
    yield "safetensors-empty", _safetensors_bytes({}), ["its state holds no tensors"]
    for case, metadata, words in (
        ("list", ["x"], "metadata is not text"),
        ("number", {"a": 3}, "metadata is not text"),
        ("schema", {"flatout.schema": "9"}, "another flatout"),
        ("config", {"flatout.schema": "1", "flatout.config": "{"}, "config is not valid JSON"),
        ("config-deep", {"flatout.schema": "1", "flatout.config": "[" * 99 + "]" * 99}, "nested deeper"),
        ("config-type", {"flatout.schema": "1", "flatout.config": "[]"}, "its config is of type list"),
        ("names", {"flatout.schema": "1", "flatout.names": "[null]"}, "names are not all text"),
        ("surrogate", {"flatout.schema": "1", "flatout.names": r'["\ud800"]'}, "surrogate"),
    ):
        yield f"safetensors-metadata-{case}", _safetensors_bytes(good | {"__metadata__": metadata}), [words]


def _safetensors_bytes(header: object, data: bytes = bytes(16)) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def _strangers() -> Iterator[tuple[str, bytes, list[str]]]:
    """Files that are something else."""
    lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 75\n"
    old_torch = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
    tar = b"storages".ljust(257, b"\0") + b"ustar\x0000"
    yield "stranger-empty", b"", ["is empty"]
    yield "stranger-html", b"\n<!DOCTYPE html><html><body>404</body></html>", ["is a web page"]
    yield "stranger-xml", b"\xef\xbb\xbf<?xml version='1.0'?><Error>AccessDenied</Error>", ["is a web page"]
    yield "stranger-lfs", lfs, ["Git LFS pointer", "git lfs pull"]
    yield "stranger-json", b'{"message": "Not Found"}', ["is text"]
    yield "stranger-old-torch", old_torch, ["older than 1.6"]
    yield "stranger-bare-pickle", b"\x80\x04\x95" + b"x" * 99, ["bare pickle"]
    yield "stranger-pickle-0", b"cos\nsystem\n(S'touch ran'\ntR.", ["bare pickle"]
    yield "stranger-tar", tar.ljust(1024, b"\0"), ["tar archive"]
    yield "stranger-gzip", b"\x1f\x8b\x08" + bytes(40), ["is compressed"]
    yield "stranger-hdf5", b"\x89HDF\r\n\x1a\n" + bytes(40), ["HDF5"]
    yield "stranger-onnx", b"\x08\x07\x12\x07pytorch" + bytes(40), ["ONNX"]
    yield "stranger-noise", bytes(range(128, 256)), ["not a weights file"]
    yield "stranger-one-byte", b"\x00", ["not a weights file"]


def _no_files() -> Iterator[tuple[str, Callable[[Path], object], list[str]]]:
    """Paths that are no files, or lead to none."""
    yield "path-folder", Path.mkdir, ["is a folder"]
    yield "path-fifo", lambda path: os.mkfifo(path), ["is a pipe or device"]
    yield "path-device", lambda path: path.symlink_to("/dev/zero"), ["is a pipe or device"]
    yield "path-link-to-itself", lambda path: path.symlink_to(path.name), ["symbolic links"]
    yield "path-link-to-nothing", lambda path: path.symlink_to("nothing"), ["no such file"]
    yield "path-socket", _bind, ["cannot be read"]
    yield "path-missing", lambda path: None, ["no such file"]


def _bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        before = Path.cwd()
        # The name of a socket may have 108 bytes only.
        os.chdir(path.parent)
        server.bind(path.name)
        os.chdir(before)


if __name__ == "__main__":
    print(len(write_corpus(Path(sys.argv[1]))), "files")
