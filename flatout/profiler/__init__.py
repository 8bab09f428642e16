"""The clock every part of flatout stamps, and the profiler that reads it: ledger, verdict, predicted speeds.

`flatout.profiler.watch` and what it returns are public. Each name is imported when it is first used: feed workers
import the clock from here, and must not load torch with it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.profiler.ledger import Ledger, make_ledger
    from flatout.profiler.limits import find_limits
    from flatout.profiler.measurement import Measurement
    from flatout.profiler.report.save import load_measurement
    from flatout.profiler.verdict import Trial, Verdict, judge
    from flatout.profiler.watching import watch

__all__ = [
    "Ledger",
    "Measurement",
    "Trial",
    "Verdict",
    "find_limits",
    "judge",
    "load_measurement",
    "make_ledger",
    "watch",
]

_HOME = {
    "Ledger": "ledger",
    "Measurement": "measurement",
    "Trial": "verdict",
    "Verdict": "verdict",
    "find_limits": "limits",
    "judge": "verdict",
    "load_measurement": "report.save",
    "make_ledger": "ledger",
    "watch": "watching",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
