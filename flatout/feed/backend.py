"""The workers of a feed, as its owner sees them: started, ended, killed, told to go home.

Three crews with one face: `Processes` (in processes.py), threads, and nobody (the owner does the
work itself while it waits). Which task a worker is at is not known here; the ring knows.
"""

import contextlib
import fcntl
import os
import pickle
import select
import signal
import socket
import sys
import termios
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from flatout.feed.forkserver import Ended
from flatout.feed.ring import Ring
from flatout.feed.source import Source
from flatout.feed.worker import QUIT, WORK, Bench, Report, WorkOrders, work


class Crew(Protocol):
    """Those who fill the slots."""

    can_be_killed: bool

    def call_up(self) -> None:
        """Have every worker at its place; blocks until they are. Does nothing if they are already."""

    def announce(self, num_tasks: int, lane: int = 0) -> None:
        """Tell the workers of a lane that tasks were published."""

    def remind(self, num_unclaimed: Sequence[int]) -> None:
        """Announce again, in each lane, what a worker took note of but did not claim: it ended or was stopped."""

    def wait_for_reports(self, timeout_s: float) -> tuple[list[Report], list[Ended]]:
        """What was done and who ended, after `timeout_s` at most; returns at once if there is something."""

    def restart(self, worker: int) -> None:
        """Put a new worker in the place of one that ended."""

    def kill(self, worker: int) -> None:
        """End a worker that hangs."""

    def pids(self) -> dict[int, int]:
        """Worker -> process id, of those that are processes."""

    def send_home(self) -> None:
        """Let the workers end after the tasks they are at; `call_up` brings new ones."""

    def close(self) -> None:
        """End everything. May be called twice."""


class Lines:
    """The lines of communication: tokens to the workers of each lane, reports from all of them."""

    def __init__(self, num_lanes: int) -> None:
        pipes = [os.pipe() for _ in range(num_lanes)]
        self.tokens_out, self.tokens_in = (tuple(ends) for ends in zip(*pipes, strict=True))
        for end in self.tokens_in:
            os.set_blocking(end, False)
        self.reports_out, self.reports_in = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.reports_out.setblocking(False)

    def read_reports(self) -> list[Report]:
        """Every report that has arrived."""
        reports = []
        while True:
            try:
                reports.append(pickle.loads(self.reports_out.recv(1 << 18)))
            except BlockingIOError:
                return reports

    def announce(self, num_tasks: int, lane: int = 0) -> None:
        self._put(WORK * num_tasks, lane)

    def remind(self, num_unclaimed: Sequence[int]) -> None:
        """Have a token in the pipe for each unclaimed task; one too many wakes a worker for nothing, no more."""
        for lane, num_tasks in enumerate(num_unclaimed):
            self.announce(max(0, num_tasks - self._num_tokens(lane)), lane)

    def send_home(self, num_workers: int) -> None:
        for lane in range(len(self.tokens_in)):
            self._put(QUIT * num_workers, lane)  # more than a lane of its own needs; see `forget_tokens`

    def forget_tokens(self) -> None:
        """Empty the pipes; nobody may be reading them."""
        for lane, end in enumerate(self.tokens_out):
            if num_tokens := self._num_tokens(lane):
                os.read(end, num_tokens)

    def _put(self, tokens: bytes, lane: int) -> None:
        # What does not fit is made up for by `remind`: to wait for room here would be to wait for workers
        # that may be waiting for their reports to be read.
        with contextlib.suppress(BlockingIOError):
            os.write(self.tokens_in[lane], tokens)

    def _num_tokens(self, lane: int) -> int:
        return int.from_bytes(fcntl.ioctl(self.tokens_out[lane], termios.FIONREAD, bytes(4)), sys.byteorder)

    def close(self) -> None:
        for fd in (*self.tokens_out, *self.tokens_in):
            os.close(fd)
        self.reports_out.close()
        self.reports_in.close()


class Nobody:
    """No workers: tasks are done by whoever waits for their reports."""

    can_be_killed = False

    def __init__(self, ring: Ring, source: Source, orders: WorkOrders) -> None:
        self._reports: list[Report] = []
        self._bench = Bench(0, ring, source, orders, self._reports.append)

    def call_up(self) -> None: ...

    def announce(self, num_tasks: int, lane: int = 0) -> None: ...

    def remind(self, num_unclaimed: Sequence[int]) -> None: ...

    def wait_for_reports(self, timeout_s: float) -> tuple[list[Report], list[Ended]]:
        if timeout_s > 0:
            self._bench.do_next_task()
        reports = self._reports[:]
        self._reports.clear()
        return reports, []

    def restart(self, worker: int) -> None: ...

    def kill(self, worker: int) -> None: ...

    def pids(self) -> dict[int, int]:
        return {}

    def send_home(self) -> None: ...

    def close(self) -> None: ...


class Threads:
    """Workers in this process: nothing to start, nothing to pickle; sources must release the GIL to gain."""

    can_be_killed = False

    def __init__(self, ring: Ring, source: Source, orders: WorkOrders) -> None:
        self._work = (ring, source, orders)
        self._lines: Lines | None = Lines(ring.spec.num_lanes)
        self._threads: list[threading.Thread] = []

    def call_up(self) -> None:
        assert self._lines is not None
        if self._threads:
            return
        for worker in range(self._work[0].spec.num_workers):
            tokens = self._lines.tokens_out[worker % len(self._lines.tokens_out)]
            args = (worker, *self._work, tokens, self._lines.reports_in)
            thread = threading.Thread(target=work, args=args, name=f"flatout-feed-{worker}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def announce(self, num_tasks: int, lane: int = 0) -> None:
        assert self._lines is not None
        self._lines.announce(num_tasks, lane)

    def remind(self, num_unclaimed: Sequence[int]) -> None:
        assert self._lines is not None
        self._lines.remind(num_unclaimed)

    def wait_for_reports(self, timeout_s: float) -> tuple[list[Report], list[Ended]]:
        assert self._lines is not None
        wait_readable([self._lines.reports_out], timeout_s)
        return self._lines.read_reports(), []

    def restart(self, worker: int) -> None: ...

    def kill(self, worker: int) -> None: ...

    def pids(self) -> dict[int, int]:
        return {}

    def send_home(self) -> None:
        assert self._lines is not None
        self._lines.send_home(len(self._threads))
        for thread in self._threads:
            thread.join()
        self._threads = []

    def close(self) -> None:
        if self._lines is None:
            return
        self._lines.send_home(len(self._threads))
        deadline = time.monotonic() + 1
        for thread in self._threads:
            thread.join(timeout=max(0, deadline - time.monotonic()))
        # Closed under a thread that still reads, a descriptor could come back as something else.
        if not any(thread.is_alive() for thread in self._threads):
            self._lines.close()
        self._lines = None


def wait_readable(sockets: Sequence[socket.socket], timeout_s: float) -> set[int]:
    """Descriptors that have something to read, after `timeout_s` at most."""
    poll = select.poll()  # select() would refuse descriptors above 1023
    for each in sockets:
        poll.register(each, select.POLLIN)
    return {fd for fd, _ in poll.poll(timeout_s * 1000)}


class RemoteError(Exception):
    """Shows a worker's traceback where Python prints causes."""

    def __init__(self, text: str) -> None:
        super().__init__(f"\n{text}")


def describe_exit(status: int) -> str:
    """'exit code 1' or 'SIGKILL', from os.waitstatus_to_exitcode."""
    if status >= 0:
        return f"exit code {status}"
    known = {each.value: each.name for each in signal.Signals}
    return known.get(-status, f"signal {-status}")
