"""The feed for any torch map-style dataset, with the face of torch's DataLoader. See docs/loader.md.

Files:

    batch_parts  What a worker hands over for a micro-batch, beside the rows it has written into the body
    loader       The face of torch's DataLoader, with workers that fill the batch together
    passes       One pass over a dataset: batches in the sampler's order, each valid for as long as somebody holds it
    runtime      Slots and workers of a running Loader
    slots        Two areas per slot whose size only the data knows: what is to be read, and room for the batch itself
    source       A torch dataset as the workers see it: fetch samples, collate, hand over a piece of a batch
"""

from flatout.feed.loader.loader import Loader
from flatout.feed.loader.passes import cat_rows, join_rows

__all__ = ["Loader", "cat_rows", "join_rows"]
