"""The profiler: it reads the clock that every part of flatout stamps; ledger, verdict, predicted speeds.

`flatout.profiler.watch` and what it returns are public. Each name is imported when it is first used.

Files:

    demands      How long is a step, given what it asks of each resource?
    measurement  What was measured, as plain numbers: the only thing the ledger and the verdict look at
    outcome      What an observation comes to: numbers, ledger, verdict, and the ways to show them
    observe/     Looking at a training while it runs
    report/      A measurement and its verdict for a person
    verdict/     Why is a training as slow as it is
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.profiler.demands import KEPT_DECODED, Demands
    from flatout.profiler.measurement import Ledger, Limits, Measurement, make_ledger
    from flatout.profiler.observe.device_times import DeviceTrace
    from flatout.profiler.observe.engine_steps import EngineObservation
    from flatout.profiler.observe.limits import drain, find_limits
    from flatout.profiler.observe.observation import ALL, KERNELS, SPEED, Phases
    from flatout.profiler.observe.speed_of_light import SpeedOfLight, measure_machine
    from flatout.profiler.observe.summary import machine_facts
    from flatout.profiler.observe.watch import watch
    from flatout.profiler.outcome import Profile, load_measurement
    from flatout.profiler.report.page import KIND_COLOURS
    from flatout.profiler.report.text import (
        between_lines,
        runs_of,
        shown_rows,
        speed_of_light_lines,
        verdict_lines,
        wait_lines,
    )
    from flatout.profiler.verdict import EndToEndTrial, Remedy, Trial, Verdict, diagnose
    from flatout.profiler.verdict.remedy import number, respelled
    from flatout.profiler.verdict.rules_host import CUDA_GRAPH
    from flatout.profiler.verdict.rules_input import ON_DEVICE

__getattr__, __dir__ = face(__name__)
