"""The input of a training: images of a data set as augmented batches, made by workers or on the GPU.

plain     files --decode every time--> worker: augment --> slot --> device
fast      files --decode once--> store --> worker: augment --> slot --> device
device    files --decode once--> store on the device; worker: draws and boxes --> slot --> device: one kernel
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Union

import numpy as np
import torch

from flatout.clock import machine
from flatout.errors import ConfigError
from flatout.feed import CHUNK_BYTES, DeviceBatches, Feed, FeedConfig, Plan, Rows, Store, StoreConfig, chunks_of
from flatout.ranks import World
from flatout.yolo.augment.draw import AugmentConfig, ClassAware
from flatout.yolo.augment.gpu.batches import DeviceInput
from flatout.yolo.augment.gpu.input import (
    DeviceInputConfig,
    MemoryBudget,
    memory_budget,
    plan_memory,
    training_input,
)
from flatout.yolo.augment.gpu.jpeg import DeviceDecoded, decoded_on_device
from flatout.yolo.augment.gpu.source import TILES
from flatout.yolo.augment.layout import resized_wh
from flatout.yolo.augment.samples import ResizedImages, SizedImages, TileImages, WholeImages
from flatout.yolo.augment.source import TrainingSource
from flatout.yolo.data.data_yaml import DataSet
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.letterbox import RectBatches, rect_batches, step_shapes
from flatout.yolo.data.open_set import SplitConfig, open_training_splits
from flatout.yolo.data.tile_set import TileSet, cut_into_tiles
from flatout.yolo.train import choose_input
from flatout.yolo.train.choose_input import Choice, InputSettings

logger = logging.getLogger(__name__)

MAX_PER_TASK = 32
"""Samples in one task of a worker, at most."""


# Opening the input


@dataclass(frozen=True, kw_only=True)
class InputConfig:
    """Everything that defines the samples of a training, except the images and the `InputSettings` of the machine."""

    augment: AugmentConfig
    size: int
    batch_size: int
    """Samples per batch of this rank."""
    seed: int
    grid: int
    epochs: int
    device: torch.device
    dtype: torch.dtype
    """Type of the network's input, for images that are rendered on the device."""
    world: World
    class_aware: ClassAware | None = None
    """Rotate and shear mosaics by the head that their labels belong to."""
    rect: bool = False
    """Batches of images with similar aspect ratios, without mosaics."""
    sequential: bool = False
    """Do not shuffle."""
    channels_last: bool = False
    """Memory format of images that are rendered on the device."""
    persistent_workers: bool = True
    verify: bool = False
    """Compare stored images with their checksums."""
    label_ids: bool = False
    """Deliver `label_ids`: the number of each target's label in the data set."""
    begin: tuple[int, int] = (0, 0)
    """The epoch and step that the training begins with, whose images are decoded first where that is possible."""
    decode_first: str = ""
    """Why all images are decoded before the training begins, in any case; empty: there is no such reason."""

    @property
    def applied_augment(self) -> AugmentConfig:
        """`augment`, without mosaics if `rect`."""
        return replace(self.augment, mosaic=0.0) if self.rect else self.augment


ImageProvider = Union[Store, ResizedImages, TileImages, DeviceDecoded, "NeededImages", "NeededTiles"]
"""Resized images: from a store, decoded on each read, cut from larger ones in a store, decoded by the GPU, or only
those of a few steps."""
MIN_IMAGES = 4096
"""Fewest images that are decoded while the training goes on: fewer are decoded within a second or two."""
TILE_STORE_SHARE = 0.5
"""Share of the free memory that whole images may take that tiles are cut from; otherwise they are stored on disk."""


def open_input(
    images: ImageSet, config: InputConfig, choices: Sequence[Choice], stack: ExitStack
) -> tuple[DeviceBatches, InputSettings]:
    """Open the first of `choices` that every rank can build, and fill its store if it has one; `stack` closes both.

    ConfigError if the last one cannot be built either.
    """
    opener = _Opener(images, config)
    # Workers can always augment; only a device may fail.
    last = next((place for place, each in enumerate(choices) if not each.settings.on_device), len(choices) - 1)
    for choice, after in pairwise(choices[: last + 1]):
        batches = _try_open(opener, choice.settings, after.settings, stack)
        if not config.world.any(batches is None):
            break
        if batches is not None:  # another rank could not build it
            batches.feed.close()
    else:
        choice = choices[last]
        batches = opener.open(choice.settings, stack)
    assert batches is not None
    stack.callback(batches.feed.close)
    return batches, choice.settings


