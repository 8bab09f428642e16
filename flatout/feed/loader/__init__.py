"""The feed behind the interface of torch's DataLoader, for any map-style dataset. See docs/loader.md.

Files:

    batch_parts  The messages between trainer and workers of a Loader: batch requests, batch parts, layouts, exceptions
    loader       The Loader: torch's DataLoader with workers that fill each batch together
    passes       One pass over a dataset: batches in the sampler's order, each valid for as long as it is referenced
    runtime      Slots and workers of a running Loader
    slots        Buffers of variable size for each slot of a Loader, and tracking of the slots that are still in use
    source       The worker's side of a Loader: fetch samples, collate them, and hand over a part of a batch
"""

from flatout.feed.loader.loader import Loader
from flatout.feed.loader.passes import cat_rows, join_rows

__all__ = ["Loader", "cat_rows", "join_rows"]
