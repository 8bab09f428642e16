"""The report: aligned text, one JSON document, exit codes; and once the real doctor on this machine."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatout.clock.machine import Cores, Descriptors, Memory, Shm
from flatout.doctor import main
from flatout.doctor.cli import Facts, as_json, as_text, diagnose, summary
from flatout.doctor.gpu import DriverFacts, DriverGpu, TorchFacts, TorchGpu
from flatout.doctor.host import DiskFacts, Software
from flatout.doctor.images import DecoderFacts
from flatout.findings import exit_code

GIB = 2**30


def machine(**changes: Any) -> Facts:
    """A healthy machine with one GPU, with changes."""
    healthy = Facts(
        cores=Cores(16, 16, None, 16),
        memory=Memory(64 * GIB, 50 * GIB, None, None, 50 * GIB),
        shm=Shm(32 * GIB, 32 * GIB),
        descriptors=Descriptors(1024, 4096, 10),
        software=Software("3.12.1", "2.4.0", "0.1.0"),
        torch=TorchFacts("2.13.0", "13.0", gpus=(TorchGpu("NVIDIA H200", 140 * GIB, (9, 0)),)),
        driver=DriverFacts("580.95.05", (DriverGpu("NVIDIA H200", (9, 0)),), pci_gpus=1),
        images=DecoderFacts("4.14.0", None, "libjpeg-turbo", 120.0, "1.9.0", 150.0),
        disk=DiskFacts("data", 800, 1500, 9000),
    )
    return replace(healthy, **changes)


def test_the_text_is_aligned_and_every_finding_has_its_advice():
    sections = diagnose(machine())
    lines = as_text(sections).splitlines()
    for finding in (finding for part in sections.values() for finding in part):
        at = lines.index(f"  {finding.level:<5} {finding.topic:<11} {finding.value}")
        assert lines[at].index(finding.value) == lines[at + 1].index(finding.advice) == 20
        assert finding.advice
    assert lines[-1] == "ready to train (13 ok)"


def test_one_bad_finding_makes_exit_code_5_and_says_so():
    sections = diagnose(machine(torch=TorchFacts(version="2.13.0+cpu")))
    findings = [finding for part in sections.values() for finding in part]
    assert exit_code(findings) == 5
    assert summary(findings) == "not ready to train: see `bad` above (12 ok, 1 bad)"
    document = json.loads(as_json(machine(), sections, 5))
    assert document["exit_code"] == 5
    assert document["facts"]["cores"]["usable"] == 16
    assert {"section", "topic", "value", "level", "advice"} == document["findings"][0].keys()


def test_help_and_usage_errors_do_not_import_torch(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["--disks"])
    assert ended.value.code == 2
    assert "usage: flatout doctor" in capsys.readouterr().err
    program = """
import sys, flatout.doctor
try:
    flatout.doctor.main(["--help"])
finally:
    assert not {"torch", "cv2", "numpy", "rich"} & {*sys.modules}
"""
    helped = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert helped.returncode == 0, helped.stderr
    assert "exit code: 0, or 5 if a finding is bad" in helped.stdout


def test_the_real_doctor_reports_this_machine(tmp_path: Path):
    command = [sys.executable, "-m", "flatout.doctor", "--json", "--disk", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    document = json.loads(ran.stdout)
    assert ran.returncode == document["exit_code"]
    assert document["facts"]["torch"]["version"]
    assert document["facts"]["torch"]["error"] is None
    assert {finding["section"] for finding in document["findings"]} == {
        "machine", "software", "torch and GPUs", "images", "disk",
    }  # fmt: skip


def test_the_old_name_of_diagnose_works_and_warns():
    from flatout.doctor import cli

    with pytest.warns(DeprecationWarning, match=r"flatout\.doctor\.cli\.judge is now called diagnose"):
        assert cli.judge is diagnose
