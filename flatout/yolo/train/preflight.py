"""Before a detection training begins: memory, and how fast pictures can be decoded at most."""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

from flatout.clock import machine
from flatout.feed import DecodeError
from flatout.findings import in_units
from flatout.images import read_picture
from flatout.yolo.augment.config import AugmentConfig
from flatout.yolo.augment.layout import decoded_bytes
from flatout.yolo.data.image_set import ImageSet

logger = logging.getLogger(__name__)

LOW_MEMORY_BYTES = 2**30
STORE_SHARE = 0.5
"""Of the free memory, what decoded pictures may take."""
MEASURE_S = 0.1
MOST_PICTURES = 32


@dataclass(frozen=True, kw_only=True)
class PreflightConfig:
    """What a training is going to do with its pictures."""

    size: int
    keeps_pictures: bool
    """Decode once, into memory; else in every epoch."""
    workers: int
    """Of each rank."""
    ranks: int = 1


def remarks(images: ImageSet, augment: AugmentConfig, config: PreflightConfig) -> Iterator[str]:
    """What was found, a text each; what is too little is a warning of its own."""
    yield _memory(images, config)
    yield _shm()
    if not config.keeps_pictures:
        yield _decoding(images, augment, config.workers, ranks=config.ranks)


def reads_per_sample(augment: AugmentConfig) -> float:
    """Pictures that a training sample is made of, on average; what is pasted in is not counted."""
    return (1 + 3 * augment.mosaic) * (1 + augment.mosaic * augment.mixup)


def _memory(images: ImageSet, config: PreflightConfig) -> str:
    free = machine.memory().free
    if free < LOW_MEMORY_BYTES:
        logger.warning("Only %s of memory are free: workers may be killed. End other programs first.", in_units(free))
    if not config.keeps_pictures:
        return f"memory {in_units(free)} free"
    needed = decoded_bytes(images.size_wh_N2, config.size)
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
