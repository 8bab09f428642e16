"""Signals that ask a training to end, wherever it is, and what is answered within seconds.

    before the first step, between trainings   StopSignals: raises StopRequested there; exit code 75
    in the loop, something is unsaved          Interrupts: a flag; the loop saves where it can, then ends; exit code 75
    in the loop, nothing is unsaved            Interrupts: raises StopRequested there; exit code 75
    SIGINT a second time                       ends now, exit code 130
    SIGUSR1 in the loop                        save, then go on

A handler of Python's runs between two of its instructions: not while torch computes a step that takes a minute. A
command therefore has a thread that hears of signals from the kernel (`watched`). A signal that was ignored when the
training began stays ignored: that is how nohup, and shells with their background jobs, ask for it. No torch here.
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

from flatout.errors import FlatoutError, Interrupted

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAVING = signal.SIGUSR1
STOPPED_AT_ONCE = 130
ANSWER_S = 3.0
"""How long the watching thread leaves the answer to the main thread."""
SAME_WISH_S = 2.0
"""Signals that come so soon after the first are the same wish: launchers signal processes and their groups."""
STEP_FIRST = "the step under way is finished first, then everything is saved"
LAST_FILES = "training is over, only its last files are being written"
_SHOW_CURSOR = b"\x1b[?25h"


class StopRequested(KeyboardInterrupt):
    """A signal asked for the end, where nothing is unsaved. The text is the whole story.

    No Exception: what goes on after errors must not go on after this.
    """

    exit_code = Interrupted.exit_code


class _Listener:
    """Takes over the signals for a block, and gives them back."""

    nothing_unsaved = True
    """Whether the process may end here and now without losing anything."""
    meanwhile: str | None = None
    """What to say while a request is being obeyed, and takes long."""

    def __init__(self) -> None:
        self.requested: str | None = None
        """Name of the first signal that asked for the end, such as "SIGTERM"."""
        self._num_ctrl_c = 0
        self._pid = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    def _listen(self, *numbers: signal.Signals) -> None:
        """Only the main thread can receive signals. Elsewhere this does nothing, and nothing is ever requested."""
        if threading.current_thread() is threading.main_thread():
            _listeners.append(self)
            for number in numbers:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._receive)

    def _hand_back(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            # None: it was set by code other than Python's, which cannot be restored from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self in _listeners:
            _listeners.remove(self)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A child that was forked off: it has nothing to save.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        global _heard_s
        _heard_s = time.monotonic()
        self._num_ctrl_c += number == signal.SIGINT
        if self._num_ctrl_c > 1:
            stop_at_once()
        self._obey(signal.Signals(number))

    def _obey(self, number: signal.Signals) -> None:
        """A signal asked for the end."""
        raise NotImplementedError


class StopSignals(_Listener):
    """Context manager: inside the block SIGTERM, SIGINT and SIGHUP end it with Interrupted (exit code 75).

    For wherever nothing is unsaved: before a training's loop, and between two trainings of one job. A loop takes the
    signals over while it trains (`Interrupts`) and gives them back.
    """

    def __init__(self) -> None:
        super().__init__()
        self._obeyed_s = float("-inf")
        self.has_trained = False

    def __enter__(self) -> Self:
        self._listen(*ENDING)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hand_back()
        # C code that is interrupted while it calls Python, such as an import, makes an error of its own of it.
        is_ours = isinstance(error, StopRequested) or not isinstance(error, FlatoutError | SystemExit)
        if self.requested is not None and error is not None and is_ours:
            raise Interrupted(self.text()) from None

    def text(self) -> str:
        if self.has_trained:
            return str(Interrupted.by(self.requested or ""))
        return nothing_lost(self.requested or "")

    def _obey(self, number: signal.Signals) -> None:
        self.requested = self.requested or number.name
        if time.monotonic() - self._obeyed_s > SAME_WISH_S:
            self._obeyed_s = time.monotonic()
            raise StopRequested(self.text())


class Interrupts(_Listener):
    """Context manager: inside the block signals set flags; afterwards they do what they did before.

    While `nothing_unsaved` is set, a signal that asks for the end does not wait for the step: the block ends with
    Interrupted (exit code 75).
    """

    nothing_unsaved = False

    def __init__(self, meanwhile: str = STEP_FIRST) -> None:
        """`meanwhile` is said to somebody who has to wait for the end."""
        super().__init__()
        self.save_requested = False
        """Set by SIGUSR1; see `take_save_request`."""
        self._stops_at_once = False
        self.meanwhile = meanwhile

    def take_save_request(self) -> bool:
        """Whether a save was asked for since the last call. Ask before saving: a signal during the save then counts."""
        wanted, self.save_requested = self.save_requested, False
        return wanted

    @contextmanager
    def stopping_at_once(self) -> Iterator[None]:
        """Inside this block too, a signal that asks for the end raises StopRequested; the caller saves."""
        self._stops_at_once = True
        try:
            if self.requested is not None:
                raise StopRequested(str(Interrupted.by(self.requested)))
            yield
        finally:
            self._stops_at_once = False

    def __enter__(self) -> Self:
        # An exception that is raised while C code calls Python may be lost; the wish must not be.
        self.requested = next((each.requested for each in _listeners if each.requested), None)
        self._listen(*ENDING, SAVING)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hand_back()
        for outer in _listeners:
            if isinstance(outer, StopSignals):
                outer.has_trained = True
        if isinstance(error, StopRequested):
            raise Interrupted(str(error)) from None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == SAVING:
            self.save_requested = True
        else:
            super()._receive(number, frame)

    def _obey(self, number: signal.Signals) -> None:
        is_first, self.requested = self.requested is None, self.requested or number.name
        if is_first and (self.nothing_unsaved or self._stops_at_once):
            raise StopRequested(str(Interrupted.by(number.name)))


class PassedOn(_Listener):
    """Context manager: inside the block signals are for others, which save and end, or save and go on."""

    nothing_unsaved = False

    def __init__(self, pass_on: Callable[[signal.Signals], None]) -> None:
        super().__init__()
        self._pass_on = pass_on

    def __enter__(self) -> Self:
        self._listen(*ENDING, SAVING)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hand_back()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._pass_on(signal.Signals(number))


_heard_s = float("-inf")
"""When a handler of Python's last ran, by the monotonic clock."""
_listeners: list[_Listener] = []
"""Blocks that have taken over the signals of this process, the innermost last."""


