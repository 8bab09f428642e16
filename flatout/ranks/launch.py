"""Start one process per GPU on this machine, without a launcher: `--device 0,1`.

    this process --starts, forwards signals--> rank 0, rank 1 ...     ends with the exit code of the cause

Does what torchrun does on one machine, but keeps exit codes: 75 still means that the same command continues.
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
from flatout.ranks.signals import ForwardedSignals

GRACE_S = 60.0
"""Time for the other ranks to end by themselves after one has failed; they notice within half of it."""
_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1
_FIRST_PORT, _NUM_PORTS = 12_000, 20_000


def has_launcher() -> bool:
    """Whether a launcher started this process, so that it need not start ranks; unlike `read_world` without torch."""
    return "WORLD_SIZE" in os.environ


def is_first_rank() -> bool:
    """Whether this process is the only rank or the first one; without torch."""
    return os.environ.get("RANK", "0") in ("", "0")


def launch_ranks(words: Sequence[str], num_ranks: int, *, grace_s: float = GRACE_S) -> int:
    """Run `flatout WORDS` on this many ranks and wait for them; returns the exit code of the cause."""
    command = [sys.executable, "-m", "flatout", *words]
    port = free_port()
    ranks = [
        # A session of its own: Ctrl-C reaches only this process, which forwards it to each rank once.
        subprocess.Popen(
            command,
            env=environ_of(rank, num_ranks, port, os.environ),
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        for rank in range(num_ranks)
    ]
    try:
        with ForwardedSignals(lambda number: _signal_all(ranks, number)):
            return exit_code_of(_wait(ranks, grace_s))
    finally:
        _kill(ranks)


def run_rank(
    words: Sequence[str],
    *,
    rank: int,
    num_ranks: int,
    local_rank: int,
    local_ranks: int,
    address: str,
    port: int,
    folder: str = "",
) -> int:
    """Run `flatout WORDS` as one rank of a group that meets at address:port, and wait; returns its exit code.

    For schedulers that start one process per rank themselves. `folder` is the rank's current folder; empty: this one's.
    If this process is killed, the rank is asked to save and end.
    """
    of_group = {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": address}
    environ = environ_of(local_rank, local_ranks, port, os.environ) | of_group
    command = [sys.executable, "-m", "flatout", *words]
    return subprocess.Popen(command, env=environ, cwd=folder or None, preexec_fn=_end_with_parent).wait()


def environ_of(rank: int, num_ranks: int, port: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a rank: the variables that torchrun sets, and a PYTHONPATH with this package."""
    ranks = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "RANK": rank, "LOCAL_RANK": rank}
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    threads = {"OMP_NUM_THREADS": max(1, len(os.sched_getaffinity(0)) // num_ranks)}
    package = str(Path(__file__).parents[2])
    path = {"PYTHONPATH": os.pathsep.join(filter(None, (package, environ.get("PYTHONPATH"))))}
    return {name: str(value) for name, value in {**threads, **environ, **ranks, **rendezvous, **path}.items()}


def exit_code_of(codes: Sequence[int]) -> int:
    """The exit code for all ranks together: that of the cause, not of its consequences. Negative codes are signals."""
    lost = ChildLostError.exit_code
    causes = [code for code in codes if code > 0 and code != lost]
    return causes[0] if causes else lost if any(codes) else 0


def _wait(ranks: Sequence["subprocess.Popen[bytes]"], grace_s: float) -> list[int]:
    """Wait for all ranks; returns their exit codes in the order in which they ended."""
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


def _end_with_parent() -> None:
    """Runs in the new process before the rank starts: if the parent is killed, the rank gets SIGTERM and saves."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    """A free port outside the ephemeral range, so that no other process is assigned it before it is used."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port := _FIRST_PORT + secrets.randbelow(_NUM_PORTS)))
            return port
