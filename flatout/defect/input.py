"""Where training batches come from: patches painted by workers, or numbers drawn by workers and patches on the GPU.

host     files --decode once--> store, shared by all workers --> worker: crop, paint --> slot --> device
device   files --decode once--> GPU memory;  worker: numbers only --> slot --> device: crop and paint there
"""

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from flatout.defect.data.find import HARD_NEGATIVES, ImgFormat, list_images, root_of, training_folder
from flatout.defect.data.items import PLANES, Strips
from flatout.defect.patches import Grid
from flatout.defect.render import renderer_for
from flatout.defect.source import ImageNames, ParameterSource, PatchSource, SampleRecipe
from flatout.defect.synth.config import BoardShape, SynthConfig
from flatout.defect.synth.pool import make_kernels
from flatout.errors import ConfigError
from flatout.feed import (
    DeviceBatches,
    DeviceFeed,
    DeviceStore,
    Feed,
    FeedConfig,
    Output,
    Plan,
    Store,
    StoreConfig,
    free_ram_bytes,
    shuffled_order,
)
from flatout.ranks import World

logger = logging.getLogger(__name__)

MICRO_BATCH = 16
DEVICE_WORKERS = 2
"""They only draw numbers."""


@dataclass(frozen=True)
class TrainingImages:
    """The files of a training: those to cut up, then those that must not fire."""

    strips: Strips
    num_images: int

    @property
    def num_hard_negatives(self) -> int:
        return len(self.strips) - self.num_images


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """Which files are read."""

    folder: str
    """R/train/good, or the root R of a data set."""
    img_format: ImgFormat
    hard_negatives: bool = False
    """Whether images that must not fire are wanted."""
    hard_negative_folder: str = ""
    """Empty: R/train/hard_negative_samples."""


def find_images(config: ImagesConfig) -> TrainingImages:
    """List the files and look at the first; DataError if there are none."""
    if not config.folder:
        raise ConfigError("--training_dataset_path is missing: name R/train/good, or the root R of a data set.")
    images = list_images(training_folder(config.folder), config.img_format)
    hard: list[Path] = []
    if config.hard_negatives:
        folder = config.hard_negative_folder or root_of(config.folder) / "train" / HARD_NEGATIVES
        hard = list_images(folder, config.img_format)
    return TrainingImages(Strips([*images, *hard]), len(images))


@dataclass(frozen=True, kw_only=True)
class SamplesConfig:
    """What is cut out of images and painted into them."""

    synth: SynthConfig
    seed: int
    patch_px: int
    min_patches: tuple[int, int] | None
    """Rows and columns of patches per image at least; None: neighbours share 16 pixels."""
    psf_type: str
    psf_pool_size: int
    board_shapes: tuple[BoardShape, ...]


def make_recipe(config: SamplesConfig, images: TrainingImages) -> SampleRecipe:
    """What the samples of a training are."""
    kernels = make_kernels(
        config.synth.mode,
        psf_type=config.psf_type,
        pool_size=config.psf_pool_size,
        seed=config.seed,
        board_shapes=config.board_shapes,
    )
    return SampleRecipe(
        Grid.over(images.strips.shape_hw, config.patch_px, config.min_patches),
        config.synth,
        kernels,
        num_images=images.num_images,
        num_hard_negatives=images.num_hard_negatives,
    )


@dataclass(frozen=True, kw_only=True)
class InputConfig:
    """How batches are made of samples."""

    total_batch: int
    """Of all ranks together."""
    epochs: int
    seed: int = 42
    group_images: int = 0
    """Visit patches in groups of this many images; 0: shuffle all."""
    workers: int | str = "auto"
    prefetch_factor: int | None = None
    cache_size: int | None = None
    """Decoded images to keep; None: all that fit."""
    device_strips: Literal["auto", "on", "off"] = "auto"
    """Keep images in GPU memory and paint there; auto: where there is a GPU."""
    channels_last: bool = True


def open_input(
    images: TrainingImages,
    recipe: SampleRecipe,
    config: InputConfig,
    device: torch.device,
    world: World,
    stack: ExitStack,
) -> DeviceBatches:
    """The input that the config asks for; decodes the images. `stack` closes it."""
    plan = make_plan(recipe, config, world)
    on_device = config.device_strips == "on" or (config.device_strips == "auto" and device.type == "cuda")
    with ExitStack() as opened:
        store = opened.enter_context(open_store(images.strips, config, world))
        if on_device:
            batches: DeviceBatches = _on_device(store, recipe, config, plan, device)
            opened.close()  # the images are on the device now
        else:
            feed = Feed(PatchSource(recipe, store), plan, feed_config(config, plan, world))
            batches = DeviceBatches(feed, device)
        stack.push(opened.pop_all())
    stack.enter_context(batches.feed)
    return batches


