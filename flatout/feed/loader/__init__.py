"""The feed for any torch map-style dataset, with the face of torch's DataLoader. See docs/loader.md.

Files:

    assemble      From the pieces of a batch to the batch, in the trainer
    batch_parts   What a worker hands over for a micro-batch, beside the rows it has written into the body
    collating     From samples to a piece of a batch, in a worker: tensors into the body, the rest into a pickle
    loader        The face of torch's DataLoader, with workers that fill the batch together
    passes        One pass over a dataset: batches in the sampler's order, each valid for as long as somebody holds it
    runtime       Slots and workers of a running Loader
    slot_buffers  Two areas per slot whose size only the data knows: what is to be read, and room for the batch itself
    slot_refs     Who still looks at a slot? Tensors that a user keeps, slices of them, copies to the GPU under way
    source        A torch dataset as the workers see it: fetch samples, collate, hand over a piece of a batch
"""

from flatout.feed.loader.assemble import cat_rows, join_rows
from flatout.feed.loader.loader import Loader

__all__ = ["Loader", "cat_rows", "join_rows"]
