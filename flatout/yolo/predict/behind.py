"""Writing behind: work done by threads after it was handed over, and finished in the order of handing over.

work --pool of threads--> what is left to do, one after the other, in a thread of its own
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self, TypeVar

T = TypeVar("T")


class WriteBehind:
    """Runs `work` side by side and `then` in order, at most `depth` behind. A context manager."""

    def __init__(self, *, threads: int, depth: int) -> None:
        self._room = threading.Semaphore(depth)
        self._waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[Any], None]] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="flatout-draw")
        self._finishing = threading.Thread(target=self._finish, name="flatout-write", daemon=True)
        self._finishing.start()

    def submit(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Hand over; blocks while too much is waiting. Raises the error of what was handed over before."""
        self._room.acquire()
        if self._error is not None:
            self._room.release()
            raise self._error
        self._waiting.put((self._pool.submit(work), then))

    def close(self) -> None:
        """Wait until everything is done; raises the first error, once. May be called twice."""
        if self._finishing.is_alive():
            self._waiting.put(None)
            self._finishing.join()
            self._pool.shutdown()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _finish(self) -> None:
        while (handed := self._waiting.get()) is not None:
            future, then = handed
            try:
                # After an error nothing more is written: what came behind it may depend on it.
                if self._error is None:
                    then(future.result())
            except BaseException as error:
                self._error = error
            finally:
                self._room.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, *rest: object) -> None:
        try:
            self.close()
        except BaseException:
            # The error that ended the block is the one to tell.
            if kind is None:
                raise
