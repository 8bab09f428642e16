"""Is there room for what a training saves? Counted from its tensors, before the first step."""

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatout.engine.checkpoint.atomic import file_size_limit
from flatout.engine.ema import MovingAverage
from flatout.errors import ResourceError

logger = logging.getLogger(__name__)

GENERATIONS = 3
"""The newest state, the one before, and the one being written."""
OVERHEAD = 1.02
"""A file is that much larger than its tensors, about."""


class DiskNeed(NamedTuple):
    """Bytes."""

    state: int
    """Everything that a training continues from, once."""
    least: int
    """Without which it cannot be saved."""
    whole: int
    """With every file that stays."""


def disk_need(
    network: nn.Module,
    average: MovingAverage | None,
    optimizer: torch.optim.Optimizer,
    *,
    kept: int,
    saves: bool = True,
) -> DiskNeed:
    """`kept`: states that stay for good, such as epoch_024.pt. Without `saves` one is written when it ends."""
    weights = tensor_bytes(network.state_dict())
    moments = max(tensor_bytes(optimizer.state_dict()), _moments_to_come(optimizer))
    state = round(OVERHEAD * (weights + (tensor_bytes(average.network.state_dict()) if average else 0) + moments))
    least = state * (GENERATIONS if saves else 1)
    # best.pt in half precision, and the network before its first step.
    return DiskNeed(state, least, least + kept * state + round(1.5 * OVERHEAD * weights))


def check_disk(folder: Path, need: DiskNeed) -> str:
    """What there is and what is needed, as a remark. ResourceError if the training could not even be saved."""
    limit = file_size_limit()
    if limit is not None and limit < need.state:
        raise ResourceError(
            f"{folder}: a saved state of this training takes {_gb(need.state)}, and this process may write files of "
            f"{_gb(limit)} at most. Raise the limit: ulimit -f unlimited"
        )
    free = shutil.disk_usage(folder).free
    if free + _bytes_of(folder, "last*.pt") < need.least:
        raise ResourceError(
            f"{folder}: {_gb(free)} are free, and saving this training takes {_gb(need.least)} "
            f"(a state is {_gb(need.state)}). Free some space, or choose another disk with --project."
        )
    if free + _bytes_of(folder, "*.pt") < need.whole:
        logger.warning(
            "%s: %s are free, and all files of this training take about %s: training will go on without some of them.",
            folder, _gb(free), _gb(need.whole),
        )  # fmt: skip
    return f"disk {_gb(free)} free, about {_gb(need.whole)} needed"


def _bytes_of(folder: Path, pattern: str) -> int:
    """Of files that are there already and will be replaced, or need not be written any more."""
    return sum(path.stat().st_size for path in folder.rglob(pattern))


def tensor_bytes(value: object) -> int:
    """Of all tensors in nested containers."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(tensor_bytes, value.values()))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return sum(map(tensor_bytes, value))
    return 0


def _moments_to_come(optimizer: torch.optim.Optimizer) -> int:
    """Adam makes its two moments at the first step."""
    is_adam = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return 2 * tensor_bytes(parameters) if is_adam else 0


def _gb(num_bytes: int) -> str:
    if num_bytes < 100_000:
        return f"{num_bytes / 1e3:.0f} kB"
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
