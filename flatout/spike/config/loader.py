"""Section DATALOADER: who loads, and how far ahead."""

from dataclasses import dataclass

WorkerCount = int | str
"""A number, `auto`, or a share of the cores like `cpu*0.9`."""


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """Who loads, and how far ahead."""

    TOTAL_WORKERS: WorkerCount = "auto"
    """For all GPUs together: a number, `auto` (80 % of the cores) or `cpu*0.9`."""
    TRAIN_WORKERS: WorkerCount | None = None
    """Per GPU; unset or `auto`: TOTAL_WORKERS / GPUs."""
    VAL_WORKERS: WorkerCount | None = None
    """Per GPU; unset: half of the training's."""
    TRAIN_PREFETCH_FACTOR: int = 4
    """Batches to hold ready (at least; small batches need more to keep all workers busy)."""
    VAL_PREFETCH_FACTOR: int = 2
    """The same for validation."""
    PIN_MEMORY: bool = True
    """Accepted; batches for a GPU always come from pinned memory."""
    PERSISTENT_WORKERS: bool = True
    """False ends workers after each epoch: less memory in between, slower starts."""
    CPU_CORES: int | None = None
    """Plan for this many cores instead of those this process may use."""
