"""The end of a training: its last files, and how it ended, told once to its callbacks."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flatout.engine.callbacks import Callbacks, End, How
from flatout.engine.interrupts import LAST_FILES, Interrupts, StopRequested
from flatout.errors import FlatoutError, Interrupted, ResourceError

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
