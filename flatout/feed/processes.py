"""Worker backends: start, stop, kill and replace the workers of a feed, in the process that trains.

    InlineBackend    no workers: the owner runs the tasks itself while it waits
    ThreadBackend    threads of this process
    ProcessBackend   processes forked by a forkserver (forkserver.py)

Backends do not know which task a worker is running; the ring does.
"""

import contextlib
import errno
import fcntl
import logging
import math
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
from typing import IO

from flatout.clock import machine
from flatout.errors import ChildLostError, ConfigError, ResourceError
from flatout.feed.forkserver import (
    Forkserver,
    ForkserverFds,
    StartFailed,
    WorkerEnded,
    WorkerStarted,
    ignore_signals,
    is_loading_source,
)
from flatout.feed.ring import Ring
from flatout.feed.source import Source
from flatout.feed.worker import QUIT, WORK, Report, TaskRunner, WorkerSettings, work

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120
END_TIMEOUT_S = 5
MAIN_KEYS = "init_main_from_name", "init_main_from_path"


class WorkerBackend:
    """The workers that fill the slots. What a backend does not override does nothing."""

    can_be_killed = False

    def start_workers(self) -> None:
        """Start all workers that are not running; blocks until they are."""

    def announce(self, num_tasks: int, lane: int = 0) -> None:
        """Wake the workers of a lane: tasks were published."""

    def announce_again(self, num_unclaimed: Sequence[int]) -> None:
        """Repeat, in each lane, the announcements that a worker received but did not act on before it ended."""

    def wait_for_reports(self, timeout_s: float) -> tuple[list[Report], list[WorkerEnded]]:
        """Reports and ended workers; waits for at most `timeout_s`, and returns as soon as there is something."""
        raise NotImplementedError

    def restart(self, worker: int) -> None:
        """Start a new worker in the place of one that ended."""

    def kill(self, worker: int) -> None:
        """Kill a worker that hangs."""

    def pids(self) -> dict[int, int]:
        """Worker -> process id; empty if workers are not processes."""
        return {}

    def stop_workers(self) -> None:
        """Stop the workers after their current tasks; `start_workers` starts new ones."""

    def close(self) -> None:
        """Stop everything. May be called twice."""


class InlineBackend(WorkerBackend):
    """No workers: tasks run in the thread that waits for their reports."""

    def __init__(self, ring: Ring, source: Source, settings: WorkerSettings) -> None:
        self._reports: list[Report] = []
        self._runner = TaskRunner(0, ring, source, settings, self._reports.append)

    def wait_for_reports(self, timeout_s: float) -> tuple[list[Report], list[WorkerEnded]]:
        if timeout_s > 0:
            self._runner.run_next_task()
        reports = self._reports[:]
        self._reports.clear()
        return reports, []


class PipedBackend(WorkerBackend):
    """Base of backends with pipes to their workers: tokens to the workers of each lane, reports from all of them."""

    def __init__(self, ring: Ring, source: Source, settings: WorkerSettings) -> None:
        self._ring, self._source, self._settings = ring, source, settings
        pipes = [os.pipe() for _ in range(ring.spec.num_lanes)]
        self._token_readers, self._token_writers = (tuple(ends) for ends in zip(*pipes, strict=True))
        for end in self._token_writers:
            os.set_blocking(end, False)
        self._report_reader, self._report_writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._report_reader.setblocking(False)

    def _read_reports(self) -> list[Report]:
        """All reports that have arrived."""
        reports = []
        while True:
            try:
                reports.append(pickle.loads(self._report_reader.recv(1 << 18)))
            except BlockingIOError:
                return reports

    def announce(self, num_tasks: int, lane: int = 0) -> None:
        self._put(WORK * num_tasks, lane)

    def announce_again(self, num_unclaimed: Sequence[int]) -> None:
        """Top up each pipe to one token per unclaimed task; an extra token only wakes a worker for nothing."""
        for lane, num_tasks in enumerate(num_unclaimed):
            self.announce(max(0, num_tasks - self._num_tokens(lane)), lane)

    def _quit(self, num_workers: int) -> None:
        """Have this many workers of each lane end."""
        for lane in range(len(self._token_writers)):
            self._put(QUIT * num_workers, lane)  # a lane with a single worker needs fewer; see `_drain_tokens`

    def _drain_tokens(self) -> None:
        """Empty the pipes; no worker may be reading them."""
        for lane, end in enumerate(self._token_readers):
            if num_tokens := self._num_tokens(lane):
                os.read(end, num_tokens)

    def _put(self, tokens: bytes, lane: int) -> None:
        # Tokens that do not fit are repeated by `announce_again`. Waiting for room here could deadlock with workers
        # that wait for their reports to be read.
        with contextlib.suppress(BlockingIOError):
            os.write(self._token_writers[lane], tokens)

    def _num_tokens(self, lane: int) -> int:
        return int.from_bytes(fcntl.ioctl(self._token_readers[lane], termios.FIONREAD, bytes(4)), sys.byteorder)

    def close(self) -> None:
        """May be called twice; nothing is announced any more."""
        for fd in (*self._token_readers, *self._token_writers):
            os.close(fd)
        self._token_readers = self._token_writers = ()
        self._report_reader.close()
        self._report_writer.close()