def expected_targets(batches: DeviceBatches) -> float:
    """Estimated targets per sample."""
    targets = batches.feed.source.fields["targets"]
    assert isinstance(targets, Rows)
    return float(targets.expected)


def _try_open(
    opener: "_Opener", settings: InputSettings, after: InputSettings, stack: ExitStack
) -> DeviceBatches | None:  # fmt: skip
    """The opened input, or None if it cannot be built: after a ConfigError with a warning, without one if the opener
    itself returns None."""
    try:
        return opener.open(settings, stack)
    except ConfigError as error:
        does = "decodes" if after.on_device else "augments"
        logger.warning("%s --fast %s on the CPU instead.", error, does)
        return None


class _Opener:
    """Builds the input of one choice after another; a store that several of them need is built once."""

    def __init__(self, images: ImageSet, config: InputConfig) -> None:
        self._images, self._config = images, config
        self._rect = _rect(images, config) if config.rect else None
        self._plan = _plan(images, config, self._rect, sequential=config.sequential)
        self._store: Store | None = None

    def open(self, settings: InputSettings, stack: ExitStack) -> DeviceBatches | None:
        """None if the GPU cannot decode; ConfigError if the device cannot augment. `stack` closes the store."""
        config = self._config
        if not settings.gpu_decode:
            if settings.on_device and (budget := self._budget_to_decode_meanwhile(settings)) is not None:
                batches = self._on_device(self._resized(settings), settings, budget, fill_from=config.begin)
                stack.callback(batches.close_fill)
                return batches
            provider = self._provider(settings, stack)
            return self._on_device(provider, settings) if settings.on_device else self._by_workers(provider, settings)
        decoded = decoded_on_device(
            self._images, size=config.size, device=config.device, budget_bytes=device_budget(config.device)
        )
        return self._on_device(decoded, settings) if decoded is not None else None

    def open_single_steps(self, settings: InputSettings, needed: Callable[[Plan], np.ndarray]) -> DeviceBatches:
        """`open` for someone who wants a few steps only: nothing is decoded before a step asks for it.

        There are no workers. `needed` tells which images those steps are made of, for a device that keeps images.
        """
        settings = replace(settings, workers=0, slots=2)
        numbers = needed(self._plan)
        if isinstance(self._images, TileSet):
            provider: ResizedImages | NeededTiles = NeededTiles(self._images, size=self._config.size, needed=numbers)
        else:
            provider = self._resized(settings)
        if not settings.on_device:
            return self._by_workers(provider, settings)
        if settings.gpu_decode and self._config.device.type == "cuda":
            batches = self.open(settings, ExitStack())
            if batches is not None:
                return batches
        images = NeededImages(provider, self._images, self._config.size, numbers)
        # Room for the images of one batch, and for no others.
        wh_N2 = images.shapes_ND[:, :2]
        largest = np.sort(chunks_of(wh_N2.prod(1) * 3))[-self._plan.batch_size * TILES :]
        return self._on_device(images, settings, MemoryBudget(int(largest.sum()) * CHUNK_BYTES, 0))

    def _provider(self, settings: InputSettings, stack: ExitStack) -> Store | ResizedImages | TileImages:
        if isinstance(self._images, TileSet):
            return TileImages(self._images, self._whole_images(self._images, stack), size=self._config.size)
        if settings.keep == "off":
            return self._resized(settings)
        if self._store is None:
            store_config = StoreConfig(verify=self._config.verify)
            self._store = stack.enter_context(Store.open(self._resized(settings), store_config))
            logger.info("Training images: %s", self._store.statistics())
        return self._store

    def _budget_to_decode_meanwhile(self, settings: InputSettings) -> MemoryBudget | None:
        """The memory for images if the training can begin while they are decoded; None if it cannot, with the reason in
        the log."""
        config, images = self._config, self._images
        if len(images) < MIN_IMAGES or self._store is not None:
            return None
        budget = memory_budget(config.device, self._device_config(settings))
        if config.decode_first:
            why = config.decode_first
        elif isinstance(images, TileSet):
            why = "tiles are cut from whole images"
        elif config.world.size > 1:
            why = "several ranks share them"
        elif config.verify:
            why = "--verify-cache compares them with their files"
        else:
            items = self._plan.batch_size * TILES
            planned = plan_memory(
                images.size_wh_N2, size=config.size, budget=budget, batch_items=items, subsampled=settings.subsampled
            )
            if planned.num_resident == len(images):
                return budget
            why = f"only {planned.num_resident} of {len(images)} fit into the device's memory"
        logger.info("All images are decoded before the training begins: %s.", why)
        return None

    def _whole_images(self, tiles: TileSet, stack: ExitStack) -> Store:
        """The images that tiles are cut from, decoded once whatever the options say: a tile alone cannot be decoded."""
        if self._store is None:
            items = WholeImages(tiles.whole)
            fits = items.num_bytes <= TILE_STORE_SHARE * machine.memory().free
            store_config = StoreConfig(place="ram" if fits else "disk", verify=self._config.verify)
            self._store = stack.enter_context(Store.open(items, store_config))
            logger.info("Images for tiles, in %s: %s", "memory" if fits else "a file", self._store.statistics())
        return self._store

    def _resized(self, settings: InputSettings) -> ResizedImages:
        return ResizedImages(self._images, size=self._config.size, augment=True, shrunk=settings.shrunk)

    def _device_config(self, settings: InputSettings, budget: MemoryBudget | None = None) -> DeviceInputConfig:
        config = self._config
        budget_bytes, pinned_bytes = (device_budget(config.device), None) if budget is None else budget
        return DeviceInputConfig(
            dtype=config.dtype,
            channels_last=config.channels_last,
            workers=settings.workers,
            persistent_workers=config.persistent_workers,
            epochs=config.epochs,
            budget_bytes=budget_bytes,
            pinned_bytes=pinned_bytes,
            subsampled=settings.subsampled,
            label_ids=config.label_ids,
        )

    def _on_device(
        self,
        provider: ImageProvider,
        settings: InputSettings,
        budget: MemoryBudget | None = None,
        *,
        fill_from: tuple[int, int] | None = None,
    ) -> DeviceInput:
        config = self._config
        return training_input(
            self._images,
            provider,
            config.applied_augment,
            self._plan,
            size=config.size,
            device=config.device,
            config=self._device_config(settings, budget),
            class_aware=config.class_aware,
            rect=self._rect,
            fill_from=fill_from,
        )

    def _by_workers(self, provider: ImageProvider, settings: InputSettings) -> DeviceBatches:
        config = self._config
        source = TrainingSource(
            self._images,
            provider,
            config.applied_augment,
            size=config.size,
            class_aware=config.class_aware,
            label_ids=config.label_ids,
        )
        # The first rank chose; this rank may be on a smaller machine.
        workers = num_workers(settings.workers, config.batch_size, config.world)
        feed_config = FeedConfig(
            workers=workers,
            micro_batch=samples_per_task(config.batch_size, workers),
            slots=settings.slots,
            persistent_workers=config.persistent_workers,
            epochs=config.epochs,
            on_error="substitute",
        )
        return DeviceBatches(Feed(source, self._plan, feed_config), config.device)


