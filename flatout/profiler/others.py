"""How many cores do other processes keep busy? What they take, no remedy can give back."""

import os
import re
import statistics
import time
from pathlib import Path


class Others:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), _busy_s()

    def cores(self, own_cpu_s: float) -> float | None:
        """Cores busy with other work since then, on average; `own_cpu_s` is what this training used. None: unknown."""
        began_s, busy_s = self._began
        now_busy_s = _busy_s()
        if busy_s is None or now_busy_s is None:
            return None
        return max(0.0, (now_busy_s - busy_s - own_cpu_s) / max(1e-3, time.perf_counter() - began_s))


def fitting_threads(num_threads: int, free_cores: float) -> int | None:
    """For how many of so many threads a core is free; None if for all. One thread is never too many."""
    if num_threads <= max(1.0, free_cores + 0.5):
        return None
    return max(1, int(free_cores + 0.25))


def busy_cores(*, glances: int = 5, pause_s: float = 0.01, root: Path = Path("/")) -> float:
    """Cores that other processes of the machine keep busy at the moment; 0 where the system does not say.

    The smaller of two numbers: processes that run or wait for a core now, and the load of the last minute. A command
    that has just ended is in the second alone, and one that starts up for an instant in the first.
    """
    running = []
    for _ in range(glances):
        running.append(_num_running(root) - 1)
        time.sleep(pause_s)
    try:
        load = float((root / "proc/loadavg").read_text().split()[0])
    except (OSError, ValueError):
        return 0.0
    return max(0.0, min(load, statistics.median(running)))


def _num_running(root: Path) -> int:
    """Threads that run or wait for a core, this one included; 1 where the system does not say."""
    try:
        found = re.search(r"^procs_running (\d+)", (root / "proc/stat").read_text(), re.MULTILINE)
    except OSError:
        return 1
    return int(found[1]) if found else 1


def _busy_s() -> float | None:
    """Seconds all cores together have worked since boot, time stolen by other guests included."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, first.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
