"""Decode once: items as arrays that every worker and rank of a machine shares. See docs/store.md."""

from flatout.feed.store.config import StoreConfig
from flatout.feed.store.items import Items
from flatout.feed.store.store import Store, StoreStatistics

__all__ = ["Items", "Store", "StoreConfig", "StoreStatistics"]
