"""Toy trainings in real processes, started cheaply: forked from one that has already imported torch.

Each has its own signals and exit code, and can be killed. Fixture `toys` (conftest.py).
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

from tests.feed.injections import CHECKOUT, MARK, is_gone, wait_until

LIMIT_S = 60
REPEATS = int(os.environ.get("FLATOUT_FAULT_REPEATS", "10"))
"""Number of random moments at which a training is interrupted; 100 for a nightly run."""


class Toys:
    """Starts toy trainings. A context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        environ = os.environ | {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
        self._server = subprocess.Popen(
            [sys.executable, "-c", "from tests.runs.toy_runs import serve; serve()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> "Toys":
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(LIMIT_S)
        assert self._server.stdout is not None
        self._server.stdout.close()

    def start(self, project: Path, *args: object, ignore: str = "", env: dict[str, str] | None = None) -> "ToyRun":
        """Start or continue a training in `project` without waiting for it. `ignore`: a signal to ignore, as with
        nohup."""
        self._count += 1
        logs = self._folder / f"{self._count:04}"
        mark = uuid.uuid4().hex
        argv = ["--project", str(project), *map(str, args)]
        request = {"argv": argv, "logs": str(logs), "ignore": ignore, "env": {MARK: mark, **(env or {})}}
        return ToyRun(self, self.send(request), logs, mark)

    def run(self, project: Path, *args: object, **settings: Any) -> "ToyRun":
        """Start or continue a training and wait for its end."""
        run = self.start(project, *args, **settings)
        run.wait()
        return run

    def send(self, request: dict[str, Any]) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())


class ToyRun:
    """A process that trains."""

    def __init__(self, toys: Toys, pid: int, logs: Path, mark: str) -> None:
        self._toys = toys
        self.pid = pid
        self._logs = logs
        self._mark = mark
        self.code: int | None = None
        """Exit code once it has ended; negative: the signal that killed it."""

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def has_ended(self) -> bool:
        if self.code is None:
            self.code = self._toys.send({"poll": self.pid})
        return self.code is not None

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Wait for the end; returns the exit code."""
        try:
            wait_until(self.has_ended, limit_s)
        except BaseException:
            self.send(signal.SIGKILL)
            raise
        assert self.code is not None
        return self.code

    @property
    def output(self) -> str:
        """Standard error, including the log."""
        path = self._logs.with_suffix(".err")
        return path.read_text() if path.exists() else ""

    def wait_for_words(self, words: str) -> None:
        wait_until(lambda: words in self.output or self.has_ended(), LIMIT_S)

    @property
    def printed(self) -> str:
        """Standard output."""
        return self._logs.with_suffix(".out").read_text()

    def children(self) -> list[int]:
        """All processes of this training's feed."""
        needle = f"{MARK}={self._mark}".encode()
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if needle in _environ(pid)]

    def wait_until_nothing_is_left(self, limit_s: float = 5) -> None:
        wait_until(lambda: not [pid for pid in self.children() if not is_gone(pid)], limit_s)


def _environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


# The server: a process that has imported torch and computes nothing itself


def serve() -> None:
    """Until standard input ends, fork a training for each request, or return the exit code of one."""
    from tests.runs import toy_faults

    living: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        answer: int | None
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
            living.discard(pid)
        else:
            answer = os.fork()
            if answer == 0:
                _train(toy_faults.run_command, request)
            living.add(answer)
        print(json.dumps(answer), flush=True)
    for pid in living:
        os.kill(pid, signal.SIGKILL)


def _train(command: Any, request: dict[str, Any]) -> None:
    code = 99
    try:
        os.setsid()
        logs = Path(request["logs"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for fd, suffix in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(logs.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
        if request["ignore"]:
            signal.signal(getattr(signal, request["ignore"]), signal.SIG_IGN)
        os.environ.update(request["env"])
        sys.argv = ["toy", *request["argv"]]
        code = command()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
