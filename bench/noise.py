"""How noisy is this machine now?

Repeats a fixed piece of arithmetic and a fixed memory copy: on a quiet machine each repeat takes the same time. Other
processes on other cores do not slow these down, but would slow a benchmark with workers, so the cores that they keep
busy are counted as well. Other benchmarks print this line first.
"""

import os
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.measure import arguments, facts_line, measure, report

SPREAD_LIMIT = 1.15
OTHERS_LIMIT = 0.15


class Noise(NamedTuple):
    """p90 / p10 of equal work, and cores that were busy with other processes (None: unknown)."""

    cpu_spread: float
    copy_spread: float
    others_cores: float | None

    @property
    def verdict(self) -> str:
        if (self.others_cores or 0) > OTHERS_LIMIT:
            return "BUSY with other processes: repeat later"
        if max(self.cpu_spread, self.copy_spread) > SPREAD_LIMIT:
            # Nothing else runs here, so it is the clock frequency or other guests of the same host.
            return "UNSTEADY by itself: trust medians of interleaved pairs only"
        return "quiet"

    def line(self) -> str:
        others = "unknown" if self.others_cores is None else f"{self.others_cores:.2f}"
        return (
            f"noise: arithmetic p90/p10 {self.cpu_spread:.2f}, memory copy {self.copy_spread:.2f}, "
            f"cores busy with other work {others}: {self.verdict}"
        )


def listen(repeats: int = 60) -> Noise:
    """Measure the noise, in about two seconds."""
    source = np.ones(32 << 20, np.uint8)
    target = np.zeros_like(source)
    wall, own, busy = time.perf_counter(), time.process_time(), _busy_s()
    cpu = measure(_arithmetic, warmup=3, repeats=repeats)
    copy = measure(lambda: np.copyto(target, source), warmup=3, repeats=repeats)
    elapsed_s, own_s = time.perf_counter() - wall, time.process_time() - own
    busy_after = _busy_s()
    others = None if busy is None or busy_after is None else max(0.0, (busy_after - busy - own_s) / elapsed_s)
    return Noise(cpu.p90 / cpu.p10, copy.p90 / copy.p10, others)


def _arithmetic() -> int:
    return sum(i * i for i in range(300_000))


def _busy_s() -> float | None:
    """Seconds that all cores together were busy since boot, time stolen by other guests included."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, first.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    options = arguments(__doc__).parse_args()
    noise = listen(repeats=10 if options.quick else 60)
    print(facts_line())
    report("noise", noise.line(), noise._asdict(), options)


if __name__ == "__main__":
    main()
