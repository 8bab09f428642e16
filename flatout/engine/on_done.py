"""`--on-done COMMAND`: a command of the user's, run when a training has ended, however it did.

What happened is told in environment variables and nowhere else, so that no name or message of ours is ever read as
shell code. The exit code of the training stays what it is.

    FLATOUT_OUTCOME    finished, stopped (by a budget or a number of steps), interrupted or failed
    FLATOUT_EXIT_CODE  what this process is about to end with
    FLATOUT_RUN        folder of the run; empty if it failed before there was one
    FLATOUT_EPOCH      epochs that are complete
    FLATOUT_MESSAGE    one line; empty where everything went as planned
    FLATOUT_SECONDS, FLATOUT_COST   spent on this run so far; the cost is empty without --price
"""

import logging
import os
import subprocess
from types import TracebackType
from typing import Self

from flatout.engine.callbacks import Callback, End, RunStart
from flatout.engine.ending import end_by, one_line
from flatout.engine.spending import Spending

logger = logging.getLogger(__name__)


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
