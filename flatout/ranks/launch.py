"""One process per GPU without a launcher: `--device 0,1` starts them here, on this machine.

    this process --starts, passes signals on--> rank 0, rank 1 ...     ends with the exit code that tells the cause

What torchrun does on one machine, except that exit codes survive: 75 still means that the same command continues.
"""

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from flatout.errors import ChildLostError
from flatout.ranks.signals import PassedOn

GRACE_S = 60.0
"""For the others to end by themselves once one has; they notice within half of it."""
_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1
_FIRST_PORT, _NUM_PORTS = 12_000, 20_000


def launch_ranks(words: Sequence[str], num_ranks: int, *, grace_s: float = GRACE_S) -> int:
    """Run `flatout WORDS` as so many ranks, to their end; returns the exit code of the whole."""
    command = [sys.executable, "-m", "flatout", *words]
    port = free_port()
    ranks = [
        # A session of its own: Ctrl-C comes here, and goes on to each of them once.
        subprocess.Popen(
            command, env=environ_of(rank, num_ranks, port, os.environ), start_new_session=True, preexec_fn=_end_with_us
        )
        for rank in range(num_ranks)
    ]
    try:
        with PassedOn(lambda number: _signal_all(ranks, number)):
            return exit_code_of(_wait(ranks, grace_s))
    finally:
        _kill(ranks)


def environ_of(rank: int, num_ranks: int, port: int, environ: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would set, and where flatout is if it is not installed."""
    place = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "RANK": rank, "LOCAL_RANK": rank}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    threads = {"OMP_NUM_THREADS": max(1, len(os.sched_getaffinity(0)) // num_ranks)}
    package = str(Path(__file__).parents[2])
    path = {"PYTHONPATH": os.pathsep.join(filter(None, (package, environ.get("PYTHONPATH"))))}
    return {name: str(value) for name, value in (threads | dict(environ) | place | meeting | path).items()}


def exit_code_of(codes: Sequence[int]) -> int:
    """Of all ranks together: the cause, not what followed from it. Negative codes are signals."""
    lost = ChildLostError.exit_code
    causes = [code for code in codes if code > 0 and code != lost]
    return causes[0] if causes else lost if any(codes) else 0


def _wait(ranks: Sequence["subprocess.Popen[bytes]"], grace_s: float) -> list[int]:
    """Exit codes, those that ended first coming first."""
    codes: dict[int, int] = {}
    end_s: float | None = None
    while len(codes) < len(ranks):
        for rank, process in enumerate(ranks):
            if rank not in codes and (code := process.poll()) is not None:
                codes[rank] = code
                if code and end_s is None:
                    end_s = time.monotonic() + grace_s
        if end_s is not None and time.monotonic() > end_s:
            _kill(ranks)
        time.sleep(_POLL_S)
    return list(codes.values())


def _kill(ranks: Sequence["subprocess.Popen[bytes]"]) -> None:
    for process in ranks:
        if process.poll() is None:
            process.kill()


def _signal_all(ranks: Sequence["subprocess.Popen[bytes]"], number: signal.Signals) -> None:
    for process in ranks:
        process.send_signal(number)


def _end_with_us() -> None:
    """In a rank, before it begins: if this process is killed, be told to save and end."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    """Of those that no system hands out by itself: nobody gets it by chance before it is used, seconds later."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port := _FIRST_PORT + secrets.randbelow(_NUM_PORTS)))
            return port
