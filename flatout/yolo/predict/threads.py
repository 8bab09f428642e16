"""Threads around the network: reading ahead of it, and writing behind it.

calls --one thread asks for them--> pool of threads --> results in the order of the calls
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")

POLL_S = 0.1
"""How often a reader that waits looks whether it should stop."""


class ReadAhead(Generic[T]):
    """Results of calls, in order, at most `depth` of them ahead. A context manager; `close()` may be called twice."""

    def __init__(self, calls: Iterable[Callable[[], T]], *, threads: int, depth: int) -> None:
        """`calls` is iterated in a thread of its own: what it does between two calls is off the path as well."""
        self._room = threading.Semaphore(depth)
        self._made: queue.SimpleQueue[Future[T] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="flatout-read")
        self._asking = threading.Thread(target=self._ask, args=(calls,), name="flatout-ask", daemon=True)
        self._asking.start()

    def results(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[T]:
        """Until the calls end or `stopped` says so; blocks while the next result is not there.

        An exception of a call, or of the iteration over the calls, is raised here.
        """
        while not stopped():
            try:
                future = self._made.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if future is None:
                return
            self._room.release()
            yield future.result()

    @property
    def is_drained(self) -> bool:
        """Is nothing waiting at this moment?"""
        return self._made.empty()

    def close(self) -> None:
        """End the threads; a call that runs is waited for."""
        self._closed.set()
        self._room.release()  # it may be waiting for room
        self._asking.join()
        self._pool.shutdown(cancel_futures=True)

    def _ask(self, calls: Iterable[Callable[[], T]]) -> None:
        try:
            waiting = iter(calls)
            while True:
                # Room first: a call of a live source should be about what is there when its turn comes.
                self._room.acquire()
                if self._closed.is_set():
                    return
                if (call := next(waiting, None)) is None:
                    return
                self._made.put(self._pool.submit(call))
        except Exception as error:
            failed: Future[T] = Future()
            failed.set_exception(error)
            self._made.put(failed)
        finally:
            self._made.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


# Writing behind: work done by threads after it was handed over, and finished in the order of handing over.
#
# work --pool of threads--> what is left to do, one after the other, in a thread of its own


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
