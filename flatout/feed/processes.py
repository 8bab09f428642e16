"""Worker processes, and the nursery they come from, as seen by the process that trains.

The workers of a feed, as its owner sees them: started, ended, killed, told to go home.

Three crews with one face: `Processes` (in processes.py), threads, and nobody (the owner does the
work itself while it waits). Which task a worker is at is not known here; the ring knows.
"""

import contextlib
import errno
import fcntl
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing import spawn
from typing import IO, Protocol

from flatout.errors import ChildLostError, ConfigError, ResourceError
from flatout.feed.forkserver import Ended, Nursery, NurseryFds, Refused, Started, live_by_the_pipe, opening_a_source
from flatout.feed.ring import Ring, RingSpec
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


logger = logging.getLogger(__name__)

# Which part of an object keeps it from being sent to another process?


def unpicklable_attributes(owner: object) -> list[str]:
    """Names of the attributes of `owner` that cannot be pickled."""
    return [name for name, value in getattr(owner, "__dict__", {}).items() if not _can_be_pickled(value)]


def blame(owner: object) -> str:
    """The attributes to blame, as part of a sentence; 'it' if none of them alone is."""
    culprits = unpicklable_attributes(owner)
    return f"its attribute {' and '.join(map(repr, culprits))}" if culprits else "it"


