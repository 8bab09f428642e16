"""Ranks monitor each other: one that is gone, stopped or has failed is noticed by all within seconds.

    twice a second, each rank:   its heartbeat --> store         heartbeats of all, a reported failure --> each rank

A collective waits for every rank. Without heartbeats, a rank that is gone would leave the others blocked inside torch,
where signals are not handled, until a timeout that must be long because some steps are. Heartbeats come from a thread
of their own, so that a rank that is merely slow keeps sending them.
"""

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch.distributed as dist

from flatout.clock import machine
from flatout.errors import ChildLostError, FlatoutError, one_line

logger = logging.getLogger(__name__)

LOST_AFTER_S = 25.0
"""Time without a heartbeat after which a rank is lost, once training runs. Together with the half minute that torchrun
gives a process to end: a minute."""
LOST_AT_START_S = 180.0
"""The same before the first step: reading a large annotation file may hold Python's lock for long."""
GRACE_S = 10.0
"""Time for the main thread to leave a broken collective by itself and to close its files."""
STOP_S = 5.0
"""Time to write a last heartbeat or failure, and for other ranks to read it."""
_FAILURE = "failure"
PERIOD_S = 0.5
"""Time between two heartbeats of a rank."""
STALL_S = 5.0
"""A check that comes later than this after the last one means that this process itself was stopped."""
LEFT = -1
"""The heartbeat number of a rank that has ended normally."""


class Store(Protocol):
    """The part of torch's key-value stores that is used here; not a store of decoded images."""

    def set(self, key: str, value: str, /) -> None: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def set_timeout(self, timeout: timedelta, /) -> None: ...


class Heartbeats:
    """The time since the last heartbeat of each rank. Times are passed in, so that no clock is read."""

    def __init__(self, size: int, now_s: float) -> None:
        self._numbers = [0] * size
        self._changed_s = [now_s] * size
        self._checked_s = now_s

    def update(self, numbers: Sequence[int], now_s: float) -> None:
        for rank, number in enumerate(numbers):
            if number != self._numbers[rank]:
                self._numbers[rank], self._changed_s[rank] = number, now_s

    def silent(self, now_s: float, limit_s: float) -> list[int]:
        """Ranks without a heartbeat for longer than `limit_s` that have not left; to be called regularly."""
        # If this process itself was stopped, as Ctrl-Z does with all of them, missing heartbeats mean nothing.
        if now_s - self._checked_s > STALL_S:
            self._changed_s = [now_s] * len(self._changed_s)
        self._checked_s = now_s
        return [
            rank
            for rank, changed_s in enumerate(self._changed_s)
            if self._numbers[rank] != LEFT and now_s - changed_s > limit_s
        ]


class Heartbeat(NamedTuple):
    """A heartbeat of a rank, with the identity of its process."""

    number: int
    pid: int
    host: str
    start_ticks: int
    """Start time of the process, in ticks of its host; distinguishes it from a later process with the same id."""


class Failure(NamedTuple):
    """The error of the first rank that failed, for the others."""

    rank: int
    host: str
    line: str
    trace: str


