"""flatout: vision training that keeps the GPU busy and proves where the time goes.

The public names are those in `__all__`; others may change at any time. Each is imported on first use, so that
`import flatout` costs nothing: no torch, no numpy, no process, no file.

Packages, in the order of their imports:

    clock       stages of time, the machine, active workers        safefiles  untrusted files, read safely
    feed        batches, read by workers into shared memory        doctor     checks of the machine
    images      image files from any source                        profiler   where the time goes, and what would help
    ranks       several processes that train together              engine     the training loop of every job
    runs        training runs                                      charts     all plots
    export      networks as files for other programs               yolo, defect, spike: the jobs
    bootstrap, hub, monitor, profile_any, profile_command: commands for runs of any job

CONTRIBUTING.md says where to add what.
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout import defect, spike, yolo
    from flatout.feed import (
        Batch,
        DecodeError,
        DeviceFeed,
        DeviceStore,
        Feed,
        FeedConfig,
        Field,
        Items,
        Loader,
        Out,
        Plan,
        Rows,
        SampleSource,
        Source,
        Store,
        StoreConfig,
        cat_rows,
        join_rows,
        plan_workers,
    )

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

__getattr__, __dir__ = face(__name__)
