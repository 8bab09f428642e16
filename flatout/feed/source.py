"""What the feed reads from: anything that can fill rows of a batch.

A source never allocates, stacks or returns a batch. It is handed views of the batch's final place in
shared (and, on a GPU machine, pinned) memory, and writes there.

Dimension key:  M samples of a micro-batch   n rows of one sample   W row width
"""

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
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Rows:
    """A part of a sample with any number of rows of one width, such as its boxes."""

    width: int
    dtype: DTypeLike = np.float32

    expected: float = 16
    """Rows per sample to make room for at first, on average over a batch. More is never lost: the
    batch's slot grows, which costs one more reading of the samples that did not fit."""

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError(f"Rows width={self.width} must be 1 or more.")

    @property
    def row_bytes(self) -> int:
        return self.width * np.dtype(self.dtype).itemsize


Fields = Mapping[str, Field | Rows]


class DecodeError(ValueError):
    """The bytes of a sample were read but make no sense: a broken picture, a cut-off file."""


class RowsOut:
    """Takes the rows of each sample of a micro-batch; they are copied when put."""

    def __init__(self, name: str, rows: Rows, num_samples: int) -> None:
        self._name = name
        self._rows = rows
        self.taken: list[np.ndarray | None] = [None] * num_samples

    def put(self, sample: int, rows: ArrayLike) -> None:
        """Rows [n, W] of sample number `sample` of the micro-batch; n may be 0."""
        array = np.array(rows, self._rows.dtype)
        if array.size == 0:
            array = array.reshape(0, self._rows.width)
        if array.ndim != 2 or array.shape[1] != self._rows.width:
            raise DataError(
                f"field '{self._name}': got rows of shape {array.shape}, but `fields` promises [n, {self._rows.width}]"
            )
        self.taken[sample] = array

    def put_all(self, rows_TW: np.ndarray, count_M: np.ndarray) -> None:
        """Rows of all samples at once, one sample's after the other's: sample m has count_M[m] of them."""
        array = np.array(rows_TW, self._rows.dtype)
        ends_M = np.cumsum(count_M).tolist()
        if array.shape != (ends_M[-1] if ends_M else 0, self._rows.width) or len(ends_M) != len(self.taken):
            raise DataError(
                f"field '{self._name}': got rows of shape {array.shape} for {len(ends_M)} samples, but `fields` and "
                f"the counts promise [{ends_M[-1] if ends_M else 0}, {self._rows.width}] for {len(self.taken)}"
            )
        self.taken = [array[begin:end] for begin, end in zip([0, *ends_M], ends_M, strict=False)]


class Out(Mapping[str, Any]):
    """Where `read` writes: name -> ndarray view [M, *shape] of a Field, or RowsOut of a Rows field.

    A view holds whatever an earlier batch left in it: write every element.
    """

    def __init__(
        self,
        parts: Mapping[str, np.ndarray | RowsOut],
        reading: "ReadingNote | None" = None,
        *,
        first_row: int = 0,
        fetch: "Fetch | None" = None,
    ) -> None:
        self._parts = parts
        self._reading = reading
        self._fetch: Fetch = fetch or read_at_once
        self.first_row = first_row
        """Row of the batch that the first sample of this micro-batch is."""

    def __getitem__(self, name: str) -> Any:
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def reading(self, sample: int) -> None:
        """Note that sample number `sample` of the micro-batch is being read now.

        Optional. With it a hang or a crash is blamed on the right file at once; without it the feed
        finds the file by reading the micro-batch again, one sample at a time.
        """
        if self._reading is not None:
            self._reading(sample)

    def fetch(self, item: int, read: Callable[[], Item]) -> Item | None:
        """What `read` returns for an item; for an `ItemSource`, which reads all its items through this.

        None if the item cannot be read and is to be replaced: write anything in its place and go on with the next
        item. The micro-batch is then read again, without the items that failed.
        """
        return self._fetch(item, read)


class ReadingNote(Protocol):
    def __call__(self, sample: int) -> None: ...


