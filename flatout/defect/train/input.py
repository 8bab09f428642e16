"""Where training batches come from: patches painted by workers, or numbers drawn by workers and patches on the GPU.

host     files --decode once--> store, shared by all workers --> worker: crop, paint --> slot --> device
device   files --decode once--> GPU memory;  worker: numbers only --> slot --> device: crop and paint there
"""

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from flatout.defect.choose_render import renderer_for
from flatout.defect.options import TrainOptions
from flatout.defect.patches import Grid
from flatout.defect.source import ImageNames, ParameterSource, PatchSource, Recipe
from flatout.defect.strips.canonical import PLANES
from flatout.defect.strips.find import HARD_NEGATIVES, list_images, root_of, training_folder
from flatout.defect.strips.items import Strips
from flatout.defect.synth.pool import amplitudes_of, make_kernels
from flatout.defect.train.grouped import GroupedOrder
from flatout.engine.distributed import World
from flatout.errors import ConfigError
from flatout.feed import Feed, FeedConfig, Plan, Store, StoreConfig
from flatout.feed.device import DeviceBatches
from flatout.feed.device_feed import DeviceFeed, Output
from flatout.feed.device_store import DeviceStore, free_ram_bytes

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


def find_images(options: TrainOptions) -> TrainingImages:
    """List the files and look at the first; DataError if there are none."""
    if not options.training_dataset_path:
        raise ConfigError("--training_dataset_path is missing: name R/train/good, or the root R of a data set.")
    images = list_images(training_folder(options.training_dataset_path), options.img_format)
    hard: list[Path] = []
    if options.hard_negative_ratio:
        folder = options.hard_negative_dir or root_of(options.training_dataset_path) / "train" / HARD_NEGATIVES
        hard = list_images(folder, options.img_format)
    return TrainingImages(Strips([*images, *hard]), len(images))


def make_recipe(options: TrainOptions, images: TrainingImages) -> Recipe:
    """What the samples of a training are."""
    kernels = make_kernels(
        options.defect_mode,
        psf_type=options.psf_type,
        pool_size=options.psf_pool_size,
        seed=options.seed,
        board_shapes=options.board_shapes,
    )
    amplitudes = amplitudes_of(options.defect_mode, options.psf_type, options.amplitudes)
    return Recipe(
        Grid.over(images.strips.shape_hw, options.patch, options.min_patches),
        options.synth(amplitudes),
        kernels,
        num_images=images.num_images,
        num_hard_negatives=images.num_hard_negatives,
    )


class TrainingInput:
    """An open input. A context manager; `close()` may be called twice."""

    def __init__(self, batches: DeviceBatches, stack: ExitStack) -> None:
        self.batches = batches
        self.steps_per_epoch = len(batches.feed)
        self._stack = stack

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self.batches.feed.log_replaced()
        self.batches.feed.close()
        self._stack.close()


def open_input(
    images: TrainingImages, recipe: Recipe, options: TrainOptions, device: torch.device, world: World
) -> TrainingInput:
    """The input that the options ask for; decodes the images."""
    plan = make_plan(recipe, options, world)
    on_device = options.device_strips == "on" or (options.device_strips == "auto" and device.type == "cuda")
    with ExitStack() as stack:
        store = stack.enter_context(open_store(images.strips, options, world))
        if on_device:
            batches: DeviceBatches = _on_device(store, recipe, options, plan, device)
            stack.close()  # the images are on the device now
        else:
            config = feed_config(options, plan, world)
            batches = DeviceBatches(Feed(PatchSource(recipe, store), plan, config), device)
        return TrainingInput(batches, stack.pop_all())
    raise AssertionError


def feed_config(options: TrainOptions, plan: Plan, world: World) -> FeedConfig:
    """How workers share the batches out.

    Half of a lone sample's cost is drawing its numbers, which costs no more for sixteen of them: workers take many at
    a time, and enough batches are open that none of them waits.
    """
    config = FeedConfig(
        workers=options.num_workers,
        local_ranks=world.size_here,
        prefetch_factor=options.prefetch_factor,
        micro_batch=min(plan.batch_size, MICRO_BATCH),
        epochs=options.epochs,
        on_error="substitute",
    )
    if options.prefetch_factor is not None:
        return config
    tasks = -(-plan.batch_size // MICRO_BATCH)
    return replace(config, slots=max(4, -(-config.num_workers // tasks) + 2))


def make_plan(recipe: Recipe, options: TrainOptions, world: World) -> Plan:
    """Which patch comes when; the last batch of an epoch may be short."""
    order = None
    if options.group_images:
        order = GroupedOrder(recipe.num_images, recipe.grid.per_image, options.group_images, options.seed)
    return Plan(
        num_samples=len(recipe),
        batch_size=world.share_of(options.bs),
        seed=options.seed,
        last="short",
        rank=world.rank,
        num_ranks=world.size,
        order=order,
    )


def store_config(strips: Strips, options: TrainOptions) -> StoreConfig:
    """How images are kept: all that fit; and of a set that does not fit but is visited in groups, the group at hand."""
    size, each = options.cache_size, strips.item_bytes + 4096
    budget = None if size is None else size * each
    config = StoreConfig(place="off" if size == 0 else "ram", budget_bytes=budget, workers=options.num_workers)
    fits = len(strips) * each <= (free_ram_bytes() if budget is None else budget)
    if fits or not options.group_images:
        return config
    # Every worker sees patches of the whole group: each keeps one of its own.
    group_bytes = max(1, config.num_workers) * options.group_images * strips.item_bytes
    return replace(config, policy="lru", budget_bytes=group_bytes)


def open_store(strips: Strips, options: TrainOptions, world: World) -> Store:
    """Decoded images, in memory that all workers and ranks share; the first rank decodes, the others attach."""
    config = store_config(strips, options)
    if not world.is_first:
        world.wait_for_all()
    store = Store.open(strips, config)
    if world.is_first:
        world.wait_for_all()
    logger.info("Images for training: %s", store.statistics())
    return store


def _on_device(store: Store, recipe: Recipe, options: TrainOptions, plan: Plan, device: torch.device) -> DeviceFeed:
    kept = DeviceStore(store, device, batch_items=plan.batch_size)
    # Images are named in errors by the files, which stay where they are when the store is closed.
    return patches_of(kept, [store.where(index) for index in range(len(store))], recipe, options, plan)


def patches_of(
    kept: DeviceStore, names: list[str], recipe: Recipe, options: TrainOptions, plan: Plan
) -> DeviceFeed:  # fmt: skip
    """Batches cut and painted where the images are; they are only read, so several feeds may share them."""
    workers = DEVICE_WORKERS if isinstance(options.num_workers, str) else min(DEVICE_WORKERS, options.num_workers)
    config = FeedConfig(workers=workers, epochs=options.epochs)
    feed = Feed(ParameterSource(recipe, ImageNames(names)), plan, config, unreadable=kept.unreadable)
    patch_hw = recipe.grid.patch_hw
    outputs = {
        "images": Output((PLANES, *patch_hw), torch.float32, options.channels_last),
        "masks": Output((1, *patch_hw), torch.uint8),
    }
    return DeviceFeed(feed, kept, renderer_for(recipe.grid, recipe.config, recipe.kernels, kept.device), outputs)