class RankWatch:
    """Sends heartbeats, checks those of the other ranks, and ends this process if it waits for a rank that is lost."""

    def __init__(self, rank: int, size: int, store: Store, *, lost_after_s: float = LOST_AFTER_S) -> None:
        """`store` must not be used elsewhere: a blocking call would delay the heartbeats."""
        self.rank = rank
        self._store = store
        self._limit_s, self._lost_after_s = LOST_AT_START_S, lost_after_s
        self._keys = [f"heartbeat{each}" for each in range(size)]
        self._seen_keys = [f"failure_seen{each}" for each in range(size)]
        self._own = Heartbeat(0, os.getpid(), socket.gethostname(), process_start_ticks(os.getpid()) or 0)
        self._latest: list[Heartbeat] = []
        self._heartbeats = Heartbeats(size, time.monotonic())
        self._failure: Failure | None = None
        self._lost: ChildLostError | None = None
        self._stopping = threading.Event()
        self._main_knows = threading.Event()
        self._traceback_shown = threading.Lock()
        self._store.set(self._keys[rank], json.dumps(self._own))
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in {"rank-heartbeat": self._send_heartbeats, "rank-monitor": self._monitor}.items()
        ]

    def start(self) -> None:
        """Start the threads; call once all ranks have joined, so that every first heartbeat is set."""
        for thread in self._threads:
            thread.start()

    def tighten_timeouts(self) -> None:
        """Training runs: from here on a silent rank counts as lost sooner."""
        self._limit_s = self._lost_after_s

    def stop(self) -> None:
        """Send the heartbeat of a rank that ends normally, so that the others do not report it as lost. May be called
        twice."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        # A heartbeat in progress would overwrite the last one; and no thread may be inside torch when Python ends.
        sender = self._threads[0]
        if sender.is_alive():
            sender.join(STOP_S)
        if sender.is_alive():
            return  # the store does not answer
        # If the first rank has ended, the store is gone, and so are its readers.
        with suppress(RuntimeError):
            self._store.set_timeout(timedelta(seconds=STOP_S))
            self._store.set(self._keys[self.rank], json.dumps(self._own._replace(number=LEFT)))

    def report_failure(self, error: BaseException) -> None:
        """Report an error of this rank to the others. Of several failures only the first, the cause, is kept."""
        self._main_knows.set()
        if is_of_collective(error):
            return
        line = " ".join(f"{type(error).__name__}: {error}".split())
        trace = "".join(traceback.format_exception(error))
        with suppress(RuntimeError):
            own = Failure(self.rank, self._own.host, line, trace)
            self._store.compare_set(_FAILURE, "", json.dumps(own))

    def wait_until_seen(self) -> None:
        """On the first rank, which hosts the store, wait a few seconds for the others to read the failure."""
        seen = [key for rank, key in enumerate(self._seen_keys) if rank != self.rank]
        end_s = time.monotonic() + STOP_S
        with suppress(RuntimeError):
            while self.rank == 0 and not self._store.check(seen) and time.monotonic() < end_s:
                time.sleep(PERIOD_S / 5)

    def explain(self, error: BaseException) -> ChildLostError:
        """Why a collective failed. Waits a few seconds for a reported failure or a missing heartbeat."""
        self._main_knows.set()
        began_s = time.monotonic()
        while (waited_s := time.monotonic() - began_s) < 8 * PERIOD_S:
            if self._lost is not None:
                return self._lost
            if self._failure is not None:
                return self._failure_error(self._failure)
            # A rank that sent a heartbeat after the connection broke is not the one that broke it.
            if waited_s > 4 * PERIOD_S and (silent := self._silent(3 * PERIOD_S)):
                return self._lost_error(silent)
            time.sleep(PERIOD_S / 5)
        return ChildLostError(
            f"the connection between ranks broke: {one_line(error, 200)}. Everything saved so far is kept. "
            "Run the same command again to continue."
        )

    # Threads

    def _send_heartbeats(self) -> None:
        number = 0
        while not self._stopping.wait(PERIOD_S):
            number += 1
            try:
                self._store.set(self._keys[self.rank], json.dumps(self._own._replace(number=number)))
                self._latest = [Heartbeat(*json.loads(text)) for text in self._store.multi_get(self._keys)]
                if self._failure is None and self._store.check([_FAILURE]):
                    self._failure = Failure(*json.loads(self._store.get(_FAILURE)))
                    self._store.set(self._seen_keys[self.rank], "yes")
            except RuntimeError:
                continue  # the store ended with its rank, whose heartbeats then stop
            self._heartbeats.update([heartbeat.number for heartbeat in self._latest], time.monotonic())

    def _monitor(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            failure = self._failure
            if failure is not None and failure.rank != self.rank:
                return self._end_process(self._failure_error(failure))
            if silent := self._silent(self._limit_s):
                self._lost = self._lost_error(silent)
                self._kill(silent)
                return self._end_process(self._lost)
        return None

    def _silent(self, limit_s: float) -> list[int]:
        silent = self._heartbeats.silent(time.monotonic(), limit_s)
        # If not even this rank's own heartbeats come back, the store is gone, and with it the first rank.
        return [0] if self.rank in silent and self.rank else [rank for rank in silent if rank != self.rank]

    def _kill(self, silent: list[int]) -> None:
        """Kill silent ranks on this host: a stopped process would stay forever, and its open connections would keep the
        others waiting."""
        for rank in silent:
            if rank < len(self._latest) and self._latest[rank].host == self._own.host:
                kill_process(self._latest[rank].pid, self._latest[rank].start_ticks)

    def _end_process(self, error: ChildLostError) -> None:
        """End this process, unless the main thread is already handling the error."""
        if self._main_knows.wait(GRACE_S) or self._stopping.is_set():
            return
        print(f"flatout: {error}", file=sys.stderr, flush=True)
        # Files on disk are complete at any time, and workers end with this process.
        os._exit(error.exit_code)

    # Errors

    def _failure_error(self, failure: Failure) -> ChildLostError:
        reporter = 0 if failure.rank else 1
        # Only one rank shows the traceback, and only one of its threads.
        if self.rank == reporter and self._traceback_shown.acquire(blocking=False):
            logger.error("Rank %d (%s) failed:\n%s", failure.rank, failure.host, failure.trace.rstrip())
        return ChildLostError(
            f"rank {failure.rank} failed, so all ranks end: {failure.line} Everything saved so far is kept: fix the "
            "cause and run the same command again to continue."
        )

    def _lost_error(self, ranks: list[int]) -> ChildLostError:
        which = " and ".join(map(str, ranks))
        hosts = ", ".join(sorted({self._latest[rank].host for rank in ranks if rank < len(self._latest)}))
        return ChildLostError(
            f"no heartbeat from rank {which} ({hosts or 'unknown host'}): it was killed or stopped, or its machine is "
            "down. Everything saved so far is kept. Run the same command again to continue."
        )


def is_of_collective(error: BaseException) -> bool:
    """Whether torch raised this exception because the connection to another rank broke."""
    if isinstance(error, FlatoutError) or not isinstance(error, RuntimeError):
        return False
    words = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Timed out waiting", "Socket Timeout")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


# The store of the launcher, and the identity of processes


def store_of_launcher(environ: Mapping[str, str], *, timeout_s: float = 60) -> Store:
    """A separate connection to the store through which the ranks met; keys of earlier restarts are not visible."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefixed: Store = dist.PrefixStore(f"flatout/{attempt}", store)  # type: ignore[attr-defined]
    return prefixed


def process_start_ticks(pid: int) -> int | None:
    """Start time of a process in ticks since its host booted; None if there is no such process, or no /proc."""
    try:
        return machine.start_ticks(pid)
    except OSError:
        return None


def kill_process(pid: int, start_ticks: int) -> bool:
    """Send SIGKILL to a process, unless its id now belongs to another one; returns whether it was sent."""
    if process_start_ticks(pid) != start_ticks:
        return False
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False
