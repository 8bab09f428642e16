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
