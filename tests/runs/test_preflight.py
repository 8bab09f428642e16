"""Checks before a training: GPUs that torch cannot use (F30, simulated), and disks that are too small."""

import resource
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from flatout.clock import machine
from flatout.doctor.gpu import DriverFacts, DriverGpu, TorchFacts, TorchGpu
from flatout.engine.optim import MovingAverage
from flatout.errors import ResourceError
from flatout.runs import preflight
from flatout.runs.preflight import DiskNeed, check_descriptors, check_disk, disk_need
from flatout.runs.recipe import Model

H100 = DriverGpu("H100", (9, 0))
NEW_DRIVER = DriverFacts(version="580.65.06", gpus=(H100,), pci_gpus=1)
OLD_DRIVER = DriverFacts(version="470.57", gpus=(H100,), pci_gpus=1)
CUDA = TorchFacts(version="2.13.0", cuda="13.0", archs=("sm_75", "sm_90"))


@pytest.mark.parametrize(
    ("torch_facts", "driver", "reason", "remedy"),
    [
        (
            TorchFacts(version="2.13.0+cpu"), NEW_DRIVER, "gpu H100: unused, this torch is built for the CPU only",
            'pip uninstall -y torch && python -m pip install "torch>=2.11"',
        ),
        (CUDA, OLD_DRIVER, "driver 470.57 is too old: CUDA 13.0 needs 580 or newer", "update the NVIDIA driver"),
        (
            TorchFacts(version="2.13.0", cuda="13.0", archs=("sm_90",), gpus=(TorchGpu("P4", 8, (6, 1), "no code"),)),
            DriverFacts(version="580.1", gpus=(DriverGpu("P4", (6, 1)),)),
            "this torch has no kernels for it, only for sm_90",
            'python -m pip install "torch==2.7.*"',
        ),
        (CUDA, DriverFacts(error="mismatch", pci_gpus=1), "driver does not answer: mismatch", "sudo reboot"),
    ],
)  # fmt: skip
def test_a_gpu_that_torch_cannot_use_is_refused_with_reason_and_command(
    torch_facts: TorchFacts, driver: DriverFacts, reason: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "torch_facts", lambda device: torch_facts)
    monkeypatch.setattr(preflight, "driver_facts", lambda: driver)
    with pytest.raises(ResourceError) as refused:
        preflight.check_gpus("")
    assert reason in str(refused.value) and remedy in str(refused.value)
    assert str(refused.value).endswith("To train on the CPU instead: --device cpu")
    preflight.check_gpus("cpu")


def test_a_gpu_that_works_is_not_refused_because_its_driver_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    working = TorchFacts(version="2.13.0", cuda="13.0", archs=("sm_90",), gpus=(TorchGpu("H100", 2**36, (9, 0)),))
    preflight.check_gpu_facts(working, DriverFacts(error="Driver/library version mismatch"))
    assert "does not answer" in caplog.text


def test_a_machine_without_a_gpu_causes_no_message(caplog: pytest.LogCaptureFixture) -> None:
    preflight.check_gpu_facts(TorchFacts(version="2.13.0+cpu"), DriverFacts())
    assert caplog.messages == []


def test_hidden_gpus_cause_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    preflight.check_gpu_facts(CUDA, DriverFacts(version="580.1", gpus=(H100,), visible=""))
    assert caplog.messages == ["gpu H100: hidden by CUDA_VISIBLE_DEVICES='': to use them: unset CUDA_VISIBLE_DEVICES"]


class Usage(NamedTuple):
    total: int = 0
    used: int = 0
    free: int = 0


def test_the_needed_space_is_that_of_the_tensors() -> None:
    network = nn.Linear(1000, 1000, bias=False)
    sgd = torch.optim.SGD(network.parameters(), lr=0.1)
    adam = torch.optim.Adam(network.parameters(), lr=0.1)
    averaged = Model(network=network, optimizer=sgd, average=MovingAverage(network), epochs=1)
    by_adam = Model(network=network, optimizer=adam, epochs=1)
    assert disk_need(averaged, kept=0).state == pytest.approx(8e6, rel=0.03)
    assert disk_need(by_adam, kept=0).state == pytest.approx(12e6, rel=0.03)
    need = disk_need(by_adam, kept=10)
    assert need.least == 3 * need.state
    assert need.whole > 13 * need.state


def test_a_disk_too_small_for_checkpoints_is_refused_and_one_too_small_for_all_files_causes_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    need = DiskNeed(state=10**9, least=3 * 10**9, whole=8 * 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(free=2_000_000_000))
    with pytest.raises(
        ResourceError, match=r"2.0 GB free, but the checkpoints of this training need 3.0 GB .*--project"
    ):
        check_disk(tmp_path, need)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(free=5_000_000_000))
    assert check_disk(tmp_path, need) == "disk 5.0 GB free, about 8.0 GB needed"
    assert "best.pt and checkpoints that are kept, such as epoch_024.pt, may not be written" in caplog.text
    # Files that are replaced need no additional space.
    (tmp_path / "last.pt").write_bytes(b"")
    with (tmp_path / "last.pt").open("r+b") as file:
        file.truncate(2_000_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(free=1_500_000_000))
    check_disk(tmp_path, need)


def test_too_few_descriptors_are_found_before_anything_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """F10: they used to run out when the workers of the first validation were started."""
    monkeypatch.setattr(machine, "descriptors", lambda: machine.Descriptors(24, 24, 5))
    with pytest.raises(ResourceError, match=r"about 45 file descriptors, .* 24\. Raise the limit: ulimit -n 45"):
        check_descriptors(uses_gpu=False)
    monkeypatch.setattr(machine, "descriptors", lambda: machine.Descriptors(45, 1024, 5))
    check_descriptors(uses_gpu=False)


def test_a_file_size_limit_below_the_size_of_a_checkpoint_is_found(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        check_disk(tmp_path, DiskNeed(state=1_000_000, least=0, whole=0))
        with pytest.raises(
            ResourceError, match=r"checkpoint .* takes 3\.0 MB, .* files of at most 1\.0 MB\. .*ulimit -f"
        ):
            check_disk(tmp_path, DiskNeed(state=3_000_000, least=0, whole=0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
