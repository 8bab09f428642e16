"""Fault injection from outside a feed (signals, limits, scripts that end badly), and checks for what is left behind."""

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import pytest

from flatout.clock import cgroup
from flatout.feed import Feed

CHECKOUT = Path(__file__).parents[2]
MARK = "FLATOUT_TEST_MARK"


def wait_until(condition: Callable[[], object], timeout_s: float = 10) -> None:
    """Block until `condition()` is true; fails the test after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{condition} was not true within {timeout_s} s"
        time.sleep(0.005)


def status_of(pid: int) -> dict[str, str]:
    """The lines of /proc/<pid>/status; empty once the process is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


def is_gone(pid: int) -> bool:
    return status_of(pid).get("State", "Z").startswith("Z")


def is_stopped(pid: int) -> bool:
    return status_of(pid).get("State", "").startswith("T")


def forkservers_of(feed: Feed) -> set[int]:
    """The process that a feed's workers were forked from; empty while all of them are being replaced."""
    statuses = map(status_of, list(feed.worker_pids.values()))
    return {int(status["PPid"]) for status in statuses if not status.get("State", "Z").startswith("Z")}


def forkserver_of(feed: Feed) -> int:
    """The same, if workers are known to be running."""
    (forkserver,) = forkservers_of(feed)
    return forkserver


def open_files(pid: int) -> list[str]:
    """The open files of a process; the kernel marks deleted ones as such."""
    return [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Script:
    """A Python script in its own session, and all processes it starts, found by a mark in their environment."""

    def __init__(self, text: str, folder: Path, *args: object, prefix: Sequence[str] = ()) -> None:
        self._mark = uuid.uuid4().hex
        self._path = folder / f"script_{self._mark}.py"
        self._path.write_text(text)
        environ = os.environ | {MARK: self._mark, "PYTHONPATH": str(CHECKOUT), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(self._path), *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
            cwd=folder,
            start_new_session=True,
        )

    def __enter__(self) -> "Script":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        self.process.communicate()

    def wait_for_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self, timeout_s: float = 30) -> "Outcome":
        """Wait until the main process has ended."""
        out, err = self.process.communicate(timeout=timeout_s)
        return Outcome(self.process.returncode, out, err)

    def pids(self) -> list[int]:
        """All running processes of this script, even those in another session."""
        needle = f"{MARK}={self._mark}".encode()
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if needle in _environ(pid)]

    def wait_until_gone(self, timeout_s: float = 5) -> None:
        wait_until(lambda: not self.pids(), timeout_s)


class Outcome:
    """Exit code and output of a script."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    def __repr__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


def run_script(text: str, folder: Path, *args: object, prefix: Sequence[str] = ()) -> Outcome:
    """Run a script to its end; none of its processes may be left then."""
    with Script(text, folder, *args, prefix=prefix) as script:
        outcome = script.end()
        script.wait_until_gone()
        return outcome


@contextlib.contextmanager
def limited_cgroup(controller: str, limits: Mapping[str, str]) -> Iterator[list[str]]:
    """A new cgroup (v1 or v2) with limits; yields the command prefix that runs a command in it.

    Skips the test if that is not possible.
    """
    folder = _cgroup_folder(controller) / f"flatout-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be created for {controller}: {error}")
    try:
        known = {name: value for name, value in limits.items() if (folder / name).exists()}
        if not known:
            pytest.skip(f"the {controller} controller is not available in {folder.parent}")
        for name, value in known.items():
            (folder / name).write_text(value)
        yield ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh"]
    finally:
        wait_until(lambda: not (folder / "cgroup.procs").read_text())
        folder.rmdir()


def _cgroup_folder(controller: str) -> Path:
    """The cgroup of this process, so that limits around the test still apply."""
    folders = cgroup.folders(controller)
    if not folders:
        pytest.skip("this machine has no cgroups")
    return folders[0]


def _environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def in_private_mounts(commands: str) -> list[str]:
    """Command prefix that first runs shell `commands` in a private mount namespace. Skips if that is not permitted."""
    probe = subprocess.run(["unshare", "-m", "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"no private mount namespace: {probe.stderr.strip()}")
    return ["unshare", "-m", "sh", "-ec", f'{commands}\nexec "$@"', "sh"]
