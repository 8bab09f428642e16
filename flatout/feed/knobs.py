"""How a feed runs: every knob, none of which changes what is delivered."""

from dataclasses import dataclass
from typing import Literal

from flatout.errors import ConfigError
from flatout.feed.headcount import plan_workers


@dataclass(frozen=True, kw_only=True)
class FeedConfig:
    """How the feed runs. None of this changes what it delivers."""

    workers: int | str = "auto"
    """A number, "auto" (80 % of the cores) or "cpu*0.9"; the last two are shared among `local_ranks`.
    0 reads in the caller's own thread."""

    local_ranks: int = 1
    """Training processes on this machine."""

    backend: Literal["process", "thread"] = "process"
    """Threads start at once and need no pickling, but only pay off if `read` releases the GIL."""

    start_method: Literal["spawn", "fork"] = "spawn"
    """How the process comes to be that workers are forked from: a fresh interpreter, or a fork of this
    one. A fork needs no pickling, but must not be made after CUDA or threads were started."""

    slots: int | None = None
    """Batches in flight. Memory = slots * batch_size * bytes per sample. None: enough for the workers."""

    prefetch_factor: int | None = None
    """PyTorch's word for it: complete batches to hold ready. Means slots = prefetch_factor + 2."""

    micro_batch: int | None = None
    """Samples per task. None: a quarter of each worker's share of a batch."""

    persistent_workers: bool = True
    """False ends the workers after each epoch and starts them for the next."""

    epochs: int | None = None
    """Epochs of the whole run, if known: the feed reads ahead into the next epoch, up to the last."""

    on_error: Literal["raise", "substitute"] = "raise"
    """A sample that cannot be read (OSError, DecodeError) ends the epoch, or is replaced by another one
    that follows from its place in the stream; anything else always raises. Of a sample made of several items
    (see `ItemSource`) only those are replaced that cannot be read."""

    bad_share: float = 0.01
    """Share of all samples, or items if they are fewer, that may be replaced before it counts as a broken data set."""

    watchdog_s: float = 60
    """A worker that is at one sample for longer is killed and replaced; 0 waits for ever."""

    def __post_init__(self) -> None:
        if self.slots is not None and self.prefetch_factor is not None:
            raise ConfigError("slots and prefetch_factor say the same thing: give one of them.")
        if self.slots is not None and self.slots < 2:
            raise ConfigError(
                f"slots={self.slots} is too small: one batch is used while the next is filled. Use slots=2 or more."
            )
        for name in ("prefetch_factor", "micro_batch", "epochs", "local_ranks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more.")
        for name, known in {
            "backend": ("process", "thread"),
            "start_method": ("spawn", "fork"),
            "on_error": ("raise", "substitute"),
        }.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown: use {' or '.join(map(repr, known))}.")
        if not 0 <= self.bad_share <= 1:
            raise ConfigError(f"bad_share={self.bad_share} must lie in 0..1.")
        if not self.watchdog_s >= 0:  # also refuses NaN
            raise ConfigError(f"watchdog_s={self.watchdog_s} must not be negative; 0 switches the watchdog off.")

    @property
    def num_workers(self) -> int:
        """Workers of this feed on this machine."""
        plan = plan_workers(self.workers, gpus=self.local_ranks)
        return plan.train if isinstance(self.workers, str) and not self.workers.isdigit() else plan.total
