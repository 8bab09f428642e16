"""Threads around the network: prefetching calls, and a write queue.

Prefetcher   calls --one thread submits them--> pool of threads --> results in the order of the calls
WriteQueue   work --pool of threads--> rest of the work in one thread, in the order of submission
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")

POLL_S = 0.1
"""How often `results` looks at `stopped` while no call is submitted; a running call is waited for."""


class Closing:
    """A context manager that calls `close()` at the end; an error of the block counts more than one of `close()`."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, *rest: object) -> None:
        try:
            self.close()
        except BaseException:  # whatever it is: the error that ended the block is the one to raise
            if kind is None:
                raise


class Prefetcher(Closing, Generic[T]):
    """Runs calls in threads, at most `depth` ahead, and returns their results in order.

    A context manager; `close()` may be called twice.
    """

    def __init__(self, calls: Iterable[Callable[[], T]], *, threads: int, depth: int) -> None:
        """`calls` is iterated in a thread of its own, so that its own work does not block the reader, either."""
        self._room = threading.Semaphore(depth)
        self._made: queue.SimpleQueue[Future[T] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="flatout-read")
        self._submitter = threading.Thread(target=self._submit_calls, args=(calls,), name="flatout-ask", daemon=True)
        self._submitter.start()

    def results(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[T]:
        """Yield results in the order of the calls, until they end or `stopped` is True (checked between results).

        Raises the exceptions of calls, and of the iteration over the calls.
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
        """Whether the result of every call submitted so far was taken."""
        return self._made.empty()

    def close(self) -> None:
        """End the threads; waits for running calls."""
        self._closed.set()
        self._room.release()  # the submitting thread may be waiting for room
        self._submitter.join()
        self._pool.shutdown(cancel_futures=True)

    def _submit_calls(self, calls: Iterable[Callable[[], T]]) -> None:
        try:
            waiting = iter(calls)
            while True:
                # Wait for room first: a call of a live source should read what is newest when it runs.
                self._room.acquire()
                if self._closed.is_set():
                    return
                if (call := next(waiting, None)) is None:
                    return
                self._made.put(self._pool.submit(call))
        except Exception as error:  # any error of the caller's iterator: it is raised in the reader
            failed: Future[T] = Future()
            failed.set_exception(error)
            self._made.put(failed)
        finally:
            self._made.put(None)


class WriteQueue(Closing):
    """Runs `work` in parallel and `then` in order of submission, with at most `depth` items waiting.

    A context manager.
    """

    def __init__(self, *, threads: int, depth: int) -> None:
        self._room = threading.Semaphore(depth)
        self._waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[Any], None]] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="flatout-draw")
        self._finisher = threading.Thread(target=self._finish, name="flatout-write", daemon=True)
        self._finisher.start()

    def submit(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Queue an item; blocks while too many are waiting. Raises the error of an earlier item."""
        self._room.acquire()
        if self._error is not None:
            self._room.release()
            raise self._error
        self._waiting.put((self._pool.submit(work), then))

    def close(self) -> None:
        """Wait until all items are done; raises the first error, once. May be called twice."""
        if self._finisher.is_alive():
            self._waiting.put(None)
            self._finisher.join()
            self._pool.shutdown()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _finish(self) -> None:
        while (item := self._waiting.get()) is not None:
            future, then = item
            try:
                # Nothing more is written after an error: later items may depend on the one that failed.
                if self._error is None:
                    then(future.result())
            except BaseException as error:  # whatever it is: `submit` and `close` raise it in the caller's thread
                self._error = error
            finally:
                self._room.release()
