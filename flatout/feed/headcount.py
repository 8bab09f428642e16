"""How many workers, for each GPU, for training and for validation?

    total    "auto" = 80 % of the cores, "cpu*0.9" = that share of them, or a number
    per GPU  total // GPUs, at least 1; validation gets half as many

Plain arithmetic: the same arguments give the same plan on any machine. A total of 0 still means one per GPU.
"""

from dataclasses import dataclass

from flatout.errors import ConfigError
from flatout.profiler import machine

AUTO_SHARE = 0.8
MOST_CORES = 8192
"""The Linux kernel's own ceiling: a larger count is a typing mistake."""
MOST_GPUS = 1024
TOTAL_WORDS = '"auto", "cpu*0.9" or '


@dataclass(frozen=True)
class WorkerPlan:
    """Workers in all and per GPU; `str(plan)` tells it in one line."""

    total: int
    per_gpu: int
    train: int
    """Training workers per GPU."""
    val: int
    """Validation workers per GPU."""
    train_sum: int
    """Training workers on all GPUs; may exceed `total`, since every GPU gets at least one."""
    rule: str
    """The total as it was asked for."""
    gpus: int
    cores: str
    """The core count the plan started from, and where it came from."""

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
    """Plan the workers of one node.

    `cores` defaults to what this process may use (affinity and cgroup quota respected). `train` and `val` are per
    GPU: a number overrides the plan; validation follows `train` when unset and the plan when "auto".
    """
    if cores is None:
        facts = machine.cores()
        cores, origin = facts.usable, f"cores: {facts}"
    else:
        cores = _whole("cores", cores, 1, MOST_CORES)
        origin = f"cores: {cores}, as given"
    gpus = _whole("gpus", gpus, 0, MOST_GPUS)
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
        raise _refusal("workers", value, 0, most, TOTAL_WORDS)
    return max(1, int(product))


def _share(value: int | str) -> float | None:
    """The share of the cores that "auto" or "cpu*f" asks for; None for anything else."""
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
    """`value` as a whole number from `least` to `most`; a numeric string counts, a bool or a fraction does not."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        raise _refusal(name, value, least, most, others) from None
    if isinstance(value, bool) or not least <= number <= most or (not isinstance(value, str) and number != value):
        raise _refusal(name, value, least, most, others)
    return number


def _refusal(name: str, value: object, least: int, most: int, others: str) -> ConfigError:
    return ConfigError(f"{name}={value!r:.60} cannot be obeyed. Use {others}a whole number from {least} to {most}.")
