"""Before a detection training begins: disk, memory, and how fast pictures can be decoded at most.

One line says what was found; what is too little is a warning of its own, what cannot work a ResourceError.
"""

import logging
import time
from pathlib import Path

from flatout.doctor.finding import in_units
from flatout.engine.preflight.disk import DiskNeed, check_disk
from flatout.feed import DecodeError
from flatout.images import read_picture
from flatout.profiler import machine
from flatout.yolo.augment.config import AugmentConfig
from flatout.yolo.augment.layout import resized_wh
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.options import TrainOptions
from flatout.yolo.train.input import num_workers
from flatout.yolo.train.setting import Setting
from flatout.yolo.train.weight_files import is_kept

logger = logging.getLogger(__name__)

LOW_MEMORY_BYTES = 2**30
STORE_SHARE = 0.5
"""Of the free memory, what decoded pictures may take."""
MEASURE_S = 0.1
MOST_PICTURES = 32


def check_room(folder: Path, need: DiskNeed, images: ImageSet, setting: Setting, *, size: int) -> None:
    """Refuse or warn, before anything that takes long; `folder` is that of the run, `size` the training's."""
    options, world = setting.options, setting.world
    found = [check_disk(folder, need), _memory(options, images, size), _shm()]
    if not (options.fast_dataloader or options.cache_images or options.device_augment):
        workers = num_workers(options.workers, world.share_of(options.batch_size), world)
        found.append(_decoding(images, setting.hyp.augment(), workers, ranks=world.size))
    logger.info("Preflight: %s.", "; ".join(text for text in found if text))


def num_kept(epochs: int) -> int:
    """Whole states that stay for good."""
    return sum(is_kept(epoch, epochs) for epoch in range(epochs))


def reads_per_sample(augment: AugmentConfig) -> float:
    """Pictures that a training sample is made of, on average; what is pasted in is not counted."""
    return (1 + 3 * augment.mosaic) * (1 + augment.mosaic * augment.mixup)


def _memory(options: TrainOptions, images: ImageSet, size: int) -> str:
    free = machine.memory().free
    if free < LOW_MEMORY_BYTES:
        logger.warning("Only %s of memory are free: workers may be killed. End other programs first.", in_units(free))
    if not (options.fast_dataloader or options.cache_images or options.device_augment):
        return f"memory {in_units(free)} free"
    needed = 3 * int(resized_wh(images.size_wh_N2, size).prod(1).sum())
    share = STORE_SHARE * free / max(1, needed)
    if share < 1:
        logger.warning(
            "Decoded pictures take %s, and half of the free memory is %s: about %.0f %% stay decoded, the others are "
            "decoded in every epoch.", in_units(needed), in_units(int(STORE_SHARE * free)), 100 * share,
        )  # fmt: skip
    return f"memory {in_units(free)} free, {in_units(needed)} for decoded pictures"


def _shm() -> str:
    shm = machine.shm()
    return f"/dev/shm {in_units(shm.free)}, not needed" if shm is not None else ""


def _decoding(images: ImageSet, augment: AugmentConfig, workers: int, *, ranks: int) -> str:
    """The speed that no training can exceed whose pictures are decoded in every epoch; measured on its own pictures."""
    seconds = _seconds_per_picture(images)
    if seconds is None:
        return ""
    limit = ranks * max(1, workers) / seconds / reads_per_sample(augment)
    who = (f"{workers} workers" if workers else "no workers") + (f" on each of {ranks} ranks" if ranks > 1 else "")
    return f"decoding allows at most about {limit:,.0f} img/s with {who} (--fast-dataloader decodes once)"


def _seconds_per_picture(images: ImageSet) -> float | None:
    """Reading and decoding, one after the other, for a tenth of a second; None if none can be read."""
    step = max(1, len(images) // MOST_PICTURES)
    began, count = time.perf_counter(), 0
    for path in images.paths[::step][:MOST_PICTURES]:
        try:
            read_picture(path)
            count += 1
        except (OSError, DecodeError):
            continue
        if time.perf_counter() - began > MEASURE_S:
            break
    return (time.perf_counter() - began) / count if count else None
