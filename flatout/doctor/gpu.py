"""Facts and findings about torch, the NVIDIA driver and the GPUs.

Facts about torch come from a child process, so that a build that crashes, hangs or is missing costs only one line of
the report. Findings are pure functions of the facts.
"""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from flatout.clock import machine, system_text
from flatout.findings import Finding, in_units

PROBE = Path(__file__).with_name("torch_probe.py")
PROBE_TIMEOUT_S = 180
"""Importing torch from a cold network disk takes a minute; so may the first start of CUDA with many GPUs."""


# Facts


@dataclass(frozen=True)
class TorchGpu:
    """A GPU as torch sees it; `kernel_error` is None if a kernel ran and gave the right result."""

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
    """Architectures that the build has machine code (sm_90) or intermediate code (compute_90) for."""
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
    """The NVIDIA driver; `version` is None if there is none."""

    version: str | None = None
    gpus: tuple[DriverGpu, ...] = ()
    error: str | None = None
    """Why the driver did not respond."""
    pci_gpus: int = 0
    """Number of NVIDIA display or compute devices on the PCI bus, with or without a driver."""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES; None: not set."""


def torch_facts(timeout_s: float = PROBE_TIMEOUT_S) -> TorchFacts:
    """Facts about torch, from a child process that may take at most `timeout_s`.

    A crash or timeout is reported in `error`, never raised.
    """
    version = machine.package_version("torch")
    # -P: the folder of the probe must not come first on the path, or its files would shadow other modules.
    command = [sys.executable, "-P", str(PROBE)]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return TorchFacts(version=version, error=f"no response within {timeout_s:.0f} s")
    return read_probe(child.returncode, child.stdout, version)


def read_probe(returncode: int, stdout: str, version: str | None) -> TorchFacts:
    """The facts in the last line of the probe's output, or how it ended."""
    if returncode != 0 or not stdout.strip():
        reason = signal.Signals(-returncode).name if returncode < 0 else f"exit code {returncode}"
        return TorchFacts(version=version, error=f"crashed with {reason}")
    fields = {"version": version, **json.loads(stdout.splitlines()[-1])}
    gpus = tuple(TorchGpu(**gpu | {"capability": tuple(gpu["capability"])}) for gpu in fields.pop("gpus", ()))
    return TorchFacts(**fields | {"archs": tuple(fields.get("archs", ())), "gpus": gpus})


def driver_facts(root: Path = Path("/")) -> DriverFacts:
    """Facts about the driver from NVML; without NVML, its version from the kernel module."""
    found, visible = _ask_nvml(), os.environ.get("CUDA_VISIBLE_DEVICES")
    version = found.version or kernel_module_version(root)
    return replace(found, version=version, pci_gpus=count_pci_gpus(root), visible=visible)


def kernel_module_version(root: Path = Path("/")) -> str | None:
    """Version of the loaded NVIDIA kernel module; None if it is not loaded."""
    text = system_text(root / "proc/driver/nvidia/version") or ""
    found = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else None


def count_pci_gpus(root: Path = Path("/")) -> int:
    """Number of NVIDIA devices of the display class (VGA or 3D controller) on the PCI bus."""
    nvidia = [d for d in (root / "sys/bus/pci/devices").glob("*") if system_text(d / "vendor") == "0x10de"]
    return sum((system_text(device / "class") or "").startswith("0x03") for device in nvidia)


def _ask_nvml() -> DriverFacts:
    """Driver version and GPUs, or the error; nothing if there is no driver."""
    try:
        import pynvml
    except ImportError:
        return DriverFacts()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        # No library means no driver, as on any machine without a GPU. Any other error is a problem of the driver.
        absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return DriverFacts(error=None if error.value in absent else str(error))
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        name, capability = pynvml.nvmlDeviceGetName, pynvml.nvmlDeviceGetCudaComputeCapability
        gpus = tuple(DriverGpu(name(handle), tuple(capability(handle))) for handle in handles)
        return DriverFacts(pynvml.nvmlSystemGetDriverVersion(), gpus)
    except pynvml.NVMLError as error:
        return DriverFacts(error=str(error))
    finally:
        pynvml.nvmlShutdown()


