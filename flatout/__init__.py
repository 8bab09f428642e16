"""flatout: vision training that keeps the GPU busy and proves where the time goes.

The public names are those in `__all__`; what is not listed is free to change. Each is imported
when it is first used, so `import flatout` costs nothing: no torch, no numpy, no process, no file.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.feed import (
        Batch,
        DecodeError,
        Feed,
        FeedConfig,
        Field,
        Plan,
        Rows,
        SampleSource,
        Source,
        plan_workers,
    )

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "DecodeError",
    "Feed",
    "FeedConfig",
    "Field",
    "Plan",
    "Rows",
    "SampleSource",
    "Source",
    "__version__",
    "plan_workers",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("flatout.feed"), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
