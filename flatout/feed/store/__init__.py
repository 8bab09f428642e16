"""Decode once: items as arrays that every worker and rank of a machine shares. See docs/store.md.

Files:

    build  Decode everything once, in parallel, into a store
    file   The bytes of a store: one portable file that NumPy and mmap can read, on disk or in memory
    home   Where stores live on disk and in memory, and which one belongs to some items
    keep   Who keeps decoded items while a run goes on: a whole store, the items used last, or nobody
    store  Decode once: items as arrays, from memory that every worker and rank of this machine shares
"""

from flatout.feed.store.file import Items, StoreConfig
from flatout.feed.store.store import Store, StoreStatistics

__all__ = ["Items", "Store", "StoreConfig", "StoreStatistics"]
