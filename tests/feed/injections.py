"""Ways to hurt a feed from outside: signals, limits, scripts that end badly; and to see what is left of it."""

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
    """Block until `condition()` holds; fails the test when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{condition} did not come true within {timeout_s} s"
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


def nurseries_of(feed: Feed) -> set[int]:
    """The process that a feed's workers were forked from; none where all of them are just being replaced."""
    statuses = map(status_of, list(feed.worker_pids.values()))
    return {int(status["PPid"]) for status in statuses if not status.get("State", "Z").startswith("Z")}


def nursery_of(feed: Feed) -> int:
    """The same where workers are known to be there."""
    (nursery,) = nurseries_of(feed)
    return nursery


def open_files(pid: int) -> list[str]:
    """What the descriptors of a process are open on; deleted files are marked as such by the kernel."""
    return [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Script:
    """A Python script in a session of its own, and everything it starts, found by a mark in the environment."""

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
        """Wait for the end of the main process."""
        out, err = self.process.communicate(timeout=timeout_s)
        return Outcome(self.process.returncode, out, err)

    def pids(self) -> list[int]:
        """Every living process of this script, also those that hid in another session."""
        needle = f"{MARK}={self._mark}".encode()
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if needle in _environ(pid)]

    def wait_until_gone(self, timeout_s: float = 5) -> None:
        wait_until(lambda: not self.pids(), timeout_s)


class Outcome:
    """How a script ended and what it said."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    def __repr__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


def run_script(text: str, folder: Path, *args: object, prefix: Sequence[str] = ()) -> Outcome:
    """Run a script to its end; nothing of it may be left then."""
    with Script(text, folder, *args, prefix=prefix) as script:
        outcome = script.end()
        script.wait_until_gone()
        return outcome


@contextlib.contextmanager
def limited_cgroup(controller: str, limits: Mapping[str, str]) -> Iterator[list[str]]:
    """A new cgroup (v1 or v2) with limits; gives the command prefix that runs something in it. Skips if it cannot."""
    folder = _cgroup_folder(controller) / f"flatout-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made for {controller}: {error}")
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
    """Our own cgroup, so that limits around this test still hold."""
    folders = cgroup.folders(controller)
    if not folders:
        pytest.skip("no cgroups here")
    return folders[0]


def _environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def in_private_mounts(commands: str) -> list[str]:
    """Command prefix: run `commands` as a shell in a mount namespace of its own first. Skips if that is forbidden."""
    probe = subprocess.run(["unshare", "-m", "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"no private mount namespace: {probe.stderr.strip()}")
    return ["unshare", "-m", "sh", "-ec", f'{commands}\nexec "$@"', "sh"]
