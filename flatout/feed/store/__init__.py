"""Items decoded once into arrays that all workers and ranks of a machine share. See docs/store.md.

Files:

    build  Find the store of some items, or build it by decoding them in parallel
    file   The file format of a store, which NumPy and mmap can read, and its settings
    home   Where stores are kept on disk and in memory, and which one belongs to given items
    keep   Caches of decoded items: a whole store, the items used last, or none
    store  The store: items as arrays in memory that all workers and ranks of this machine share
"""

from flatout.feed.store.file import Items, StoreConfig
from flatout.feed.store.store import Store, StoreStatistics

__all__ = ["Items", "Store", "StoreConfig", "StoreStatistics"]
