"""The profiler: where the time of a training step goes, why, and how fast each remedy would make the training.

It reads the clock that every part of flatout marks its stages on. `flatout.profiler.watch` and what it returns are
public. Each name is imported when it is first used.

Files:

    demands      Step time as a function of what a step needs of each resource
    measurement  The numbers of a measurement, and the ledger that is computed from them
    outcome      The result of an observation: measurement, ledger and verdict, and the files they are saved in
    observe/     Observing a training while it runs: recorders
    report/      Ledger and verdict as plain text and as an HTML page
    verdict/     From a measurement to a verdict: the cause of slow training
"""

import warnings
from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.profiler.demands import KEPT_DECODED, Demands
    from flatout.profiler.measurement import Ledger, Limits, Measurement, make_ledger
    from flatout.profiler.observe.any_loop import watch_any
    from flatout.profiler.observe.device_times import DeviceTrace
    from flatout.profiler.observe.engine_steps import EngineObservation
    from flatout.profiler.observe.limits import drain, find_limits
    from flatout.profiler.observe.observation import ALL_PHASES, KERNEL_PHASES, SPEED_PHASES, Phases
    from flatout.profiler.observe.speed_of_light import SpeedOfLight, measure_machine
    from flatout.profiler.observe.summary import machine_facts
    from flatout.profiler.observe.watch import watch
    from flatout.profiler.outcome import Profile, load_measurement
    from flatout.profiler.report.page import KIND_COLOURS
    from flatout.profiler.report.text import (
        ledger_head,
        note_lines,
        runs_of,
        shown_rows,
        verdict_lines,
    )
    from flatout.profiler.verdict import EndToEndTrial, Remedy, Trial, Verdict, diagnose
    from flatout.profiler.verdict.remedy import number, with_job_flags
    from flatout.profiler.verdict.rules_host import CUDA_GRAPH
    from flatout.profiler.verdict.rules_input import ON_DEVICE

_get, __dir__ = face(__name__)


def __getattr__(name: str) -> object:
    if name == "judge":
        warnings.warn("flatout.profiler.judge is now called diagnose", DeprecationWarning, stacklevel=2)
        name = "diagnose"
    return _get(name)
