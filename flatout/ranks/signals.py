"""Signals that stop a training at any point, each answered within seconds.

    before the first step, between trainings   StopSignals: raises StopRequested; exit code 75
    in the loop, with unsaved steps            Interrupts: sets a flag; the loop saves as soon as it can; exit code 75
    in the loop, everything saved              Interrupts: raises StopRequested; exit code 75
    SIGINT a second time                       ends immediately, exit code 130
    SIGUSR1 in the loop                        saves and continues

Python runs signal handlers between two of its instructions: not while torch computes a step that takes a minute. A
command therefore has a thread that learns of signals from the kernel (`watched`). A signal that is ignored when the
training starts stays ignored, as nohup and background jobs of shells require. Does not import torch.
"""

import atexit
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from flatout.errors import CTRL_C_CODE, FlatoutError, Interrupted

STOP_SIGNALS: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAVE_SIGNAL = signal.SIGUSR1
ANSWER_S = 3.0
"""How long the watching thread waits for the main thread to react."""
SAME_REQUEST_S = 2.0
"""Signals that follow the first this soon are one request: launchers signal processes and also their groups."""
STEP_FIRST = "finishing the current step, then saving"
LAST_FILES = "training is finished; writing the final files"
_SHOW_CURSOR = b"\x1b[?25h"


class StopRequested(KeyboardInterrupt):
    """A signal requested the end while nothing was unsaved. The text is the message for the user.

    Not an Exception: code that continues after errors must not continue after this.
    """

    exit_code = Interrupted.exit_code


class _SignalBlock:
    """Base of context managers that handle signals inside a block and restore the handlers afterwards."""

    nothing_unsaved = True
    """Whether the process may end immediately without losing anything."""
    meanwhile: str | None = None
    """Message for a user who has to wait for the end."""
    handled = STOP_SIGNALS

    def __init__(self) -> None:
        self.requested: str | None = None
        """Name of the first signal that requested the end, such as "SIGTERM"."""
        self._num_ctrl_c = 0
        self._pid = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Handle the signals. Does nothing outside of the main thread, the only one that can receive signals."""
        if threading.current_thread() is threading.main_thread():
            _blocks.append(self)
            for number in self.handled:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._before:
            number, handler = self._before.popitem()
            # None: the handler was set by C code and cannot be restored from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self in _blocks:
            _blocks.remove(self)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked child has nothing to save.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        global _handled_s
        _handled_s = time.monotonic()
        self._num_ctrl_c += number == signal.SIGINT
        if self._num_ctrl_c > 1:
            stop_at_once()
        self._on_stop_signal(signal.Signals(number))

    def _on_stop_signal(self, number: signal.Signals) -> None:
        """Called for each signal that requests the end."""
        raise NotImplementedError


class StopSignals(_SignalBlock):
    """Context manager: SIGTERM, SIGINT and SIGHUP end the block with Interrupted (exit code 75).

    For code with nothing unsaved: before the training loop, and between two trainings of one job. While the loop runs,
    its `Interrupts` handle the signals instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self._raised_s = float("-inf")
        self.has_trained = False

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        # C code that calls Python, such as an import, may turn the exception into an error of its own.
        is_ours = isinstance(error, StopRequested) or not isinstance(error, FlatoutError | SystemExit)
        if self.requested is not None and error is not None and is_ours:
            raise Interrupted(self.text()) from None

    def text(self) -> str:
        if self.has_trained:
            return str(Interrupted.by(self.requested or ""))
        return nothing_lost(self.requested or "")

    def _on_stop_signal(self, number: signal.Signals) -> None:
        """Raise StopRequested, but only once for signals that belong to one request."""
        self.requested = self.requested or number.name
        if time.monotonic() - self._raised_s > SAME_REQUEST_S:
            self._raised_s = time.monotonic()
            raise StopRequested(self.text())


