"""Training batches: painted by workers, or rendered on the GPU from parameters that workers draw.

host     files --decode once--> store, shared by all workers --> worker: crop, paint --> slot --> device
device   files --decode once--> GPU memory;  worker: parameters only --> slot --> device: crop, paint

Dimension key:  N images   T patches of an image
"""

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from flatout.defect.data.find import HARD_NEGATIVES, ImgFormat, list_images, root_of, training_folder
from flatout.defect.data.items import FAINT, PLANES, Strips
from flatout.defect.data.pairs import holds_pairs, list_pair_images, read_template_planes
from flatout.defect.render import renderer_for
from flatout.defect.source import ParameterSource, PatchSource, SampleRecipe
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
"""Samples that a worker makes at a time."""
DEVICE_WORKERS = 2
"""Maximum number of workers if the device renders: they only draw parameters."""


@dataclass(frozen=True)
class TrainingImages:
    """The image files of a training: first those with patches to train on, then the hard negatives."""

    strips: Strips
    num_images: int

    @property
    def num_hard_negatives(self) -> int:
        return len(self.strips) - self.num_images


def find_images(
    folder: str, img_format: ImgFormat, *, hard_negatives: bool = False, hard_negative_folder: str = ""
) -> TrainingImages:
    """List the files and decode the first; DataError if there are none.

    `folder` is R/train/good, the root R of a data set, or pairs. Hard negatives are by default those in
    R/train/hard_negative_samples.
    """
    if not folder:
        raise ConfigError(
            "--training_dataset_path is missing. Give the folder of defect-free images (DATASET/train/good), or "
            "DATASET itself."
        )
    if holds_pairs(folder):
        if hard_negatives:
            raise ConfigError("--hard_negative_ratio: hard negatives are files of three planes, which pairs are not.")
        return _templates(folder)
    images = list_images(training_folder(folder), img_format)
    hard: list[Path] = []
    if hard_negatives:
        hard = list_images(hard_negative_folder or root_of(folder) / "train" / HARD_NEGATIVES, img_format)
    strips = Strips([*images, *hard])
    _warn_if_faint(strips)
    if strips.equal_planes:
        logger.warning(
            "%s: its three planes are equal (a grey file fills all three), so target and both references are the same "
            "image. Painted defects are then the only difference between them: set shift_px, noise and edge_noise to "
            "what your references differ by, or give files of three planes.",
            strips.equal_planes,
        )
    return TrainingImages(strips, len(images))


def _templates(folder: str) -> TrainingImages:
    """The templates of pairs, each once and in all planes: they are free of defects, and disturbed when cropped."""
    references = (path for image in list_pair_images(folder) for path in image.references)
    templates = list(dict.fromkeys(references))
    strips = Strips(templates, read=read_template_planes)
    _warn_if_faint(strips)
    return TrainingImages(strips, len(templates))


def _warn_if_faint(strips: Strips) -> None:
    if strips.faint:
        logger.warning("%s: %s, or what is painted into them has nothing in common with them.", strips.faint, FAINT)


@dataclass(frozen=True, kw_only=True)
class InputConfig:
    """How samples are made into batches."""

    total_batch: int
    """Batch size, summed over all ranks."""
    epochs: int
    seed: int = 42
    group_images: int = 0
    """Visit patches in groups of this many images; 0: shuffle all patches."""
    workers: int | str = "auto"
    prefetch_factor: int | None = None
    """Batches to keep ready; None: enough to keep all workers busy."""
    cache_size: int | None = None
    """Number of decoded images to keep; None: as many as fit."""
    device_strips: Literal["auto", "on", "off"] = "auto"
    """Whether to keep the images in GPU memory and render there; auto: if there is a GPU."""
    channels_last: bool = True


def open_input(
    images: TrainingImages,
    recipe: SampleRecipe,
    config: InputConfig,
    device: torch.device,
    world: World,
    stack: ExitStack,
) -> DeviceBatches:
    """Decode the images and open the batches as configured. `stack` closes what is opened."""
    plan = make_plan(recipe, config, world)
    on_device = config.device_strips == "on" or (config.device_strips == "auto" and device.type == "cuda")
    with ExitStack() as opened:
        store = opened.enter_context(open_store(images.strips, config, world))
        if on_device:
            device_store = DeviceStore(store, device, batch_items=plan.batch_size)
            # Names for error messages, copied because the store is closed.
            names = [store.where(index) for index in range(len(store))]
            batches: DeviceBatches = device_patch_feed(device_store, names, recipe, config, plan)
            opened.close()  # the store is not needed any more: the images are on the device
        else:
            feed = Feed(PatchSource(recipe, store), plan, feed_config(config, plan, world))
            batches = DeviceBatches(feed, device)
        stack.push(opened.pop_all())
    stack.enter_context(batches.feed)
    return batches