# Findings: can torch train on the GPUs of this machine, and if not, which command fixes that?
#
# The usual causes are a torch without CUDA, a driver too old for the build, a build without kernels for the GPU, and
# GPUs hidden from the process.

OLDEST_TORCH = (2, 6)
SAFE_TORCH = (2, 10)
"""In older versions `torch.load(weights_only=True)` is vulnerable (CVE-2026-24747)."""

OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""Oldest driver branch per CUDA major version (NVIDIA's table of minor version compatibility)."""

NO_GPU = "training will use the CPU: fine for trying things out, slow for real work"


def check_torch_and_gpus(torch: TorchFacts, driver: DriverFacts) -> list[Finding]:
    """Findings about torch, the driver, and each GPU."""
    return [check_torch(torch), check_driver(torch, driver), *check_gpus(torch, driver)]


def check_torch(torch: TorchFacts) -> Finding:
    """Finding about torch: whether it is installed, can be imported, and is new enough."""
    if torch.version is None:
        return Finding("torch", "not installed", "bad", "needed for training: python -m pip install torch")
    if torch.error:
        release = torch.version.partition("+")[0]
        value = f"{torch.version} cannot be imported: {torch.error}"
        return Finding("torch", value, "bad", f"reinstall it: {reinstall(f'torch=={release}')}")
    build = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.rocm}" if torch.rocm else "CPU"
    value = f"{torch.version}, {build} build"
    if version_pair(torch.version) < OLDEST_TORCH:
        return Finding("torch", value, "bad", f"flatout needs 2.6 or newer: {reinstall('torch>=2.10')}")
    if version_pair(torch.version) < SAFE_TORCH:
        advice = "before 2.10, loading an untrusted checkpoint can run its code (CVE-2026-24747): update when you can"
        return Finding("torch", value, "warn", advice)
    return Finding("torch", value, "ok", "new enough, and can be imported")


def check_driver(torch: TorchFacts, driver: DriverFacts) -> Finding:
    """Finding about the driver: whether it exists, responds, and is new enough for this build of torch."""
    if driver.error:
        advice = "usually an update without a restart: sudo reboot (nvidia-smi should then list the GPUs)"
        return Finding("driver", f"does not answer: {driver.error}", "bad", advice)
    if driver.version is None and driver.pci_gpus:
        advice = "start a container with its GPUs (docker run --gpus all); elsewhere install the driver (580 or newer)"
        return Finding("driver", f"none, but {driver.pci_gpus} NVIDIA GPU(s) on the bus", "warn", advice)
    if driver.version is None:
        return Finding("driver", "none, and no NVIDIA GPU", "note", NO_GPU)
    if too_old(torch, driver):
        value = f"{driver.version} is too old: CUDA {torch.cuda} needs {oldest_driver(torch.cuda or '')} or newer"
        return Finding("driver", value, "bad", install_advice(driver, oldest_gpu(driver)))
    return Finding("driver", driver.version, "ok", "new enough for this torch")


def check_gpus(torch: TorchFacts, driver: DriverFacts) -> list[Finding]:
    """One finding per GPU that torch sees, or one with the reason why it sees none."""
    if torch.gpus:
        return [check_gpu(gpu, torch, driver) for gpu in torch.gpus]
    # Without NVML the driver lists no GPUs, but the bus still shows them.
    has_gpus = driver.gpus or (driver.version and driver.pci_gpus)
    if not has_gpus or torch.version is None or torch.error or too_old(torch, driver):
        return []
    names = ", ".join(gpu.name for gpu in driver.gpus) or f"{driver.pci_gpus} NVIDIA GPU(s)"
    if torch.cuda is None:
        value = f"{names}: unused, this torch is built for the CPU only"
        return [Finding("gpu", value, "bad", install_advice(driver, oldest_gpu(driver)))]
    if driver.visible is not None:
        value = f"{names}: hidden by CUDA_VISIBLE_DEVICES={driver.visible!r}"
        return [Finding("gpu", value, "warn", "to use them: unset CUDA_VISIBLE_DEVICES")]
    value = f"{names}: not visible to torch: {torch.cuda_error}"
    return [Finding("gpu", value, "bad", "compare with the output of nvidia-smi")]


