"""Where batches of clips come from: files or the store -> workers -> slots -> device.

training     shuffled crops, the last incomplete step of an epoch left out
validation   whole frames, in order; one clip at a time where sequences differ in size
"""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor

from flatout.errors import ConfigError
from flatout.feed import (
    DeviceBatches,
    Feed,
    FeedConfig,
    Output,
    Plan,
    Shapes,
    Sources,
    Store,
    StoreConfig,
    shuffled_order,
)
from flatout.ranks import World
from flatout.spike.config import DataConfig
from flatout.spike.data.clip_set import ClipSet
from flatout.spike.data.frames import FrameItems, Frames, Shown
from flatout.spike.data.source import ClipSource, shown_of
from flatout.spike.data.voxels import bin_edges
from flatout.spike.step import StepPlan

logger = logging.getLogger(__name__)

DEVICE_WORKERS = 2
"""They only draw numbers: two are enough for any GPU."""


@dataclass(frozen=True, kw_only=True)
class FeedWishes:
    """How a feed of clips runs."""

    batch: int
    workers: int
    slots: int | None = None
    persistent: bool = True
    device: torch.device


class ClipFeed:
    """An open feed. A context manager; `close()` may be called twice."""

    def __init__(self, clips: ClipSet, batches: DeviceBatches, store: Store | None, stack: ExitStack) -> None:
        self.clips, self.batches, self.store = clips, batches, store
        self.feed = batches.feed
        self._stack = stack

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self.feed.log_replaced()
        self.feed.close()
        self._stack.close()


class TrainedOrder:
    """A shuffled epoch without the clips that fill no whole optimizer step."""

    def __init__(self, num_samples: int, *, plan: StepPlan, seed: int) -> None:
        self._num_samples, self._seed = num_samples, seed
        self._num_trained = plan.steps_per_epoch * plan.samples_per_step

    def __call__(self, epoch: int) -> np.ndarray:
        return shuffled_order(self._num_samples, seed=self._seed, epoch=epoch)[: self._num_trained]


def open_store(clips: ClipSet, config: DataConfig, *, budget_bytes: int, workers: int) -> Store | None:
    """Frames decoded once for the whole node; None if the config wants no cache."""
    if not config.USE_RAM_CACHE or budget_bytes <= 0:
        return None
    policy: Literal["lru", "resident"] = "lru" if config.CACHE_SCOPE == "process" else "resident"
    store = Store.open(
        FrameItems(clips), StoreConfig(budget_bytes=budget_bytes, policy=policy, workers=max(1, workers))
    )  # fmt: skip
    logger.info("Cache of %s: %s", clips.where, store.statistics())
    return store


def training_source(clips: ClipSet, config: DataConfig, store: Store | None = None) -> ClipSource:
    """Random crops."""
    shown = shown_of(config)
    _check_one_size(clips, config)
    return ClipSource(clips, Frames(clips, shown, store), shown, crop=config.CROP_SIZE, augment=config.AUGMENT)


def open_training_feed(
    clips: ClipSet,
    config: DataConfig,
    wishes: FeedWishes,
    *,
    steps: StepPlan,
    seed: int,
    epochs: int,
    world: World,
    store: Store | None,
) -> ClipFeed:
    """Shuffled crops of this rank."""
    with ExitStack() as stack:
        if store is not None:
            stack.enter_context(store)
        plan = _training_plan(clips, wishes, steps=steps, seed=seed, world=world)
        feed = Feed(training_source(clips, config, store), plan, _feed_config(wishes, epochs=epochs))
        return ClipFeed(clips, DeviceBatches(feed, wishes.device), store, stack.pop_all())
    raise AssertionError


def open_scoring_feed(clips: ClipSet, config: DataConfig, wishes: FeedWishes, store: Store | None = None) -> ClipFeed:
    """Whole frames in order, every clip once."""
    shown = shown_of(config)
    source = ClipSource(clips, Frames(clips, shown, store), shown, crop=None)
    same_size = len({each.rgb_hw for each in clips.sequences}) == 1
    with ExitStack() as stack:
        if store is not None:
            stack.enter_context(store)
        plan = Plan(
            num_samples=len(clips),
            batch_size=wishes.batch if same_size else 1,
            shuffle=False,
            last="short",
            shapes=None if same_size else _ShapeOfStep(source),
        )
        feed = Feed(source, plan, _feed_config(wishes, epochs=None))
        return ClipFeed(clips, DeviceBatches(feed, wishes.device), store, stack.pop_all())
    raise AssertionError


def open_resident_feed(
    clips: ClipSet,
    config: DataConfig,
    wishes: FeedWishes,
    *,
    steps: StepPlan,
    seed: int,
    epochs: int,
    world: World,
    store: Store | None,
) -> ClipFeed:
    """As `open_training_feed`, the same clips, but made on the device from what lives there."""
    from flatout.feed import DeviceFeed, DeviceStore
    from flatout.spike.data.source import NumbersSource

    if config.CROP_SIZE is None:
        raise ConfigError("DEVICE_RESIDENT cuts crops on the device: set CROP_SIZE.")
    shown, whole = shown_of(config), training_source(clips, config)
    render = Render(clips, whole, shown, crop=config.CROP_SIZE)
    with ExitStack() as stack:
        items = store or Store.open(FrameItems(clips), StoreConfig(place="off"))
        stack.enter_context(items)
        resident = DeviceStore(items, wishes.device, batch_items=3 * clips.clip_length * wishes.batch)
        plan = _training_plan(clips, wishes, steps=steps, seed=seed, world=world)
        numbers = NumbersSource(clips, whole, shown, crop=config.CROP_SIZE)
        few = replace(wishes, workers=min(wishes.workers, DEVICE_WORKERS))
        feed = Feed(numbers, plan, _feed_config(few, epochs=epochs), unreadable=resident.unreadable)
        return ClipFeed(clips, DeviceFeed(feed, resident, render, render.outputs), store, stack.pop_all())
    raise AssertionError


