"""Batches for training, read by workers straight into their final place. See docs/feed.md."""

from flatout.feed.batch import Batch
from flatout.feed.feed import Feed
from flatout.feed.foreman import SampleError
from flatout.feed.headcount import WorkerPlan, plan_workers
from flatout.feed.knobs import FeedConfig
from flatout.feed.plan import Plan
from flatout.feed.source import DecodeError, Field, Out, Rows, SampleSource, Source
from flatout.feed.store import Items, Store, StoreConfig, StoreStatistics

__all__ = [
    "Batch",
    "DecodeError",
    "Feed",
    "FeedConfig",
    "Field",
    "Items",
    "Out",
    "Plan",
    "Rows",
    "SampleError",
    "SampleSource",
    "Source",
    "Store",
    "StoreConfig",
    "StoreStatistics",
    "WorkerPlan",
    "plan_workers",
]
