"""Batches of clips: loader plan, feeds for training and evaluation, and rendering on the GPU.

files or the store -> workers -> slots -> device
training     shuffled crops, without the last incomplete optimizer step of an epoch
evaluation   whole frames, in order; one clip at a time if sequences differ in size

Workers, prefetching and memory are planned, checked and logged before anything starts.

Dimension key:  N clips   L frames of a clip   C bins   S side of a crop   P pixels of a spike crop
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.clock import machine
from flatout.errors import ConfigError, ResourceError
from flatout.feed import (
    DeviceBatches,
    Feed,
    FeedConfig,
    Output,
    Plan,
    Sources,
    Store,
    StoreConfig,
    WorkerPlan,
    choose_slots,
    plan_workers,
    shuffled_order,
)
from flatout.ranks import World
from flatout.spike.config import DataConfig, LoaderConfig, SpikeConfig
from flatout.spike.data.clip_set import ClipSet
from flatout.spike.data.frames import FrameItems, Frames
from flatout.spike.data.source import ClipParameterSource, ClipSource
from flatout.spike.data.voxels import bin_edges
from flatout.spike.step import StepPlan

logger = logging.getLogger(__name__)

# The loader plan

MEMORY_SHARE = 0.5
"""Share of the free memory that prefetching may take."""
GIB = 2**30

HIGH_MS, LOW_MS = 50.0, 20.0
"""Limits of `data_time` in the tuning table of the original guide."""


@dataclass(frozen=True, kw_only=True)
class LoaderPlan:
    """The loaders of one rank, on a machine with `gpus` ranks."""

    config: LoaderConfig
    gpus: int
    batch: int
    val_batch: int
    sample_bytes: int
    """Size of a training clip in a slot."""
    cache_bytes: int
    """Size of the cache, for the whole machine; 0 without a cache."""

    @cached_property
    def workers(self) -> WorkerPlan:
        config = self.config
        total, train, val = config.TOTAL_WORKERS, config.TRAIN_WORKERS, config.VAL_WORKERS
        return plan_workers(total, cores=config.CPU_CORES, gpus=self.gpus, train=train, val=val)

    @property
    def cores(self) -> int:
        return self.config.CPU_CORES or machine.cores().usable

    @property
    def slots(self) -> int:
        return max(choose_slots(self.batch, self.workers.train), self.config.TRAIN_PREFETCH_FACTOR + 2)

    @property
    def val_slots(self) -> int:
        return max(choose_slots(self.val_batch, self.workers.val), self.config.VAL_PREFETCH_FACTOR + 2)

    @property
    def prefetch_bytes(self) -> int:
        """Memory of the slots of all ranks; the workers of a rank share its slots, so their number does not matter."""
        return self.gpus * self.slots * self.batch * self.sample_bytes


def plan_for(config: SpikeConfig, clips: ClipSet, *, gpus: int, batch: int) -> LoaderPlan:
    """The plan of a training on these clips, with `batch` clips per micro-batch of a rank; nothing is started."""
    return LoaderPlan(
        config=config.loader,
        gpus=gpus or 1,
        batch=batch,
        val_batch=config.TRAIN.VAL_BATCH_SIZE,
        sample_bytes=sum(field.sample_bytes for field in training_source(clips, config.DATA).fields.values()),
        cache_bytes=int(config.DATA.CACHE_SIZE_GB * GIB) if config.DATA.USE_RAM_CACHE else 0,
    )


def check_memory(plan: LoaderPlan, free_bytes: int | None = None) -> None:
    """Raise ResourceError if the plan does not fit into the free memory."""
    free = machine.memory().free if free_bytes is None else free_bytes
    if plan.cache_bytes > free:
        raise ResourceError(
            f"CACHE_SIZE_GB asks for {plan.cache_bytes / GIB:.1f} GB, but {free / GIB:.1f} GB of memory are free. Use "
            "a smaller CACHE_SIZE_GB (part of the data then stays on disk), or USE_RAM_CACHE: false."
        )
    if plan.prefetch_bytes > MEMORY_SHARE * (free - plan.cache_bytes):
        raise ResourceError(
            f"Prefetching takes {plan.prefetch_bytes / GIB:.2f} GB ({plan.gpus} GPUs x {plan.slots} batches x "
            f"{plan.batch} clips x {plan.sample_bytes / 2**20:.1f} MiB), more than half of the "
            f"{(free - plan.cache_bytes) / GIB:.2f} GB that the cache leaves free. Use a smaller "
            "TRAIN_PREFETCH_FACTOR, BATCH_SIZE, CROP_SIZE or CACHE_SIZE_GB."
        )


def loading_summary(plan: LoaderPlan, lang: Literal["en", "zh"]) -> list[str]:
    """The lines logged at the start about data loading."""
    prefetch, cache = plan.prefetch_bytes / GIB, plan.cache_bytes / GIB
    text = _SUMMARIES[lang].format(plan=plan, workers=plan.workers, prefetch=prefetch, cache=cache)
    return [f"[train] {line}" for line in text.splitlines()]


def hint(wait_ms: float, step_ms: float) -> str:
    """How much a perfect loader would gain at most, and which settings to change if that is much."""
    gain = 100 * wait_ms / max(step_ms - wait_ms, 1e-9)
    text = f"data_time={wait_ms:.1f}ms of {step_ms:.1f}ms: at most {gain:.0f} % faster with a perfect loader"
    if wait_ms > HIGH_MS:
        return f"{text}. Try TOTAL_WORKERS: cpu*0.9, TRAIN_PREFETCH_FACTOR: 6, and USE_RAM_CACHE: true."
    if wait_ms >= LOW_MS:
        return f"{text}. USE_RAM_CACHE: true decodes frames once."
    return f"{text}."


_SUMMARIES = {
    "en": """\