def _can_be_pickled(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # whatever a class does when it is pickled
        return False
    return True


START_TIMEOUT_S = 120
END_TIMEOUT_S = 5
MAIN_KEYS = "init_main_from_name", "init_main_from_path"


class Processes:
    """Workers in processes of their own, forked by a nursery that is a fresh interpreter or a fork of this one."""

    can_be_killed = True

    def __init__(self, ring: Ring, source: Source, orders: WorkOrders, *, start_method: str) -> None:
        self._ring = ring
        self._source = source
        self._orders = orders
        self._start_method = start_method
        self._lines: Lines | None = Lines(ring.spec.num_lanes)
        self._control: socket.socket | None = None
        self._nursery: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._nurseries_lost = 0
        self._pids: dict[int, int] = {}
        self._awaited: set[int] = set()
        self._ended: list[Ended] = []

    def call_up(self) -> None:
        if self._control is None:
            self._start_nursery()
        everybody = set(range(self._ring.spec.num_workers))
        # Those whose end nobody has been told of yet are restarted after what they were at is known.
        untold = {end.worker for end in self._ended}
        for worker in sorted(everybody - self._pids.keys() - self._awaited - untold):
            self.restart(worker)
            self._listen(timeout_s=0)  # or hundreds of workers would fill both directions of the socket
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._awaited:
            if time.monotonic() > deadline:
                raise ChildLostError(
                    f"The feed's workers did not start within {START_TIMEOUT_S} s. The machine may be out of memory or "
                    "its disk may hang; use fewer workers, or workers=0 to do without them."
                )
            self._listen(timeout_s=1)

    def announce(self, num_tasks: int, lane: int = 0) -> None:
        assert self._lines is not None
        self._lines.announce(num_tasks, lane)

    def remind(self, num_unclaimed: Sequence[int]) -> None:
        assert self._lines is not None
        self._lines.remind(num_unclaimed)

    def wait_for_reports(self, timeout_s: float) -> tuple[list[Report], list[Ended]]:
        assert self._lines is not None
        self._listen(timeout_s, also=self._lines.reports_out)
        # Ended first, then the reports: whatever a worker sent before it ended is among them.
        ended, self._ended = self._ended, []
        return self._lines.read_reports(), ended

    def restart(self, worker: int) -> None:
        assert self._control is not None
        self._awaited.add(worker)
        with contextlib.suppress(ConnectionError):  # a nursery that is gone; the next one is asked again
            self._control.send(str(worker).encode())

    def kill(self, worker: int) -> None:
        with contextlib.suppress(KeyError, ProcessLookupError):  # it has ended by itself meanwhile
            os.kill(self._pids[worker], signal.SIGKILL)

    def pids(self) -> dict[int, int]:
        return dict(self._pids)

    def send_home(self) -> None:
        assert self._lines is not None
        # Those on their way too: a worker replaced a moment ago may not have been heard of.
        self._lines.send_home(len(self._pids) + len(self._awaited))
        deadline = time.monotonic() + END_TIMEOUT_S
        while self._pids or self._awaited:
            self._listen(timeout_s=min(1, END_TIMEOUT_S))
            if time.monotonic() > deadline:
                for worker in self._pids:
                    self.kill(worker)
        self._ended.clear()
        self._lines.forget_tokens()

    def close(self) -> None:
        if self._lines is None:
            return
        if self._control is not None:
            # Not only closed: a child that was forked for other purposes may hold a copy.
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
            self._control.close()
            self._control = None
        self._lines.close()
        self._lines = None
        self._reap_nursery()

    def _start_nursery(self) -> None:
        assert self._lines is not None
        if opening_a_source():
            raise ConfigError(
                "A feed was started while a worker imports the script that defines its source. "
                "Put the training code under `if __name__ == '__main__':`"
            )
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = NurseryFds(theirs.fileno(), self._ring.arena.fd, self._lines.reports_in.fileno(), self._lines.tokens_out)
        try:
            if self._start_method == "fork":
                warn_of_opencv_threads()
                self._nursery = ForkedProcess(lambda: self._be_forked_nursery(fds))
            else:
                self._nursery = self._spawn_nursery(fds)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ENOMEM):
                raise
            raise self._too_few_processes(f"No process could be started: {error}") from None
        finally:
            theirs.close()

    def _spawn_nursery(self, fds: NurseryFds) -> "subprocess.Popen[bytes]":
        # One thread per worker process for numerical libraries: the parallelism is the workers'.
        one_thread = dict.fromkeys(
            ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OPENCV_FOR_THREADS_NUM"), "1"
        )
        with tempfile.TemporaryFile() as parcel:
            self._pack(parcel)
            parcel.seek(0)
            return subprocess.Popen(
                [sys.executable, "-c", "from flatout.feed.forkserver import main; main()", *map(str, fds.flat)],
                stdin=parcel,
                pass_fds=fds.flat,
                env=one_thread | dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                # Out of the terminal's reach: Ctrl-C is the trainer's to answer.
                start_new_session=True,
            )

    def _pack(self, parcel: IO[bytes]) -> None:
        work_pickled = pickle_work(self._source, self._ring.spec, self._orders)
        # The caller's script is imported over there only if the source was defined in it.
        wanted = {"sys_path", "dir"} | ({"sys_argv", *MAIN_KEYS} if b"__main__" in work_pickled else set())
        preparation = spawn.get_preparation_data("flatout-feed-nursery")
        pickle.dump({key: value for key, value in preparation.items() if key in wanted}, parcel)
        parcel.write(work_pickled)

    def _be_forked_nursery(self, fds: NurseryFds) -> None:
        assert self._lines is not None
        assert self._control is not None
        os.setsid()
        live_by_the_pipe()
        # The trainer's ends: held open here, they would hide its death from the workers.
        self._control.close()
        self._lines.reports_out.close()
        for end in self._lines.tokens_in:
            os.close(end)
        Nursery(self._source, self._ring.spec, self._orders, fds).serve()

    def _listen(self, timeout_s: float, also: socket.socket | None = None) -> None:
        """Take in what the nursery says, after `timeout_s` at most or when `also` has something."""
        assert self._control is not None
        ready = wait_readable([self._control, also] if also else [self._control], timeout_s)
        while self._control.fileno() in ready:
            message = self._hear()
            if not message:
                self._lose_nursery()
                return
            self._take_in(pickle.loads(message))
            ready = wait_readable([self._control], 0)

    def _hear(self) -> bytes:
        assert self._control is not None
        try:
            return self._control.recv(1 << 18)
        except ConnectionResetError:
            # Said once if the nursery ended before it had read everything; what it told before comes after.
            return self._control.recv(1 << 18)

    def _take_in(self, message: Started | Ended | Refused) -> None:
        if isinstance(message, Started):
            self._pids[message.worker] = message.pid
            self._awaited.discard(message.worker)
        elif isinstance(message, Ended):
            self._pids.pop(message.worker, None)
            self._ended.append(message)
        elif message.worker is None:
            raise ConfigError(
                f"The workers cannot open {type(self._source).__name__}: {message.cause}. Define the source in a "
                "module that can be imported (in a script: guard the training code with `if __name__ == '__main__':`), "
                "or use start_method='fork' or backend='thread'."
            ) from RemoteError(message.traceback)
        else:
            self._awaited.discard(message.worker)
            raise self._too_few_processes(message.cause)

    def _too_few_processes(self, cause: object) -> ResourceError:
        return ResourceError(
            f"{cause}. The feed needs {self._ring.spec.num_workers + 1} processes; "
            "raise the limit (ulimit -u) or use fewer workers."
        )

    def _lose_nursery(self) -> None:
        """The nursery was killed, and its workers with it: start over; what they were at is redone."""
        status = self._reap_nursery()
        self._nurseries_lost += 1
        if self._nurseries_lost > 3:
            raise ChildLostError(
                f"The process that starts the feed's workers ended {self._nurseries_lost} times ({status}). Something "
                "kills it: look for the memory killer in the system log (dmesg), use fewer workers, or workers=0 to do "
                "without it. A training, started again, continues from its last saved state."
            )
        logger.warning("The process that starts the feed's workers ended (%s); starting it again.", status)
        for pid in self._pids.values():
            _wait_until_gone(pid)  # the kernel kills them; until then they may still write and report
        self._ended += [Ended(worker, pid, -signal.SIGKILL) for worker, pid in self._pids.items()]
        self._pids = {}
        assert self._control is not None
        self._control.close()
        self._start_nursery()
        for worker in sorted(self._awaited):
            self.restart(worker)

    def _reap_nursery(self) -> str:
        """Wait for the end of a nursery that has been hung up on; returns how it ended."""
        nursery, self._nursery = self._nursery, None
        if nursery is None:
            return "not started"
        try:
            return describe_exit(nursery.wait(END_TIMEOUT_S))
        except subprocess.TimeoutExpired:
            nursery.kill()
            return describe_exit(nursery.wait())


