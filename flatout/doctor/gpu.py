"""What torch, the NVIDIA driver and the PCI bus each say about GPUs: facts only, see `gpu_verdict` for what they mean.

torch is asked in a child process, so that a build that crashes, hangs or is missing costs one line of the report.
"""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from flatout.doctor.host import installed
from flatout.findings import Finding, in_units

PROBE = Path(__file__).with_name("torch_probe.py")
PROBE_TIMEOUT_S = 180
"""Importing torch from a cold network disk takes a minute; the first CUDA start on a many-GPU box as long again."""


@dataclass(frozen=True)
class TorchGpu:
    """A GPU as torch sees it; `kernel_error` is None when a kernel ran and gave the right answer."""

    name: str
    memory: int
    capability: tuple[int, int]
    kernel_error: str | None = None


@dataclass(frozen=True)
class TorchFacts:
    """The torch build; `cuda` and `rocm` are None for a CPU build, `error` says why the import failed."""

    version: str | None = None
    cuda: str | None = None
    rocm: str | None = None
    archs: tuple[str, ...] = ()
    """What the build has machine code (sm_90) or intermediate code (compute_90) for."""
    gpus: tuple[TorchGpu, ...] = ()
    cuda_error: str | None = None
    """Why CUDA did not start."""
    error: str | None = None


@dataclass(frozen=True)
class DriverGpu:
    """A GPU as the driver sees it."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class DriverFacts:
    """The NVIDIA driver; `version` is None without one."""

    version: str | None = None
    gpus: tuple[DriverGpu, ...] = ()
    error: str | None = None
    """Why the driver did not answer."""
    pci_gpus: int = 0
    """NVIDIA display or compute devices on the bus, whether or not a driver serves them."""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES, None when unset."""


def torch_facts(timeout_s: float = PROBE_TIMEOUT_S) -> TorchFacts:
    """Ask torch in a child process; waits at most `timeout_s`."""
    version = installed("torch")
    # -P: the folder of the probe must not come first on the path, its neighbours would shadow other modules.
    command = [sys.executable, "-P", str(PROBE)]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return TorchFacts(version=version, error=f"no answer within {timeout_s:.0f} s")
    return read_probe(child.returncode, child.stdout, version)


def read_probe(returncode: int, stdout: str, version: str | None) -> TorchFacts:
    """The facts in a probe's last line of output, or how it died."""
    if returncode != 0 or not stdout.strip():
        died = signal.Signals(-returncode).name if returncode < 0 else f"exit code {returncode}"
        return TorchFacts(version=version, error=f"died of {died}")
    fields = {"version": version, **json.loads(stdout.splitlines()[-1])}
    gpus = tuple(TorchGpu(**gpu | {"capability": tuple(gpu["capability"])}) for gpu in fields.pop("gpus", ()))
    return TorchFacts(**fields | {"archs": tuple(fields.get("archs", ())), "gpus": gpus})


