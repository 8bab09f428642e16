"""Every row is written once and completely, whatever interrupts a run."""

import csv
import json
import math
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flatout.runs.folder import Records


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Records]:
    with Records(tmp_path) as opened:
        yield opened


def write(records: Records, epoch: int) -> None:
    records.line("results.txt", f"{epoch}/9  0.{epoch}")
    records.row("results.csv", {"epoch": epoch, "note": 'a, "b"'})
    records.event("log.jsonl", {"epoch": epoch, "loss": epoch / 7})


def epochs_in(folder: Path) -> tuple[list[int], list[int], list[int]]:
    text = [int(line.split("/")[0]) for line in (folder / "results.txt").read_text().splitlines()]
    with (folder / "results.csv").open() as file:
        table = [int(row["epoch"]) for row in csv.DictReader(file)]
    events = [json.loads(line)["epoch"] for line in (folder / "log.jsonl").read_text().splitlines()]
    return text, table, events


def test_every_kind_of_row_is_written_immediately_and_readable(records: Records, tmp_path: Path):
    for epoch in range(3):
        write(records, epoch)
        expected = list(range(epoch + 1))
        assert epochs_in(tmp_path) == (expected, expected, expected)
    with (tmp_path / "results.csv").open() as file:
        assert next(csv.DictReader(file))["note"] == 'a, "b"'


def test_no_row_appears_twice_after_a_resume(records: Records, tmp_path: Path):
    write(records, 0)
    state = records.state_dict()
    write(records, 1)
    write(records, 2)
    records.close()
    with Records(tmp_path) as resumed:
        resumed.load_state_dict(state)
        write(resumed, 1)
    assert epochs_in(tmp_path) == ([0, 1], [0, 1], [0, 1])


def test_without_truncating_rows_would_appear_twice(records: Records, tmp_path: Path):
    """Negative control."""
    write(records, 0)
    write(records, 1)
    with Records(tmp_path) as resumed:
        write(resumed, 1)
    assert epochs_in(tmp_path)[0] == [0, 1, 1]


def test_a_file_that_was_created_after_the_save_is_emptied(records: Records, tmp_path: Path):
    state = records.state_dict()
    write(records, 0)
    with Records(tmp_path) as resumed:
        resumed.load_state_dict(state)
        write(resumed, 5)
    assert epochs_in(tmp_path) == ([5], [5], [5])


def test_a_removed_file_causes_a_warning_and_is_started_again(records: Records, tmp_path: Path, caplog):
    write(records, 0)
    state = records.state_dict()
    (tmp_path / "results.txt").unlink()
    with Records(tmp_path) as resumed:
        resumed.load_state_dict(state)
        write(resumed, 1)
    assert "results.txt is shorter than when the checkpoint was saved" in caplog.text
    assert epochs_in(tmp_path) == ([1], [0, 1], [0, 1])


def test_a_table_of_an_older_version_keeps_its_columns(tmp_path: Path):
    (tmp_path / "results.csv").write_text("epoch,gone,loss\n0,7,0.5\n")
    with Records(tmp_path) as records:
        records.row("results.csv", {"epoch": 1, "loss": 0.25, "new": 3})
        assert (tmp_path / "results.csv").read_text() == "epoch,gone,loss\n0,7,0.5\n1,,0.25\n"
        records.clear()
        records.rows("results.csv", [])
        records.row("results.csv", {"epoch": 0, "new": 3})
    assert (tmp_path / "results.csv").read_text() == "epoch,new\n0,3\n", "started again, it has the current columns"


@pytest.mark.fault
def test_a_table_whose_first_rows_are_missing_has_its_names_once(records: Records, tmp_path: Path):
    with full_after(3):
        records.row("results.csv", {"epoch": 0})
    for epoch in (1, 2):
        records.row("results.csv", {"epoch": epoch})
    assert (tmp_path / "results.csv").read_text() == "# 1 missing\nepoch\n1\n2\n"


def test_numbers_that_are_not_finite_are_null_in_json(records: Records, tmp_path: Path):
    records.event("log.jsonl", {"loss": math.nan, "lr": math.inf, "epoch": 0, "ok": 0.5, "name": "x"})
    assert json.loads((tmp_path / "log.jsonl").read_text()) == {
        "loss": None, "lr": None, "epoch": 0, "ok": 0.5, "name": "x",
    }  # fmt: skip


@contextmanager
def full_after(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.fault
def test_a_full_disk_costs_rows_and_one_warning_and_the_gap_is_marked(records: Records, tmp_path: Path, caplog):
    """F16, with a limit in the middle of a row."""
    records.line("results.txt", "0/9  first")
    with full_after(15):
        for epoch in (1, 2, 3):
            records.line("results.txt", f"{epoch}/9  lost")
            assert (tmp_path / "results.txt").read_text() == "0/9  first\n"
    records.line("results.txt", "4/9  back")
    assert (tmp_path / "results.txt").read_text() == "0/9  first\n# 3 missing\n4/9  back\n"
    (warning,) = caplog.messages
    assert "results.txt: cannot be written: File too large. Training goes on without it" in warning


@pytest.mark.fault
def test_a_gap_among_json_lines_is_json(records: Records, tmp_path: Path):
    with full_after(3):
        records.event("log.jsonl", {"epoch": 0})
    records.event("log.jsonl", {"epoch": 1})
    assert (tmp_path / "log.jsonl").read_text() == '{"missing": 1}\n{"epoch": 1}\n'


@pytest.mark.fault
def test_a_device_that_is_always_full_stops_nothing(tmp_path: Path, caplog):
    (tmp_path / "results.txt").symlink_to("/dev/full")
    with Records(tmp_path, ["results.txt"]) as records:
        for epoch in range(5):
            records.line("results.txt", str(epoch))
        assert records.state_dict() == {"bytes": {"results.txt": 0}}
    assert len(caplog.messages) == 1
    assert "No space left on device" in caplog.text


@pytest.mark.fault
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_a_disk_that_fills_up_and_empties_again(tmp_path: Path):
    """F16 on a real file system of 64 kB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs here: {mounted.stderr.strip()}")
    try:
        with Records(tmp_path, ["results.txt"]) as records:
            records.line("results.txt", "0")
            with pytest.raises(OSError, match="No space left"):
                (tmp_path / "ballast").write_bytes(bytes(1 << 20))
            for epoch in range(1, 2000):
                records.line("results.txt", f"{epoch} {'x' * 10}")
            (tmp_path / "ballast").unlink()
            records.line("results.txt", "2000")
        lines = (tmp_path / "results.txt").read_text().splitlines()
        (mark,) = [at for at, line in enumerate(lines) if line.startswith("#")]
        assert int(lines[mark].split()[1]) == 2000 - mark
        assert lines[-1] == "2000"
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
