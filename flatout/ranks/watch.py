"""Ranks look after each other: one that is gone, stopped or has failed is noticed by all within seconds.

    twice a second, each rank:   its beat --> store         beats of all, word of a failure --> each rank

A collective waits for every rank. Without this, one that is gone leaves the others deep inside torch, where no signal
is heard, until a timeout that must be long because some steps are. A beat comes from a thread of its own, so a rank
that is merely slow goes on beating.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, Protocol

import torch.distributed as dist

from flatout.errors import ChildLostError, FlatoutError, one_line

logger = logging.getLogger(__name__)

LOST_AFTER_S = 25.0
"""Without a beat, once training goes. Together with the half minute that torchrun gives a process to end: a minute."""
LOST_AT_START_S = 180.0
"""Before the first step: reading a large annotation file may hold Python's lock for long."""
GRACE_S = 10.0
"""For the main thread to come out of a broken collective by itself, and to close what it has open."""
STOP_S = 5.0
"""For a last word to be taken, and to be heard."""
_FAILURE = "failure"
PERIOD_S = 0.5
"""Between two beats of a rank."""
STALL_S = 5.0
"""A judge who comes back later than this was stopped himself."""
LEFT = -1
"""The beat of a rank that has ended as it should."""
_AFTER_NAME_START_TIME = 19
"""Of the fields behind the name in /proc/PID/stat, the one that says when the process was started."""


class Store(Protocol):
    """What is used of torch's key-value stores."""

    def set(self, key: str, value: str, /) -> None: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def set_timeout(self, timeout: timedelta, /) -> None: ...


class Pulses:
    """Who has been silent for how long? Pure but for the times it is told."""

    def __init__(self, size: int, now_s: float) -> None:
        self._numbers = [0] * size
        self._heard_s = [now_s] * size
        self._looked_s = now_s

    def hear(self, numbers: Sequence[int], now_s: float) -> None:
        for rank, number in enumerate(numbers):
            if number != self._numbers[rank]:
                self._numbers[rank], self._heard_s[rank] = number, now_s

    def silent(self, now_s: float, limit_s: float) -> list[int]:
        """Ranks that said nothing for so long and have not left; asked again and again."""
        # Whoever was stopped himself, such as all of them by Ctrl-Z, has no right to blame others.
        if now_s - self._looked_s > STALL_S:
            self._heard_s = [now_s] * len(self._heard_s)
        self._looked_s = now_s
        return [
            rank
            for rank, heard_s in enumerate(self._heard_s)
            if self._numbers[rank] != LEFT and now_s - heard_s > limit_s
        ]


class Beat(NamedTuple):
    """The latest word of a rank."""

    number: int
    pid: int
    host: str
    born: int
    """When its process was started, in ticks of its host; tells it from a later one of the same number."""


class Failure(NamedTuple):
    """What the first rank that failed told the others."""

    rank: int
    host: str
    line: str
    trace: str