class ThreadBackend(PipedBackend):
    """Workers as threads of this process: nothing to pickle, but only faster if the source releases the GIL."""

    def __init__(self, ring: Ring, source: Source, settings: WorkerSettings) -> None:
        super().__init__(ring, source, settings)
        self._threads: list[threading.Thread] = []

    def start_workers(self) -> None:
        if self._threads:
            return
        for worker in range(self._ring.spec.num_workers):
            tokens = self._token_readers[worker % len(self._token_readers)]
            args = (worker, self._ring, self._source, self._settings, tokens, self._report_writer)
            thread = threading.Thread(target=work, args=args, name=f"flatout-feed-{worker}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def wait_for_reports(self, timeout_s: float) -> tuple[list[Report], list[WorkerEnded]]:
        wait_readable([self._report_reader], timeout_s)
        return self._read_reports(), []

    def stop_workers(self) -> None:
        self._quit(len(self._threads))
        for thread in self._threads:
            thread.join()
        self._threads = []

    def close(self) -> None:
        self._quit(len(self._threads))
        deadline = time.monotonic() + 1
        for thread in self._threads:
            thread.join(timeout=max(0, deadline - time.monotonic()))
        # While a thread still reads a descriptor, closing it could let its number be reused for another file.
        if not any(thread.is_alive() for thread in self._threads):
            super().close()


def wait_readable(sockets: Sequence[socket.socket], timeout_s: float) -> set[int]:
    """File descriptors with data to read; waits for at most `timeout_s`."""
    poll = select.poll()  # select() would refuse descriptors above 1023
    for each in sockets:
        poll.register(each, select.POLLIN)
    return {fd for fd, _ in poll.poll(timeout_s * 1000)}


class RemoteError(Exception):
    """Holds a worker's traceback, for use as the `__cause__` of another exception."""

    def __init__(self, text: str) -> None:
        super().__init__(f"\n{text}")


def describe_exit(status: int) -> str:
    """A result of os.waitstatus_to_exitcode in words: 'exit code 1' or 'SIGKILL'."""
    if status >= 0:
        return f"exit code {status}"
    known = {each.value: each.name for each in signal.Signals}
    return known.get(-status, f"signal {-status}")


class ProcessBackend(PipedBackend):
    """Workers as processes, forked by a forkserver that is a fresh interpreter or a fork of this process."""

    can_be_killed = True

    def __init__(self, ring: Ring, source: Source, settings: WorkerSettings, *, start_method: str) -> None:
        super().__init__(ring, source, settings)
        self._start_method = start_method
        self._control: socket.socket | None = None
        self._forkserver: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._num_forkservers_lost = 0
        self._pids: dict[int, int] = {}
        self._awaited: set[int] = set()
        self._ended: list[WorkerEnded] = []

    def start_workers(self) -> None:
        if self._control is None:
            self._start_forkserver()
        all_workers = set(range(self._ring.spec.num_workers))
        # Workers whose end has not been reported yet are restarted by the supervisor, once it knows their task.
        unreported = {end.worker for end in self._ended}
        for worker in sorted(all_workers - self._pids.keys() - self._awaited - unreported):
            self.restart(worker)
            self._receive(timeout_s=0)  # otherwise hundreds of workers would fill both directions of the socket
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._awaited:
            if time.monotonic() > deadline:
                raise ChildLostError(
                    f"The feed's workers did not start within {START_TIMEOUT_S} s. The machine may be out of memory or "
                    "its disk may hang; use fewer workers, or workers=0 to read without worker processes."
                )
            self._receive(timeout_s=1)

    def wait_for_reports(self, timeout_s: float) -> tuple[list[Report], list[WorkerEnded]]:
        self._receive(timeout_s, also=self._report_reader)
        # Ended workers first, then the reports: these then include everything that a worker sent before it ended.
        ended, self._ended = self._ended, []
        return self._read_reports(), ended

    def restart(self, worker: int) -> None:
        assert self._control is not None
        self._awaited.add(worker)
        with contextlib.suppress(ConnectionError):  # the forkserver has ended; the next one is asked again
            self._control.send(str(worker).encode())

    def kill(self, worker: int) -> None:
        with contextlib.suppress(KeyError, ProcessLookupError):  # it has ended by itself in the meantime
            os.kill(self._pids[worker], signal.SIGKILL)

    def pids(self) -> dict[int, int]:
        return dict(self._pids)

    def stop_workers(self) -> None:
        # Count those still starting too: a worker that was just replaced may not have been reported yet.
        self._quit(len(self._pids) + len(self._awaited))
        deadline = time.monotonic() + END_TIMEOUT_S
        while self._pids or self._awaited:
            self._receive(timeout_s=min(1, END_TIMEOUT_S))
            if time.monotonic() > deadline:
                for worker in self._pids:
                    self.kill(worker)
        self._ended.clear()
        self._drain_tokens()

    def close(self) -> None:
        if self._control is not None:
            # Shut down, not only closed: a child that was forked for other purposes may hold a copy.
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
            self._control.close()
            self._control = None
        super().close()
        self._reap_forkserver()

    def _start_forkserver(self) -> None:
        if is_loading_source():
            raise ConfigError(
                "A feed was started while its own forkserver was importing the script that defines the source. "
                "Put the training code under `if __name__ == '__main__':`"
            )
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reports, tokens = self._report_writer.fileno(), self._token_readers
        fds = (theirs.fileno(), self._ring.arena.fd, reports, *tokens)
        try:
            if self._start_method == "fork":
                warn_of_opencv_threads()
                self._forkserver = ForkedProcess(lambda: self._serve_in_fork(fds))
            else:
                self._forkserver = self._spawn_forkserver(fds)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ENOMEM):
                raise
            raise self._too_few_processes(f"No process could be started: {error}") from None
        finally:
            theirs.close()

    def _spawn_forkserver(self, fds: ForkserverFds) -> "subprocess.Popen[bytes]":
        # One thread per worker for numerical libraries: the workers already run in parallel.
        one_thread = dict.fromkeys(
            ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OPENCV_FOR_THREADS_NUM"), "1"
        )
        with tempfile.TemporaryFile() as payload:
            self._write_payload(payload)
            payload.seek(0)
            return subprocess.Popen(
                [sys.executable, "-c", "from flatout.feed.forkserver import main; main()", *map(str, fds)],
                stdin=payload,
                pass_fds=fds,
                env=one_thread | dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                # A new session keeps Ctrl-C away from it: the trainer handles that.
                start_new_session=True,
            )

    def _write_payload(self, payload: IO[bytes]) -> None:
        advice = "`read`, or use start_method='fork' or backend='thread'"
        pickled = pickle_for_workers(self._source, self._ring.spec, self._settings, advice=advice)
        # The forkserver imports the caller's script only if the source was defined in it.
        wanted = {"sys_path", "dir"} | ({"sys_argv", *MAIN_KEYS} if b"__main__" in pickled else set())
        preparation = spawn.get_preparation_data("flatout-feed-forkserver")
        pickle.dump({key: value for key, value in preparation.items() if key in wanted}, payload)
        payload.write(pickled)

    def _serve_in_fork(self, fds: ForkserverFds) -> None:
        assert self._control is not None
        os.setsid()
        ignore_signals()
        # The trainer's ends: if they stayed open here, workers would not notice the trainer's death.
        self._control.close()
        self._report_reader.close()
        for end in self._token_writers:
            os.close(end)
        Forkserver(self._source, self._ring.spec, self._settings, fds).serve()

    def _receive(self, timeout_s: float, also: socket.socket | None = None) -> None:
        """Process the forkserver's messages; waits for at most `timeout_s`, or until `also` has data."""
        assert self._control is not None
        ready = wait_readable([self._control, also] if also else [self._control], timeout_s)
        while self._control.fileno() in ready:
            message = self._receive_message()
            if not message:
                self._replace_forkserver()
                return
            self._handle_message(pickle.loads(message))
            ready = wait_readable([self._control], 0)

    def _receive_message(self) -> bytes:
        assert self._control is not None
        try:
            return self._control.recv(1 << 18)
        except ConnectionResetError:
            # Raised once if the forkserver ended with unread requests; the messages it sent before follow.
            return self._control.recv(1 << 18)

    def _handle_message(self, message: WorkerStarted | WorkerEnded | StartFailed) -> None:
        if isinstance(message, WorkerStarted):
            self._pids[message.worker] = message.pid
            self._awaited.discard(message.worker)
        elif isinstance(message, WorkerEnded):
            self._pids.pop(message.worker, None)
            self._ended.append(message)
        elif message.worker is None:
            raise ConfigError(
                f"The workers cannot load {type(self._source).__name__}: {message.cause}. Define the source in an "
                "importable module (in a script, put the training code under `if __name__ == '__main__':`), "
                "or use FeedConfig(start_method='fork') or FeedConfig(backend='thread')."
            ) from RemoteError(message.traceback)
        else:
            self._awaited.discard(message.worker)
            raise self._too_few_processes(message.cause)

    def _too_few_processes(self, cause: object) -> ResourceError:
        return ResourceError(
            f"{cause}. The feed needs {self._ring.spec.num_workers + 1} processes: "
            "raise the limit (ulimit -u) or use fewer workers."
        )

    def _replace_forkserver(self) -> None:
        """Start a new forkserver after the old one was killed, and its workers with it; their tasks are repeated."""
        status = self._reap_forkserver()
        self._num_forkservers_lost += 1
        if self._num_forkservers_lost > 3:
            raise ChildLostError(
                f"The feed's forkserver, which starts its workers, died {self._num_forkservers_lost} times ({status}). "
                "Something kills it: look for the OOM killer in the system log (dmesg), and use fewer workers, or "
                "workers=0 to read without worker processes. A training that is started again resumes from its last "
                "checkpoint."
            )
        logger.warning("The feed's forkserver, which starts its workers, died (%s); starting a new one.", status)
        for pid in self._pids.values():
            _wait_until_gone(pid)  # the kernel kills them; until then they may still write and report
        self._ended += [WorkerEnded(worker, pid, -signal.SIGKILL) for worker, pid in self._pids.items()]
        self._pids = {}
        assert self._control is not None
        self._control.close()
        self._start_forkserver()
        for worker in sorted(self._awaited):
            self.restart(worker)

    def _reap_forkserver(self) -> str:
        """Wait until the forkserver, whose control socket is closed, has ended; returns how it ended."""
        forkserver, self._forkserver = self._forkserver, None
        if forkserver is None:
            return "not started"
        try:
            return describe_exit(forkserver.wait(END_TIMEOUT_S))
        except subprocess.TimeoutExpired:
            forkserver.kill()
            return describe_exit(forkserver.wait())


