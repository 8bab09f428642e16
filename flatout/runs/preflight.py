"""Checks before a training starts: a usable GPU, enough disk space for its files, enough file descriptors.

The disk space is computed from the tensors of the training. GPUs are checked like in `flatout doctor`, but in this
process, which has imported torch anyway, and without running a kernel.
"""

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flatout.clock import machine
from flatout.doctor import DriverFacts, TorchFacts, TorchGpu, check_torch_and_gpus, driver_facts, has_code_for
from flatout.engine import parameters_of
from flatout.errors import ResourceError, one_line
from flatout.findings import Finding
from flatout.ranks import choose_devices
from flatout.runs.recipe import Model
from flatout.safefiles import file_size_limit

logger = logging.getLogger(__name__)

GENERATIONS = 3
"""The newest checkpoint, the one before, and the one being written."""
OVERHEAD = 1.02
"""Size of a file relative to its tensors, about."""
DESCRIPTORS = 40
"""File descriptors needed beyond those open at the start: 16 for each of two feeds, training and validation, and some
for files. Measured: 19 with two workers on a CPU."""
DESCRIPTORS_OF_GPU = 80
"""Further ones for the device files of the driver: the number varies, and this is about twice what it takes."""


def check_descriptors(*, uses_gpu: bool) -> None:
    """ResourceError if this process may open too few files, which would fail only when the validation starts."""
    limits = machine.descriptors()
    needed = limits.open + DESCRIPTORS + (DESCRIPTORS_OF_GPU if uses_gpu else 0)
    if limits.soft is not None and limits.soft < needed:
        raise ResourceError(
            f"training needs about {needed} file descriptors, but this process may open only {limits.soft}. "
            f"Raise the limit: ulimit -n {needed}"
        )


# Disk


class DiskNeed(NamedTuple):
    """Disk space that a training needs, in bytes."""

    state: int
    """One checkpoint."""
    least: int
    """All checkpoints that exist at the same time, without which the training cannot be saved."""
    whole: int
    """All files of the run."""


def disk_need(model: Model, *, kept: int, saves: bool = True) -> DiskNeed:
    """The disk space that a training needs. `kept`: number of checkpoints that are kept for good, such as epoch_024.pt.
    Without `saves`, only one is written, at the end."""
    weights = tensor_bytes(model.network.state_dict())
    average = tensor_bytes(model.average.network.state_dict()) if model.average else 0
    moments = max(tensor_bytes(model.optimizer.state_dict()), _moments_to_come(model.optimizer))
    state = round(OVERHEAD * (weights + average + moments))
    least = state * (GENERATIONS if saves else 1)
    # best.pt in half precision, and the network before its first step.
    return DiskNeed(state, least, least + kept * state + round(1.5 * OVERHEAD * weights))


def check_disk(folder: Path, need: DiskNeed) -> str:
    """The free and needed space, as a text. ResourceError if not even the checkpoints fit."""
    limit = file_size_limit()
    if limit is not None and limit < need.state:
        raise ResourceError(
            f"{folder}: a checkpoint of this training takes {_gb(need.state)}, but this process may write files of at "
            f"most {_gb(limit)}. Raise the limit: ulimit -f unlimited"
        )
    free = shutil.disk_usage(folder).free
    if free + _bytes_of(folder, "last*.pt") < need.least:
        raise ResourceError(
            f"{folder}: {_gb(free)} free, but the checkpoints of this training need {_gb(need.least)} "
            f"({_gb(need.state)} each). Free some space, or choose another disk with --project."
        )
    if free + _bytes_of(folder, "*.pt") < need.whole:
        logger.warning(
            "%s: %s free, but all files of this training need about %s: the newest checkpoints fit, but best.pt and "
            "checkpoints that are kept, such as epoch_024.pt, may not be written. Free some space, or choose another "
            "disk with --project.",
            folder, _gb(free), _gb(need.whole),
        )  # fmt: skip
    return f"disk {_gb(free)} free, about {_gb(need.whole)} needed"


def _bytes_of(folder: Path, pattern: str) -> int:
    """Size of existing files that will be replaced or need not be written again."""
    return sum(path.stat().st_size for path in folder.rglob(pattern))


def tensor_bytes(value: object) -> int:
    """Total size of the tensors in nested containers, in bytes."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(tensor_bytes, value.values()))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return sum(map(tensor_bytes, value))
    return 0


def _moments_to_come(optimizer: torch.optim.Optimizer) -> int:
    """Size of the two moments that Adam allocates at the first step, in bytes; 0 for other optimizers."""
    is_adam = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    return 2 * tensor_bytes(parameters_of(optimizer)) if is_adam else 0


def _gb(num_bytes: int) -> str:
    if num_bytes < 100_000:
        return f"{num_bytes / 1e3:.0f} kB"
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


# GPUs


def check_gpus(device: str) -> None:
    """ResourceError if the training is to use a GPU of this machine (`device` is the value of `--device`) and torch
    cannot use it."""
    if device.strip().lower() == "cpu":
        return
    check_gpu_facts(torch_facts(device), driver_facts())


def check_gpu_facts(facts: TorchFacts, driver: DriverFacts) -> None:
    """ResourceError or warnings for problems with GPUs; nothing if there are no GPUs, or no problems."""
    is_usable = bool(facts.gpus) and all(gpu.kernel_error is None for gpu in facts.gpus)
    for finding in check_torch_and_gpus(facts, driver):
        if finding.level == "bad" and not is_usable:
            raise ResourceError(
                f"{_described(finding)}. To fix it: {finding.advice}. To train on the CPU instead: --device cpu"
            )
        if finding.level in ("warn", "bad"):
            logger.warning("%s: %s", _described(finding), finding.advice)


def torch_facts(device: str) -> TorchFacts:
    """What torch in this process reports about the GPUs that `device` selects."""
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
    except Exception as error:  # errors of any type are the reason that is reported
        return one_line(error, 200)
    return "torch found no device"


def _described(finding: Finding) -> str:
    return f"{finding.topic} {finding.value}"