class Fetch(Protocol):
    """See `Out.fetch`."""

    def __call__(self, item: int, read: Callable[[], Item], /) -> Item | None: ...


def read_at_once(item: int, read: Callable[[], Item], /) -> Item | None:
    """A `Fetch` without a feed: errors reach the caller."""
    return read()


class Source(Protocol):
    """Samples that workers can read. Plain attributes only: it is pickled once, for all workers."""

    @property
    def fields(self) -> Fields:
        """Name -> Field or Rows, the same for every sample."""

    def __len__(self) -> int: ...

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        """Random parameters of M samples, arrays [M, ...]; row m follows from (seed, epoch, positions[m],
        indices[m]) alone. NumPy only; see `flatout.feed.plan` for keyed numbers."""

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        """Write samples `indices` into `out`, without any randomness but that in `draws`."""

    def where(self, index: int) -> str:
        """The file (or key) of a sample, for error texts."""


class Substituted(NamedTuple):
    """Samples that do without unreadable items."""

    indices: np.ndarray
    """int64 [M], which samples are shown; as before where a sample's own item is not the one that is replaced."""

    draws: Mapping[str, np.ndarray]

    num_replaced: np.ndarray
    """int [M], substitutes that each sample shows."""


@runtime_checkable
class ItemSource(Source, Protocol):
    """A source whose samples are made of items that several samples share: pictures of mosaics, files of clips.

    Items are what can be unreadable. `read` gets each of them by `Out.fetch`, and knows from the draws which ones;
    `indices` remain those of the plan. For any other source a sample is an item, and is replaced as a whole.
    """

    @property
    def num_items(self) -> int: ...

    def where_item(self, item: int) -> str:
        """The file (or key) of an item, for error texts."""

    def substitute(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], unreadable: "Unreadable") -> Substituted:
        """The same samples, but for unreadable items; NumPy only.

        Which items are replaced follows from the draws and from which items are unreadable, never from which of them
        are known: replace an item where `read` would fetch it, and let `read` fetch every item that the choice of
        substitutes depends on.
        """