def driver_facts(root: Path = Path("/")) -> DriverFacts:
    """Ask the driver through NVML; without NVML, read what the kernel module says about itself."""
    version, gpus, error = _ask_nvml()
    return DriverFacts(
        version=version or kernel_module_version(root),
        gpus=gpus,
        error=error,
        pci_gpus=count_pci_gpus(root),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def kernel_module_version(root: Path = Path("/")) -> str | None:
    """Version of the loaded NVIDIA kernel module, None if it is not loaded."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else None


def count_pci_gpus(root: Path = Path("/")) -> int:
    """NVIDIA devices of the display class (VGA or 3D controller) on the PCI bus."""
    devices = (root / "sys/bus/pci/devices").glob("*")
    return sum(_pci(d, "vendor") == "0x10de" and _pci(d, "class").startswith("0x03") for d in devices)


def _pci(device: Path, name: str) -> str:
    try:
        return (device / name).read_text().strip()
    except OSError:
        return ""


def _ask_nvml() -> tuple[str | None, tuple[DriverGpu, ...], str | None]:
    """Driver version, GPUs, and why it failed; all empty when there is no driver to ask."""
    try:
        import pynvml
    except ImportError:
        return None, (), None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        # No library: no driver, an ordinary CPU box. Anything else is a driver in trouble.
        absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return None, (), None if error.value in absent else str(error)
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        name, capability = pynvml.nvmlDeviceGetName, pynvml.nvmlDeviceGetCudaComputeCapability
        gpus = tuple(DriverGpu(name(handle), tuple(capability(handle))) for handle in handles)
        return pynvml.nvmlSystemGetDriverVersion(), gpus, None
    except pynvml.NVMLError as error:
        return None, (), str(error)
    finally:
        pynvml.nvmlShutdown()


# Can torch train on the GPUs of this machine, and if not, which one command mends it?
#
# Pure: facts in, findings out. The usual causes, each named exactly: torch without CUDA, a driver too old for the
# build, a build without kernels for the GPU, GPUs hidden from the process.

OLDEST_TORCH = (2, 6)
SAFE_TORCH = (2, 10)
"""Below it `torch.load(weights_only=True)` can be abused (CVE-2026-24747)."""

OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""Oldest driver branch per CUDA major version (NVIDIA's table of minor version compatibility)."""

NO_GPU = "training will use the CPU: fine for trying things, slow for real work"


def check_torch_and_gpus(torch: TorchFacts, driver: DriverFacts) -> list[Finding]:
    """Findings on torch, the driver, and each GPU."""
    return [check_torch(torch), check_driver(torch, driver), *check_gpus(torch, driver)]


def check_torch(torch: TorchFacts) -> Finding:
    """Is there a torch that imports and is new enough?"""
    if torch.version is None:
        return Finding("torch", "not installed", "bad", "training needs it: python -m pip install torch")
    if torch.error:
        release = torch.version.partition("+")[0]
        value = f"{torch.version} does not import: {torch.error}"
        return Finding("torch", value, "bad", f"install it afresh: {reinstall(f'torch=={release}')}")
    build = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.rocm}" if torch.rocm else "CPU"
    value = f"{torch.version}, {build} build"
    if version_pair(torch.version) < OLDEST_TORCH:
        return Finding("torch", value, "bad", f"flatout needs 2.6 or newer: {reinstall('torch>=2.10')}")
    if version_pair(torch.version) < SAFE_TORCH:
        advice = "below 2.10 loading a foreign checkpoint can run its code (CVE-2026-24747); update when you can"
        return Finding("torch", value, "warn", advice)
    return Finding("torch", value, "ok", "new enough, and it imports")


def check_driver(torch: TorchFacts, driver: DriverFacts) -> Finding:
    """Is there a driver, does it answer, and is it new enough for this build of torch?"""
    if driver.error:
        advice = "usually an update without a restart: sudo reboot (nvidia-smi should then list the GPUs)"
        return Finding("driver", f"does not answer: {driver.error}", "bad", advice)
    if driver.version is None and driver.pci_gpus:
        advice = "in a container start it with its GPUs (docker run --gpus all), else install the driver (580 or newer)"
        return Finding("driver", f"none, but {driver.pci_gpus} NVIDIA GPU(s) on the bus", "warn", advice)
    if driver.version is None:
        return Finding("driver", "none, and no NVIDIA GPU", "note", NO_GPU)
    if too_old(torch, driver):
        value = f"{driver.version} is too old: CUDA {torch.cuda} needs {oldest_driver(torch.cuda or '')} or newer"
        return Finding("driver", value, "bad", install_advice(driver, oldest_gpu(driver)))
    return Finding("driver", driver.version, "ok", "new enough for this torch")


def check_gpus(torch: TorchFacts, driver: DriverFacts) -> list[Finding]:
    """One finding per GPU that torch sees, or one that says why it sees none."""
    if torch.gpus:
        return [check_gpu(gpu, torch, driver) for gpu in torch.gpus]
    # Without NVML the driver names no GPU, but the bus still shows them.
    served = driver.gpus or (driver.version and driver.pci_gpus)
    if not served or torch.version is None or torch.error or too_old(torch, driver):
        return []
    names = ", ".join(gpu.name for gpu in driver.gpus) or f"{driver.pci_gpus} NVIDIA GPU(s)"
    if torch.cuda is None:
        value = f"{names}: unused, this torch is built for the CPU only"
        return [Finding("gpu", value, "bad", install_advice(driver, oldest_gpu(driver)))]
    if driver.visible is not None:
        value = f"{names}: hidden by CUDA_VISIBLE_DEVICES={driver.visible!r}"
        return [Finding("gpu", value, "warn", "to use them: unset CUDA_VISIBLE_DEVICES")]
    return [Finding("gpu", f"{names}: torch sees none: {torch.cuda_error}", "bad", "compare with: nvidia-smi")]


