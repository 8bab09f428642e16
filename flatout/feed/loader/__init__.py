"""The feed behind the interface of torch's DataLoader, for any map-style dataset. See docs/loader.md.

Files:

    batch_parts  The messages between trainer and workers: batch requests, batch parts, layouts, exceptions
    loader       The Loader: torch's DataLoader with workers that fill each batch together
    passes       One pass over a dataset, and the assembly of batches from their parts
    runtime      Slots and workers of a running Loader
    slots        Buffers of variable size for each slot, and tracking of the slots that are still in use
    source       The worker's side: fetch samples, collate them, write them into the slot
"""

from flatout.feed.loader.loader import Loader
from flatout.feed.loader.passes import cat_rows, join_rows

__all__ = ["Loader", "cat_rows", "join_rows"]
