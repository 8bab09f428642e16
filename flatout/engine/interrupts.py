"""Signals as wishes: the training hears them at the end of a step, when it can save.

    SIGTERM, SIGINT, SIGHUP  -> save, then end        SIGUSR1 -> save, then go on
    SIGINT a second time     -> end now, exit code 130

A handler sets a flag and nothing else; what to do about it is the loop's. A signal that was ignored when training began
stays ignored: that is how nohup, and shells with their background jobs, ask for it.
"""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAVING = signal.SIGUSR1
STOPPED_AT_ONCE = 130
_SHOW_CURSOR = b"\x1b[?25h"


class Interrupts:
    """Context manager: inside the block signals set flags; afterwards they do what they did before.

    Only the main thread can receive signals. Elsewhere this does nothing, and nothing is ever requested.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        """Name of the first signal that asked for the end, such as "SIGTERM"."""
        self.save_requested = False
        """Set by SIGUSR1; see `take_save_request`."""
        self._num_ctrl_c = 0
        self._before: dict[signal.Signals, Any] = {}

    def take_save_request(self) -> bool:
        """Whether a save was asked for since the last call. Ask before saving: a signal during the save then counts."""
        wanted, self.save_requested = self.save_requested, False
        return wanted

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (*ENDING, SAVING):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._before:
            number, handler = self._before.popitem()
            # None: it was set by code other than Python's, which cannot be restored from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == SAVING:
            self.save_requested = True
            return
        self.requested = self.requested or signal.Signals(number).name
        self._num_ctrl_c += number == signal.SIGINT
        if self._num_ctrl_c > 1:
            stop_at_once()


def ignore_ending() -> None:
    """For a process that is about to end by itself: SIGTERM changes nothing any more."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def stop_at_once() -> None:
    """End without another thought: files on disk are whole at any moment, and workers end with us."""
    # A progress bar may have hidden the cursor, and nobody else will bring it back.
    cursor = _SHOW_CURSOR if os.isatty(2) else b""
    os.write(2, cursor + b"\nflatout: stopped at once; what was saved is untouched. Run the same command again.\n")
    os._exit(STOPPED_AT_ONCE)
