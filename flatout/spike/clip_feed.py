"""Where batches of clips come from: files or the store -> workers -> slots -> device.

training     shuffled crops, the last incomplete step of an epoch left out
validation   whole frames, in order; one clip at a time where sequences differ in size
"""

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
import torch

from flatout.engine.distributed import World
from flatout.errors import ConfigError
from flatout.feed import Feed, FeedConfig, Plan, Store, StoreConfig
from flatout.feed.device import DeviceBatches
from flatout.feed.plan import Shapes, shuffled_order
from flatout.spike.config import DataConfig
from flatout.spike.data import ClipSet
from flatout.spike.frames import FrameItems, Frames
from flatout.spike.schedule import StepPlan
from flatout.spike.source import ClipSource, shown_of

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
    from flatout.feed.device_feed import DeviceFeed
    from flatout.feed.device_store import DeviceStore
    from flatout.spike.resident import Render
    from flatout.spike.resident_numbers import NumbersSource

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