def _training_plan(clips: ClipSet, wishes: FeedWishes, *, steps: StepPlan, seed: int, world: World) -> Plan:
    return Plan(
        num_samples=len(clips),
        batch_size=wishes.batch,
        seed=seed,
        order=TrainedOrder(len(clips), plan=steps, seed=seed),
        rank=world.rank,
        num_ranks=world.size,
    )


class _ShapeOfStep:
    """Shapes of a step that is one clip."""

    def __init__(self, source: ClipSource) -> None:
        self._source = source

    def __call__(self, epoch: int, step: int) -> Shapes:
        return self._source.shapes(step)


def _feed_config(wishes: FeedWishes, *, epochs: int | None) -> FeedConfig:
    return FeedConfig(
        workers=wishes.workers,
        slots=wishes.slots,
        persistent_workers=wishes.persistent,
        epochs=epochs,
        on_error="substitute" if epochs else "raise",
    )


def _check_one_size(clips: ClipSet, config: DataConfig) -> None:
    if config.CROP_SIZE is None and len({each.rgb_hw for each in clips.sequences}) > 1:
        raise ConfigError(
            f"CROP_SIZE: null takes whole frames, and the sequences of {clips.where} differ in size. Set CROP_SIZE."
        )


# The GPU path: frames and packed spikes live on the device, which crops, turns, unpacks and counts.
#
#     worker: draw -> numbers of frames, origins, flips (a few hundred bytes) -> slot -> device: gather -> batch
#
# Plain torch, the same bytes as `source.py` makes on the CPU (tests compare them), and nothing waits for the device.
#
# Dimension key:  N clips   L frames   C bins   S side of a crop   h w crop of spikes   P = h * w   T spike frames


class Render:
    """Fills `blur`, `sharp` and `spikes` of a batch from what is resident."""

    def __init__(self, clips: ClipSet, whole: ClipSource, shown: Shown, *, crop: int) -> None:
        first = clips.sequences[0]
        if clips.precomputed or shown.kind != "voxel" or first.layout.format == "bytes":
            raise ConfigError(
                "DEVICE_RESIDENT bins streams on the device: use SPIKE_REPR: voxel, live, packed or uint8."
            )
        if any(crop % step for each in clips.sequences for step in each.steps):
            raise ConfigError(f"DEVICE_RESIDENT needs exact crops: CROP_SIZE={crop} is no multiple of {first.steps}.")
        self._crop, self._layout, self._length = crop, first.layout, clips.clip_length
        longest = max(each.num_spike_frames for each in clips.frames) - sum(shown.trim)
        self._most_per_bin = int(np.diff(bin_edges(longest, shown.channels)).max())
        fields = whole.fields
        if fields["spikes"].dtype != np.uint8:
            raise ConfigError("DEVICE_RESIDENT counts in bytes: use more NUM_VOXEL_BINS for streams as long as these.")
        self.outputs = {name: Output(fields[name].shape, torch.uint8) for name in ("blur", "sharp", "spikes")}

    def __call__(self, sources: Sources, params: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        length = self._length
        y, x = turned_places(params["turn"], self._crop, self._crop)
        for part, name in enumerate(("blur", "sharp")):
            here = slice(part * length, (part + 1) * length)
            self._cut(sources, here, params["corner"], y, x, out[name])
        self.count(sources, params, out["spikes"])

    def _cut(self, sources: Sources, here: slice, corner_N4: Tensor, y: Tensor, x: Tensor, out: Tensor) -> None:
        """Gather [N, L, S, S, 3] bytes."""
        width_NL = sources.shapes[:, here, 1]
        rows, columns = y + corner_N4[:, 0, None, None], x + corner_N4[:, 1, None, None]
        pixel = rows[:, None] * width_NL[..., None, None] + columns[:, None]
        first = sources.offsets[:, here, None, None] + 3 * pixel
        out.copy_(sources.data[first[..., None] + torch.arange(3, device=first.device)])

    def count(self, sources: Sources, params: Mapping[str, Tensor], out: Tensor) -> None:
        """Sum the spikes of each bin, one spike frame of every bin at a time: no atomics, the same bits every time."""
        num, length, channels, height, width = out.shape
        here = slice(2 * length, 3 * length)
        y, x = turned_places(params["turn"], height, width)
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
            # A frame outside of its bin is read at the bin's start, which exists, and then not counted.
            frame = torch.where(inside, start + number, torch.zeros_like(start))
            values = sources.data[byte + frame * frame_bytes]
            total += (values >> bit & 1 if packed else values) * inside
        out.copy_(total.view(out.shape))


def turned_places(turn_N4: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Row and column of the untouched crop that each pixel of the turned one comes from, int64 [N, S, S]."""
    y = torch.arange(height, device=turn_N4.device).view(1, -1, 1).expand(len(turn_N4), height, width)
    x = torch.arange(width, device=turn_N4.device).view(1, 1, -1).expand(len(turn_N4), height, width)
    hflip, vflip, rot90 = (turn_N4[:, place, None, None].bool() for place in (1, 2, 3))
    y, x = torch.where(rot90, x, y), torch.where(rot90, width - 1 - y, x)
    return torch.where(vflip, height - 1 - y, y), torch.where(hflip, width - 1 - x, x)