def feed_config(config: InputConfig, plan: Plan, world: World) -> FeedConfig:
    """How workers share the batches out.

    Half of a lone sample's cost is drawing its numbers, which costs no more for sixteen of them: workers take many at
    a time, and enough batches are open that none of them waits.
    """
    feed = FeedConfig(
        workers=config.workers,
        local_ranks=world.size_here,
        prefetch_factor=config.prefetch_factor,
        micro_batch=min(plan.batch_size, MICRO_BATCH),
        epochs=config.epochs,
        on_error="substitute",
    )
    if config.prefetch_factor is not None:
        return feed
    tasks = -(-plan.batch_size // MICRO_BATCH)
    return replace(feed, slots=max(4, -(-feed.num_workers // tasks) + 2))


def make_plan(recipe: SampleRecipe, config: InputConfig, world: World) -> Plan:
    """Which patch comes when; the last batch of an epoch may be short."""
    order = None
    if config.group_images:
        order = GroupedOrder(recipe.num_images, recipe.grid.per_image, config.group_images, config.seed)
    return Plan(
        num_samples=len(recipe),
        batch_size=world.share_of(config.total_batch),
        seed=config.seed,
        last="short",
        rank=world.rank,
        num_ranks=world.size,
        order=order,
    )


def store_config(strips: Strips, config: InputConfig) -> StoreConfig:
    """How images are kept: all that fit; and of a set that does not fit but is visited in groups, the group at hand."""
    size, each = config.cache_size, strips.item_bytes + 4096
    budget = None if size is None else size * each
    store = StoreConfig(place="off" if size == 0 else "ram", budget_bytes=budget, workers=config.workers)
    fits = len(strips) * each <= (free_ram_bytes() if budget is None else budget)
    if fits or not config.group_images:
        return store
    # Every worker sees patches of the whole group: each keeps one of its own.
    group_bytes = max(1, store.num_workers) * config.group_images * strips.item_bytes
    return replace(store, policy="lru", budget_bytes=group_bytes)


def open_store(strips: Strips, config: InputConfig, world: World) -> Store:
    """Decoded images, in memory that all workers and ranks share; the first rank decodes, the others attach."""
    if not world.is_first:
        world.wait_for_all()
    store = Store.open(strips, store_config(strips, config))
    if world.is_first:
        world.wait_for_all()
    logger.info("Images for training: %s", store.statistics())
    return store


def _on_device(store: Store, recipe: SampleRecipe, config: InputConfig, plan: Plan, device: torch.device) -> DeviceFeed:
    kept = DeviceStore(store, device, batch_items=plan.batch_size)
    # Images are named in errors by the files, which stay where they are when the store is closed.
    return patches_of(kept, [store.where(index) for index in range(len(store))], recipe, config, plan)


def patches_of(
    kept: DeviceStore, names: list[str], recipe: SampleRecipe, config: InputConfig, plan: Plan
) -> DeviceFeed:  # fmt: skip
    """Batches cut and painted where the images are; they are only read, so several feeds may share them."""
    workers = DEVICE_WORKERS if isinstance(config.workers, str) else min(DEVICE_WORKERS, config.workers)
    feed_config = FeedConfig(workers=workers, epochs=config.epochs)
    feed = Feed(ParameterSource(recipe, ImageNames(names)), plan, feed_config, unreadable=kept.unreadable)
    patch_hw = recipe.grid.patch_hw
    outputs = {
        "images": Output((PLANES, *patch_hw), torch.float32, config.channels_last),
        "masks": Output((1, *patch_hw), torch.uint8),
    }
    return DeviceFeed(feed, kept, renderer_for(recipe.grid, recipe.config, recipe.kernels, kept.device), outputs)


class GroupedOrder:
    """Order of an epoch, for `Plan(order=...)`."""

    def __init__(self, num_images: int, per_image: int, group: int, seed: int) -> None:
        self._num_images, self._per_image, self._group, self._seed = num_images, per_image, group, seed

    def __call__(self, epoch: int) -> np.ndarray:
        """Sample numbers, int64 [images * patches]: every one exactly once."""
        image_N = shuffled_order(self._num_images, seed=self._seed, epoch=epoch)
        sample_NT = image_N[:, None] * self._per_image + np.arange(self._per_image)
        # Sorted by group first, at random within it: one shuffle of everything says how.
        rank_NT = np.empty(sample_NT.size, np.int64)
        rank_NT[shuffled_order(sample_NT.size, seed=self._seed + 1, epoch=epoch)] = np.arange(sample_NT.size)
        group_NT = np.repeat(np.arange(self._num_images) // self._group, self._per_image)
        return np.asarray(sample_NT.reshape(-1)[np.lexsort((rank_NT, group_NT))])
