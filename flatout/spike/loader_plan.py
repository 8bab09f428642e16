"""Who loads, how far ahead, and whether it fits: decided and told before anything starts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from flatout.clock import machine
from flatout.errors import ResourceError
from flatout.feed import WorkerPlan, choose_slots, plan_workers
from flatout.spike.config import LoaderConfig

MEMORY_SHARE = 0.5
"""Of the free memory, what prefetching may take."""
GIB = 2**30

HIGH_MS, LOW_MS = 50.0, 20.0
"""`data_time` above, between and below which the guide's tuning table has its rows."""


@dataclass(frozen=True, kw_only=True)
class LoaderPlan:
    """The loaders of one rank of a node with several."""

    workers: WorkerPlan
    cores: int
    gpus: int
    batch: int
    val_batch: int
    slots: int
    val_slots: int
    persistent: bool
    sample_bytes: int
    """Of a training clip in a slot."""
    cache_bytes: int
    """For the whole node; 0 without a cache."""

    @property
    def prefetch_bytes(self) -> int:
        """Of all ranks: slots are shared by the workers of a rank, so their number does not count."""
        return self.gpus * self.slots * self.batch * self.sample_bytes

    @property
    def total_bytes(self) -> int:
        return self.prefetch_bytes + self.cache_bytes


def plan_loader(
    config: LoaderConfig, *, gpus: int, batch: int, val_batch: int, sample_bytes: int, cache_bytes: int
) -> LoaderPlan:
    """Work out the plan; nothing is started."""
    workers = plan_workers(
        config.TOTAL_WORKERS,
        cores=config.CPU_CORES,
        gpus=gpus,
        train=config.TRAIN_WORKERS,
        val=config.VAL_WORKERS,
    )
    return LoaderPlan(
        workers=workers,
        cores=config.CPU_CORES or machine.cores().usable,
        gpus=max(1, gpus),
        batch=batch,
        val_batch=val_batch,
        slots=max(choose_slots(batch, workers.train), config.TRAIN_PREFETCH_FACTOR + 2),
        val_slots=max(choose_slots(val_batch, workers.val), config.VAL_PREFETCH_FACTOR + 2),
        persistent=config.PERSISTENT_WORKERS,
        sample_bytes=sample_bytes,
        cache_bytes=cache_bytes,
    )


def check_memory(plan: LoaderPlan, free_bytes: int | None = None) -> None:
    """ResourceError if the plan cannot fit into the memory that is free."""
    free = machine.memory().free if free_bytes is None else free_bytes
    if plan.cache_bytes > free:
        raise ResourceError(
            f"CACHE_SIZE_GB asks for {plan.cache_bytes / GIB:.1f} GB, and {free / GIB:.1f} GB of memory are free. Use "
            "a smaller CACHE_SIZE_GB (part of the set then stays on disk), or USE_RAM_CACHE: false."
        )
    if plan.prefetch_bytes > MEMORY_SHARE * (free - plan.cache_bytes):
        raise ResourceError(
            f"Prefetching takes {plan.prefetch_bytes / GIB:.2f} GB ({plan.gpus} GPUs x {plan.slots} batches x "
            f"{plan.batch} clips x {plan.sample_bytes / 2**20:.1f} MiB), more than half of the "
            f"{(free - plan.cache_bytes) / GIB:.2f} GB that the cache leaves free. Use a smaller "
            "TRAIN_PREFETCH_FACTOR, BATCH_SIZE, CROP_SIZE or CACHE_SIZE_GB."
        )


def block(plan: LoaderPlan, lang: Literal["en", "zh"]) -> Iterator[str]:
    """The lines that say at start how data is loaded; with the guide's own labels in Chinese."""
    workers = plan.workers
    words = _WORDS[lang]
    yield f"[train] ===== {words['title']} ====="
    yield f"[train] {words['cores']}: {plan.cores}"
    yield f"[train] {words['total']}: {workers.total} ({words['advice'].format(gpus=plan.gpus)})"
    yield f"[train] {words['train']}:"
    yield f"[train]   - num_workers: {workers.train} ({words['each']})"
    yield f"[train]   - batch_size: {plan.batch}, slots: {plan.slots}, persistent_workers: {plan.persistent}"
    yield f"[train] {words['val']}:"
    yield f"[train]   - num_workers: {workers.val} ({words['each']})"
    yield f"[train]   - batch_size: {plan.val_batch}, slots: {plan.val_slots}"
    yield f"[train] {words['sum'].format(sum=workers.train_sum)}"
    prefetch, cache = plan.prefetch_bytes / GIB, plan.cache_bytes / GIB
    yield f"[train] {words['memory']}: {prefetch:.2f} GB prefetch + {cache:.2f} GB cache"


def hint(wait_ms: float, step_ms: float) -> str:
    """What a perfect loader would gain at most, and what to turn if that is worth it."""
    gain = 100 * wait_ms / max(step_ms - wait_ms, 1e-9)
    text = f"data_time {wait_ms:.1f} ms of {step_ms:.1f} ms: at most {gain:.0f} % faster with a perfect loader"
    if wait_ms > HIGH_MS:
        return f"{text}. Try TOTAL_WORKERS: cpu*0.9, TRAIN_PREFETCH_FACTOR: 6, and USE_RAM_CACHE: true."
    if wait_ms >= LOW_MS:
        return f"{text}. USE_RAM_CACHE: true decodes frames once."
    return f"{text}."


_WORDS = {
    "en": {
        "title": "data loading",
        "cores": "CPU cores",
        "total": "workers in all",
        "advice": "suggested, for all {gpus} GPUs",
        "train": "training loader",
        "val": "validation loader",
        "each": "per GPU",
        "sum": "together: {sum} training workers",
        "memory": "memory",
    },
    "zh": {
        "title": "数据加载配置",
        "cores": "CPU核心数",
        "total": "总worker数",
        "advice": "建议值，用于所有{gpus}个GPU",  # noqa: RUF001
        "train": "训练DataLoader",
        "val": "验证DataLoader",
        "each": "每GPU",
        "sum": "总计: {sum} 个训练workers 利用CPU资源",
        "memory": "内存",
    },
}
"""The Chinese labels are the guide's, letter for letter: scripts look for them."""
