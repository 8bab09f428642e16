"""How many samples are in a batch? Loaders give tensors, pairs, dicts, tuples of pictures of any size, and more."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

Path = tuple[Any, ...]
"""The way into a batch: keys and positions."""

FIELDS = 16
"""Of a batch, that are looked at."""
DIMS_OF_SAMPLE = 3
"""A tensor with more of them (images of NCHW, say) is a whole batch."""


class SamplesOf:
    """Counts the samples of a loader's batches, every one in the same place: a last batch may be shorter."""

    def __init__(self, expected: int | None = None) -> None:
        """`expected`: in a full batch, where the loader says so."""
        self._expected = expected
        self._path: Path | None = None

    @classmethod
    def loader(cls, loader: Any) -> "SamplesOf":
        """By what the loader says of its batches."""
        sizes = (getattr(source, "batch_size", None) for source in (loader, getattr(loader, "batch_sampler", None)))
        return cls(next((size for size in sizes if isinstance(size, int) and size > 0), None))

    def __call__(self, batch: Any) -> int:
        """At least 1."""
        lengths = dict(_lengths(batch))
        if self._path is None:
            self._path = next((path for path, length in lengths.items() if length == self._expected), None)
        if self._path in lengths:
            return max(1, lengths[self._path])
        first = next(iter(lengths.values()), 0)
        # Nothing in it is as long as a batch of this loader: it is a short one, or nothing in it tells.
        return max(1, first) if self._expected is None or 0 < first < self._expected else self._expected


def _lengths(part: Any, path: Path = ()) -> Iterator[tuple[Path, int]]:
    """Where a batch has a length that may be its number of samples, the most likely first."""
    if hasattr(part, "shape"):
        if len(part.shape):
            yield path, int(part.shape[0])
    elif isinstance(part, Mapping):
        for key in islice(part, FIELDS):
            yield from _lengths(part[key], (*path, key))
    elif isinstance(part, list | tuple):
        yield from _lengths_of_list(part, path)
    elif not isinstance(part, str | bytes):
        yield from _lengths_of_object(part, path)


def _lengths_of_list(part: Any, path: Path) -> Iterator[tuple[Path, int]]:
    """Fields of a batch, as in (images, labels), or samples side by side."""
    are_samples = bool(path) and not any(len(getattr(item, "shape", ())) > DIMS_OF_SAMPLE for item in part[:1])
    if are_samples:
        yield path, len(part)
    for place, item in enumerate(part[:FIELDS]):
        yield from _lengths(item, (*path, place))
    if not are_samples:
        yield path, len(part)


def _lengths_of_object(part: Any, path: Path) -> Iterator[tuple[Path, int]]:
    if hasattr(part, "__len__"):
        yield path, len(part)
    elif hasattr(part, "__dict__") and len(path) < DIMS_OF_SAMPLE:  # a dataclass, say; no deeper than batches are
        yield from _lengths(dict(vars(part)), path)
