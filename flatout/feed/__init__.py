"""Batches for training, written by workers directly into shared, page-locked memory. See docs/feed.md.

Files:

    background_fill Items read in the background, in the order in which a training needs them
    batch           The host batch that a feed yields, and how ragged rows of many workers become one array
    config          Settings of a feed, none of which changes the batches it yields, and how many workers each GPU gets
    device          Batches on the GPU: copied one batch ahead on a separate stream, without a host-device wait
    device_store    The device store: decoded arrays kept in device memory, with pinned RAM for those that do not fit
    feed            The feed: a resumable stream of batches, in plan order, with any number of workers
    forkserver      The forkserver: the small process that worker processes are forked from
    plan            Which sample goes into which step, decided before anything is read
    processes       Worker backends: start, stop, kill and replace the workers of a feed, in the process that trains
    ring            The ring: slots for batches and a task queue, in shared memory
    runtime         The runtime of a started feed: memory checks, slots, workers, batches in order
    source          The protocol of data sources: anything that can fill rows of a batch
    streamed_items  Streamed items: those that a device store cannot keep, sent along with the batches that need them
    supervisor      The supervisor: publishes tasks, and recovers from workers that die, hang or fail
    worker          The worker's loop: claim a task, draw, read into the slot, hand over ragged rows, report
    loader/         The feed behind the interface of torch's DataLoader, for any map-style dataset. See docs/loader.md
    store/          Items decoded once into arrays that all workers and ranks of a machine share. See docs/store.md
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.feed.background_fill import BackgroundFill
    from flatout.feed.batch import Arrays, Batch, ShapedArrays
    from flatout.feed.config import FeedConfig, WorkerPlan, plan_workers
    from flatout.feed.device import (
        DeviceBatch,
        DeviceBatches,
        DeviceFeed,
        HostPass,
        OpenPass,
        Output,
        Render,
        pin_slots_of_fill,
    )
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
