"""Small trainings of every job, each in its own process, forked from one that has imported torch.

python -m tests.runs.every_job serves requests on standard input; the fixture `jobs` (test_every_job.py) sends them. A
request has the arguments of a command, a folder, environment variables and a change that the process makes first.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from flatout.ranks.launch import free_port
from tests.feed.injections import CHECKOUT
from tests.old_runs.situations import SITUATIONS


class Done(NamedTuple):
    """A command that has ended."""

    code: int
    out: str
    err: str
    saves: int
    """Number of saved checkpoints."""
    seconds: float
    """Run time, without imports."""


class Jobs:
    """Runs commands. A context manager."""

    def __init__(self) -> None:
        environ = os.environ | {
            "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "FLATOUT_STOP_AFTER": "",
        }  # fmt: skip
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.runs.every_job"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environ, cwd=CHECKOUT,
        )  # fmt: skip

    def __enter__(self) -> "Jobs":
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(60)
        self._server.stdout.close()

    def run(self, folder: Path, *words: str, ranks: int = 1, change: str = "", **environ: str) -> list[Done]:
        """Run `flatout WORDS` in a folder, on this many ranks; `change` is one of CHANGES."""
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        request = {
            "words": words, "folder": str(folder), "change": change,
            "environ": [
                environ | (rendezvous | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {})
                for rank in range(ranks)
            ],
        }  # fmt: skip
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return [Done(*each) for each in json.loads(self._server.stdout.readline())]


class JobFolder:
    """A folder with the data of a job, and its command."""

    def __init__(self, jobs: Jobs, job: str, folder: Path) -> None:
        self._jobs, self.job, self.folder = jobs, job, folder
        self.situation = SITUATIONS[job]
        self.run_folder = folder / self.situation.run

    def train(self, *more: str, **settings: Any) -> Done:
        """Run the training command of the job, with further flags."""
        return self.ranks(1, *more, **settings)[0]

    def ranks(self, num: int, *more: str, stop_after: int | None = None, change: str = "") -> list[Done]:
        environ = {} if stop_after is None else {"FLATOUT_STOP_AFTER": str(stop_after)}
        return self._jobs.run(
            self.folder, *self.situation.command, *more, ranks=num, change=change, **environ
        )  # fmt: skip

    def command(self, *words: str) -> Done:
        return self._jobs.run(self.folder, *words)[0]

    @property
    def flags(self) -> Sequence[str]:
        return self.situation.command[2:]

    @property
    def epochs(self) -> list[int]:
        return [json.loads(line)["epoch"] for line in (self.run_folder / "log.jsonl").read_text().splitlines()]

    @property
    def record(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.run_folder / "run.json").read_text())
        return content


# The server process


def _compile_cheaply() -> None:
    import functools

    import torch

    torch.compile = functools.partial(torch.compile, backend="eager")


def _decide_immediately() -> None:
    from flatout.engine import compile

    compile.WARMUP_STEPS, compile.MIN_INTERVALS = 0, 1


def _terminate_at_step(number: int) -> None:
    import signal

    from flatout.engine.loop import Loop

    train_step = Loop._train_step

    def train(self: Loop, batch: Any) -> None:
        if self.steps_here == number:
            os.kill(os.getpid(), signal.SIGTERM)
        train_step(self, batch)

    Loop._train_step = train  # type: ignore[method-assign]


CHANGES: Mapping[str, Callable[[], None]] = {
    "": lambda: None,
    "compile cheaply": _compile_cheaply,
    "decide immediately": _decide_immediately,
    "SIGTERM at step 7": lambda: _terminate_at_step(7),
}


def serve() -> None:
    """Serve requests until standard input ends."""
    import flatout.defect.train
    import flatout.spike.train
    import flatout.yolo.train  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryDirectory() as name:
            files = [Path(name) / str(rank) for rank in range(len(request["environ"]))]
            pids = [
                _start(request, environ, file) for environ, file in zip(request["environ"], files, strict=True)
            ]  # fmt: skip
            began_s = time.monotonic()
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            seconds = time.monotonic() - began_s
            texts = [[Path(f"{file}.{kind}").read_text() for kind in ("out", "err", "saves")] for file in files]
        answer = [(code, out, err, len(saves), seconds) for code, (out, err, saves) in zip(codes, texts, strict=True)]
        print(json.dumps(answer), flush=True)


def _start(request: Mapping[str, Any], environ: Mapping[str, str], file: Path) -> int:
    for kind in ("out", "err", "saves"):
        Path(f"{file}.{kind}").touch()
    if (pid := os.fork()) == 0:
        _run_flatout(request, environ, file)
    return pid


def _run_flatout(request: Mapping[str, Any], environ: Mapping[str, str], file: Path) -> NoReturn:
    code = 99
    try:
        for number, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{file}.{kind}", os.O_WRONLY), number)
        os.chdir(request["folder"])
        os.environ.update(environ)
        _count_saves(Path(f"{file}.saves"))
        CHANGES[request["change"]]()
        from flatout.__main__ import main

        code = main(request["words"])
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _count_saves(path: Path) -> None:
    from flatout.engine.checkpoints import CheckpointStore

    save = CheckpointStore.save

    def counted(self: CheckpointStore, sections: Mapping[str, object]) -> None:
        save(self, sections)
        with path.open("a") as file:
            file.write(".")

    CheckpointStore.save = counted  # type: ignore[method-assign]


if __name__ == "__main__":
    serve()
