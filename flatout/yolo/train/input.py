"""Where training batches come from: pictures augmented by workers, or numbers drawn by workers and pictures on the GPU.

classic   files --decode every time--> worker: OpenCV, step by step --> slot --> device
fast      files --decode once--> store --> worker: the same pixels, fewer passes --> slot --> device
device    files --decode once--> store on the device; worker: draws and boxes --> slot --> device: one kernel
"""

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from flatout.engine.distributed import World
from flatout.errors import ConfigError
from flatout.feed import Feed, FeedConfig, Plan, Rows, Store, StoreConfig, plan_workers
from flatout.feed.device import DeviceBatches
from flatout.profiler import machine
from flatout.yolo.augment.class_aware import ClassAware
from flatout.yolo.augment.config import AugmentConfig
from flatout.yolo.augment.device_input import DeviceInputConfig, training_input
from flatout.yolo.augment.jpeg_on_device import DeviceDecoded, decoded_on_device
from flatout.yolo.augment.pictures import ResizedPictures
from flatout.yolo.augment.source import TrainingSource
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.rect import RectBatches, StepShapes, rect_batches
from flatout.yolo.options import TrainOptions

logger = logging.getLogger(__name__)

MOST_PER_TASK = 32
FEW_CORES = 8
"""With more, nvJPEG is left alone. Sixteen cores were as fast at 320 px and faster at 640 px
(bench/results/augment_store_h200_202611.md); where fewer cores fall behind was not measured, only estimated."""
DEVICE_WORKERS = 2
"""They only draw numbers and move boxes: two are enough for any GPU."""


@dataclass(frozen=True, kw_only=True)
class InputConfig:
    """What the input depends on, beside the pictures."""

    augment: AugmentConfig
    size: int
    batch_size: int
    """Of this rank."""
    seed: int
    grid: int
    epochs: int
    device: torch.device
    dtype: torch.dtype
    """Of the network's input, where pictures are made on the device."""
    world: World
    class_aware: ClassAware | None = None
    """Turn and shear mosaics by the head that their labels belong to."""
    keeps: bool | None = None
    """Whether pictures are kept decoded; None: as the options say."""
    slots: int | None = None
    """Batches under way; None: the feed's own rule."""


class TrainingInput:
    """An open input. A context manager; `close()` may be called twice."""

    def __init__(self, batches: DeviceBatches, stack: ExitStack) -> None:
        self.batches = batches
        self.feed = batches.feed
        self.steps_per_epoch = len(self.feed)
        self._stack = stack

    @property
    def expected_targets(self) -> float:
        """Per picture, about."""
        targets = self.feed.source.fields["targets"]
        assert isinstance(targets, Rows)
        return float(targets.expected)

    def set_weights(self, weights_N: np.ndarray, epoch: int) -> None:
        """Draw pictures by these weights from the beginning of `epoch` on; ends a pass that is under way."""
        self.batches.epoch(epoch)
        self.feed.set_weights(weights_N)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self.feed.log_replaced()
        self.feed.close()
        self._stack.close()


def open_input(images: ImageSet, config: InputConfig, options: TrainOptions) -> TrainingInput:
    """The input that the options ask for; `options` are resolved. Builds the store if there is to be one."""
    rect = _rect(images, config) if options.rect else None
    augment = replace(config.augment, mosaic=0.0) if options.rect else config.augment
    plan = _plan(images, config, rect, sequential=options.sequential)
    with ExitStack() as stack:
        pictures = _pictures(images, config, options, stack)
        batches = _on_device(images, pictures, augment, plan, rect, config, options) if options.device_augment else None
        if isinstance(pictures, DeviceDecoded) and batches is None:
            # Workers need them in a store after all.
            pictures = _pictures(images, config, replace(options, no_gpu_decode=True), stack)
        if batches is None:
            source = TrainingSource(
                images,
                pictures,
                augment,
                size=config.size,
                painter="fast" if options.fast_dataloader else "classic",
                class_aware=config.class_aware,
            )
            workers = num_workers(options.workers, config.batch_size, config.world)
            micro_batch = pictures_per_task(config.batch_size, workers)
            feed_config = FeedConfig(
                workers=workers,
                micro_batch=micro_batch,
                slots=config.slots,
                persistent_workers=not options.no_persistent_workers,
                epochs=config.epochs,
                on_error="substitute",
            )
            feed = Feed(source, plan, feed_config)
            batches = DeviceBatches(feed, config.device)
        return TrainingInput(batches, stack.pop_all())
    raise AssertionError