class Interrupts(_SignalBlock):
    """Context manager: inside the block signals set flags, which the training loop checks.

    While `nothing_unsaved` is set, a signal that requests the end does not wait for the step: the block ends with
    Interrupted (exit code 75).
    """

    nothing_unsaved = False
    handled = (*STOP_SIGNALS, SAVE_SIGNAL)

    def __init__(self, meanwhile: str = STEP_FIRST) -> None:
        """`meanwhile` is the message for a user who has to wait for the end."""
        super().__init__()
        self.save_requested = False
        """Set by SIGUSR1; see `take_save_request`."""
        self._stops_at_once = False
        self.meanwhile = meanwhile

    def take_save_request(self) -> bool:
        """Whether a save was requested since the last call. Call it before saving, so that a signal during the save
        causes another one."""
        requested, self.save_requested = self.save_requested, False
        return requested

    @contextmanager
    def stopping_at_once(self) -> Iterator[None]:
        """Inside this block, too, a signal that requests the end raises StopRequested.

        The caller must catch it and save first: its message says that everything is saved, and is shown if the
        exception leaves the `with` block of the `Interrupts`.
        """
        self._stops_at_once = True
        try:
            if self.requested is not None:
                raise StopRequested(str(Interrupted.by(self.requested)))
            yield
        finally:
            self._stops_at_once = False

    def __enter__(self) -> Self:
        # An exception raised while C code calls Python may be lost; the request must not be.
        self.requested = next((each.requested for each in _blocks if each.requested), None)
        return super().__enter__()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        for outer in _blocks:
            if isinstance(outer, StopSignals):
                outer.has_trained = True
        if isinstance(error, StopRequested):
            raise Interrupted(str(error)) from None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == SAVE_SIGNAL:
            self.save_requested = True
        else:
            super()._receive(number, frame)

    def _on_stop_signal(self, number: signal.Signals) -> None:
        """Record the first signal; raise StopRequested if the process need not finish its step."""
        is_first, self.requested = self.requested is None, self.requested or number.name
        if is_first and (self.nothing_unsaved or self._stops_at_once):
            raise StopRequested(str(Interrupted.by(number.name)))


class ForwardedSignals(_SignalBlock):
    """Context manager: inside the block signals are forwarded to other processes, which save and end or continue."""

    nothing_unsaved = False
    handled = (*STOP_SIGNALS, SAVE_SIGNAL)

    def __init__(self, forward: Callable[[signal.Signals], None]) -> None:
        super().__init__()
        self._forward = forward

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._forward(signal.Signals(number))


_handled_s = float("-inf")
"""When a Python signal handler last ran, by the monotonic clock."""
_blocks: list[_SignalBlock] = []
"""The active blocks that handle signals of this process, the innermost last."""


@contextmanager
def watched() -> Iterator[None]:
    """Inside the block a training command answers signals, even while C code occupies the main thread.

    Until a `StopSignals` or `Interrupts` block begins there is nothing to clean up, and the process ends immediately.
    While the interpreter shuts down, which takes a second with torch, signals no longer change the exit code.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=(reader,), name="flatout-signals", daemon=True)
    thread.start()
    try:
        with _EndImmediately():
            yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        thread.join(ANSWER_S)
        # Registered after the block, because what is registered last runs first; only once per process.
        atexit.unregister(ignore_stop_signals)
        atexit.register(ignore_stop_signals)


class _EndImmediately(_SignalBlock):
    """Used while a command imports its modules: a signal ends the process, as nothing is lost."""

    def _on_stop_signal(self, number: signal.Signals) -> None:
        _end_now(nothing_lost(number.name), Interrupted.exit_code)


def _watch(reader: int) -> None:
    """Runs in a thread. For each signal the kernel writes a byte, its number, to the pipe; ends when that is closed."""
    num_ctrl_c, received_s, received = 0, 0.0, None
    while True:
        left_s = None if received is None else max(0.0, received_s + ANSWER_S - time.monotonic())
        if select.select([reader], [], [], left_s)[0]:
            numbers = os.read(reader, 64)
            if not numbers:
                break
            num_ctrl_c += numbers.count(signal.SIGINT)
            if num_ctrl_c > 1:
                stop_at_once()
            if received is None and (found := [number for number in numbers if number in STOP_SIGNALS]):
                received, received_s = signal.Signals(found[0]), time.monotonic()
        elif received is not None:
            _react_if_unanswered(received, received_s)
            received = None
    os.close(reader)


def _react_if_unanswered(number: signal.Signals, received_s: float) -> None:
    """End the process if nothing is unsaved and the main thread has not reacted; tell the user who has to wait."""
    if not _blocks:
        return
    block = _blocks[-1]
    # The handler may run a moment before this thread learns of the signal.
    was_handled = _handled_s > received_s - 1
    if block.nothing_unsaved and not was_handled:
        _end_now(nothing_lost(number.name), Interrupted.exit_code)
    if not block.nothing_unsaved and block.meanwhile is not None:
        _write(f"{number.name}: {block.meanwhile}.")


def nothing_lost(name: str) -> str:
    """The message for a signal that came before anything was trained."""
    return f"{name}: stopped before the first step; nothing is lost. Run the same command again."


def ignore_stop_signals() -> None:
    """Ignore SIGTERM and SIGHUP in a process that is about to end by itself."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def stop_at_once() -> None:
    """End immediately. Files on disk are complete at any time, and workers end with this process."""
    _end_now("stopped immediately; everything saved so far is kept. Run the same command again.", CTRL_C_CODE)


def _end_now(text: str, code: int) -> None:
    _write(text)
    os._exit(code)


def _write(text: str) -> None:
    """Write to stderr without Python's buffers, which the main thread may have locked."""
    # A progress bar may have hidden the cursor, and will not restore it.
    is_terminal = os.isatty(2)
    os.write(2, (_SHOW_CURSOR + b"\n" if is_terminal else b"") + f"flatout: {text}\n".encode())
