"""Which store belongs to these items? Same files, same parameters: same key, in any run on this machine."""

import hashlib
import os
from collections.abc import Iterator
from typing import NamedTuple

from flatout.feed.store.file import VERSION
from flatout.feed.store.items import Items


class StoreKey(NamedTuple):
    """Two stores of one family hold the same items at different times: the older one is of no use any more."""

    family: str
    """What is decoded, and how: paths, parameters, kind of items, version of the format."""
    state: str
    """The family, and the state of every input file: size, mtime, ctime and inode."""

    @property
    def name(self) -> str:
        """The stem of the file names."""
        return f"{self.family[:16]}-{self.state[:32]}"


def key_of(items: Items) -> StoreKey:
    """Asks for the status of every input file; none is opened."""
    family = hashlib.sha256(repr((VERSION, type(items).__qualname__, items.parameters, len(items))).encode())
    state = hashlib.sha256()
    for path, file_state in _inputs(items):
        family.update(os.fsencode(path) + b"\0")
        state.update(file_state.encode())
    state.update(family.digest())
    return StoreKey(family.hexdigest(), state.hexdigest())


def _inputs(items: Items) -> Iterator[tuple[str, str]]:
    """Absolute path and state of each item's input file."""
    last, path, state = None, "", ""
    for index in range(len(items)):
        name = items.path(index)
        if name != last:  # neighbours often come from one file
            last, path, state = name, os.path.abspath(name), _state_of(name)
        yield path, state


def _state_of(path: str) -> str:
    try:
        status = os.stat(path)
    except OSError:
        return "absent;"  # reading the item says what is wrong with it
    return f"{status.st_size},{status.st_mtime_ns},{status.st_ctime_ns},{status.st_ino};"
