"""The end of a training: its last files, how it ended, `--on-done`, and the warnings kept in run.log."""

import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from flatout.engine import Callback, Callbacks, End, How, RunStart
from flatout.errors import FlatoutError, Interrupted, ResourceError
from flatout.ranks import LAST_FILES, Interrupts, StopRequested
from flatout.runs.budget import Spending

logger = logging.getLogger(__name__)

INTERNAL_ERROR = 70
CTRL_C = 130


@contextmanager
def finishing() -> Iterator[None]:
    """Inside the block the last files of a training are written: all is trained and saved, so signals wait for it.

    A disk that does not take them costs nothing but time: the message says how the run is completed.
    """
    with Interrupts(LAST_FILES):
        try:
            yield
        except ResourceError as error:
            raise ResourceError(
                f"{error} Every step is trained and saved: the same command then completes the run."
            ) from error.__cause__


class Ending:
    """Filled in by a training that stops early, as it was asked to."""

    why = ""


@contextmanager
def telling_end(callbacks: Callbacks, folder: Path) -> Iterator[Ending]:
    """Tell the callbacks how the block ended. Exceptions go on their way."""
    ending = Ending()
    try:
        yield ending
    except BaseException as error:
        callbacks.end(End(how=end_by(error)[0], why=one_line(str(error)), folder=folder, epoch=callbacks.epoch))
        raise
    how: How = "stopped" if ending.why else "finished"
    callbacks.end(End(how=how, why=one_line(ending.why), folder=folder, epoch=callbacks.epoch))


def end_by(error: BaseException) -> tuple[How, int]:
    """What an exception makes of a training, and the exit code of a process that ends with it."""
    if isinstance(error, Interrupted | StopRequested):
        return "interrupted", error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", CTRL_C
    return "failed", error.exit_code if isinstance(error, FlatoutError) else INTERNAL_ERROR


def one_line(text: str) -> str:
    """Without line ends, and without the zero byte, which no environment variable can hold."""
    return " ".join(text.replace("\0", " ").split())


# `--on-done COMMAND`: a command of the user's, run when a training has ended, however it did.
#
# What happened is told in environment variables and nowhere else, so that no name or message of ours is ever read as
# shell code. The exit code of the training stays what it is.
#
#     FLATOUT_OUTCOME    finished, stopped (by a budget or a number of steps), interrupted or failed
#     FLATOUT_EXIT_CODE  what this process is about to end with
#     FLATOUT_RUN        folder of the run; empty if it failed before there was one
#     FLATOUT_EPOCH      epochs that are complete
#     FLATOUT_MESSAGE    one line; empty where everything went as planned
#     FLATOUT_SECONDS, FLATOUT_COST   spent on this run so far; the cost is empty without --price


class OnDone(Callback):
    """Context manager around a training, and a callback of it, to hear where it is. Without a command, nothing."""

    def __init__(self, command: str, spending: Spending) -> None:
        self._command, self._spending = command, spending
        self._folder, self._epoch = "", 0
        self._end: End | None = None

    def start(self, run: RunStart) -> None:
        self._folder, self._epoch = str(run.folder.resolve()), run.epoch

    def end(self, end: End) -> None:
        self._end = end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._command and os.environ.get("RANK", "0") in ("", "0"):
            self._run(self.described(error))

    def described(self, error: BaseException | None) -> dict[str, str]:
        """The environment variables."""
        how, code = end_by(error) if error is not None else (self._end.how if self._end else "finished", 0)
        cost = self._spending.cost()
        return {
            "FLATOUT_OUTCOME": how,
            "FLATOUT_EXIT_CODE": str(code),
            "FLATOUT_RUN": self._folder,
            "FLATOUT_EPOCH": str(self._end.epoch if self._end is not None else self._epoch),
            "FLATOUT_MESSAGE": one_line(str(error) if error is not None else self._end.why if self._end else ""),
            "FLATOUT_SECONDS": f"{self._spending.seconds:.0f}",
            "FLATOUT_COST": "" if cost is None else f"{cost:.2f}",
        }

    def _run(self, variables: dict[str, str]) -> None:
        try:
            # A shell, because it is the user's own line; what we add to it is data.
            # It outlives us if a signal ends us meanwhile: `subprocess.run` would kill it.
            code = subprocess.Popen(self._command, shell=True, env=os.environ | variables).wait()
        except (OSError, ValueError) as error:
            logger.warning("--on-done could not be run: %s.", error)
            return
        if code:
            logger.warning("--on-done ended with exit code %d: %s", code, self._command)


# Warnings of a training, kept in its run folder (run.log): `flatout monitor` shows the last of them.
#
# A command asks for it by adding this callback; the library itself installs no handlers.

FILE_NAME = "run.log"


class KeepWarnings(Callback):
    """From the start of a run to its end; a continued run goes on in the same file."""

    def __init__(self) -> None:
        self._handler: _Lines | None = None

    def start(self, run: RunStart) -> None:
        self._handler = _Lines(run.folder / FILE_NAME)
        logging.getLogger("flatout").addHandler(self._handler)

    def end(self, end: End) -> None:
        if self._handler is not None:
            logging.getLogger("flatout").removeHandler(self._handler)
            self._handler = None


class _Lines(logging.Handler):
    """One line per warning, appended and closed again: a run may be killed at any moment, and warnings are rare."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self._path = path
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        # A full disk must not end a training for want of a warning.
        with suppress(OSError), self._path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(" ".join(self.format(record).split()) + "\n")