@cache
def warn_of_opencv_threads() -> None:
    """Warn, once per process, that OpenCV hangs in a fork while waiting for threads of its parent."""
    cv2 = sys.modules.get("cv2")
    if cv2 is not None and cv2.getNumThreads() > 1:
        logger.warning(
            "Workers are forked from a process in which OpenCV uses threads, so they may hang in OpenCV. Call "
            "cv2.setNumThreads(1) before any other OpenCV function, or use 'spawn' instead of 'fork'."
        )


class ForkedProcess:
    """A fork of this process, with the interface of subprocess.Popen."""

    def __init__(self, target: Callable[[], None]) -> None:
        self._pid = os.fork()
        if self._pid == 0:
            try:
                target()
            except BaseException:  # the child must never return into the parent's code
                traceback.print_exc()
            finally:
                os._exit(0)  # buffers and exit handlers belong to the parent

    def wait(self, timeout: float = math.inf) -> int:
        deadline = time.monotonic() + timeout
        while True:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("forkserver", timeout)
            time.sleep(0.005)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)


def _wait_until_gone(pid: int) -> None:
    """Wait until a killed process, not a child of this one, has ended."""
    deadline = time.monotonic() + END_TIMEOUT_S
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while machine.process_fields(pid)[0] not in "ZX":
            if time.monotonic() > deadline:
                raise ChildLostError(
                    f"Worker process {pid} was killed but does not end: the disk that it reads from may have failed."
                )
            time.sleep(0.001)


# Pickling the source


def pickle_for_workers(owner: object, *others: object, advice: str) -> bytes:
    """What workers need, pickled; raises ConfigError that names the attribute of `owner` which cannot be pickled."""
    try:
        return pickle.dumps((owner, *others))
    except Exception as error:  # a class may raise anything when it is pickled
        culprits = unpicklable_attributes(owner)
        what = f"its attribute {' and '.join(map(repr, culprits))}" if culprits else "it"
        raise ConfigError(
            f"{type(owner).__name__} cannot be sent to worker processes: {what} cannot be pickled ({error}). "
            f"Open files and handles on first use in {advice}."
        ) from error


def unpicklable_attributes(owner: object) -> list[str]:
    """Names of the attributes of `owner` that cannot be pickled."""
    return [name for name, value in getattr(owner, "__dict__", {}).items() if not _can_be_pickled(value)]


def _can_be_pickled(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # a class may raise anything when it is pickled
        return False
    return True
