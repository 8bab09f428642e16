"""The objects of a file that torch.save wrote: zip, pickle and storages put together."""

from collections.abc import Callable
from typing import BinaryIO

from flatout.engine.checkpoint.archive import Archive
from flatout.engine.checkpoint.digest import check_digest
from flatout.engine.checkpoint.refusal import DAMAGED, Refusal
from flatout.engine.checkpoint.storages import DTYPES, Storage, Storages
from flatout.engine.checkpoint.unpickle import unpickle
from flatout.engine.checkpoint.vocabulary import Name, Vocabulary

MAX_PICKLE_BYTES = 16 << 20
"""Without the tensors; the largest network of the YOLOv7 family, saved in training, needs about 1 MB."""


def read_objects(file: BinaryIO, vocabulary_of: Callable[[Storages], Vocabulary]) -> object:
    """Whatever was saved: plain values, tensors on the CPU, and the objects of the vocabulary.

    Not to be trusted yet: containers may be cyclic or share parts a million times. Walk them with `plain`.
    """
    check_digest(file)
    archive = Archive(file)
    root = _find_root(archive)
    _check_byte_order(archive, root)
    pickled = archive.read(f"{root}/data.pkl", limit=MAX_PICKLE_BYTES)
    storages = Storages(archive, root)
    return unpickle(pickled, vocabulary_of(storages), lambda key: _open_storage(storages, key))


def _find_root(archive: Archive) -> str:
    """The folder inside the zip, named after the file at the time of saving."""
    roots = [name.removesuffix("/data.pkl") for name in archive.names() if name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise Refusal("is a zip that torch.save did not write: it has no single data.pkl. Give a file with weights.")
    if f"{roots[0]}/constants.pkl" in archive:
        raise Refusal("is a TorchScript program, not weights. Give the .pt file it was exported from.")
    return roots[0]


def _check_byte_order(archive: Archive, root: str) -> None:
    name = f"{root}/byteorder"
    if name in archive and archive.read(name, limit=64).strip() != b"little":
        raise Refusal("was saved on a big-endian machine. Save it again on a little-endian one.")


def _open_storage(storages: Storages, persistent_id: object) -> Storage:
    match persistent_id:
        # The device is where it lived when it was saved; that GPU need not exist here.
        case (str(tag), Name(text=kind), str(key), str(), int(num_elements)) if tag == "storage" and kind in DTYPES:
            return storages.open(key, DTYPES[kind], num_elements)
    raise Refusal(f"its pickle names a storage in a way torch never does. {DAMAGED}")
