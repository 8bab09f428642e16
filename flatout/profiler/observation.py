"""Look at a training loop for some steps: first warm up, then count waits, on a GPU trace, then time.

    |warm up|count waits|trace (GPU)|  time: stages, samples, workers, device events  |

Each kind of looking disturbs the others, so they take turns, and only undisturbed steps are timed. What that may cost a
step is asked by bench/profiler_overhead.py. Pauses between steps (a validation, say) are neither traced nor counted as
part of a step, only timed, each under its own name. Whoever drives the loop says when a step has ended: a watched
loader, or an engine whose marks are known.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import CodeType

from flatout.errors import ConfigError
from flatout.profiler import clock, machine
from flatout.profiler.device_clock import DeviceClock, DeviceSteps
from flatout.profiler.device_trace import DeviceTrace, DeviceWork
from flatout.profiler.measurement import Lane, Limits, Measurement
from flatout.profiler.others import Others
from flatout.profiler.pauses import stage_apart
from flatout.profiler.recorder import Event, StepRecorder
from flatout.profiler.sampler import Line, Sampler
from flatout.profiler.speed_of_light import launch_us
from flatout.profiler.summary import (
    device_lane,
    host_lane,
    hot_lines,
    machine_facts,
    no_longer_than,
    run_ahead,
    with_serial_input,
)
from flatout.profiler.waits import WaitCounter
from flatout.profiler.workers_seen import WorkersSeen, WorkerWatch

logger = logging.getLogger(__name__)

WARM_UP, COUNTED, TRACED = 2, 2, 2
"""Steps of each kind, in this order; tracing needs a GPU."""

AT_LEAST = 3
"""Timed steps below which nothing is concluded."""


class Observation:
    """One look at a loop of this thread. Complete once `num_steps` were timed, or the block has ended."""

    def __init__(
        self,
        workers: WorkerWatch,
        *,
        num_steps: int | None = None,
        warm_up: int = WARM_UP,
        functions: Mapping[CodeType, str] | None = None,
        title: str = "",
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`num_steps` None: to the end of the block. `functions`: code -> stage, for what cannot be marked."""
        self._device: DeviceClock | None = None
        self.recorder = self._make_recorder()
        self.recorder.on_pause = self._pause_in_step
        self.workers = workers
        self._num_steps, self._warm_up, self._on_end = num_steps, warm_up, on_end
        self._functions, self._title = functions or {}, title
        self._waits = WaitCounter(self._stage_apart)
        self._counting = ExitStack()
        self._trace: DeviceTrace | None = None
        self._work: DeviceWork | None = None
        self._sampler: Sampler | None = None
        self._samples: Counter[tuple[Line, str | None]] = Counter()
        self._fresh: list[tuple[Line, str | None]] = []  # of the step that runs
        self._is_between_passes = False
        self._device_timelines: dict[str, list[Event]] = {}
        self._worker_timelines: dict[str, list[Event]] = {}
        self.steps_seen = 0
        self._measurement: Measurement | None = None
        self._is_over = False

    def _make_recorder(self) -> StepRecorder:
        return StepRecorder()

    @property
    def steps_before_timing(self) -> int:
        return self._warm_up + COUNTED + (TRACED if self._device else 0)

    def attach_device(self) -> None:
        """Host-device wait: mark stages on the GPU too, if there is one and a step is about to use it."""
        if self._device is None:
            self._device = self.recorder.device = _device_clock()

    @contextmanager
    def observing(self) -> Iterator["Observation"]:
        """Look at the loop inside the block."""
        with ExitStack() as stack:
            stack.enter_context(self.recorder.recording())
            stack.callback(self.finish)
            yield self

    def after_step(self) -> None:
        """To be called between two steps, after clock.step_ended: one kind of looking ends, the next begins."""
        if self._is_over:
            return
        self.steps_seen += 1
        if self._fresh:
            fresh, self._fresh = self._fresh, []
            self._samples.update(fresh)
        if self._warm_up < self.steps_seen <= self._warm_up + COUNTED:
            self._waits.num_steps += 1
        if self.steps_seen == self._warm_up:
            self._counting.enter_context(self._waits.counting())
        elif self.steps_seen == self._warm_up + COUNTED:
            self._counting.close()
            if self._device:
                self._start_trace()
        if self.steps_seen == self.steps_before_timing:
            self._stop_trace(TRACED)
            self._begin_timing()
        elif self._sampler is not None:
            self.workers.look(self._steps_timed)
        if self._num_steps is not None and self._sampler is not None and self.recorder.num_steps >= self._num_steps:
            self.finish()

    def pass_begins(self) -> None:
        """To be called before the first step of a pass over the data, where steps end with their pass."""
        self._is_between_passes = False
        self._fresh = []
        if self._num_traced == 0 and self._trace is None:
            self._start_trace()

    def pass_ends(self) -> None:
        """What follows, up to the next pass, belongs to no step."""
        self._is_between_passes = True
        self._stop_trace(self._num_traced)

    def _pause_in_step(self) -> None:
        """A step is done, and before it ends something else begins that every step does not do."""
        self._stop_trace(self._num_traced + 1)

    @property
    def _num_traced(self) -> int:
        """Whole steps since a trace was due; negative: it is not yet."""
        return self.steps_seen - (self._warm_up + COUNTED) if self._device else -1

    def _start_trace(self) -> None:
        trace = DeviceTrace()
        trace.start()
        self._trace = trace  # only now: one that did not start cannot be stopped

    def _stop_trace(self, num_steps: int) -> None:
        """Host-device wait, if there is a trace. One of no step at all is thrown away."""
        if self._trace is not None:
            work = self._trace.stop(max(1, num_steps))
            self._work = work if num_steps else None
            self._trace = None

    def finish(self) -> None:
        """End the looking; may be called twice. What was timed so far is summed up."""
        if self._is_over:
            return
        self._is_over = True
        self._counting.close()
        self._stop_trace(0)
        if self._sampler is not None:
            self._sampler.close()
            if self.recorder.num_steps >= AT_LEAST:
                self._measurement = self._sum_up()
        clock.stop(self.recorder)
        self._on_end()

    @property
    def is_complete(self) -> bool:
        """Whether enough steps were timed to say anything."""
        return self._measurement is not None

    @property
    def _steps_timed(self) -> int:
        return self.steps_seen - self.steps_before_timing

    @property
    def measurement(self) -> Measurement:
        if self._measurement is None:
            raise ConfigError(
                f"Only {self.steps_seen} steps were seen: at least {self.steps_before_timing + AT_LEAST} are needed."
            )
        return self._measurement

    @property
    def timeline(self) -> dict[str, list[Event]]:
        """Place -> events of the last steps."""
        lanes = {"host": self.recorder.timeline}
        lanes |= {place: events for place, events in self._device_timelines.items() if events}
        # Workers may be ahead of the loop: what they did after its end belongs to no step.
        end_ns = max((event.end_ns for event in lanes["host"]), default=0)
        for name, events in self._worker_timelines.items():
            lanes[name] = [event for event in events if event.end_ns <= end_ns]
        return lanes

    def _begin_timing(self) -> None:
        # Kept step by step: what runs after the last step is nobody's.
        self._samples.clear()
        self._sampler = Sampler(label=self._stage_now, functions=self._functions, on_sample=self._keep_sample)
        self.workers.begin()
        self._others, self._cpu_began_s = Others(), time.process_time()
        self._untimed_on_device = self._device.num_steps if self._device else 0
        self.recorder.restart()

    def _keep_sample(self, line: Line, stage: str | None) -> None:
        self._fresh.append((line, stage))

    def _stage_now(self) -> str | None:
        innermost = self.recorder.innermost
        return stage_apart(innermost) or (None if innermost is None else innermost.name)

    def _stage_apart(self) -> str | None:
        return "between" if self._is_between_passes else stage_apart(self.recorder.innermost)

    def _sum_up(self) -> Measurement:
        steps = self.recorder.steps()
        seen = self.workers.end(self._steps_timed)
        self._worker_timelines = self.workers.timelines()
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
            num_workers=seen.num_workers if seen else 0,
            usable_cores=float(machine.cores().usable),
            others_cores=self._others.cores(self._own_cpu_s(seen)),
            has_device=self._device is not None,
            device_busy_ms=self._work.busy_ms if self._work else None,
            launches=self._work.launches if self._work else None,
            launch_us=launch_us() if self._device else None,
            waits=self._waits.sites(),
            waits_between=self._waits.between(),
            lines=lines,
            limits=Limits(),
            machine=machine_facts(),
            title=self._title,
        )

    def _own_cpu_s(self, seen: WorkersSeen | None) -> float:
        """Since timing began: also what ran after the last step, and workers of a validation."""
        workers_ms = seen.cpu_ms + seen.apart_cpu_ms if seen else 0.0
        return time.process_time() - self._cpu_began_s + workers_ms * self._steps_timed / 1e3

    def _read_device(self, *, beside: bool = False) -> DeviceSteps | None:
        """Host-device wait: the timed steps on the device's own clock, of the step's stream or of those beside it."""
        if self._device is None:
            return None
        device = self._device.read(skip=self._untimed_on_device, beside=beside)
        self._device_timelines["copy" if beside else "device"] = device.timeline
        real = self.recorder.is_step()
        if len(real) != len(device.wall_ms):  # more steps than the recorder keeps
            return device
        return device._replace(self_ms=device.self_ms[real], wall_ms=device.wall_ms[real])


def _device_clock() -> DeviceClock | None:
    import torch

    return DeviceClock() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
