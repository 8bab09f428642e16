"""Can torch use the GPU that a training is about to use? If not: the exact reason, and the command that mends it.

The facts are those of `flatout doctor`, asked in this process, which has imported torch anyway. No kernel is run: a GPU
that this process is not going to use is left alone.
"""

import logging
from dataclasses import replace

import torch

from flatout.doctor.finding import Finding
from flatout.doctor.gpu import DriverFacts, TorchFacts, TorchGpu, driver_facts
from flatout.doctor.gpu_verdict import has_code_for, judge
from flatout.engine.device_choice import choose_devices
from flatout.errors import ResourceError, one_line

logger = logging.getLogger(__name__)


def check_gpus(device: str) -> None:
    """`device` is what `--device` says. ResourceError if this machine has GPUs, wants one, and torch cannot use it."""
    if device.strip().lower() == "cpu":
        return
    judge_gpus(torch_facts(device), driver_facts())


def judge_gpus(facts: TorchFacts, driver: DriverFacts) -> None:
    """Refuse or warn, in a line each; silent on a machine without GPUs, and on one where all is well."""
    is_usable = bool(facts.gpus) and all(gpu.kernel_error is None for gpu in facts.gpus)
    for finding in judge(facts, driver):
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
