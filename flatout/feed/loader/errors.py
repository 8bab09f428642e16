"""An exception on its way from a worker to the trainer: the same class and arguments, with where it came from."""

import pickle
import traceback
from typing import Any

from flatout.feed.crew import RemoteError


def pack_error(error: Exception, *, worker: int, doing: str) -> bytes:
    """Everything the trainer needs to raise `error` itself."""
    where = f"In worker {worker}, {doing}"
    text = "".join(traceback.format_exception(error))
    return pickle.dumps((_pickled_or_none(error), f"{type(error).__name__}: {error}", where, text))


def raise_packed(packed: bytes) -> None:
    """Raise what `pack_error` packed; the worker's traceback is the `__cause__`."""
    pickled, summary, where, text = pickle.loads(packed)
    cause = RemoteError(f"{where}\n{text}")
    if pickled is None:
        # Torch does the same: an exception that cannot travel arrives as a RuntimeError with its text.
        raise RuntimeError(f"{summary} ({where})") from cause
    error = pickle.loads(pickled)
    error.add_note(where)
    raise error from cause


def _pickled_or_none(error: Exception) -> bytes | None:
    """The exception pickled, if it also comes back."""
    try:
        pickled = pickle.dumps(error)
        back: Any = pickle.loads(pickled)
    except Exception:  # whatever an exception class of someone else does when it is rebuilt
        return None
    return pickled if type(back) is type(error) else None
