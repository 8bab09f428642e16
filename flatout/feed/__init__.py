"""Batches for training, read by workers straight into their final place. See docs/feed.md."""

from flatout.feed.batch import Batch
from flatout.feed.feed import Feed
from flatout.feed.foreman import SampleError
from flatout.feed.headcount import WorkerPlan, plan_workers
from flatout.feed.knobs import FeedConfig
from flatout.feed.plan import Plan
from flatout.feed.source import DecodeError, Field, ItemSource, Out, Rows, SampleSource, Source, Substituted
from flatout.feed.store import Items, Store, StoreConfig, StoreStatistics
from flatout.feed.substitutes import Unreadable

__all__ = [
    "Batch",
    "DecodeError",
    "Feed",
    "FeedConfig",
    "Field",
    "ItemSource",
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
    "Substituted",
    "Unreadable",
    "WorkerPlan",
    "plan_workers",
]
