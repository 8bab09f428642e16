"""The protocol of data sources: anything that can fill rows of a batch; and substitutes for unreadable items.

A source never allocates, stacks or returns a batch. It gets views of the batch's final place in shared (and, on a GPU
machine, pinned) memory, and writes there.

Dimension key:  M samples of a micro-batch   n rows of one sample   T rows of all samples   W row width   N items
                K substitutions   R samples with substitutions   J candidates per substitution
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from flatout.errors import ConfigError, DataError
from flatout.feed.plan import Purpose, keyed_bits, keyed_generator, keyed_uniform

Item = TypeVar("Item")


@dataclass(frozen=True)
class Field:
    """A part of a sample with a fixed shape, such as an image."""

    shape: tuple[int, ...]
    """Per-sample shape; the largest one where a plan varies it from step to step."""

    dtype: DTypeLike = np.uint8

    def __post_init__(self) -> None:
        if any(side < 1 for side in self.shape):
            raise ConfigError(f"Field shape {self.shape} must have sides of 1 or more.")

    @property
    def sample_bytes(self) -> int:
        return int(math.prod(self.shape)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Rows:
    """A part of a sample with any number of rows of one width, such as its boxes."""

    width: int
    dtype: DTypeLike = np.float32

    expected: float = 16
    """Expected rows per sample, averaged over a batch, for which memory is reserved. No row is ever lost: if there are
    more, the slot grows, and the samples that did not fit are read once more."""

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError(f"Rows width={self.width} must be 1 or more.")

    @property
    def row_bytes(self) -> int:
        return self.width * np.dtype(self.dtype).itemsize


Fields = Mapping[str, Field | Rows]


class DecodeError(ValueError):
    """The bytes of a sample were read but cannot be decoded: a damaged image, a truncated file."""


class RowsOut:
    """Collects the rows of each sample of a micro-batch; `put` copies them."""

    def __init__(self, name: str, rows: Rows, num_samples: int) -> None:
        self._name = name
        self._rows = rows
        self.taken: list[np.ndarray | None] = [None] * num_samples

    def put(self, sample: int, rows: ArrayLike) -> None:
        """Set the rows [n, W] of sample number `sample` of the micro-batch; n may be 0."""
        array = np.array(rows, self._rows.dtype)
        if array.size == 0:
            array = array.reshape(0, self._rows.width)
        if array.ndim != 2 or array.shape[1] != self._rows.width:
            raise DataError(
                f"field '{self._name}': got rows of shape {array.shape}, but `fields` declares [n, {self._rows.width}]"
            )
        self.taken[sample] = array

    def put_all(self, rows_TW: np.ndarray, count_M: np.ndarray) -> None:
        """Set the rows of all samples at once, one sample after another: sample m has count_M[m] of them."""
        array = np.array(rows_TW, self._rows.dtype)
        ends_M = np.cumsum(count_M).tolist()
        if array.shape != (ends_M[-1] if ends_M else 0, self._rows.width) or len(ends_M) != len(self.taken):
            raise DataError(
                f"field '{self._name}': put_all() got rows of shape {array.shape} and {len(ends_M)} counts with a sum "
                f"of {ends_M[-1] if ends_M else 0}. It needs a count for each of the {len(self.taken)} samples, and as "
                f"many rows of {self._rows.width} values as the sum of the counts."
            )
        self.taken = [array[begin:end] for begin, end in zip([0, *ends_M], ends_M, strict=False)]


class Out(Mapping[str, Any]):
    """The destination of `read`: name -> ndarray view [M, *shape] for a Field, RowsOut for a Rows field.

    A view still contains the data of an earlier batch: write every element.
    """

    def __init__(
        self,
        parts: Mapping[str, np.ndarray | RowsOut],
        reading: Callable[[int], None] | None = None,
        *,
        first_row: int = 0,
        fetch: "Fetch | None" = None,
    ) -> None:
        self._parts = parts
        self._reading = reading
        self._fetch: Fetch = fetch or read_at_once
        self.first_row = first_row
        """Row of the first sample of this micro-batch within the batch."""

    def __getitem__(self, name: str) -> Any:
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def reading(self, sample: int) -> None:
        """Record that sample number `sample` of the micro-batch is being read now.

        Optional. With it, a hang or crash is attributed to the right file immediately; without it, the feed finds the
        file by reading the micro-batch again, one sample at a time.
        """
        if self._reading is not None:
            self._reading(sample)

    def fetch(self, item: int, read: Callable[[], Item]) -> Item | None:
        """Call `read` for an item and return its result; an `ItemSource` reads all its items through this method.

        Returns None if the item cannot be read and will be replaced: write anything in its place and continue with the
        next item. The micro-batch is then read again, without the items that failed.
        """
        return self._fetch(item, read)


class Fetch(Protocol):
    """Reads an item; see `Out.fetch`."""

    def __call__(self, item: int, read: Callable[[], Item], /) -> Item | None: ...


def read_at_once(item: int, read: Callable[[], Item], /) -> Item | None:
    """A `Fetch` for use without a feed: errors are raised to the caller."""
    return read()


class Source(Protocol):
    """Samples that workers can read. It is pickled once, for all workers, so attributes must be picklable."""

    @property
    def fields(self) -> Fields:
        """Name -> Field or Rows, the same for every sample."""

    def __len__(self) -> int: ...

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        """Random parameters of M samples, arrays [M, ...]; row m depends only on (seed, epoch, positions[m],
        indices[m]). Use NumPy only; see `flatout.feed.plan` for keyed random numbers."""

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        """Write samples `indices` into `out`; all randomness comes from `draws`."""

    def where(self, index: int) -> str:
        """The file (or key) of a sample, for error messages."""


class Substituted(NamedTuple):
    """Samples in which unreadable items have been replaced."""

    indices: np.ndarray
    """int64 [M], the samples that are shown; unchanged unless a sample's own item was replaced."""

    draws: Mapping[str, np.ndarray]

    num_replaced: np.ndarray
    """int [M], number of substitutes in each sample."""