@cache
def warn_of_opencv_threads() -> None:
    """Once: OpenCV waits for ever for threads that a fork has left behind."""
    cv2 = sys.modules.get("cv2")
    if cv2 is not None and cv2.getNumThreads() > 1:
        logger.warning(
            "Workers are forked from a process whose OpenCV uses threads, and may hang in it. Call "
            "cv2.setNumThreads(1) before any other OpenCV function, or start them with 'spawn' instead of 'fork'."
        )


class ForkedProcess:
    """A child that shares this process's memory as it is now, with the face of subprocess.Popen."""

    def __init__(self, target: Callable[[], None]) -> None:
        self._pid = os.fork()
        if self._pid == 0:
            try:
                target()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)  # nothing of the parent's may be flushed or cleaned up twice

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            pid, status = os.waitpid(self._pid, 0 if deadline is None else os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("nursery", timeout or 0)
            time.sleep(0.005)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)


def _wait_until_gone(pid: int) -> None:
    """Wait for the end of a killed process that is nobody's child here."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while not _has_ended(pid):
        if time.monotonic() > deadline:
            raise ChildLostError(
                f"Worker process {pid} was killed but does not end; the disk it reads from may be dead."
            )
        time.sleep(0.001)


def _has_ended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def pickle_work(source: Source, spec: RingSpec, orders: WorkOrders) -> bytes:
    """What workers need, pickled; a source that cannot be pickled is told which part of it is to blame."""
    try:
        return pickle.dumps((source, spec, orders))
    except Exception as error:
        raise ConfigError(
            f"{type(source).__name__} cannot be sent to worker processes: {blame(source)} cannot be pickled ({error}). "
            "Open such things on first use in `read`, or use start_method='fork' or backend='thread'."
        ) from error