@contextmanager
def watched() -> Iterator[None]:
    """From here to the end of the block a training command answers signals, even while C code keeps the main thread.

    Until a `StopSignals` or `Interrupts` takes over there is nothing to clean up, and the process ends at once. While
    the interpreter shuts down, which takes a second with torch, signals no longer change the exit code.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=(reader,), name="flatout-signals", daemon=True)
    thread.start()
    try:
        with _AtOnce():
            yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        thread.join(ANSWER_S)
        # Now and not before the block: what is registered last runs first. Once, however many commands a process runs.
        atexit.unregister(ignore_ending)
        atexit.register(ignore_ending)


class _AtOnce(_Listener):
    """While a command imports what it needs."""

    def __enter__(self) -> None:
        self._listen(*ENDING)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hand_back()

    def _obey(self, number: signal.Signals) -> None:
        _end_now(nothing_lost(number.name), Interrupted.exit_code)


def _watch(reader: int) -> None:
    """In a thread: the kernel tells of a signal by a byte, which is its number. Ends when nobody writes any more."""
    num_ctrl_c, asked_s, asked = 0, 0.0, None
    while True:
        left_s = None if asked is None else max(0.0, asked_s + ANSWER_S - time.monotonic())
        if select.select([reader], [], [], left_s)[0]:
            numbers = os.read(reader, 64)
            if not numbers:
                break
            num_ctrl_c += numbers.count(signal.SIGINT)
            if num_ctrl_c > 1:
                stop_at_once()
            if asked is None and (found := [number for number in numbers if number in ENDING]):
                asked, asked_s = signal.Signals(found[0]), time.monotonic()
        elif asked is not None:
            _see_that_it_is_answered(asked, asked_s)
            asked = None
    os.close(reader)


def _see_that_it_is_answered(number: signal.Signals, asked_s: float) -> None:
    if not _listeners:
        return
    listener = _listeners[-1]
    # The handler may run a moment before this thread hears of the signal.
    was_heard = _heard_s > asked_s - 1
    if listener.nothing_unsaved and not was_heard:
        _end_now(nothing_lost(number.name), Interrupted.exit_code)
    if not listener.nothing_unsaved and listener.meanwhile is not None:
        _write(f"{number.name}: {listener.meanwhile}.")


def nothing_lost(name: str) -> str:
    """For a signal that came before anything was trained."""
    return f"{name}: stopped before the first step, nothing is lost. Run the same command again."


def ignore_ending() -> None:
    """For a process that is about to end by itself: SIGTERM and SIGHUP change nothing any more."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def stop_at_once() -> None:
    """End without another thought: files on disk are whole at any moment, and workers end with us."""
    _end_now("stopped at once; what was saved is untouched. Run the same command again.", STOPPED_AT_ONCE)


def _end_now(text: str, code: int) -> None:
    _write(text)
    os._exit(code)


def _write(text: str) -> None:
    """Without Python's buffers, which the main thread may have locked."""
    # A progress bar may have hidden the cursor, and nobody else will bring it back.
    is_terminal = os.isatty(2)
    os.write(2, (_SHOW_CURSOR + b"\n" if is_terminal else b"") + f"flatout: {text}\n".encode())
