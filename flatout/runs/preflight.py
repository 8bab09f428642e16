"""Before a training begins: is there a GPU that can be used, room on the disk for what will be saved, and may this
process open as many files as that takes?

What is needed on the disk is counted from the tensors of the training. The facts about GPUs are those of `flatout
doctor`, asked in this process, which has imported torch anyway; no kernel is run.
"""

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatout.clock import machine
from flatout.doctor import DriverFacts, TorchFacts, TorchGpu, check_torch_and_gpus, driver_facts, has_code_for
from flatout.engine import MovingAverage
from flatout.errors import ResourceError, one_line
from flatout.findings import Finding
from flatout.ranks import choose_devices
from flatout.safefiles import file_size_limit

logger = logging.getLogger(__name__)

GENERATIONS = 3
"""The newest state, the one before, and the one being written."""
OVERHEAD = 1.02
"""A file is that much larger than its tensors, about."""
DESCRIPTORS = 40
"""Beyond those that are open at the start: 16 for each of two feeds, training and validation, and some for files.
Measured: 19 with two workers on a CPU."""
DESCRIPTORS_OF_GPU = 80
"""More, where the driver opens its device files: its number varies, this is about twice what it takes."""


def check_descriptors(*, uses_gpu: bool) -> None:
    """ResourceError if this process may open too few files: now, and not when the validation's workers start."""
    limits = machine.descriptors()
    needed = limits.open + DESCRIPTORS + (DESCRIPTORS_OF_GPU if uses_gpu else 0)
    if limits.soft is not None and limits.soft < needed:
        raise ResourceError(
            f"A training needs about {needed} file descriptors, and this process may have {limits.soft}. "
            f"Raise the limit: ulimit -n {needed} or more."
        )


# Disk


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


# GPUs


def check_gpus(device: str) -> None:
    """`device` is what `--device` says. ResourceError if this machine has GPUs, wants one, and torch cannot use it."""
    if device.strip().lower() == "cpu":
        return
    judge_gpus(torch_facts(device), driver_facts())


def judge_gpus(facts: TorchFacts, driver: DriverFacts) -> None:
    """Refuse or warn, in a line each; silent on a machine without GPUs, and on one where all is well."""
    is_usable = bool(facts.gpus) and all(gpu.kernel_error is None for gpu in facts.gpus)
    for finding in check_torch_and_gpus(facts, driver):
        if finding.level == "bad" and not is_usable:
            raise ResourceError(
                f"{_told(finding)}. To mend it: {finding.advice}. To train on the CPU all the same: --device cpu"
            )
        if finding.level in ("warn", "bad"):
            logger.warning("%s: %s", _told(finding), finding.advice)


def torch_facts(device: str) -> TorchFacts:
    """What torch in this process knows, about the GPUs that `device` means."""
    build = TorchFacts(str(torch.__version__), torch.version.cuda, getattr(torch.version, "hip", None))
    if not torch.cuda.is_available():
        return replace(build, cuda_error=_why_not() if build.cuda else None)
    archs = tuple(torch.cuda.get_arch_list())
    gpus = tuple(_gpu(chosen.index or 0, archs if build.cuda else ()) for chosen in choose_devices(device))
    return replace(build, archs=archs, gpus=gpus)


def _gpu(number: int, archs: tuple[str, ...]) -> TorchGpu:
    properties = torch.cuda.get_device_properties(number)
    capability = (properties.major, properties.minor)
    missing = archs and not has_code_for(capability, archs)
    return TorchGpu(properties.name, properties.total_memory, capability, "no code for it" if missing else None)


def _why_not() -> str:
    try:
        torch.cuda.init()
    except Exception as error:  # the reason is the finding, whatever its type
        return one_line(error, 200)
    return "torch found no device"


def _told(finding: Finding) -> str:
    return f"{finding.topic} {finding.value}"
