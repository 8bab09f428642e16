"""The background of a run: makes its plots in a thread, one after the other, while the training goes on.

    training --submit(call)--> queue --one thread--> image files
             --wait()--> all of them are on disk

Most of the time of a plot is spent in OpenCV and NumPy, which let other threads run. Calls must not use the device:
they would wait for the steps that are queued there. So what is plotted is copied to the host first.
"""

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from flatout.errors import FlatoutError

logger = logging.getLogger(__name__)

BackgroundCall = Callable[[], object]
"""Makes a plot from what is on the host and writes it."""


class Background(AbstractContextManager["Background"]):
    """Makes plots in a thread, which starts with the first one. Leaving its block waits for all plots, however it ends.

    Plots are optional: an error is only logged as a warning.
    """

    def __init__(self) -> None:
        self._calls: queue.Queue[BackgroundCall | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def submit(self, call: BackgroundCall) -> None:
        """Make this plot after all earlier ones; does not wait."""
        if self._thread is None:
            # A daemon: a second Ctrl-C ends the process without its plots.
            self._thread = threading.Thread(target=self._plot_all, name="flatout-plot", daemon=True)
            self._thread.start()
        self._calls.put(call)

    def wait(self) -> None:
        """Wait until all plots so far are made."""
        self._calls.join()

    def __exit__(self, *exc_info: object) -> None:
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None

    def _plot_all(self) -> None:
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