@runtime_checkable
class ItemSource(Source, Protocol):
    """A source whose samples are made of items that several samples share: tiles of mosaics, files of clips.

    Unreadable data is tracked by item. `read` gets each item by `Out.fetch`; the draws say which ones, and `indices`
    remain those of the plan. In any other source, a sample is one item and is replaced as a whole.
    """

    @property
    def num_items(self) -> int: ...

    def where_item(self, item: int) -> str:
        """The file (or key) of an item, for error messages."""

    def substitute(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], unreadable: "Unreadable") -> Substituted:
        """The same samples with unreadable items replaced. Use NumPy only.

        The result must depend only on the draws and on which items are unreadable, not on which of them are already
        known to be: replace an item wherever `read` would fetch it, and let `read` fetch every item that the choice of
        substitutes depends on.
        """


class SampleSource(ABC):
    """Base class of sources that read one sample at a time: define `fields`, `__len__` and `sample`.

    class Photos(SampleSource):
        fields = {"image": Field((3, 224, 224)), "label": Field((), np.int64)}

        def __init__(self, paths): self.paths = paths
        def __len__(self): return len(self.paths)
        def where(self, index): return self.paths[index]
        def sample(self, index, rng):
            return {"image": decode_and_crop(self.paths[index], rng), "label": index % 10}
    """

    fields: Fields

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def sample(self, index: int, rng: np.random.Generator) -> Mapping[str, ArrayLike]:
        """One value per field. All randomness comes from `rng`, which is a new generator for each visit."""

    def where(self, index: int) -> str:
        return f"sample {index}"

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        return {"bits": keyed_bits(seed, epoch, positions, 2)}

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        for i, index in enumerate(indices):
            out.reading(i)
            values = self.sample(int(index), keyed_generator(draws["bits"][i]))
            if not isinstance(values, Mapping) or set(values) != set(self.fields):
                raise DataError(
                    f"sample() returned {_describe(values)}, but `fields` declares {_names(self.fields)}. Return a "
                    "dict with these names."
                )
            for name, value in values.items():
                _place(name, self.fields[name], value, i, out)


def num_items_of(source: Source) -> int:
    """Number of items whose readability is tracked: in most sources, each sample is one."""
    return source.num_items if isinstance(source, ItemSource) else len(source)


def check_source(source: Source) -> None:
    """Raise ConfigError or DataError if `source` does not follow the protocol or is empty."""
    if missing := [name for name in ("__len__", "fields", "draw", "read", "where") if not hasattr(source, name)]:
        raise ConfigError(
            f"{type(source).__name__} is not a source: it has no {_names(missing)}. Subclass flatout.feed.SampleSource."
        )
    if len(source) == 0:
        raise DataError(f"{type(source).__name__} is empty (0 samples). Check the data path.")
    fields = source.fields
    if not isinstance(fields, Mapping) or not fields:
        raise ConfigError(f"{type(source).__name__}.fields is {_describe(fields)}: give at least one Field or Rows.")
    for name, field in fields.items():
        if not isinstance(field, Field | Rows):
            raise ConfigError(f"{type(source).__name__}.fields['{name}'] is {field!r}: use Field(...) or Rows(...).")
        if np.dtype(field.dtype).hasobject:
            raise ConfigError(
                f"{type(source).__name__}.fields['{name}'] has dtype object, which a slot cannot hold. "
                "Use a numeric dtype."
            )