class NeededImages(SizedImages):
    """Resized images of which only some will be looked at: all others are blank, and their files are not opened."""

    def __init__(
        self, images: "ResizedImages | NeededTiles", image_set: ImageSet, size: int, needed: np.ndarray
    ) -> None:
        super().__init__(images, resized_wh(image_set.size_wh_N2, size))
        self._needed = frozenset(needed.tolist())

    def __getitem__(self, index: int) -> np.ndarray:
        return super().__getitem__(index) if index in self._needed else np.zeros(self.shapes_ND[index], self.dtype)


class NeededTiles:
    """Tiles of which only some will be looked at. Each image is decoded once, for all of them that are cut from it."""

    def __init__(self, tiles: TileSet, *, size: int, needed: np.ndarray) -> None:
        self._tiles, self._size, self._needed = tiles, size, needed
        self._whole = WholeImages(tiles.whole)
        self._cut: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._tiles)

    def __getitem__(self, index: int) -> np.ndarray:
        if index not in self._cut:
            image = int(self._tiles.image_N[index])
            cut = TileImages(self._tiles, {image: self._whole.decode(image)}, size=self._size)
            of_image = self._needed[self._tiles.image_N[self._needed] == image].tolist()
            # A substitute of an unreadable image is not among the tiles that are known to be needed.
            self._cut |= {each: cut[each] for each in {index, *of_image}}
        return self._cut[index]


