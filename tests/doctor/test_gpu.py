"""Torch, driver and GPUs: from fake facts to the exact cause and the command that fixes it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatout.doctor import gpu
from flatout.doctor.gpu import DriverFacts, DriverGpu, TorchFacts, TorchGpu
from flatout.findings import Finding, exit_code

GIB = 2**30
CUDA13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
CUDA124 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
H200 = DriverGpu("NVIDIA H200", (9, 0))
NO_KERNEL = "AcceleratorError: CUDA error: no kernel image is available for execution on the device"


def torch_facts(**changes: Any) -> TorchFacts:
    """A CUDA 13 build of torch that sees one healthy H200, with changes."""
    healthy = TorchGpu("NVIDIA H200", 140 * GIB, (9, 0))
    return replace(TorchFacts("2.13.0", "13.0", archs=CUDA13, gpus=(healthy,)), **changes)


def driver_facts(**changes: Any) -> DriverFacts:
    """A driver new enough for everything, with one H200, with changes."""
    return replace(DriverFacts("580.95.05", (H200,), pci_gpus=1), **changes)


def only_bad(findings: list[Finding]) -> Finding:
    (bad,) = [finding for finding in findings if finding.level == "bad"]
    return bad


def test_a_healthy_gpu_machine_is_all_ok():
    findings = gpu.check_torch_and_gpus(torch_facts(), driver_facts())
    assert [finding.level for finding in findings] == ["ok", "ok", "ok"]
    assert "NVIDIA H200, 140.0 GiB, sm_90" in findings[-1].value


def test_torch_without_cuda_on_a_machine_with_a_gpu():
    torch = TorchFacts(version="2.13.0+cpu", cuda_error="AssertionError: Torch not compiled with CUDA enabled")
    bad = only_bad(gpu.check_torch_and_gpus(torch, driver_facts()))
    assert bad.value == "NVIDIA H200: unused, this torch is built for the CPU only"
    assert bad.advice == 'python -m pip uninstall -y torch && python -m pip install "torch>=2.11"'


def test_torch_without_cuda_gets_a_build_that_the_driver_can_run():
    bad = only_bad(gpu.check_torch_and_gpus(TorchFacts(version="2.13.0+cpu"), driver_facts(version="570.86.10")))
    assert bad.advice.endswith('python -m pip install "torch==2.10.*"')


def test_torch_without_cuda_is_noticed_without_nvml_too():
    bad = only_bad(gpu.check_torch_and_gpus(TorchFacts(version="2.13.0+cpu"), driver_facts(gpus=())))
    assert bad.value == "1 NVIDIA GPU(s): unused, this torch is built for the CPU only"
    assert bad.advice.endswith('"torch>=2.11"')


def test_a_driver_too_old_for_cuda_13():
    torch = torch_facts(gpus=(), cuda_error="RuntimeError: The NVIDIA driver on your system is too old")
    bad = only_bad(gpu.check_torch_and_gpus(torch, driver_facts(version="550.54.15")))
    assert bad.topic == "driver"
    assert bad.value == "550.54.15 is too old: CUDA 13.0 needs 580 or newer"
    assert bad.advice == 'python -m pip uninstall -y torch && python -m pip install "torch==2.10.*"'


def test_a_driver_too_old_for_any_torch_must_be_updated():
    bad = only_bad(gpu.check_torch_and_gpus(torch_facts(gpus=()), driver_facts(version="470.256.02")))
    assert bad.advice == "update the NVIDIA driver to 580 or newer, then restart"


def test_an_old_driver_that_runs_kernels_anyway_is_fine():
    # With forward-compatibility packages, data-centre GPUs run newer CUDA versions than their driver supports.
    findings = gpu.check_torch_and_gpus(torch_facts(), driver_facts(version="535.183.01"))
    assert exit_code(findings) == 0


def test_a_gpu_too_new_for_the_build():
    blackwell = TorchGpu("NVIDIA GeForce RTX 5090", 32 * GIB, (12, 0), kernel_error=NO_KERNEL)
    torch = torch_facts(version="2.10.0", cuda="12.4", archs=CUDA124, gpus=(blackwell,))
    bad = only_bad(gpu.check_torch_and_gpus(torch, driver_facts(gpus=(DriverGpu(blackwell.name, (12, 0)),))))
    assert "RTX 5090, 32.0 GiB, sm_120: this torch has no kernels for it, only for sm_50" in bad.value
    assert bad.advice.endswith('"torch>=2.11"')


def test_a_gpu_too_old_for_the_build():
    pascal = TorchGpu("Tesla P100", 16 * GIB, (6, 0), kernel_error=NO_KERNEL)
    bad = only_bad(gpu.check_torch_and_gpus(torch_facts(gpus=(pascal,)), driver_facts()))
    assert "sm_60: this torch has no kernels for it" in bad.value
    assert bad.advice.endswith('"torch==2.7.*"')


def test_a_kernel_that_fails_for_another_reason_is_quoted():
    full = TorchGpu("NVIDIA H200", 140 * GIB, (9, 0), kernel_error="OutOfMemoryError: CUDA out of memory")
    bad = only_bad(gpu.check_torch_and_gpus(torch_facts(gpus=(full,)), driver_facts()))
    assert "a test kernel failed: OutOfMemoryError" in bad.value
    assert "nvidia-smi" in bad.advice


def test_gpus_hidden_by_the_environment_are_a_warning_not_an_error():
    hidden = driver_facts(visible="")
    findings = gpu.check_torch_and_gpus(
        torch_facts(gpus=(), cuda_error="RuntimeError: No CUDA GPUs are available"), hidden
    )
    assert findings[-1].level == "warn"
    assert findings[-1].advice == "to use them: unset CUDA_VISIBLE_DEVICES"


def test_the_error_of_a_driver_is_quoted():
    bad = only_bad(gpu.check_torch_and_gpus(torch_facts(gpus=()), DriverFacts(error="Driver/library version mismatch")))
    assert "Driver/library version mismatch" in bad.value


def test_a_gpu_on_the_bus_without_a_driver_is_a_warning():
    findings = gpu.check_torch_and_gpus(TorchFacts(version="2.13.0+cpu"), DriverFacts(pci_gpus=2))
    assert [finding.level for finding in findings] == ["ok", "warn"]
    assert "--gpus all" in findings[1].advice


def test_a_machine_without_gpus_is_a_note():
    findings = gpu.check_torch_and_gpus(TorchFacts(version="2.13.0+cpu"), DriverFacts())
    assert [finding.level for finding in findings] == ["ok", "note"]


@pytest.mark.parametrize(
    ("torch", "level", "words"),
    [
        (TorchFacts(error="ModuleNotFoundError: No module named 'torch'"), "bad", "python -m pip install torch"),
        (TorchFacts(version="2.13.0+cu130", error="crashed with SIGSEGV"), "bad", '"torch==2.13.0"'),
        (TorchFacts(version="2.4.1"), "bad", "needs 2.6"),
        (TorchFacts(version="2.9.1"), "warn", "CVE-2026-24747"),
        (TorchFacts(version="2.10.0a0+git1"), "ok", "can be imported"),
    ],
)
def test_torch_missing_broken_old_or_fine(torch: TorchFacts, level: str, words: str):
    finding = gpu.check_torch(torch)
    assert finding.level == level
    assert words in finding.advice


@pytest.mark.parametrize(
    ("capability", "archs", "runs"),
    [
        ((9, 0), ("sm_90",), True),
        ((8, 9), ("sm_80",), True),
        ((8, 0), ("sm_86",), False),
        ((9, 0), ("sm_80",), False),
        ((9, 0), ("compute_80",), True),
        ((12, 0), ("sm_90", "sm_100"), False),
        ((12, 1), ("sm_120",), True),
        ((10, 3), ("sm_100a",), False),
        ((10, 0), ("sm_100a",), True),
        ((9, 0), (), False),
    ],
)
def test_which_builds_run_on_which_gpus(capability: tuple[int, int], archs: tuple[str, ...], runs: bool):
    assert gpu.has_code_for(capability, archs) is runs


def test_a_probe_that_crashes_is_a_fact_and_no_crash_of_the_doctor():
    assert gpu.read_probe(-11, "", "2.13.0").error == "crashed with SIGSEGV"
    assert gpu.read_probe(1, "", "2.13.0").error == "crashed with exit code 1"


def test_a_torch_that_cannot_be_imported_is_a_fact_and_no_crash_of_the_doctor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert gpu.torch_facts().error == "OSError: libcudart.so.13: cannot open shared object file"


def test_a_probe_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "hang.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(gpu, "PROBE", tmp_path / "hang.py")
    assert gpu.torch_facts(timeout_s=0.2).error == "no response within 0 s"


def test_the_last_line_of_the_probe_is_read_whatever_comes_before():
    fields = {"version": "2.13.0", "cuda": "13.0", "archs": ["sm_90"]}
    gpus = [{"name": "H200", "memory": 5, "capability": [9, 0], "kernel_error": None}]
    facts = gpu.read_probe(0, "a library says hello\n" + json.dumps(fields | {"gpus": gpus}) + "\n", None)
    assert facts == TorchFacts("2.13.0", "13.0", None, ("sm_90",), (TorchGpu("H200", 5, (9, 0)),))


def test_driver_version_and_pci_devices_are_read_from_the_kernel(tmp_path: Path):
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n")
    for name, vendor, kind in [("a", "0x10de", "0x030200"), ("b", "0x10de", "0x040300"), ("c", "0x1002", "0x030000")]:
        device = tmp_path / "sys/bus/pci/devices" / name
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor + "\n")
        (device / "class").write_text(kind + "\n")
    assert gpu.kernel_module_version(tmp_path) == "535.183.01"
    assert gpu.count_pci_gpus(tmp_path) == 1
