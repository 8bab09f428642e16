"""From what recorders, samplers and probes hold to the lanes and lines of a measurement."""

import os
import platform
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from flatout.profiler import machine
from flatout.profiler.device_clock import DeviceSteps
from flatout.profiler.measurement import IDLE, WAIT, HotLine, Lane
from flatout.profiler.recorder import Steps
from flatout.profiler.sampler import Line, short_place
from flatout.profiler.stages import AHEAD, canonical
from flatout.profiler.waits import source_text

Samples = Mapping[tuple[Line, str | None], int]
SHOWN_LINES = 40


def host_lane(steps: Steps, samples: Samples, sampled: Collection[str] = ()) -> Lane:
    """Marked stages, and those that only samples can see (`sampled`: a loss that is a plain function)."""
    num_steps = len(steps.images)
    stage_ms: dict[str, float] = defaultdict(float)
    runs: dict[str, float] = defaultdict(float)
    for name, ns, count in zip(steps.names, steps.self_ns.sum(0), steps.runs.sum(0), strict=True):
        stage_ms[canonical(name)] += float(ns) / 1e6 / num_steps
        runs[canonical(name)] = max(runs[canonical(name)], float(count) / num_steps)
    step_ms, total = float(steps.wall_ns.mean()) / 1e6, max(1, sum(samples.values()))
    seen: Counter[str] = Counter()
    for (_, stage), count in samples.items():
        if stage is not None and stage in sampled and stage not in stage_ms:
            seen[stage] += count
    for stage, count in seen.items():
        # Sampled shares may not take more than the marks leave.
        rest_ms = max(0.0, step_ms - sum(stage_ms.values()))
        stage_ms[stage] = min(step_ms * count / total, rest_ms)
    return Lane(place="host", stage_ms=dict(stage_ms), stage_runs=dict(runs))


def run_ahead(host: Lane, *, host_ms: float, device_ms: float) -> Lane:
    """The main thread's lane when it queues steps faster than the device works them off."""
    if device_ms <= host_ms:
        return host
    ahead_ms = host.stage_ms.get(AHEAD, 0.0) + device_ms - host_ms
    return replace(host, stage_ms=dict(host.stage_ms) | {AHEAD: ahead_ms})


def no_longer_than(step_ms: float, workers: Lane) -> Lane:
    """Nobody works for longer than there is time.

    Work that began before the first timed step is charged when it ends: in a short look, workers that never idle would
    have worked for more than all of it.
    """
    busy_ms = sum(workers.stage_ms.values())
    if busy_ms <= workers.width * step_ms:
        return workers
    share = workers.width * step_ms / busy_ms
    return replace(workers, stage_ms={stage: ms * share for stage, ms in workers.stage_ms.items()})


def with_serial_input(host: Lane, made_here: Lane) -> Lane:
    """The main thread's lane when it makes batches itself: part of its wait for data is work, stage by stage."""
    made_ms = sum(made_here.stage_ms.values())
    stage_ms = dict(host.stage_ms) | {WAIT: max(0.0, host.stage_ms.get(WAIT, 0.0) - made_ms)}
    for stage, ms in made_here.stage_ms.items():
        stage_ms[stage] = stage_ms.get(stage, 0.0) + ms
    return replace(host, stage_ms=stage_ms, stage_runs=dict(host.stage_runs) | dict(made_here.stage_runs))


def device_lane(steps: DeviceSteps, place: str = "device") -> Lane:
    """Marked stages on the compute stream, or on those beside it."""
    means = steps.self_ms.mean(0) if len(steps.self_ms) else np.zeros(len(steps.names))
    stage_ms: dict[str, float] = defaultdict(float)
    for name, ms in zip(steps.names, means, strict=True):
        stage_ms[canonical(name)] += float(ms)
    return Lane(place=place, stage_ms=dict(stage_ms), rest=IDLE)


def hot_lines(samples: Samples, step_ms: float) -> list[HotLine]:
    """Lines of the main thread, hottest first."""
    total = max(1, sum(samples.values()))
    hottest = sorted(samples.items(), key=lambda item: -item[1])[:SHOWN_LINES]
    return [
        HotLine(
            where=short_place(str(line)),
            ms=step_ms * count / total,
            stage=None if stage is None else canonical(stage),
            text=source_text(str(line)),
            function=line.function,
        )
        for (line, stage), count in hottest
    ]


def worker_lines(samples: Counter[tuple[str, str]], busy_ms: float) -> list[HotLine]:
    """Lines of the workers, hottest first; samples are per (file:line, function), `busy_ms` is all their work."""
    total = max(1, sum(samples.values()))
    return [
        HotLine(
            where=short_place(where),
            ms=busy_ms * count / total,
            text=source_text(where),
            function=function,
            in_worker=True,
        )
        for (where, function), count in samples.most_common(SHOWN_LINES)
    ]


def machine_facts() -> dict[str, str]:
    """What the numbers depend on; nothing that names the machine itself."""
    import torch

    facts = {
        "CPU": machine.cpu_name(),
        "cores": str(machine.cores()),
        "RAM": f"{machine.memory().total / 2**30:.0f} GiB",
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "threads": f"{torch.get_num_threads()} of torch, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '-')}",
    }
    if torch.cuda.is_available():
        facts["GPU"] = torch.cuda.get_device_name()
    return facts
