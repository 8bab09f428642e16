"""Steps that are timed: what is collected meanwhile, and the measurement it comes to.

Stages by the recorder's marks, the running line by samples, workers by their tables, the device by its events. What
that may cost a step is asked by bench/profiler_overhead.py.
"""

import time
from collections import Counter
from collections.abc import Mapping
from types import CodeType

from flatout.clock import Event, Others, machine, stage_apart
from flatout.profiler.measurement import Lane, Limits, Measurement
from flatout.profiler.observe.device_times import DeviceClock, DeviceSteps, DeviceWork
from flatout.profiler.observe.recorder import StepRecorder
from flatout.profiler.observe.sampler import Line, Sampler
from flatout.profiler.observe.speed_of_light import launch_us
from flatout.profiler.observe.summary import (
    WorkersSeen,
    WorkerWatch,
    device_lane,
    host_lane,
    hot_lines,
    machine_facts,
    no_longer_than,
    run_ahead,
    with_serial_input,
)
from flatout.profiler.observe.waits import WaitCounter


class TimedSteps:
    """From the moment it is made; the recorder forgets what came before."""

    def __init__(
        self,
        recorder: StepRecorder,
        workers: WorkerWatch,
        device: DeviceClock | None,
        functions: Mapping[CodeType, str],
    ) -> None:
        """`functions`: code -> stage, for what cannot be marked."""
        self._recorder, self._workers, self._device, self._functions = recorder, workers, device, functions
        self.num_steps = 0
        # Kept step by step: what runs after the last step is nobody's.
        self._samples: Counter[tuple[Line, str | None]] = Counter()
        self._fresh: list[tuple[Line, str | None]] = []  # of the step that runs
        self._device_timelines: dict[str, list[Event]] = {}
        self._worker_timelines: dict[str, list[Event]] = {}
        self._sampler = Sampler(label=self._stage_now, functions=functions, on_sample=self._keep_sample)
        workers.begin()
        self._others, self._cpu_began_s = Others(), time.process_time()
        self._untimed_on_device = device.num_steps if device else 0
        recorder.restart()

    def step_ended(self) -> None:
        self.num_steps += 1
        fresh, self._fresh = self._fresh, []
        self._samples.update(fresh)
        self._workers.look(self.num_steps)

    def forget_samples(self) -> None:
        """What was sampled since the last step ended belongs to none."""
        self._fresh = []

    def close(self) -> None:
        """No more samples are taken; may be called twice."""
        self._sampler.close()

    def timeline(self) -> dict[str, list[Event]]:
        """Place -> events of the last steps, once they are summed up."""
        lanes = {"host": self._recorder.timeline}
        lanes |= {place: events for place, events in self._device_timelines.items() if events}
        # Workers may be ahead of the loop: what they did after its end belongs to no step.
        end_ns = max((event.end_ns for event in lanes["host"]), default=0)
        for name, events in self._worker_timelines.items():
            lanes[name] = [event for event in events if event.end_ns <= end_ns]
        return lanes

    def _keep_sample(self, line: Line, stage: str | None) -> None:
        self._fresh.append((line, stage))

    def _stage_now(self) -> str | None:
        innermost = self._recorder.innermost
        return stage_apart(innermost) or (None if innermost is None else innermost.name)

    def sum_up(self, work: DeviceWork | None, waits: WaitCounter, title: str) -> Measurement:
        """Host-device wait. `work` and `waits` were seen before, in steps of their own."""
        steps = self._recorder.steps()
        seen = self._workers.end(self.num_steps)
        self._worker_timelines = self._workers.timelines()
        host = host_lane(steps, self._samples, set(self._functions.values()))
        if seen is not None and seen.num_workers == 0:
            host, seen = with_serial_input(host, seen.lane), None
        walls_ms = steps.wall_ns / 1e6
        device, beside = self._read_device(), self._read_device(beside=True)
        if device is not None and len(device.wall_ms) == len(walls_ms):
            host = run_ahead(host, host_ms=float(walls_ms.mean()), device_ms=float(device.wall_ms.mean()))
            # A host that never waits only queues: the device says how long steps really take.
            walls_ms = device.wall_ms if device.wall_ms.mean() > walls_ms.mean() else walls_ms
        lanes: list[Lane] = [host]
        lines = hot_lines(self._samples, float(steps.wall_ns.mean()) / 1e6)
        if seen is not None:
            lanes.append(no_longer_than(float(walls_ms.mean()), seen.lane))
            lines += seen.lines
        if device is not None:
            lanes.append(device_lane(device))
        if beside is not None and beside.names:
            lanes.append(device_lane(beside, "copy"))
        return Measurement(
            wall_ms=walls_ms.tolist(),
            images=float(steps.images.mean()),
            lanes=lanes,
            main_cpu_ms=float(steps.cpu_ns.mean()) / 1e6,
            worker_cpu_ms=seen.cpu_ms if seen else None,
            worker_blocked_ms=seen.blocked_ms if seen else None,
            num_workers=seen.num_workers if seen else self._workers.num_unseen,
            usable_cores=float(machine.cores().usable),
            others_cores=self._others.cores(self._own_cpu_s(seen)),
            num_threads=_num_threads(),
            has_device=self._device is not None,
            device_busy_ms=work.busy_ms if work else None,
            launches=work.launches if work else None,
            launch_us=launch_us() if self._device else None,
            waits=waits.sites(),
            waits_between=waits.between(),
            lines=lines,
            limits=Limits(),
            machine=machine_facts(),
            title=title,
        )

    def _own_cpu_s(self, seen: WorkersSeen | None) -> float:
        """Since timing began: also what ran after the last step, and workers of a validation."""
        workers_ms = seen.cpu_ms + seen.apart_cpu_ms if seen else 0.0
        return time.process_time() - self._cpu_began_s + workers_ms * self.num_steps / 1e3

    def _read_device(self, *, beside: bool = False) -> DeviceSteps | None:
        """Host-device wait: the timed steps on the device's own clock, of the step's stream or of those beside it."""
        if self._device is None:
            return None
        device = self._device.read(skip=self._untimed_on_device, beside=beside)
        self._device_timelines["copy" if beside else "device"] = device.timeline
        real = self._recorder.is_step()
        if len(real) != len(device.wall_ms):  # more steps than the recorder keeps
            return device
        return device._replace(self_ms=device.self_ms[real], wall_ms=device.wall_ms[real])


def _num_threads() -> int:
    import torch

    return torch.get_num_threads()
