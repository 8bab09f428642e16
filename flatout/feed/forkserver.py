"""The forkserver: the small process that worker processes are forked from.

It is started once per feed and holds only the source and the ring (no CUDA, no threads, no torch unless the source
imports it). So a worker can be forked from it safely and within milliseconds at any time, even long after the trainer
has become a process that must not be forked.

    trainer --start worker--> forkserver --fork--> worker
    trainer <--worker ended-- forkserver

Lifetime: it lives as long as the trainer's end of the control socket is open. When that closes, however the trainer
died, the forkserver kills its workers and exits; when the forkserver is killed, the kernel kills the workers.
"""

import ctypes
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from multiprocessing import spawn
from typing import Any, NamedTuple

from flatout.feed.ring import KernelLock, Ring, RingSpec
from flatout.feed.source import Source
from flatout.feed.worker import WorkerSettings, cause_of, traceback_of, work

CHECK_PARENT_MS = 1000
PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


class WorkerStarted(NamedTuple):
    """Message: a worker process was started."""

    worker: int
    pid: int


class WorkerEnded(NamedTuple):
    """Message: a worker process has ended; status as from os.waitstatus_to_exitcode (negative: signal)."""

    worker: int
    pid: int
    status: int


class StartFailed(NamedTuple):
    """Message: a worker could not be forked or, with `worker` None, the source could not be loaded."""

    worker: int | None
    cause: str
    traceback: str


ForkserverFds = tuple[int, ...]
"""File descriptors that the forkserver inherits from the trainer: of the control socket, the arena and the reports,
then one for the tokens of each lane of the ring."""


class Forkserver:
    """Forks workers on request, and reports when they end."""

    def __init__(self, source: Source, spec: RingSpec, settings: WorkerSettings, fds: ForkserverFds) -> None:
        self._source = source
        self._spec = spec
        self._settings = settings
        control, self._arena, self._reports, *self._tokens = fds
        self._control = socket.socket(fileno=control)
        self._pid = os.getpid()
        self._workers: dict[int, int] = {}  # pid -> worker

    def serve(self) -> None:
        """Run until the trainer is gone."""
        trainer = os.getppid()
        wake_reader, wake_writer = socket.socketpair()
        wake_writer.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_writer.fileno(), warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(wake_reader, select.POLLIN)
        try:
            # The parent's pid is checked too: a child that the trainer forked for other purposes may hold a copy of the
            # control socket, which then never reports end of file.
            while os.getppid() == trainer:
                ready = {fd for fd, _ in poll.poll(CHECK_PARENT_MS)}
                if wake_reader.fileno() in ready:
                    wake_reader.recv(4096)
                self._report_ended()
                if self._control.fileno() in ready and not self._handle_request():
                    return
        except ConnectionError:
            return  # the trainer ended while a message was being sent
        finally:
            signal.set_wakeup_fd(-1)
            for pid in self._workers:
                os.kill(pid, signal.SIGKILL)

    def _handle_request(self) -> bool:
        """Start the requested worker; False when the trainer has closed the socket."""
        request = self._control.recv(64)
        if not request:
            return False
        worker = int(request)
        try:
            pid = os.fork()
        except OSError as error:
            send_message(self._control, StartFailed(worker, f"worker {worker} could not be started: {error}", ""))
            return True
        if pid == 0:
            self._become_worker(worker)
        self._workers[pid] = worker
        send_message(self._control, WorkerStarted(worker, pid))
        return True

    def _become_worker(self, worker: int) -> None:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            set_parent_death_signal(True)
            if os.getppid() != self._pid:  # the forkserver died before the line above took effect
                os._exit(1)
            keep_freed_memory()
            self._control.close()
            ring = Ring.attach(self._spec, self._arena)
            reports = socket.socket(fileno=self._reports)
            tokens = self._tokens[worker % len(self._tokens)]
            work(worker, ring, self._source, self._settings, tokens, reports)
            os._exit(0)
        except BaseException:  # a worker must never return into the forkserver's loop
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def _report_ended(self) -> None:
        while self._workers:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                # A stopped worker that holds the ring's lock would block all others, and the watchdog too.
                if KernelLock(self._arena).holder() == pid:
                    os.kill(pid, signal.SIGKILL)
            elif pid in self._workers:  # the source may have started child processes of its own
                send_message(self._control, WorkerEnded(self._workers.pop(pid), pid, os.waitstatus_to_exitcode(status)))


_is_loading_source = False


def is_loading_source() -> bool:
    """Whether this process is a forkserver that is currently loading its source."""
    return _is_loading_source


def send_message(control: socket.socket, message: NamedTuple) -> None:
    control.send(pickle.dumps(message))


def set_parent_death_signal(on: bool) -> None:
    """Choose whether the kernel kills this process when the thread that created it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL if on else 0)


def keep_freed_memory() -> None:
    """Make the allocator keep up to 256 MB of freed memory instead of returning it after every image.

    A decoded image is large enough to be mapped separately each time: 400 page faults and a fifth of a worker's time
    per sample, measured on 640 x 480 JPEGs. Only glibc has this setting.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(M_TRIM_THRESHOLD, 256 << 20)


def ignore_signals() -> None:
    """Ignore signals that are meant for the trainer; the forkserver ends when the trainer does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def main() -> None:
    """Entry point of a fresh interpreter: descriptors as arguments, everything else pickled on stdin."""
    global _is_loading_source
    ignore_signals()
    fds = tuple(map(int, sys.argv[1:]))
    # Loading a source can take long, and the control socket is not polled in the meantime.
    set_parent_death_signal(True)
    _is_loading_source = True
    try:
        preparation: dict[str, Any] = pickle.load(sys.stdin.buffer)
        spawn.prepare(preparation)
        source, spec, settings = pickle.load(sys.stdin.buffer)
    except BaseException as error:  # importing the user's modules may raise anything, SystemExit included
        send_message(socket.socket(fileno=fds[0]), StartFailed(None, cause_of(error), traceback_of(error)))
        return
    _is_loading_source = False
    if cv2 := sys.modules.get("cv2"):
        cv2.setNumThreads(1)  # workers already run in parallel, and a thread pool does not survive a fork
    set_parent_death_signal(False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    Forkserver(source, spec, settings, fds).serve()


if __name__ == "__main__":
    main()