def _place(name: str, field: Field | Rows, value: ArrayLike, i: int, out: Out) -> None:
    if isinstance(field, Rows):
        out[name].put(i, value)
        return
    view = out[name]
    array = np.asarray(value)
    if isinstance(value, int | list | tuple) and array.dtype.kind == "i" and view.dtype.kind in "iu":
        array = np.asarray(value, view.dtype)  # Python integers have no width; values that are too large raise
    # Checked explicitly because assignment would broadcast a grey image over three channels.
    if array.shape != view.shape[1:] or not np.can_cast(array.dtype, view.dtype, "same_kind"):
        raise DataError(
            f"field '{name}': got {array.dtype} {array.shape}, "
            f"but `fields` declares {view.dtype} {tuple(view.shape[1:])}"
        )
    view[i] = array


def _describe(value: object) -> str:
    if isinstance(value, Mapping):
        return _names(value)
    return "None" if value is None else f"a {type(value).__name__}"  # not its repr: arrays take many lines


def _names(names: Sequence[str] | Mapping[str, Any]) -> str:
    return "{" + ", ".join(sorted(map(repr, names))) + "}"


# Substitutes for unreadable items.
#
# The unit is the *item*: a tile of a mosaic, the strip that a patch is cut from, the file of a clip; for most sources,
# the sample itself. The substitute of an item depends on its position in the stream and on which items are unreadable,
# and on nothing else. If an item turns out to be unreadable only when it is read, the choice is made again. So it does
# not matter which worker knew what, and any number of workers yields the same batches.

READ_ATTEMPTS = 4
CANDIDATES = 100


UNREADABLE_ERRORS = (OSError, DecodeError)
"""Errors that a bad file can cause; any other exception is a bug."""


class NothingReadableError(DataError):
    """No readable item is left to use as a substitute."""


class Unreadable:
    """The items known to be unreadable while M samples are selected, and their substitutes."""

    def __init__(self, is_bad_N: np.ndarray, *, seed: int, epoch: int, positions_M: np.ndarray) -> None:
        self.is_bad_N = is_bad_N
        self.seed, self.epoch, self.positions_M = seed, epoch, np.asarray(positions_M)

    def among(self, items: np.ndarray) -> np.ndarray:
        """Which of these item numbers are unreadable, bool of the same shape; negative numbers stand for no item."""
        items = np.asarray(items)
        return np.asarray((items >= 0) & self.is_bad_N[items])

    def substitutes(self, sample_K: np.ndarray, number_K: np.ndarray, is_bad_N: np.ndarray) -> np.ndarray:
        """Substitutes for `number_K` in samples `sample_K`, int64 [K]: numbers that are not bad.

        `is_bad_N` marks the numbers that cannot be used. They may count all items, a subset of them, or something that
        is made of them.
        """
        num = len(is_bad_N)
        if not len(number_K):
            return np.zeros(0, np.int64)
        if is_bad_N.all():
            raise NothingReadableError(f"none of the {num} files can be read. Check the data set")
        rows, row_K = np.unique(sample_K, return_inverse=True)
        uniform_RJ = keyed_uniform(
            self.seed, self.epoch, self.positions_M[rows], CANDIDATES, purpose=Purpose.SUBSTITUTE
        )
        # Offset from the number itself: two items of one sample get different substitutes, and none gets itself.
        number_K = np.asarray(number_K, np.int64)
        candidate_KJ = (number_K[:, None] + 1 + (uniform_RJ[row_K] * (num - 1)).astype(np.int64)) % num
        is_good_KJ = ~is_bad_N[candidate_KJ]
        chosen_K = candidate_KJ[np.arange(len(number_K)), is_good_KJ.argmax(1)]
        for k in np.flatnonzero(~is_good_KJ.any(1)).tolist():
            # Hardly anything is readable: take the next number that is.
            chosen_K[k] = (number_K[k] + np.roll(is_bad_N, -int(number_K[k])).argmin()) % num
        return np.asarray(chosen_K)


def read_with_retries(read: Callable[[], Item]) -> Item:
    """Call `read` and return its result, with retries for transient disk errors (EIO, or ESTALE on network disks)."""
    for attempt in range(1, READ_ATTEMPTS):
        try:
            return read()
        except (FileNotFoundError, PermissionError):
            raise
        except OSError:
            time.sleep(0.05 * 2**attempt)  # 0.7 s in total
    return read()
