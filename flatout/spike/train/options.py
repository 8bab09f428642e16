"""What a training's command says beside its YAML; nothing that is learned depends on it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The flags of `flatout spike train`."""

    device: str = ""
    """cpu, or the number of a GPU; empty: a GPU if there is one."""
    resume: str | None = None
    """A checkpoint or run folder to continue, whatever its config."""
    fresh: bool = False
    """Begin anew even if an unfinished run of this config is there."""
    once: bool = False
    """A run of this config that is complete is not followed by another one."""
    deterministic: bool = False
    allow_data_change: bool = False
    break_lock: bool = False
    validate: bool = True
    """False: only for a look at the speed of training."""
    save_every_minutes: float = 10.0
    save_every_steps: int = 1000
    log_to: tuple[Literal["tensorboard", "wandb", "mlflow", "none"], ...] = ()
    """Where numbers go besides the run folder; empty: tensorboard, if LOG.TENSORBOARD says so and it is installed."""
    price: float | None = None
    """What an hour of this machine costs, in any currency."""
    budget: str = ""
    """Stop, saved, when this much is spent: money (with a price) or time, like 5.00 or 2h30m."""
    no_preflight: bool = False
    """Do not look at disk and GPU before training."""
    stop_after: int | None = None
    """FLATOUT_STOP_AFTER: end cleanly after this many micro-batches."""