class SampleSource(ABC):
    """A source written one sample at a time: give `fields`, `__len__` and `sample`.

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
        """One value per field. All randomness comes from `rng`, which is new for each visit."""

    def where(self, index: int) -> str:
        return f"sample {index}"

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        return {"bits": keyed_bits(seed, epoch, positions, 2)}

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        for i, index in enumerate(indices):
            out.reading(i)
            values = self.sample(int(index), keyed_generator(draws["bits"][i]))
            if not isinstance(values, Mapping) or set(values) != set(self.fields):
                raise DataError(f"sample() returned {_describe(values)}, but `fields` promises {_names(self.fields)}")
            for name, value in values.items():
                _place(name, self.fields[name], value, i, out)


def check_source(source: Source) -> None:
    """Refuse a source that cannot be fed, in one sentence."""
    if missing := [name for name in ("__len__", "fields", "draw", "read", "where") if not hasattr(source, name)]:
        raise ConfigError(
            f"{type(source).__name__} is no source: it has no {_names(missing)}. Subclass flatout.feed.SampleSource."
        )
    if len(source) == 0:
        raise DataError(f"{type(source).__name__} is empty (0 samples): there is nothing to feed. Check the data path.")
    fields = source.fields
    if not isinstance(fields, Mapping) or not fields:
        raise ConfigError(f"{type(source).__name__}.fields is {_describe(fields)}: name at least one Field or Rows.")
    for name, field in fields.items():
        if not isinstance(field, Field | Rows):
            raise ConfigError(f"{type(source).__name__}.fields['{name}'] is {field!r}: use Field(...) or Rows(...).")
        if np.dtype(field.dtype).hasobject:
            raise ConfigError(f"{type(source).__name__}.fields['{name}'] has dtype object, which no slot can hold.")


def _place(name: str, field: Field | Rows, value: ArrayLike, i: int, out: Out) -> None:
    if isinstance(field, Rows):
        out[name].put(i, value)
        return
    view = out[name]
    array = np.asarray(value)
    if isinstance(value, int | list | tuple) and array.dtype.kind == "i" and view.dtype.kind in "iu":
        array = np.asarray(value, view.dtype)  # Python's own integers have no width; too large ones raise
    # Compared, not left to assignment: NumPy would broadcast a grey picture over three channels.
    if array.shape != view.shape[1:] or not np.can_cast(array.dtype, view.dtype, "same_kind"):
        raise DataError(
            f"field '{name}': got {array.dtype} {array.shape}, "
            f"but `fields` promises {view.dtype} {tuple(view.shape[1:])}"
        )
    view[i] = array


def _describe(value: object) -> str:
    return _names(value) if isinstance(value, Mapping) else repr(value)


def _names(names: Sequence[str] | Mapping[str, Any]) -> str:
    return "{" + ", ".join(sorted(map(repr, names))) + "}"


# What is shown instead of what cannot be read.
#
# The unit is the *item*: the picture of a mosaic, the strip a patch is cut from, the file of a clip; for most sources,
# the sample itself. What stands in for an item follows from its place in the stream and from which items are
# unreadable, and from nothing else. An item that is not yet known to be unreadable is found out when it is read, and
# then the choice is made again: so it makes no difference who knew what, and any number of workers delivers the same
# batches.
#
# Dimension key:  N items   M samples   K substitutions   J candidates for one substitution

READ_ATTEMPTS = 4
CANDIDATES = 100


UNREADABLE_ERRORS = (OSError, DecodeError)
"""What a file can do to its reader; anything else is a bug."""


class NothingReadableError(DataError):
    """There is nothing left that could be shown instead."""


class Unreadable:
    """The items known to be unreadable while M samples are chosen, and what stands in for them."""

    def __init__(self, is_bad_N: np.ndarray, *, seed: int, epoch: int, positions_M: np.ndarray) -> None:
        self.is_bad_N = is_bad_N
        self.seed, self.epoch, self.positions_M = seed, epoch, np.asarray(positions_M)

    def among(self, items: np.ndarray) -> np.ndarray:
        """Which of these item numbers are unreadable, bool of the same shape; numbers below 0 are no items."""
        items = np.asarray(items)
        return np.asarray((items >= 0) & self.is_bad_N[items])

    def stand_ins(self, sample_K: np.ndarray, number_K: np.ndarray, is_bad_N: np.ndarray) -> np.ndarray:
        """What samples `sample_K` show instead of `number_K`, int64 [K]: numbers that are not bad.

        `is_bad_N` says which of N things of a kind cannot be shown: all items, some of them, or what is made of them.
        """
        num = len(is_bad_N)
        if not len(number_K):
            return np.zeros(0, np.int64)
        if is_bad_N.all():
            raise NothingReadableError(f"none of {num} files can be read. Check the data set")
        rows, row_K = np.unique(sample_K, return_inverse=True)
        uniform_RJ = keyed_uniform(
            self.seed, self.epoch, self.positions_M[rows], CANDIDATES, purpose=Purpose.SUBSTITUTE
        )
        # Counted from the number itself: two items of a sample get different ones, and none gets itself.
        number_K = np.asarray(number_K, np.int64)
        candidate_KJ = (number_K[:, None] + 1 + (uniform_RJ[row_K] * (num - 1)).astype(np.int64)) % num
        is_good_KJ = ~is_bad_N[candidate_KJ]
        chosen_K = candidate_KJ[np.arange(len(number_K)), is_good_KJ.argmax(1)]
        for k in np.flatnonzero(~is_good_KJ.any(1)).tolist():
            # Hardly anything is readable: the next that is.
            chosen_K[k] = (number_K[k] + np.roll(is_bad_N, -int(number_K[k])).argmin()) % num
        return np.asarray(chosen_K)


def read_patiently(read: Callable[[], Item]) -> Item:
    """What `read` returns; tried again where a disk may have failed for a moment (EIO, ESTALE on network disks)."""
    for attempt in range(1, READ_ATTEMPTS):
        try:
            return read()
        except (FileNotFoundError, PermissionError):
            raise
        except OSError:
            time.sleep(0.05 * 2**attempt)  # 0.7 s in all
    return read()