def _on_device(
    images: ImageSet,
    pictures: Store | ResizedPictures | DeviceDecoded,
    augment: AugmentConfig,
    plan: Plan,
    rect: RectBatches | None,
    config: InputConfig,
    options: TrainOptions,
) -> DeviceBatches | None:
    """Pictures made on the device; None where that cannot be done and only --fast, not --device-augment, asked for."""
    device_config = DeviceInputConfig(
        dtype=config.dtype,
        channels_last=options.channels_last,
        workers=min(DEVICE_WORKERS, num_workers(options.workers, config.batch_size, config.world)),
        persistent_workers=not options.no_persistent_workers,
        epochs=config.epochs,
        budget_bytes=device_budget(config.device),
        subsampled=options.store_420,
    )
    try:
        return training_input(
            images,
            pictures,
            augment,
            plan,
            size=config.size,
            device=config.device,
            config=device_config,
            class_aware=config.class_aware,
            rect=rect,
        )
    except ConfigError as error:
        if not options.fast:
            raise
        logger.warning("%s --fast uses the CPU path here.", error)
        return None


def num_workers(asked: int | str, batch_size: int, world: World) -> int:
    """YOLOv7's rule: no more than cores per rank, pictures per batch, or were asked for; one picture needs none.

    "auto" that nobody has measured is 80 % of the cores.
    """
    cores = max(1, machine.cores().usable // world.size_here)
    wanted = plan_workers(asked, gpus=world.size_here).train if isinstance(asked, str) else asked
    return min(cores, batch_size if batch_size > 1 else 0, wanted)


def device_budget(device: torch.device) -> int | None:
    """Bytes of device memory for pictures; the training has not taken its share yet, so half is left to it."""
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else None


def pictures_per_task(batch_size: int, workers: int) -> int:
    """One task per worker and batch, unless that is many: draws and labels of few pictures cost as much as of many."""
    return max(1, min(MOST_PER_TASK, -(-batch_size // max(1, workers))))


def _pictures(
    images: ImageSet, config: InputConfig, options: TrainOptions, stack: ExitStack
) -> Store | ResizedPictures | DeviceDecoded:
    if options.decodes_on_gpu and machine.cores().usable <= FEW_CORES:
        budget_bytes = device_budget(config.device)
        decoded = decoded_on_device(images, size=config.size, device=config.device, budget_bytes=budget_bytes)
        if decoded is not None:
            return decoded
    pictures = ResizedPictures(images, size=config.size, augment=True, shrunk=options.decodes_scaled)
    wanted = options.fast_dataloader or options.cache_images or options.device_augment
    if not (wanted if config.keeps is None else config.keeps or options.device_augment):
        return pictures
    store = stack.enter_context(Store.open(pictures, StoreConfig(verify=options.verify_cache)))
    logger.info("Pictures for training: %s", store.statistics())
    return store


def _plan(images: ImageSet, config: InputConfig, rect: RectBatches | None, *, sequential: bool) -> Plan:
    """Which picture comes when. Shuffled, unless the order is wished for or follows from the shapes."""
    left_over = len(images) % (config.batch_size * config.world.size)
    plan = Plan(
        num_samples=len(images),
        batch_size=config.batch_size,
        seed=config.seed,
        shuffle=not sequential,
        # Fewer pictures than ranks: one would train on nothing, and its loss spoil the step of all.
        last="pad" if 0 < left_over < config.world.size else "short",
        rank=config.world.rank,
        num_ranks=config.world.size,
    )
    if rect is None:
        return plan
    return replace(plan, shuffle=False, order=rect.order_N, shapes=StepShapes(rect.shape_hw_S2))


def _rect(images: ImageSet, config: InputConfig) -> RectBatches:
    if config.world.size > 1:
        raise ConfigError("--rect gives every batch its own shape, which several ranks cannot share: leave it out.")
    return rect_batches(
        images.size_wh_N2, batch_size=config.batch_size, img_size=config.size, stride=config.grid, pad=0.0
    )