class RankWatch:
    """Beats for this rank, listens to the others, and ends this process if it waits for one that will not come."""

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        *,
        lost_after_s: float = LOST_AFTER_S,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        """`store` belongs to the watch alone: a call that waits would hold up the beats."""
        self.rank = rank
        self._store, self._end = store, end
        self._limit_s, self._lost_after_s = LOST_AT_START_S, lost_after_s
        self._keys = [f"beat{each}" for each in range(size)]
        self._heard_keys = [f"heard{each}" for each in range(size)]
        self._own = Beat(0, os.getpid(), socket.gethostname(), born_ticks(os.getpid()) or 0)
        self._beats: list[Beat] = []
        self._pulses = Pulses(size, time.monotonic())
        self._failure: Failure | None = None
        self._verdict: ChildLostError | None = None
        self._stopping = threading.Event()
        self._main_knows = threading.Event()
        self._traceback_shown = threading.Lock()
        self._store.set(self._keys[rank], json.dumps(self._own))
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in {"rank-beat": self._beat, "rank-judge": self._judge}.items()
        ]

    def start(self) -> None:
        """Once all ranks have met: every one has set its first beat by then."""
        for thread in self._threads:
            thread.start()

    def settle(self) -> None:
        """Training goes: from here on a silent rank is a lost one sooner."""
        self._limit_s = self._lost_after_s

    def stop(self) -> None:
        """This rank ends, and says why if it must; the others will not miss it. May be called twice."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        # A beat under way would overwrite the last word; and no thread may be inside torch when Python ends.
        beats = self._threads[0]
        if beats.is_alive():
            beats.join(STOP_S)
        if beats.is_alive():
            return  # the store does not answer
        # The store of a first rank that has ended is gone, and so is everybody who would listen.
        with suppress(RuntimeError):
            self._store.set_timeout(timedelta(seconds=STOP_S))
            self._store.set(self._keys[self.rank], json.dumps(self._own._replace(number=LEFT)))

    def tell(self, error: BaseException) -> None:
        """This rank fails: the others learn why. Of several failures the first counts, not what follows from it."""
        self._main_knows.set()
        if is_of_collective(error):
            return
        line = " ".join(f"{type(error).__name__}: {error}".split())
        trace = "".join(traceback.format_exception(error))
        with suppress(RuntimeError):
            own = Failure(self.rank, self._own.host, line, trace)
            self._store.compare_set(_FAILURE, "", json.dumps(own))

    def wait_until_heard(self) -> None:
        """The store goes with the first rank: a few seconds, at most, for the others to read there why it failed."""
        heard = [key for rank, key in enumerate(self._heard_keys) if rank != self.rank]
        end_s = time.monotonic() + STOP_S
        with suppress(RuntimeError):
            while self.rank == 0 and not self._store.check(heard) and time.monotonic() < end_s:
                time.sleep(PERIOD_S / 5)

    def explain(self, error: BaseException) -> ChildLostError:
        """Why a collective broke; takes a few seconds, until there is a word of a failure or somebody stays silent."""
        self._main_knows.set()
        began_s = time.monotonic()
        while (waited_s := time.monotonic() - began_s) < 8 * PERIOD_S:
            if self._verdict is not None:
                return self._verdict
            if self._failure is not None:
                return self._blame(self._failure)
            # A rank that beat after the connection broke is not the one that broke it.
            if waited_s > 4 * PERIOD_S and (silent := self._silent(3 * PERIOD_S)):
                return self._lost(silent)
            time.sleep(PERIOD_S / 5)
        return ChildLostError(
            f"the connection between ranks broke: {one_line(error, 200)}. What was saved is untouched. "
            "Run the same command again."
        )

    # Threads

    def _beat(self) -> None:
        number = 0
        while not self._stopping.wait(PERIOD_S):
            number += 1
            try:
                self._store.set(self._keys[self.rank], json.dumps(self._own._replace(number=number)))
                self._beats = [Beat(*json.loads(text)) for text in self._store.multi_get(self._keys)]
                if self._failure is None and self._store.check([_FAILURE]):
                    self._failure = Failure(*json.loads(self._store.get(_FAILURE)))
                    self._store.set(self._heard_keys[self.rank], "yes")
            except RuntimeError:
                continue  # the store is gone with its rank, which then is silent
            self._pulses.hear([beat.number for beat in self._beats], time.monotonic())

    def _judge(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            failure = self._failure
            if failure is not None and failure.rank != self.rank:
                return self._leave(self._blame(failure))
            if silent := self._silent(self._limit_s):
                self._verdict = self._lost(silent)
                self._put_down(silent)
                return self._leave(self._verdict)
        return None

    def _silent(self, limit_s: float) -> list[int]:
        silent = self._pulses.silent(time.monotonic(), limit_s)
        # Not even this rank's own beats come back: the store is gone, and it lives with the first rank.
        return [0] if self.rank in silent and self.rank else [rank for rank in silent if rank != self.rank]

    def _put_down(self, silent: list[int]) -> None:
        """A stopped process of this host would stay for ever, and its open connections keep the others waiting."""
        for rank in silent:
            if rank < len(self._beats) and self._beats[rank].host == self._own.host:
                kill_sibling(self._beats[rank].pid, self._beats[rank].born)

    def _leave(self, error: ChildLostError) -> None:
        """End the process, unless the main thread is on its way out already."""
        if self._main_knows.wait(GRACE_S) or self._stopping.is_set():
            return
        print(f"flatout: {error}", file=sys.stderr, flush=True)
        # Files on disk are whole at any moment, and workers end with us.
        self._end(error.exit_code)

    # Words

    def _blame(self, failure: Failure) -> ChildLostError:
        witness = 0 if failure.rank else 1
        # Of all ranks one shows the traceback, and of its two threads the first.
        if self.rank == witness and self._traceback_shown.acquire(blocking=False):
            logger.error("Rank %d (%s) failed:\n%s", failure.rank, failure.host, failure.trace.rstrip())
        return ChildLostError(
            f"rank {failure.rank} failed, so all end: {failure.line} What was saved is untouched: mend the cause and "
            "run the same command again."
        )

    def _lost(self, ranks: list[int]) -> ChildLostError:
        which = " and ".join(map(str, ranks))
        hosts = ", ".join(sorted({self._beats[rank].host for rank in ranks if rank < len(self._beats)}))
        return ChildLostError(
            f"no sign of life from rank {which} ({hosts or 'unknown host'}): killed, stopped, or its machine is gone. "
            "What was saved is untouched. Run the same command again."
        )


def is_of_collective(error: BaseException) -> bool:
    """Whether an exception is what torch raises where ranks lose each other."""
    if isinstance(error, FlatoutError) or not isinstance(error, RuntimeError):
        return False
    words = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Timed out waiting", "Socket Timeout")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


# The store of the launcher, and processes of this host


def store_of_launcher(environ: Mapping[str, str], *, timeout_s: float = 60) -> Store:
    """A connection of its own to the store through which the ranks meet; keys of an earlier attempt do not count."""
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


def born_ticks(pid: int) -> int | None:
    """When a process was started, in ticks since the host was; None if there is none, or no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name stands in brackets and may contain anything, brackets too.
    return int(text.rpartition(")")[2].split()[_AFTER_NAME_START_TIME])


def kill_sibling(pid: int, born: int) -> bool:
    """SIGKILL, if the process is the one that was meant; whether it was."""
    if born_ticks(pid) != born:
        return False
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False
