"""Whose turn is it to build a store? One process builds, the others wait for it, but never for ever.

The lock is the kernel's: it is gone with its holder, however that one ends. What the kernel cannot know is whether a
holder on another machine, or one that was stopped, will ever go on. So the holder notes its progress beside the
lock, and a note that does not change for long enough is not waited for: the others then build for themselves.
"""

import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import BaseFileLock

logger = logging.getLogger(__name__)

NOTE_INTERVAL_S = 1.0
GRACE_S = 0.2
"""Waited without a word: by then a holder has said who it is."""


class Turn:
    """The right to build; `note` says how far it is."""

    def __init__(self, note_path: Path | None) -> None:
        self._note_path = note_path
        self._since = datetime.now().isoformat(" ", "seconds")
        self._noted_s = -NOTE_INTERVAL_S
        self.note(0)

    def note(self, done: int) -> None:
        """Tell those who wait how many items are done."""
        if self._note_path is None or time.monotonic() - self._noted_s < NOTE_INTERVAL_S:
            return
        self._noted_s = time.monotonic()
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": self._since, "done": done})
        with suppress(OSError):  # a full disk: nobody must wait less than they would
            self._note_path.write_text(text)


@contextmanager
def turn_to_build(lock_path: Path, *, patience_s: float) -> Iterator[Turn]:
    """Wait for the lock; blocks while its holder makes progress, and `patience_s` longer.

    Where no lock can be had (a read-only folder, a holder that hangs) the turn is a private one: whatever is
    built then must not rely on being alone.
    """
    from filelock import FileLock, Timeout  # 40 ms, which no worker has to wait for

    lock, note_path = FileLock(lock_path), lock_path.with_suffix(".owner")
    try:
        lock.acquire(timeout=GRACE_S, poll_interval=0.02)
    except Timeout:
        if not _wait_for(lock, note_path, patience_s):
            yield Turn(None)
            return
    except (OSError, NotImplementedError) as error:
        logger.info("No lock at %s (%s): building without one.", lock_path, error)
        yield Turn(None)
        return
    try:
        yield Turn(note_path)
    finally:
        with suppress(OSError):
            note_path.unlink(missing_ok=True)
        lock.release()


def _wait_for(lock: "BaseFileLock", note_path: Path, patience_s: float) -> bool:
    """Whether the lock could be had."""
    from filelock import Timeout

    note, changed_s = _read(note_path), time.monotonic()
    logger.warning("Waiting for %s to build the store of the same data.", _describe(note))
    while True:
        try:
            lock.acquire(timeout=min(0.5, patience_s), poll_interval=0.02)
            return True
        except Timeout:
            now = _read(note_path)
            if now != note:
                note, changed_s = now, time.monotonic()
            elif time.monotonic() - changed_s > patience_s:
                logger.warning(
                    "%s has made no progress for %g s: building a private store instead.", _describe(note), patience_s
                )
                return False


def _read(note_path: Path) -> dict[str, object]:
    try:
        note = json.loads(note_path.read_text())
    except (OSError, ValueError):
        return {}  # not written yet, or half written
    return note if isinstance(note, dict) else {}


def _describe(note: dict[str, object]) -> str:
    if not note:
        return "another process"
    return f"process {note.get('pid')} on {note.get('host')} (since {note.get('since')}, {note.get('done')} items)"
