"""Small items for stores: files of bytes that decode to arrays of different kinds and shapes.

Worker processes import this too, so everything here is at module level and can be pickled.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from flatout.feed import DecodeError, Field, SampleSource, Store
from tests.feed.sources import Fault, leave_a_line


class Blobs:
    """Item i is file i as an array; every decoding appends a line to `log`."""

    def __init__(self, paths: Sequence[Path], *, parameters: str = "", log: Path | None = None) -> None:
        self.paths = [str(path) for path in paths]
        self.parameters = parameters
        self.log = log
        self.faults: dict[int, Fault] = {}
        self.sleep_s = 0.0

    def __len__(self) -> int:
        return len(self.paths)

    def path(self, index: int) -> str:
        return self.paths[index]

    def where(self, index: int) -> str:
        return self.paths[index]

    def decode(self, index: int) -> np.ndarray:
        if self.log is not None:
            leave_a_line(self.log, str(index))
        if index in self.faults:
            self.faults[index]()
        time.sleep(self.sleep_s)
        data = np.fromfile(self.paths[index], np.uint8)
        if len(data) % 12:
            raise DecodeError(f"{len(data)} bytes are not a multiple of 12")
        # Reversed, so that it is not contiguous, like an image with swapped colour channels.
        flat = data.view((np.uint8, "<u2", "<f4")[index % 3]).reshape(-1, 3)[:, ::-1]
        return flat.reshape(3, -1, 1) if index % 2 else flat


def write_blobs(folder: Path, count: int, *, dozens: int = 40) -> list[Path]:
    """Files of 12 * (dozens + i) bytes."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(count)
    paths = [folder / f"{number:03}.blob" for number in range(count)]
    for number, path in enumerate(paths):
        # Below 64, so that no float is a NaN, which would not equal itself.
        path.write_bytes(rng.integers(0, 64, 12 * (dozens + number), np.uint8).tobytes())
    return paths


def contents(store: Store | Blobs, indices: Sequence[int] | None = None) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of every item: what must be equal in two stores."""
    get = store.decode if isinstance(store, Blobs) else store.__getitem__
    arrays = [get(index) for index in (range(len(store)) if indices is None else indices)]
    return [(array.dtype.str, array.shape, array.tobytes()) for array in arrays]


class Sums(SampleSource):
    """A source that reads from a store."""

    fields = {"sum": Field((), np.float64), "first": Field((), np.uint8)}

    def __init__(self, store: Store) -> None:
        self.store = store

    def __len__(self) -> int:
        return len(self.store)

    def where(self, index: int) -> str:
        return self.store.where(index)

    def sample(self, index: int, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
        array = self.store[index]
        return {"sum": np.float64(array.sum()) * rng.random(), "first": array.reshape(-1).view(np.uint8)[0]}
