"""Items decoded once into arrays that all workers and ranks of a machine share. See docs/store.md.

Files:

    build  Find the store of some items, or build it, in memory or on disk, as far as the room goes
    file   Items and settings of a store, and its file format: one portable file that NumPy and mmap can read
    home   Where stores are kept on disk and in memory, and which one belongs to given items
    keep   Caches of decoded items: a whole store, the items used last, or none
    store  The store: items decoded once into arrays, in memory that all workers and ranks of this machine share
"""

from flatout.feed.store.file import Items, StoreConfig
from flatout.feed.store.store import Store, StoreStatistics

__all__ = ["Items", "Store", "StoreConfig", "StoreStatistics"]