def check_gpu(gpu: TorchGpu, torch: TorchFacts, driver: DriverFacts) -> Finding:
    """Finding about one GPU: whether a kernel ran on it, and if not, whether the build has code for it at all."""
    arch = f"sm_{gpu.capability[0]}{gpu.capability[1]}"
    value = f"{gpu.name}, {in_units(gpu.memory)}, {arch}"
    if gpu.kernel_error is None:
        return Finding("gpu", value, "ok", "a test kernel ran on it and gave the right result")
    if torch.cuda and not has_code_for(gpu.capability, torch.archs):
        value = f"{value}: this torch has no kernels for it, only for {' '.join(torch.archs)}"
        return Finding("gpu", value, "bad", install_advice(driver, gpu.capability))
    advice = "its memory may be full, or it may be faulty: check with nvidia-smi"
    return Finding("gpu", f"{value}: a test kernel failed: {gpu.kernel_error}", "bad", advice)


def has_code_for(capability: tuple[int, int], archs: tuple[str, ...]) -> bool:
    """Whether a build with code for `archs` (sm_90, sm_90a, compute_90) runs on a GPU of this compute capability."""
    return any(_runs_on(arch, capability) for arch in archs)


def _runs_on(arch: str, capability: tuple[int, int]) -> bool:
    kind, digits, suffix = re.findall(r"([a-z]+)_(\d+)([a-z]?)", arch)[0]
    built_for = (int(digits[:-1]), int(digits[-1]))
    if suffix == "a":
        return built_for == capability
    # Intermediate code can be compiled for any later GPU; machine code runs only within its major version.
    return built_for <= capability and (kind == "compute" or built_for[0] == capability[0])


def too_old(torch: TorchFacts, driver: DriverFacts) -> bool:
    """Whether the driver is older than the build needs, and no kernel ran (with forward-compatibility packages, some
    kernels do)."""
    if torch.cuda is None or driver.version is None or any(gpu.kernel_error is None for gpu in torch.gpus):
        return False
    return int(driver.version.split(".")[0]) < oldest_driver(torch.cuda)


def oldest_driver(cuda: str) -> int:
    """Oldest driver branch that runs builds for this CUDA version ("13.0")."""
    return OLDEST_DRIVER.get(int(cuda.split(".")[0]), max(OLDEST_DRIVER.values()))


def oldest_gpu(driver: DriverFacts) -> tuple[int, int]:
    """Lowest compute capability of the GPUs that the driver lists; if none, 7.5, which every wheel supports."""
    return min((gpu.capability for gpu in driver.gpus), default=(7, 5))


def install_advice(driver: DriverFacts, capability: tuple[int, int]) -> str:
    """The command that installs a torch for this driver and GPU, or the driver update that must come first."""
    requirement = torch_for(int((driver.version or "0").split(".")[0]), capability)
    return reinstall(requirement) if requirement else "update the NVIDIA driver to 580 or newer, then restart"


def torch_for(driver_branch: int, capability: tuple[int, int]) -> str | None:
    """The torch whose standard wheel supports driver and GPU; None: the driver is too old for any.

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
    """The command to install it; uninstalls first, because pip would keep another build of the same version."""
    return f'python -m pip uninstall -y torch && python -m pip install "{requirement}"'


def version_pair(version: str) -> tuple[int, int]:
    """Major and minor of "2.13.0+cpu" or "2.11.0a0"."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)
