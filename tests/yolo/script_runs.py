"""Run the scripts at the root, each in its own process, forked from one that has already imported torch.

A new interpreter would spend most of its time importing. Used by the fixture `scripts` in test_compat_commands.py.
"""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

CHECKOUT = Path(__file__).parents[2]
LIMIT_S = 100.0
SCRIPTS = ("train.py", "train_aux.py", "test.py", "detect.py", "export.py")


class Ended(NamedTuple):
    """A process that has ended."""

    code: int
    """Exit code; negative: the signal that killed the process."""
    output: str
    """Standard output and standard error."""


class Scripts:
    """Runs `python train.py ...` in a folder that has cfg/, data/ and the scripts. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in (*SCRIPTS, "cfg", "data"):
            (folder / name).symlink_to(CHECKOUT / name)
        caches, paths = str(folder / "cache"), os.pathsep.join((str(CHECKOUT), os.environ.get("PYTHONPATH", "")))
        self.environ = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": caches}
        self._server = subprocess.Popen(
            [sys.executable, "-c", "from tests.yolo.script_runs import serve; serve()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environ, cwd=folder,
        )  # fmt: skip

    def __enter__(self) -> "Scripts":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.communicate()

    def run(self, script: str, words: Sequence[str], env: Mapping[str, str] | None = None) -> Ended:
        """Run a script to its end."""
        assert self._server.stdin is not None and self._server.stdout is not None
        log = self.folder / "output.txt"
        request = {"argv": [script, *words], "env": dict(env or {}), "log": str(log)}
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return Ended(json.loads(self._server.stdout.readline()), log.read_text())

    def run_text(self, text: str, env: Mapping[str, str] | None = None) -> Ended:
        """Run a line of shell, with a new interpreter under the name `python`."""
        line = f'python() {{ "{sys.executable}" "$@"; }}\n{text}'
        done = subprocess.run(
            ["bash", "-c", line], cwd=self.folder, env=self.environ | dict(env or {}), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        return Ended(done.returncode, done.stdout)


# The server: a process that has imported what scripts import, and computes nothing itself


def serve() -> None:
    """Fork a process for each request on standard input, wait for it, and print its exit code."""

    import flatout.yolo.evaluate
    import flatout.yolo.export.files
    import flatout.yolo.predict.detect
    import flatout.yolo.train  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run(request)
        print(_wait(pid), flush=True)


def _wait(pid: int) -> int:
    """Exit code of the process; if it takes too long, it is killed with all its children."""
    end = time.monotonic() + LIMIT_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.01)


def _run(request: dict[str, Any]) -> None:
    code = 99
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(request["env"])
        sys.argv = request["argv"]
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
