"""Signals between two trainings of one job, while no loop hears them: they end the job as they end a training.

A loop takes them over while it trains (flatout.engine.interrupts) and gives them back. Outside of it nothing is
unsaved, so that the process may stop wherever it is, as it does for Ctrl-C.
"""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from flatout.engine.callbacks import Callback, RunStart
from flatout.engine.interrupts import ENDING
from flatout.engine.job import Tick
from flatout.errors import Interrupted


class _Asked(KeyboardInterrupt):
    """A signal that asked for the end. No Exception: what goes on after errors must not go on after this."""


class HeardBetween(Callback):
    """Context manager: inside the block SIGTERM, SIGINT and SIGHUP raise Interrupted (exit code 75).

    As a callback of the trainings it makes sure: an exception that is raised while C code calls Python may be lost, and
    a loop that starts after that must hear of the signal all the same. Ignored signals stay ignored.
    """

    def __init__(self) -> None:
        self._asked: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def start(self, run: RunStart) -> None:
        self._ask_again()

    def log(self, tick: Tick) -> None:
        self._ask_again()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if isinstance(error, _Asked):
            raise Interrupted.by(str(error)) from None

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = signal.Signals(number)
        raise _Asked(self._asked.name)

    def _ask_again(self) -> None:
        if self._asked is not None:
            # Once: a second Ctrl-C would end the loop before it has saved.
            asked, self._asked = self._asked, None
            # To whoever hears signals now: the loop, which saves first.
            os.kill(os.getpid(), asked)