def feed_config(config: InputConfig, plan: Plan, world: World) -> FeedConfig:
    """How batches are divided among workers.

    Half the cost of a single sample is drawing its parameters, which costs no more for sixteen samples. So workers take
    many samples at a time, and there are enough slots that no worker has to wait.
    """
    feed = FeedConfig(
        workers=config.workers,
        local_ranks=world.ranks_here,
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
    """The order of the patches; the last batch of an epoch may be short."""
    order = None
    if config.group_images:
        order = partial(grouped_order, recipe.num_images, recipe.grid.per_image, config.group_images, config.seed)
    return Plan(
        num_samples=len(recipe),
        batch_size=world.batch_per_rank(config.total_batch),
        seed=config.seed,
        last="short",
        rank=world.rank,
        num_ranks=world.size,
        order=order,
    )


def store_config(strips: Strips, config: InputConfig) -> StoreConfig:
    """How decoded images are kept: as many as fit into `cache_size` or free memory.

    With `group_images`, if not all fit: one group per worker, whatever `cache_size` is, with a warning; 0 keeps none.
    """
    size, each = config.cache_size, strips.item_bytes + 4096
    budget = None if size is None else size * each
    store = StoreConfig(place="off" if size == 0 else "ram", budget_bytes=budget, workers=config.workers)
    fits = len(strips) * each <= (free_ram_bytes() if budget is None else budget)
    if fits or not config.group_images:
        return store
    if size:
        logger.warning(
            "--cache_size %d is less than the %d images: with --group_images %d, each worker keeps one group instead.",
            size, len(strips), config.group_images,
        )  # fmt: skip
    # Every worker reads patches of the whole group, so each of them keeps its own copy.
    group_bytes = max(1, store.num_workers) * config.group_images * strips.item_bytes
    return replace(store, policy="lru", budget_bytes=group_bytes)


def open_store(strips: Strips, config: InputConfig, world: World) -> Store:
    """Open the store of decoded images, shared by all workers and ranks; the first rank decodes, the others attach."""
    with world.first_rank_first():
        store = Store.open(strips, store_config(strips, config))
    logger.info("Images for training: %s", store.statistics())
    return store


def device_patch_feed(
    device_store: DeviceStore, names: list[str], recipe: SampleRecipe, config: InputConfig, plan: Plan
) -> DeviceFeed:  # fmt: skip
    """A feed whose batches are cropped and painted on the device; several feeds may share `device_store`."""
    workers = DEVICE_WORKERS if isinstance(config.workers, str) else min(DEVICE_WORKERS, config.workers)
    feed_config = FeedConfig(workers=workers, epochs=config.epochs)
    feed = Feed(ParameterSource(recipe, names.__getitem__), plan, feed_config, unreadable=device_store.unreadable)
    patch_hw = recipe.grid.patch_hw
    outputs = {
        "images": Output((PLANES, *patch_hw), torch.float32, config.channels_last),
        "masks": Output((1, *patch_hw), torch.uint8),
    }
    return DeviceFeed(
        feed, device_store, renderer_for(recipe.grid, recipe.config, recipe.kernels, device_store.device), outputs
    )


def grouped_order(num_images: int, per_image: int, group: int, seed: int, epoch: int) -> np.ndarray:
    """Patches in groups of images, shuffled within each group: sample numbers of an epoch, int64 [N * T], each once."""
    image_N = shuffled_order(num_images, seed=seed, epoch=epoch)
    sample_NT = image_N[:, None] * per_image + np.arange(per_image)
    # Sorted by group, then by rank in one shuffle of all samples.
    rank_NT = np.empty(sample_NT.size, np.int64)
    rank_NT[shuffled_order(sample_NT.size, seed=seed + 1, epoch=epoch)] = np.arange(sample_NT.size)
    group_NT = np.repeat(np.arange(num_images) // group, per_image)
    return np.asarray(sample_NT.reshape(-1)[np.lexsort((rank_NT, group_NT))])
