"""Warnings of a training, kept in its run folder (run.log): `flatout monitor` shows the last of them.

A command asks for it by adding this callback; the library itself installs no handlers.
"""

import logging
from contextlib import suppress
from pathlib import Path

from flatout.engine.callbacks import Callback, End, RunStart

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