===== data loading =====
CPU cores: {plan.cores}
workers in total: {workers.total} (suggested, for all {plan.gpus} GPUs)
training loader:
  - num_workers: {workers.train} (per GPU)
  - batch_size: {plan.batch}, slots: {plan.slots}, persistent_workers: {plan.config.PERSISTENT_WORKERS}
validation loader:
  - num_workers: {workers.val} (per GPU)
  - batch_size: {plan.val_batch}, slots: {plan.val_slots}
together: {workers.train_sum} training workers
memory: {prefetch:.2f} GB prefetch + {cache:.2f} GB cache
""",
    "zh": """\
===== 数据加载配置 =====
CPU核心数: {plan.cores}
总worker数: {workers.total} (建议值，用于所有{plan.gpus}个GPU)
训练DataLoader:
  - num_workers: {workers.train} (每GPU)
  - batch_size: {plan.batch}, slots: {plan.slots}, persistent_workers: {plan.config.PERSISTENT_WORKERS}
验证DataLoader:
  - num_workers: {workers.val} (每GPU)
  - batch_size: {plan.val_batch}, slots: {plan.val_slots}
总计: {workers.train_sum} 个训练workers 利用CPU资源
内存: {prefetch:.2f} GB prefetch + {cache:.2f} GB cache
""",  # noqa: RUF001
}
"""The Chinese labels are exactly those of the original guide, because scripts search for them."""


# Feeds

DEVICE_WORKERS = 2
"""Maximum number of workers if the device renders: they only draw parameters, and two are enough for any GPU."""


class ClipFeed(NamedTuple):
    """An open feed of clips, and the store that it reads from and that is closed with it."""

    clips: ClipSet
    batches: DeviceBatches
    store: Store | None


def open_store(clips: ClipSet, config: DataConfig, *, budget_bytes: int, workers: int) -> Store | None:
    """Find or build the store of decoded frames: one for the machine, or one per worker (`CACHE_SCOPE: process`).

    None without a cache or a budget.
    """
    if not config.USE_RAM_CACHE or budget_bytes <= 0:
        return None
    policy: Literal["lru", "resident"] = "lru" if config.CACHE_SCOPE == "process" else "resident"
    store = Store.open(
        FrameItems(clips), StoreConfig(budget_bytes=budget_bytes, policy=policy, workers=max(1, workers))
    )  # fmt: skip
    logger.info("Cache of %s: %s", clips.where, store.statistics())
    return store


def training_source(clips: ClipSet, config: DataConfig, store: Store | None = None) -> ClipSource:
    """The source of training clips: random crops."""
    if config.CROP_SIZE is None and not _are_of_one_size(clips):
        raise ConfigError(
            f"CROP_SIZE: null uses whole frames, but the sequences of {clips.where} differ in size. Set CROP_SIZE."
        )
    return ClipSource(Frames(clips, config, store), crop=config.CROP_SIZE, augment=config.AUGMENT)


def training_plan(clips: ClipSet, batch: int, *, steps: StepPlan, seed: int, world: World) -> Plan:
    """Which clips this rank trains on, in which order: shuffled, without those that do not fill an optimizer step."""
    num_trained = steps.steps_per_epoch * steps.samples_per_step
    return Plan(
        num_samples=len(clips),
        batch_size=batch,
        seed=seed,
        order=lambda epoch: shuffled_order(len(clips), seed=seed, epoch=epoch)[:num_trained],
        rank=world.rank,
        num_ranks=world.size,
    )


@contextmanager
def open_training_feed(
    clips: ClipSet, config: DataConfig, feed: FeedConfig, plan: Plan, device: torch.device, store: Store | None
) -> Iterator[ClipFeed]:
    """The training feed of this rank, in the order of `training_plan`: shuffled crops, made by workers."""
    with store or nullcontext(), _closing(Feed(training_source(clips, config, store), plan, feed)) as opened:
        yield ClipFeed(clips, DeviceBatches(opened, device), store)


@contextmanager
def open_scoring_feed(
    clips: ClipSet, config: DataConfig, feed: FeedConfig, batch: int, device: torch.device, store: Store | None = None
) -> Iterator[ClipFeed]:
    """A feed for an evaluation: whole frames in order, every clip once."""
    source = ClipSource(Frames(clips, config, store), crop=None)
    same_size = _are_of_one_size(clips)
    plan = Plan(
        num_samples=len(clips),
        batch_size=batch if same_size else 1,
        shuffle=False,
        last="short",
        shapes=None if same_size else lambda epoch, step: source.shapes(step),
    )
    with store or nullcontext(), _closing(Feed(source, plan, feed)) as opened:
        yield ClipFeed(clips, DeviceBatches(opened, device), store)


@contextmanager
def open_resident_feed(
    clips: ClipSet, config: DataConfig, feed: FeedConfig, plan: Plan, device: torch.device, store: Store | None
) -> Iterator[ClipFeed]:
    """As `open_training_feed`, with the same clips, but rendered on the device from frames and streams kept there."""
    from flatout.feed import DeviceFeed, DeviceStore

    if config.CROP_SIZE is None:
        raise ConfigError("DEVICE_RESIDENT crops on the device: set CROP_SIZE.")
    render = ClipRenderer(training_source(clips, config), crop=config.CROP_SIZE)
    numbers = ClipParameterSource(Frames(clips, config), crop=config.CROP_SIZE, augment=config.AUGMENT)
    few = replace(feed, workers=min(feed.num_workers, DEVICE_WORKERS))
    with store or Store.open(FrameItems(clips), StoreConfig(place="off")) as items:
        resident = DeviceStore(items, device, batch_items=3 * clips.clip_length * plan.batch_size)
        with _closing(Feed(numbers, plan, few, unreadable=resident.unreadable)) as opened:
            yield ClipFeed(clips, DeviceFeed(opened, resident, render, render.outputs), store)


@contextmanager
def _closing(feed: Feed) -> Iterator[Feed]:
    try:
        yield feed
    finally:
        feed.log_replaced()
        feed.close()


def _are_of_one_size(clips: ClipSet) -> bool:
    return len({each.rgb_hw for each in clips.sequences}) == 1


# Rendering on the device, which keeps frames and packed spikes: crop, flip, unpack and count
#
#     worker: draw -> numbers of frames, origins, flips (a few hundred bytes) -> slot -> device: gather -> batch
#
# In plain torch. It gives the same bytes as data/source.py on the CPU (tests compare them), and does not wait for the
# device.


class ClipRenderer:
    """Fills `blur`, `sharp` and `spikes` of a batch from frames and streams on the device."""

    def __init__(self, source: ClipSource, *, crop: int) -> None:
        clips, representation, fields = source.frames.clips, source.frames.representation, source.fields
        first = clips.sequences[0]
        if clips.precomputed or representation.kind != "voxel" or first.layout.format == "bytes":
            raise ConfigError(
                "DEVICE_RESIDENT bins streams on the device: use SPIKE_REPR: voxel, streams in the format packed or "
                "uint8, and USE_PRECOMPUTED_VOXELS: false."
            )
        if any(crop % step for each in clips.sequences for step in each.crop_steps):
            raise ConfigError(
                f"DEVICE_RESIDENT needs exact crops, but CROP_SIZE={crop} is not a multiple of {first.crop_steps}."
            )
        self._crop, self._layout, self._length = crop, first.layout, clips.clip_length
        longest = max(each.num_spike_frames for each in clips.frames) - sum(representation.trim)
        self._most_per_bin = int(np.diff(bin_edges(longest, representation.channels)).max())
        if fields["spikes"].dtype != np.uint8:
            raise ConfigError(
                "DEVICE_RESIDENT counts in bytes: use a larger NUM_VOXEL_BINS for streams of this length."
            )
        self.outputs = {name: Output(fields[name].shape, torch.uint8) for name in ("blur", "sharp", "spikes")}

    def __call__(self, sources: Sources, params: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        length = self._length
        y, x = source_pixels(params["transform"], self._crop, self._crop)
        for part, name in enumerate(("blur", "sharp")):
            here = slice(part * length, (part + 1) * length)
            self._cut(sources, here, params["corner"], y, x, out[name])
        self.count(sources, params, out["spikes"])

    def _cut(self, sources: Sources, here: slice, corner_N4: Tensor, y: Tensor, x: Tensor, out: Tensor) -> None:
        """Gather the crops of one kind of frames, uint8 [N, L, S, S, 3]."""
        width_NL = sources.shapes[:, here, 1]
        rows, columns = y + corner_N4[:, 0, None, None], x + corner_N4[:, 1, None, None]
        pixel = rows[:, None] * width_NL[..., None, None] + columns[:, None]
        first = sources.offsets[:, here, None, None] + 3 * pixel
        out.copy_(sources.data[first[..., None] + torch.arange(3, device=first.device)])

    def count(self, sources: Sources, params: Mapping[str, Tensor], out: Tensor) -> None:
        """Sum the spikes of each bin, one spike frame of every bin at a time: without atomics, so deterministic."""
        num, length, channels, height, width = out.shape
        here = slice(2 * length, 3 * length)
        y, x = source_pixels(params["transform"], height, width)
        rows, columns = y + params["corner"][:, 2, None, None], x + params["corner"][:, 3, None, None]
        if self._layout.flipud:
            rows = params["spike_hw"][:, 0, None, None] - 1 - rows
        pixel_N1P = (rows * params["spike_hw"][:, 1, None, None] + columns).view(num, 1, 1, -1)
        packed = self._layout.format == "packed"
        byte = sources.offsets[:, here, None, None] + (pixel_N1P >> 3 if packed else pixel_N1P)
        bit = (pixel_N1P & 7).to(torch.uint8)
        frame_bytes = sources.shapes[:, here, 2, None, None]
        start, count = params["bin_start"][..., None], params["spike_frames"][..., None]
        total = torch.zeros(num, length, channels, height * width, dtype=torch.uint8, device=out.device)
        for number in range(self._most_per_bin):
            inside = number < count
            # A spike frame outside of its bin is replaced by frame 0, which exists, and is not counted.
            frame = torch.where(inside, start + number, torch.zeros_like(start))
            values = sources.data[byte + frame * frame_bytes]
            total += (values >> bit & 1 if packed else values) * inside
        out.copy_(total.view(out.shape))


def source_pixels(transform_N4: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Row and column in the original crop of each pixel of the transformed one, int64 [N, S, S]."""
    y = torch.arange(height, device=transform_N4.device).view(1, -1, 1).expand(len(transform_N4), height, width)
    x = torch.arange(width, device=transform_N4.device).view(1, 1, -1).expand(len(transform_N4), height, width)
    hflip, vflip, rot90 = (transform_N4[:, column, None, None].bool() for column in (1, 2, 3))
    y, x = torch.where(rot90, x, y), torch.where(rot90, width - 1 - y, x)
    return torch.where(vflip, height - 1 - y, y), torch.where(hflip, width - 1 - x, x)
