"""Run the scripts at the root, each in a process of its own, forked from one that has imported torch already.

A fresh interpreter would spend most of its time importing. Fixture `scripts` in test_compat_commands.py.
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
    """A process that is over."""

    code: int
    """Negative: the signal that killed it."""
    said: str
    """On both of its outputs."""


class Scripts:
    """Runs `python train.py ...` in a folder that has cfg/, data/ and the scripts. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in (*SCRIPTS, "cfg", "data"):
            (folder / name).symlink_to(CHECKOUT / name)
        caches, paths = str(folder / "cache"), os.pathsep.join((str(CHECKOUT), os.environ.get("PYTHONPATH", "")))
        self.environ = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": caches}
        self._mother = subprocess.Popen(
            [sys.executable, "-c", "from tests.yolo.script_runs import serve; serve()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environ, cwd=folder,
        )  # fmt: skip

    def __enter__(self) -> "Scripts":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._mother.communicate()

    def run(self, script: str, words: Sequence[str], env: Mapping[str, str] | None = None) -> Ended:
        """To its end."""
        assert self._mother.stdin is not None and self._mother.stdout is not None
        log = self.folder / "said.txt"
        order = {"argv": [script, *words], "env": dict(env or {}), "log": str(log)}
        self._mother.stdin.write(json.dumps(order) + "\n")
        self._mother.stdin.flush()
        return Ended(json.loads(self._mother.stdout.readline()), log.read_text())

    def run_text(self, text: str, env: Mapping[str, str] | None = None) -> Ended:
        """A whole line of shell, with a fresh interpreter of the name `python`."""
        line = f'python() {{ "{sys.executable}" "$@"; }}\n{text}'
        done = subprocess.run(
            ["bash", "-c", line], cwd=self.folder, env=self.environ | dict(env or {}), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        return Ended(done.returncode, done.stdout)


# The other side: a process that has imported what scripts import, and computes nothing itself.


def serve() -> None:
    """Until standard input ends: fork a process per order, wait for it, tell its exit code."""

    import flatout.yolo.evaluate
    import flatout.yolo.export.files
    import flatout.yolo.predict.detect
    import flatout.yolo.train  # noqa: F401

    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run(order)
        print(_wait(pid), flush=True)


def _wait(pid: int) -> int:
    """Exit code of the process; one that takes too long is killed with everything it started."""
    end = time.monotonic() + LIMIT_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.01)


def _run(order: dict[str, Any]) -> None:
    code = 99
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(order["env"])
        sys.argv = order["argv"]
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
