"""Batches for training, read by workers straight into their final place. See docs/feed.md.

Files:

    batch           What the feed hands out: one step's samples as arrays, and how ragged rows become one of them
    config          How a feed runs
    device          The way of a batch to the GPU: one batch ahead, on a stream of its own, without a host-device wait
    device_store    Decoded arrays kept where batches are rendered
    feed            Batches for training: in plan order, with any number of workers, resumable at any step
    forkserver      The small process that worker processes are forked from
    plan            Which sample goes where, decided before anything is read
    processes       Worker processes, and the nursery they come from, as seen by the process that trains
    ring            The slots that batches are filled in, and the queue of work on them, in shared memory
    runtime         The machinery of a started feed
    source          What the feed reads from: anything that can fill rows of a batch
    streamed_items  Items that a device store cannot keep, brought along by the batches that need them
    supervisor      Sees that every published step gets done, whatever happens to the workers
    worker          What a worker does with a task: draw, read into the slot, hand over its ragged rows, report
    loader/         The feed for any torch map-style dataset, with the face of torch's DataLoader. See docs/loader.md
    store/          Decode once: items as arrays that every worker and rank of a machine shares. See docs/store.md
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.feed.batch import Arrays, Batch, ShapedArrays
    from flatout.feed.config import FeedConfig, WorkerPlan, plan_workers
    from flatout.feed.device import DeviceBatch, DeviceBatches, DeviceFeed, HostPass, OpenPass, Output, Render
    from flatout.feed.device_store import (
        CHUNK_BYTES,
        DeviceStore,
        Sources,
        chunks_of,
        free_bytes,
        free_ram_bytes,
        settle,
    )
    from flatout.feed.feed import Feed
    from flatout.feed.loader import Loader, cat_rows, join_rows
    from flatout.feed.plan import Plan, Purpose, Shapes, choose_slots, keyed_bits, keyed_uniform, shuffled_order
    from flatout.feed.runtime import FeedRuntime, Lease
    from flatout.feed.source import (
        DecodeError,
        Fetch,
        Field,
        Fields,
        ItemSource,
        Out,
        Rows,
        SampleSource,
        Source,
        Substituted,
        Unreadable,
        read_at_once,
    )
    from flatout.feed.store import Items, Store, StoreConfig, StoreStatistics
    from flatout.feed.store.home import default_folder
    from flatout.feed.streamed_items import StreamedItems
    from flatout.feed.supervisor import SampleError

__getattr__, __dir__ = face(__name__)
