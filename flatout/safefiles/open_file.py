"""Open a weights file, detect its format from its first bytes, and read the objects of a file that torch.save wrote.

A file of another format is refused with the name of that format: most "corrupt checkpoints" are web pages.
"""

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

from flatout.errors import CheckpointError
from flatout.safefiles.archive import AGAIN, DAMAGED, Archive, Refusal, check_digest
from flatout.safefiles.unpickle import DTYPES, Allowlist, Name, Storage, Storages, unpickle

FileKind = Literal["zip", "safetensors"]

HEAD_BYTES = 1024

# The magic number of torch files before they were zips.
_OLD_TORCH = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"

_FOREIGN_FORMATS: tuple[tuple[bytes, str], ...] = (
    (rb"version https://git-lfs", "is a Git LFS pointer, not the file itself. Fetch it with: git lfs pull"),
    (rb"(?:\xef\xbb\xbf)?\s*<", f"is a web page, not weights: the download returned HTML or XML. {AGAIN}"),
    (rb"PK\x05\x06", "is an empty zip. Save or download it again."),
    (rb"PK", f"is a damaged or multi-part zip. {AGAIN}"),
    (
        rb"\x80[\x00-\x05]" + re.escape(_OLD_TORCH),
        "was saved by torch older than 1.6, in a format that can only be read by running it. "
        "If you trust it, load it with torch and save it again with torch.save.",
    ),
    (
        rb"\x80[\x00-\x05]|\(dp|\(lp|c\w+\n",
        "is a bare pickle, which can only be read by running it. If you trust it, save its tensors with torch.save.",
    ),
    (rb".{257}ustar", "is a tar archive (as saved by torch older than 0.4). Unpack it, or save the weights again."),
    (rb"\x1f\x8b|BZh|\xfd7zXZ|7z\xbc\xaf|\x28\xb5\x2f\xfd|Rar!", "is compressed. Unpack it and use the file inside."),
    (rb"\x89HDF", "is an HDF5 file (Keras). Weights are read from .pt and .safetensors files."),
    (rb"GGUF", "is a GGUF file. Weights are read from .pt and .safetensors files."),
    (rb"\x08[\x00-\x20][\x12\x3a]", "looks like an ONNX file. Weights are read from .pt and .safetensors files."),
    (rb"[\t\n\r\x20-\x7e]+\Z", "is text, not weights. Use a .pt or .safetensors file."),
)


@contextmanager
def reading(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file for reading; a Refusal or OSError in the block becomes a CheckpointError with the file's name."""
    try:
        with _open_regular(path) as file:
            yield file
    except Refusal as refusal:
        raise CheckpointError(f"{path}: {refusal}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}. Check the path and the disk.") from None


def file_kind(file: BinaryIO) -> FileKind:
    """The format of the file; Refusal if it is neither of the supported ones."""
    head = os.pread(file.fileno(), HEAD_BYTES, 0)
    if not head:
        raise Refusal(f"is empty: the copy or download did not finish. {AGAIN}")
    if head.startswith(b"PK\x03\x04"):
        return "zip"
    # Eight bytes of length, then JSON. The reader checks the length.
    if re.match(rb'\{\s*["}]', head[8:]):
        return "safetensors"
    for pattern, sentence in _FOREIGN_FORMATS:
        if re.match(pattern, head, re.DOTALL):
            raise Refusal(sentence)
    raise Refusal(f"is not a weights file: neither a zip saved by torch nor safetensors. {AGAIN}")


def _open_regular(path: str | Path) -> BinaryIO:
    try:
        # O_NONBLOCK, because opening a FIFO would block; checking the type before opening would be a race.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Refusal("no such file. Give the path of a .pt or .safetensors file.") from None
    except ValueError:
        raise Refusal("this is not a valid file name. Give the path of a .pt or .safetensors file.") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        what = "a folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "a pipe or device"
        os.close(fd)
        example = next((f", such as {file}" for file in _weights_below(Path(path)) if file.is_file()), "")
        raise Refusal(f"is {what}. Give the path of a .pt or .safetensors file{example}.")
    return open(fd, "rb", buffering=0)


def _weights_below(folder: Path) -> Iterator[Path]:
    """The files that would have been meant if the folder is that of a run."""
    for name in ("best.pt", "last.pt"):
        yield from (folder / inside / name for inside in ("", "weights", "ckpts"))


# The objects of a file that torch.save wrote

MAX_PICKLE_BYTES = 16 << 20
"""Without tensors; the largest network of the YOLOv7 family, saved during training, needs about 1 MB."""


def read_objects(file: BinaryIO, make_allowlist: Callable[[Storages], Allowlist]) -> object:
    """The saved objects: plain values, tensors on the CPU, and the objects of the allowlist.

    Not safe to walk yet: containers may be cyclic or share parts a million times. Copy them with `PlainReader.plain`.
    """
    check_digest(file)
    archive = Archive(file)
    root = _find_root(archive)
    _check_byte_order(archive, root)
    pickled = archive.read(f"{root}/data.pkl", limit=MAX_PICKLE_BYTES)
    storages = Storages(archive, root)
    return unpickle(pickled, make_allowlist(storages), lambda key: _open_storage(storages, key))


def _find_root(archive: Archive) -> str:
    """The folder inside the zip, named after the file when it was saved."""
    roots = [name.removesuffix("/data.pkl") for name in archive.names() if name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise Refusal(
            f"this zip was not written by torch.save: it must hold exactly one data.pkl, and holds {len(roots)}. Give "
            "a .pt or .safetensors file of weights."
        )
    if f"{roots[0]}/constants.pkl" in archive:
        raise Refusal("is a TorchScript program, not weights. Use the .pt file it was exported from.")
    return roots[0]


def _check_byte_order(archive: Archive, root: str) -> None:
    name = f"{root}/byteorder"
    if name in archive and archive.read(name, limit=64).strip() != b"little":
        raise Refusal("was saved on a big-endian machine. Save it again on a little-endian one.")


def _open_storage(storages: Storages, persistent_id: object) -> Storage:
    match persistent_id:
        # The fourth item is the device at the time of saving, which need not exist here.
        case (str(tag), Name(text=kind), str(key), str(), int(num_elements)) if tag == "storage" and kind in DTYPES:
            return storages.open(key, DTYPES[kind], num_elements)
    raise Refusal(f"its pickle refers to a storage in a way torch never does. {DAMAGED}")
