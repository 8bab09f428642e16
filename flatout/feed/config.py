"""Settings of a feed, none of which changes the batches it yields, and how many workers each GPU gets."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

from flatout.clock import machine
from flatout.errors import ConfigError

# Worker counts per GPU, for training and for validation.
#
#     total    "auto" = 80 % of the cores, "cpu*0.9" = that share of them, or a number
#     per GPU  total // GPUs, at least 1; validation gets half as many
#
# Plain arithmetic: the same arguments give the same plan on any machine. A total of 0 still means one per GPU.

AUTO_SHARE = 0.8
MAX_CORES = 8192
"""The Linux kernel's own limit: a larger count is a typing mistake."""
MAX_GPUS = 1024
TOTAL_WORDS = '"auto", "cpu*0.9" or '


@dataclass(frozen=True)
class WorkerPlan:
    """Number of workers in total and per GPU; `str(plan)` describes it in one line."""

    total: int
    per_gpu: int
    train: int
    """Training workers per GPU."""
    val: int
    """Validation workers per GPU."""
    train_sum: int
    """Training workers on all GPUs; may exceed `total`, since every GPU gets at least one."""
    rule: str
    """The total as the caller gave it, for example "auto"."""
    gpus: int
    cores: str
    """The core count that the plan is based on, and its origin."""

    def __str__(self) -> str:
        each = f" per GPU ({self.train_sum} on {self.gpus} GPUs)" if self.gpus > 1 else ""
        total = f"{self.rule} = {self.total}" if self.rule != str(self.total) else self.rule
        return f"workers: {self.train}{each} for training, {self.val} for validation (total {total}; {self.cores})"


