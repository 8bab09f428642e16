"""flatout: vision training that keeps the GPU busy and proves where the time goes.

The public names are those in `__all__`; what is not listed is free to change. Each is imported
when it is first used, so `import flatout` costs nothing: no torch, no numpy, no process, no file.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout import defect, spike, yolo
    from flatout.feed import (
        Batch,
        DecodeError,
        Feed,
        FeedConfig,
        Field,
        Items,
        Out,
        Plan,
        Rows,
        SampleSource,
        Source,
        Store,
        StoreConfig,
        plan_workers,
    )
    from flatout.feed.device_feed import DeviceFeed
    from flatout.feed.device_store import DeviceStore
    from flatout.feed.loader import Loader, cat_rows, join_rows

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "DecodeError",
    "DeviceFeed",
    "DeviceStore",
    "Feed",
    "FeedConfig",
    "Field",
    "Items",
    "Loader",
    "Out",
    "Plan",
    "Rows",
    "SampleSource",
    "Source",
    "Store",
    "StoreConfig",
    "__version__",
    "cat_rows",
    "defect",
    "join_rows",
    "plan_workers",
    "spike",
    "yolo",
]

# These import torch, so they are not in flatout.feed itself, which workers import.
_NEED_TORCH = {
    "DeviceFeed": "flatout.feed.device_feed",
    "DeviceStore": "flatout.feed.device_store",
    "Loader": "flatout.feed.loader",
    "cat_rows": "flatout.feed.loader",
    "join_rows": "flatout.feed.loader",
}

_JOBS = ("defect", "spike", "yolo")


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _JOBS:
        return import_module(f"flatout.{name}")
    return getattr(import_module(_NEED_TORCH.get(name, "flatout.feed")), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
