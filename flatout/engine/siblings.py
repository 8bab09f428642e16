"""Processes of the same training on this host, told from later ones that happen to have the same number."""

import os
import signal
from contextlib import suppress
from pathlib import Path

_AFTER_NAME_START_TIME = 19
"""Of the fields behind the name in /proc/PID/stat, the one that says when the process was started."""


def born_ticks(pid: int) -> int | None:
    """When a process was started, in ticks since the host was; None if there is none, or no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name stands in brackets and may contain anything, brackets too.
    return int(text.rpartition(")")[2].split()[_AFTER_NAME_START_TIME])


def kill_sibling(pid: int, born: int) -> bool:
    """SIGKILL, if the process is the one that was meant; whether it was."""
    if born_ticks(pid) != born:
        return False
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False