def open_single_steps(
    images: ImageSet, config: InputConfig, settings: InputSettings, needed: Callable[[Plan], np.ndarray]
) -> DeviceBatches:
    """The input of a training that was opened with `settings`, for a few of its steps (`_Opener.open_single_steps`)."""
    return _Opener(images, config).open_single_steps(settings, needed)


def plan_of(images: ImageSet, config: InputConfig) -> Plan:
    """Which image goes into which step of a training."""
    return _Opener(images, config)._plan


def num_workers(asked: int | str, batch_size: int, world: World) -> int:
    """`choose_input.num_workers` for this machine."""
    cores = machine.cores().usable
    return choose_input.num_workers(asked, batch_size, cores=cores, ranks_here=world.ranks_here)


def device_budget(device: torch.device) -> int | None:
    """Bytes of GPU memory for images: half of what is free, since the training has not allocated its part yet."""
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else None


def samples_per_task(batch_size: int, workers: int) -> int:
    """Samples per task of a worker: one task per worker and batch, but at most MAX_PER_TASK samples.

    Fewer samples per task would not be cheaper: drawing parameters and labels costs the same for few as for many.
    """
    return max(1, min(MAX_PER_TASK, -(-batch_size // max(1, workers))))


def _plan(images: ImageSet, config: InputConfig, rect: RectBatches | None, *, sequential: bool) -> Plan:
    """Which image goes into which step: shuffled, unless the order is sequential or follows from the shapes."""
    left_over = len(images) % (config.batch_size * config.world.size)
    plan = Plan(
        num_samples=len(images),
        batch_size=config.batch_size,
        seed=config.seed,
        shuffle=not sequential,
        # With fewer images than ranks, a rank would train on nothing, and its loss would spoil the step of all ranks.
        last="pad" if 0 < left_over < config.world.size else "short",
        rank=config.world.rank,
        num_ranks=config.world.size,
    )
    if rect is None:
        return plan
    return replace(plan, shuffle=False, order=rect.order_N, shapes=step_shapes(rect.shape_hw_S2))


def _rect(images: ImageSet, config: InputConfig) -> RectBatches:
    if config.world.size > 1:
        raise ConfigError(
            "--rect gives every batch its own shape, which is not possible with several ranks: leave it out."
        )
    return rect_batches(
        images.size_wh_N2, batch_size=config.batch_size, img_size=config.size, stride=config.grid, pad=0.0
    )


# The images of a training


@dataclass(frozen=True)
class TrainingImages:
    """The training and validation images of a data set."""

    train: ImageSet
    val: ImageSet

    def fingerprint(self) -> str:
        """A digest that changes when images are added, removed or resized, or when a label changes."""
        digest = hashlib.sha256()
        for images in (self.train, self.val):
            digest.update("\n".join((*images.names, *images.paths)).encode(errors="surrogateescape"))
            for array in (images.size_wh_N2, images.labels.class_box_T5, images.labels.first_N, images.labels.point_P2):
                digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class TileRules:
    """How training images are cut into tiles."""

    tile: int
    overlap: float
    min_visible: float
    """Least visible part of its area for a label to be in a tile."""

    def cut(self, images: ImageSet) -> TileSet:
        return cut_into_tiles(images, tile=self.tile, overlap=self.overlap, min_visible=self.min_visible)


def open_images(data: DataSet, config: SplitConfig, world: World, tiles: TileRules | None = None) -> TrainingImages:
    """Training and validation images, scanned or from the cache of an earlier scan. Ranks wait for each other here.

    With `tiles` the training images are a `TileSet`; validation images stay whole.
    """
    # The first rank scans, the others read its cache.
    with world.first_rank_first():
        train, val = open_training_splits(data, config)
    if tiles is not None:
        train = tiles.cut(train)
        logger.info("train: %s", train)
    return TrainingImages(train, val)
