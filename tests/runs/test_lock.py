"""One training per folder (F12), and no lock outlives its process."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flatout.errors import ConfigError, ResourceError
from flatout.runs.lock import LOCK_NAME, RunLock

pytestmark = pytest.mark.fault

ROOT = Path(__file__).parents[2]
HOLD = """
import sys, time
from pathlib import Path
from flatout.runs.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_is_refused_immediately_with_the_name_of_the_holder(holder, tmp_path: Path):
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        RunLock(tmp_path)
    assert time.monotonic() - began < 2
    assert caught.value.exit_code == 2
    assert re.fullmatch(
        rf"{tmp_path} is in use by process {holder.pid} on host \S+, started \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\. "
        r"Wait for it, or choose another name with --name\.",
        str(caught.value),
    )


def test_even_break_lock_does_not_break_a_lock_of_this_host(holder, tmp_path: Path):
    with pytest.raises(ConfigError, match="is in use by process"):
        RunLock(tmp_path, break_lock=True)


def test_a_killed_process_leaves_no_lock(holder, tmp_path: Path, caplog):
    caplog.set_level("INFO")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with RunLock(tmp_path):
        assert f"process {holder.pid} ended without releasing the lock; taking over." in caplog.text
        assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()
    # Reading the file above has closed a descriptor of it, which releases the kernel's lock; the file must go anyway.
    assert not (tmp_path / LOCK_NAME).exists()


def test_a_lock_that_was_released_can_be_acquired_again(tmp_path: Path):
    lock = RunLock(tmp_path)
    lock.close()
    lock.close()
    assert list(tmp_path.iterdir()) == []
    RunLock(tmp_path).close()


def test_one_process_cannot_hold_it_twice(tmp_path: Path):
    with RunLock(tmp_path):
        for _ in range(2):
            with pytest.raises(ConfigError, match=f"is in use by process {os.getpid()}"):
                RunLock(tmp_path)
        # The refusal has not released the lock.
        outcome = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
        assert "Locked" in outcome.stderr


def test_a_lock_of_another_host_holds_until_it_is_broken(tmp_path: Path):
    holder = {"pid": 7, "host": "far-away", "started": "2026-01-02 03:04:05"}
    (tmp_path / LOCK_NAME).write_text(json.dumps(holder))
    with pytest.raises(ConfigError, match=r"process 7 on host far-away, started 2026-01-02 03:04:05.*--break-lock"):
        RunLock(tmp_path)
    assert json.loads((tmp_path / LOCK_NAME).read_text()) == holder
    with RunLock(tmp_path, break_lock=True):
        pass


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[1]", b"{"])
def test_a_lock_file_without_a_holder_does_not_matter(content: bytes, tmp_path: Path):
    (tmp_path / LOCK_NAME).write_bytes(content)
    RunLock(tmp_path).close()


def test_a_folder_that_cannot_be_written_is_a_resource_error(tmp_path: Path):
    with pytest.raises(ResourceError, match=r"absent: cannot be written: No such file or directory.*--project"):
        RunLock(tmp_path / "absent")
