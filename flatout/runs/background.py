"""The background of a run: makes plots and writes files in a thread, one after the other, while the training goes on.

    training --submit(call), write(file)--> queue --one thread--> files
             --wait()--> all of them are on disk

Most of that time is spent in OpenCV, in NumPy and in the system, which let other threads run. Calls must not use the
device: they would wait for the steps that are queued there. So whatever they need is copied to the host first.
"""

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from flatout.errors import FlatoutError, ResourceError
from flatout.safefiles import on_host, write_container

logger = logging.getLogger(__name__)

BackgroundCall = Callable[[], object]
"""Makes a plot, or writes a file, of what is on the host."""


class Background(AbstractContextManager["Background"]):
    """Works in a thread, which starts with the first call. Leaving its block waits for all calls, however it ends.

    For plots and for files that no run is continued from: an error is only logged as a warning.
    """

    def __init__(self) -> None:
        self._calls: queue.Queue[BackgroundCall | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._is_written = threading.Event()
        self._is_written.set()

    def submit(self, call: BackgroundCall) -> None:
        """Make this plot after all earlier calls; does not wait."""
        if self._thread is None:
            # A daemon: a second Ctrl-C ends the process without its plots.
            self._thread = threading.Thread(target=self._work, name="flatout-background", daemon=True)
            self._thread.start()
        self._calls.put(call)

    def write(self, path: Path, sections: Mapping[str, object]) -> None:
        """Write a container file after all earlier calls, with the values that its tensors have now.

        Waits only for the copy to the host and, because states are large, until the one before is written.
        """
        self.wait_for_files()
        content = on_host(sections)
        self._is_written.clear()
        self.submit(partial(self._write, path, content))

    def wait_for_files(self) -> None:
        """Wait until all files so far are written."""
        self._is_written.wait()

    def wait(self) -> None:
        """Wait until all calls so far are done."""
        self._calls.join()

    def __exit__(self, *exc_info: object) -> None:
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except (FlatoutError, ImportError, OSError, ValueError) as error:
                logger.warning("A plot could not be made: %s. Training goes on.", str(error).rstrip("."))
            except Exception:  # whatever it is: a plot must neither end a training nor the plots after it
                logger.warning("A plot could not be made. Training goes on.", exc_info=True)
            finally:
                del call  # the images in it need not wait for the next plot to be released
                self._calls.task_done()
        self._calls.task_done()

    def _write(self, path: Path, sections: Mapping[str, object]) -> None:
        try:
            write_container(path, sections)
        except ResourceError as error:
            logger.warning("%s Training goes on.", error)
        finally:
            self._is_written.set()
