"""Train without the pictures for people that a run begins with.

They are drawn once per run, at the end of its first epoch; in a run of some dozen steps they would be most of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flatout.profiler.hooks import replaced
from flatout.yolo.train import whole
from flatout.yolo.train.batch_pictures import BatchPictures


def _nothing(*args: Any, **kwargs: Any) -> None: ...


@contextmanager
def unpictured() -> Iterator[None]:
    """No training inside the block draws its labels or its first batches."""
    with replaced(BatchPictures, {"keep": _nothing}), replaced(whole, {"draw_labels": _nothing}):
        yield
