"""Batches for training, written by workers directly into shared, page-locked memory. See docs/feed.md.

Files:

    batch           The host batch that a feed yields, and how ragged rows of many workers become one array
    config          Settings of a feed, and how many workers each GPU gets
    device          Copies batches to the GPU one ahead of the step, and renders them there
    device_store    Decoded arrays kept in device memory, with pinned RAM for those that do not fit
    feed            The resumable stream of batches, in plan order, with any number of workers
    forkserver      The small process that worker processes are forked from
    plan            Which sample goes into which step, and random numbers keyed by position
    processes       Worker backends: inline, threads, or processes forked by a forkserver
    ring            Slots for batches and a task queue in shared memory
    runtime         Slots, workers, ordered batches and throughput meter of a started feed
    source          The protocol of data sources, and substitutes for unreadable items
    streamed_items  Items that a device store cannot keep, sent along with the batches that need them
    supervisor      Publishes tasks, and recovers from workers that die, hang or fail
    worker          The worker's loop: draw, read into the slot, hand over ragged rows, report
    loader/         The feed behind the interface of torch's DataLoader, for any map-style dataset. See docs/loader.md
    store/          Items decoded once into arrays that all workers and ranks of a machine share. See docs/store.md
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
