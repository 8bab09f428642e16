"""How many cores do other processes keep busy meanwhile? What they take, no remedy can give back."""

import os
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


def _busy_s() -> float | None:
    """Seconds all cores together have worked since boot, time stolen by other guests included."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, first.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
