"""Disk speed is measured and checked, and no file is left behind whatever happens."""

import os
from pathlib import Path

import pytest

from flatout.doctor import host


def test_the_disk_is_measured_and_nothing_is_left_behind(tmp_path: Path):
    facts = host.disk_facts(tmp_path)
    assert facts.error is None
    assert min(facts.write_mb_s, facts.read_mb_s, facts.small_reads_s) > 0
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_the_middle_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    assert host.disk_facts(tmp_path).error == "No space left on device"
    with pytest.raises(OSError, match="No space"):
        host._small_files(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_measured_is_one_finding(tmp_path: Path):
    (tmp_path / "file").touch()
    for folder, reason in [("missing", "No such file or directory"), ("file", "Not a directory")]:
        finding = host.check_disk(host.disk_facts(tmp_path / folder))
        assert finding.level == "warn"
        assert finding.value == f"{tmp_path / folder} cannot be measured: {reason}"


def test_slow_disks_are_a_warning():
    assert host.check_disk(host.DiskFacts("data", 100, 120, 3000)).level == "warn"
    assert host.check_disk(host.DiskFacts("data", 100, 900, 90)).level == "warn"
    assert host.check_disk(host.DiskFacts("data", 100, 900, 3000)).level == "ok"
    assert "--disk FOLDER" in host.check_disk(None).advice