def check_gpu(gpu: TorchGpu, torch: TorchFacts, driver: DriverFacts) -> Finding:
    """Did a kernel run on it, and if not, does the build have code for it at all?"""
    arch = f"sm_{gpu.capability[0]}{gpu.capability[1]}"
    value = f"{gpu.name}, {in_units(gpu.memory)}, {arch}"
    if gpu.kernel_error is None:
        return Finding("gpu", value, "ok", "a kernel ran on it and gave the right answer")
    if torch.cuda and not has_code_for(gpu.capability, torch.archs):
        value = f"{value}: this torch has no kernels for it, only for {' '.join(torch.archs)}"
        return Finding("gpu", value, "bad", install_advice(driver, gpu.capability))
    advice = "is it full or faulty? look with: nvidia-smi"
    return Finding("gpu", f"{value}: a kernel failed: {gpu.kernel_error}", "bad", advice)


def has_code_for(capability: tuple[int, int], archs: tuple[str, ...]) -> bool:
    """Whether a build with code for `archs` (sm_90, sm_90a, compute_90) runs on a GPU."""
    return any(_runs_on(arch, capability) for arch in archs)


def _runs_on(arch: str, capability: tuple[int, int]) -> bool:
    kind, digits, suffix = re.findall(r"([a-z]+)_(\d+)([a-z]?)", arch)[0]
    built_for = (int(digits[:-1]), int(digits[-1]))
    if suffix == "a":
        return built_for == capability
    # Intermediate code is compiled for any later GPU; machine code runs within its major version only.
    return built_for <= capability and (kind == "compute" or built_for[0] == capability[0])


def too_old(torch: TorchFacts, driver: DriverFacts) -> bool:
    """The driver is below the build's need, and no kernel ran (forward-compatibility packages make some run)."""
    if torch.cuda is None or driver.version is None or any(gpu.kernel_error is None for gpu in torch.gpus):
        return False
    return int(driver.version.split(".")[0]) < oldest_driver(torch.cuda)


def oldest_driver(cuda: str) -> int:
    """Oldest driver branch that runs a build for this CUDA version ("13.0")."""
    return OLDEST_DRIVER.get(int(cuda.split(".")[0]), max(OLDEST_DRIVER.values()))


def oldest_gpu(driver: DriverFacts) -> tuple[int, int]:
    """Lowest compute capability among the GPUs the driver lists; unknown ones pass for what every wheel serves."""
    return min((gpu.capability for gpu in driver.gpus), default=(7, 5))


def install_advice(driver: DriverFacts, capability: tuple[int, int]) -> str:
    """The command that gives a torch for this driver and GPU, or the update that must come first."""
    requirement = torch_for(int((driver.version or "0").split(".")[0]), capability)
    return reinstall(requirement) if requirement else "update the NVIDIA driver to 580 or newer, then restart"


def torch_for(driver_branch: int, capability: tuple[int, int]) -> str | None:
    """The torch whose standard wheel suits driver and GPU; None: too old a driver for any.

    Standard Linux wheels: 2.7 is built for CUDA 12.6 (sm_50 to sm_90), 2.8 to 2.10 for CUDA 12.8 (sm_70 to sm_120),
    2.11 on for CUDA 13 (sm_75 on).
    """
    if driver_branch < OLDEST_DRIVER[12]:
        return None
    if capability < (7, 0):
        return "torch==2.7.*"
    if driver_branch < OLDEST_DRIVER[13] or capability < (7, 5):
        return "torch==2.10.*"
    return "torch>=2.11"


def reinstall(requirement: str) -> str:
    """The command; uninstalling first, because pip takes another build of the same version for good enough."""
    return f'python -m pip uninstall -y torch && python -m pip install "{requirement}"'


def version_pair(version: str) -> tuple[int, int]:
    """Major and minor of "2.13.0+cpu" or "2.11.0a0"."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)
