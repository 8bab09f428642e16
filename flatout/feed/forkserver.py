"""The small process that worker processes are forked from.

It is started once per feed, holds the source and the ring and nothing else (no CUDA, no threads, no
torch unless the source brings it), so a worker can be forked from it safely and in milliseconds at
any time, also long after the trainer has become a process that must not be forked.

    trainer --start worker--> nursery --fork--> worker
    trainer <--worker ended-- nursery

Lifetime: the trainer's end of the control socket. When it is gone, however the trainer died, the
nursery kills its workers and ends; when the nursery is killed, the kernel kills the workers.
"""

import ctypes
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from multiprocessing import spawn
from typing import Any, NamedTuple

from flatout.feed.ring import KernelLock, Ring, RingSpec
from flatout.feed.source import Source
from flatout.feed.worker import WorkOrders, cause_of, traceback_of, work

CHECK_PARENT_MS = 1000
PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


class Started(NamedTuple):
    """A worker process exists."""

    worker: int
    pid: int


class Ended(NamedTuple):
    """A worker process is gone; status as from os.waitstatus_to_exitcode (negative: signal)."""

    worker: int
    pid: int
    status: int


class Refused(NamedTuple):
    """The nursery could not fork a worker, or open the source (then it is about no worker in particular)."""

    worker: int | None
    cause: str
    traceback: str


class NurseryFds(NamedTuple):
    """Descriptors the nursery inherits from the trainer."""

    control: int
    arena: int
    reports: int
    tokens: tuple[int, ...]
    """One for each lane of the ring."""

    @property
    def flat(self) -> tuple[int, ...]:
        return (*self[:3], *self.tokens)

    @classmethod
    def from_flat(cls, fds: Sequence[int]) -> "NurseryFds":
        control, arena, reports, *tokens = fds
        return cls(control, arena, reports, tuple(tokens))


class Nursery:
    """Forks workers on request and tells when they end."""

    def __init__(self, source: Source, spec: RingSpec, orders: WorkOrders, fds: NurseryFds) -> None:
        self._source = source
        self._spec = spec
        self._orders = orders
        self._fds = fds
        self._control = socket.socket(fileno=fds.control)
        self._pid = os.getpid()
        self._workers: dict[int, int] = {}  # pid -> worker

    def serve(self) -> None:
        """Until the trainer is gone."""
        trainer = os.getppid()
        wake_reader, wake_writer = socket.socketpair()
        wake_writer.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_writer.fileno(), warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(wake_reader, select.POLLIN)
        try:
            # The parent's pid is checked too: a child that the trainer forked for other purposes may
            # hold a copy of the control socket, which then never reports the end.
            while os.getppid() == trainer:
                ready = {fd for fd, _ in poll.poll(CHECK_PARENT_MS)}
                if wake_reader.fileno() in ready:
                    wake_reader.recv(4096)
                self._tell_ended()
                if self._control.fileno() in ready and not self._obey():
                    return
        except ConnectionError:
            return  # the trainer ended while it was being told something
        finally:
            signal.set_wakeup_fd(-1)
            for pid in self._workers:
                os.kill(pid, signal.SIGKILL)

    def _obey(self) -> bool:
        """Start one worker as asked; False when the trainer has hung up."""
        request = self._control.recv(64)
        if not request:
            return False
        worker = int(request)
        try:
            pid = os.fork()
        except OSError as error:
            tell(self._control, Refused(worker, f"worker {worker} could not be started: {error}", ""))
            return True
        if pid == 0:
            self._become_worker(worker)
        self._workers[pid] = worker
        tell(self._control, Started(worker, pid))
        return True

    def _become_worker(self, worker: int) -> None:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            be_killed_with_parent(True)
            if os.getppid() != self._pid:  # it died before the line above could take effect
                os._exit(1)
            keep_freed_memory()
            self._control.close()
            ring = Ring.attach(self._spec, self._fds.arena)
            reports = socket.socket(fileno=self._fds.reports)
            tokens = self._fds.tokens[worker % len(self._fds.tokens)]
            work(worker, ring, self._source, self._orders, tokens, reports)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def _tell_ended(self) -> None:
        while self._workers:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                # Inside the ring's lock it would hold up everybody, even the watchdog that waits for such ones.
                if KernelLock(self._fds.arena).holder() == pid:
                    os.kill(pid, signal.SIGKILL)
            elif pid in self._workers:  # a source may have children of its own
                tell(self._control, Ended(self._workers.pop(pid), pid, os.waitstatus_to_exitcode(status)))


_opening = False


def opening_a_source() -> bool:
    """Whether this process is a nursery that is importing what its source needs."""
    return _opening


def tell(control: socket.socket, message: NamedTuple) -> None:
    control.send(pickle.dumps(message))


def be_killed_with_parent(on: bool) -> None:
    """Whether the kernel ends this process when the thread that made it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL if on else 0)


def keep_freed_memory() -> None:
    """Have the allocator keep up to 256 MB that was freed instead of giving it back after every picture.

    A decoded picture is large enough to be mapped anew each time: 400 page faults and a fifth of a
    worker's time per sample, measured on 640 x 480 JPEGs. Only glibc has this knob.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(M_TRIM_THRESHOLD, 256 << 20)


def live_by_the_pipe() -> None:
    """Signals meant for the trainer end nothing here: it decides, and its end is noticed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def main() -> None:
    """A fresh interpreter's way in: descriptors as arguments, everything else pickled on stdin."""
    global _opening
    live_by_the_pipe()
    fds = NurseryFds.from_flat([int(fd) for fd in sys.argv[1:]])
    # Opening a source can take long, and nobody looks at the control socket meanwhile.
    be_killed_with_parent(True)
    _opening = True
    try:
        preparation: dict[str, Any] = pickle.load(sys.stdin.buffer)
        spawn.prepare(preparation)
        source, spec, orders = pickle.load(sys.stdin.buffer)
    except BaseException as error:
        tell(socket.socket(fileno=fds.control), Refused(None, cause_of(error), traceback_of(error)))
        return
    _opening = False
    if cv2 := sys.modules.get("cv2"):
        cv2.setNumThreads(1)  # the parallelism is the workers', and a pool of threads does not survive a fork
    be_killed_with_parent(False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    Nursery(source, spec, orders, fds).serve()


if __name__ == "__main__":
    main()