def plan_workers(
    total: int | str = "auto",
    *,
    cores: int | None = None,
    gpus: int = 1,
    train: int | str | None = None,
    val: int | str | None = None,
) -> WorkerPlan:
    """Plan the workers of one node; ConfigError for values that make no sense.

    `total` is a number, "auto" or a share of the cores such as "cpu*0.9". `cores` defaults to what this process may
    use (affinity and cgroup quota respected). `train` and `val` are per GPU: a number overrides the plan; validation
    follows `train` when unset and the plan when "auto".
    """
    if cores is None:
        facts = machine.cores()
        cores, origin = facts.usable, f"cores: {facts}"
    else:
        cores = _whole("cores", cores, 1, MAX_CORES)
        origin = f"cores: {cores}, as given"
    gpus = _whole("gpus", gpus, 0, MAX_GPUS)
    shares = max(1, gpus)
    most = max(1024, 32 * cores)
    num_total = _total(total, cores, most)
    per_gpu = max(1, num_total // shares)
    num_train = _per_gpu("train", train, per_gpu, most // shares)
    num_val = _per_gpu("val", val, max(1, (num_train if val is None else per_gpu) // 2), most // shares)
    return WorkerPlan(
        num_total, per_gpu, num_train, num_val, num_train * shares, rule=str(total), gpus=gpus, cores=origin
    )


def _total(value: int | str, cores: int, most: int) -> int:
    share = _share(value)
    if share is None:
        return _whole("workers", value, 0, most, others=TOTAL_WORDS)
    # The double-precision product, truncated: 100 * 0.29 is 28 (golden spike/workers.json).
    product = cores * share
    if not 0 <= product < most + 1:
        raise _invalid("workers", value, 0, most, TOTAL_WORDS)
    return max(1, int(product))


def _share(value: int | str) -> float | None:
    """Share of the cores that "auto" or "cpu*f" stands for; None for anything else."""
    head, star, factor = value.partition("*") if isinstance(value, str) else ("", "", "")
    if not star and head.strip().lower() == "auto":
        return AUTO_SHARE
    if head.strip().lower() != "cpu":
        return None
    try:
        return float(factor)
    except ValueError:
        return None


def _per_gpu(name: str, value: int | str | None, default: int, most: int) -> int:
    if value is None or value == "auto":
        return default
    return _whole(name, value, 0, most, others='"auto" or ')


def _whole(name: str, value: int | str, least: int, most: int, others: str = "") -> int:
    """`value` as an integer from `least` to `most`; strings of digits are accepted, bools and fractions are not.

    ConfigError otherwise; `others` names what else its message offers.
    """
    with suppress(TypeError, ValueError, OverflowError):
        number = int(value)
        if not isinstance(value, bool) and least <= number <= most and (isinstance(value, str) or number == value):
            return number
    raise _invalid(name, value, least, most, others)


def _invalid(name: str, value: object, least: int, most: int, others: str) -> ConfigError:
    return ConfigError(f"{name}={value!r:.60} is not valid. Use {others}a whole number from {least} to {most}.")


def check_choices(config: object) -> None:
    """ConfigError if a field of a dataclass that is annotated with a Literal has another value."""
    for name, hint in get_type_hints(type(config)).items():
        known, value = get_args(hint), getattr(config, name)
        if get_origin(hint) is Literal and value not in known:
            raise ConfigError(f"{name}={value!r} is unknown: use {' or '.join(map(repr, known))}.")


@dataclass(frozen=True, kw_only=True)
class FeedConfig:
    """Settings of a feed. None of them changes the batches it yields."""

    workers: int | str = "auto"
    """A number, "auto" (80 % of the cores) or "cpu*0.9"; the last two are divided among `local_ranks`.
    With 0, samples are read in the caller's own thread."""

    local_ranks: int = 1
    """Training processes on this machine."""

    backend: Literal["process", "thread"] = "process"
    """Threads start immediately and need no pickling, but are only faster if `read` releases the GIL."""

    start_method: Literal["spawn", "fork"] = "spawn"
    """How the forkserver is started, the process that workers are forked from: as a fresh interpreter, or as a fork of
    this process. A fork needs no pickling, but must not be made after CUDA or threads were started."""

    slots: int | None = None
    """Batches in flight. Memory = slots * batch_size * bytes per sample. None: enough for the workers."""

    prefetch_factor: int | None = None
    """PyTorch's name for the same setting: complete batches to keep ready. Sets slots = prefetch_factor + 2."""

    micro_batch: int | None = None
    """Samples per task. None: a quarter of each worker's share of a batch."""

    persistent_workers: bool = True
    """False ends the workers after each epoch and starts new ones for the next."""

    epochs: int | None = None
    """Epochs of the whole run, if known: the feed reads ahead into the next epoch, up to the last."""

    on_error: Literal["raise", "substitute"] = "raise"
    """Whether a sample that cannot be read (OSError, DecodeError) ends the epoch or is replaced by another one that is
    chosen by its position in the stream; any other error is always raised. In a sample made of several items (see
    `ItemSource`), only the unreadable items are replaced."""

    bad_share: float = 0.01
    """Share of all samples (or items, if there are fewer) that may be replaced; more is an error in the data set."""

    watchdog_s: float = 60
    """A worker that spends more seconds than this on one sample is killed and replaced; 0 waits forever."""

    def __post_init__(self) -> None:
        if self.slots is not None and self.prefetch_factor is not None:
            raise ConfigError("slots and prefetch_factor set the same thing: give only one of them.")
        if self.slots is not None and self.slots < 2:
            raise ConfigError(
                f"slots={self.slots} is too small: one batch is in use while the next is filled. Use slots=2 or more."
            )
        for name in ("prefetch_factor", "micro_batch", "epochs", "local_ranks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more.")
        check_choices(self)
        if not 0 <= self.bad_share <= 1:
            raise ConfigError(f"bad_share={self.bad_share} must be between 0 and 1.")
        if not self.watchdog_s >= 0:  # also refuses NaN
            raise ConfigError(f"watchdog_s={self.watchdog_s} must not be negative. Use 0 to switch the watchdog off.")

    @property
    def num_workers(self) -> int:
        """Workers of this feed on this machine."""
        plan = plan_workers(self.workers, gpus=self.local_ranks)
        return plan.train if isinstance(self.workers, str) and not self.workers.isdigit() else plan.total
