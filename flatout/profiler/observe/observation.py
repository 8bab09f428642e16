"""Observing some steps of a training loop, one phase after the other (see `Phases`), and the measurement of it.

The driver of the loop reports where steps end: a watched loader, or an engine whose marks are known. Pauses between
steps (a validation, for example) are timed, each under its own name, but neither traced nor counted as part of a step.

In timed steps the recorder's marks give stages, samples give the running line, tables give the work of the workers, and
events give the times of the device. bench/profiler_overhead.py measures what that costs a step.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import NamedTuple

from flatout.clock import Event, OtherLoad, clock, machine, pause_stage, worker_registry
from flatout.errors import ConfigError
from flatout.profiler.measurement import Lane, Measurement
from flatout.profiler.observe.device_times import DeviceClock, DeviceSteps, DeviceTrace, DeviceWork
from flatout.profiler.observe.line_counts import LineCounter
from flatout.profiler.observe.recorder import Line, Sampler, StepRecorder
from flatout.profiler.observe.speed_of_light import launch_us
from flatout.profiler.observe.summary import (
    WorkerObserver,
    WorkerStats,
    device_lane,
    host_lane,
    hot_lines,
    limited_to_step,
    machine_facts,
    with_run_ahead,
    with_serial_input,
)
from flatout.profiler.observe.waits import WaitCounter

# Phases
#
#     |warm up|count waits|trace (GPU)|settle (GPU)|  time  |
#
# Each kind of observation disturbs the others, so they follow one another, and only undisturbed steps are timed.
# Compiling kernels and reading a trace stall the loop; meanwhile the workers complete every batch they have room for,
# and the steps that use those up never wait. They are not timed either.


class Phases(NamedTuple):
    """Number of steps of each phase before timing begins, in this order."""

    warm_up: int = 2
    counted: int = 2
    """Steps in which waits are counted."""
    traced: int = 2
    """Steps in which kernels are traced."""
    settled: int = 5
    """Steps on a GPU that use up the batches made ahead: our feed has four slots, and one more batch in flight."""

    @property
    def counting_ends(self) -> int:
        """Number of steps after which counting of waits ends and tracing begins."""
        return self.warm_up + self.counted

    @property
    def tracing_ends(self) -> int:
        return self.counting_ends + self.traced

    @property
    def timing_begins(self) -> int:
        """Number of steps before the first timed one."""
        return sum(self)

    def is_counted(self, step: int) -> bool:
        """Whether waits are counted in this step; steps are numbered from 1."""
        return self.warm_up < step <= self.counting_ends


ALL_PHASES = Phases()
KERNEL_PHASES = Phases(counted=0, traced=1, settled=1)
"""For steps on a batch that is ready: no feed can get ahead, and the waits are known."""
SPEED_PHASES = Phases(counted=0, traced=0)
"""For the speed alone."""


# Timed steps


@dataclass(eq=False, repr=False)
class TimedSteps:
    """Collects what happens in timed steps, from its creation on; the recorder is restarted."""

    recorder: StepRecorder
    workers: WorkerObserver
    device: DeviceClock | None
    functions: Mapping[CodeType, str]
    """Code -> stage, for functions that cannot be marked."""

    def __post_init__(self) -> None:
        self.num_steps = 0
        # Samples are kept when their step ends: those taken after the last step belong to no step.
        self._samples: Counter[tuple[Line, str | None]] = Counter()
        self._step_samples: list[tuple[Line, str | None]] = []  # of the current step
        self._device_timelines: dict[str, list[Event]] = {}
        self._worker_timelines: dict[str, list[Event]] = {}
        self._sampler = Sampler(self._keep_sample, label=self._stage_now, functions=self.functions)
        self.workers.begin()
        self._others, self._cpu_began_s = OtherLoad(), time.process_time()
        self._thread = threading.get_native_id()
        self._queued_before_ns = worker_registry.queued_ns(self._thread)
        self._untimed_on_device = self.device.num_steps if self.device else 0
        self.recorder.restart()

    def step_ended(self) -> None:
        self.num_steps += 1
        samples, self._step_samples = self._step_samples, []
        self._samples.update(samples)
        self.workers.poll(self.num_steps)

    def discard_samples(self) -> None:
        """Drop the samples taken since the last step ended: they belong to no step."""
        self._step_samples = []

    def close(self) -> None:
        """Stop sampling; may be called twice."""
        self._sampler.close()

    def timeline(self) -> dict[str, list[Event]]:
        """Place -> events of the last steps; call after `summarize`."""
        lanes = {"host": self.recorder.timeline}
        lanes |= {place: events for place, events in self._device_timelines.items() if events}
        # Workers may be ahead of the loop: what they did after its end belongs to no step.
        end_ns = max((event.end_ns for event in lanes["host"]), default=0)
        for name, events in self._worker_timelines.items():
            lanes[name] = [event for event in events if event.end_ns <= end_ns]
        return lanes

    def _keep_sample(self, line: Line, stage: str | None) -> None:
        self._step_samples.append((line, stage))

    def _stage_now(self) -> str | None:
        innermost = self.recorder.innermost
        return pause_stage(innermost) or (None if innermost is None else innermost.name)

    def summarize(self, work: DeviceWork | None, waits: WaitCounter, counted: LineCounter, title: str) -> Measurement:
        """The measurement (host-device wait). `work`, `waits` and `counted` lines come from the phases before."""
        import torch

        steps = self.recorder.steps()
        workers = self.workers.end(self.num_steps)
        self._worker_timelines = self.workers.timelines()
        host = host_lane(steps, self._samples, set(self.functions.values()))
        blocked_ms = workers.blocked_ms if workers else None
        if workers is not None and workers.lane.width == 0:
            host, workers = with_serial_input(host, workers.lane), None
        walls_ms = steps.wall_ns / 1e6
        device, other_streams = self._read_device(), self._read_device(other_streams=True)
        if device is not None and len(device.wall_ms) == len(walls_ms):
            host = with_run_ahead(host, host_ms=float(walls_ms.mean()), device_ms=float(device.wall_ms.mean()))
            # A host that never waits only queues work: then the device tells how long steps really take.
            walls_ms = device.wall_ms if device.wall_ms.mean() > walls_ms.mean() else walls_ms
        lanes: list[Lane] = [host]
        lines = hot_lines(self._samples, float(steps.wall_ns.mean()) / 1e6, counted)
        if workers is not None:
            lanes.append(limited_to_step(float(walls_ms.mean()), workers.lane))
            lines += workers.lines
        if device is not None:
            lanes.append(device_lane(device))
        if other_streams is not None and other_streams.names:
            lanes.append(device_lane(other_streams, "copy"))
        return Measurement(
            wall_ms=walls_ms.tolist(),
            images=float(steps.images.mean()),
            lanes=lanes,
            main_cpu_ms=float(steps.cpu_ns.mean()) / 1e6,
            main_queued_ms=(worker_registry.queued_ns(self._thread) - self._queued_before_ns) / 1e6 / self.num_steps,
            worker_cpu_ms=workers.cpu_ms if workers else None,
            worker_blocked_ms=blocked_ms,
            worker_start_ms=workers.start_ms if workers else 0.0,
            num_workers=workers.lane.width if workers else self.workers.num_unobserved,
            usable_cores=float(machine.cores().usable),
            others_cores=self._others.cores(self._own_cpu_s(workers)),
            num_threads=torch.get_num_threads(),
            has_device=self.device is not None,
            device_busy_ms=work.busy_ms if work else None,
            launches=work.launches if work else None,
            launch_us=launch_us() if self.device else None,
            idle_split=work.idle if work else None,
            waits=waits.sites(),
            waits_between=waits.between(),
            lines=lines,
            machine=machine_facts(),
            title=title,
        )

    def _own_cpu_s(self, workers: WorkerStats | None) -> float:
        """CPU time of this training since timing began, including the time after the last step and the workers of a
        validation."""
        workers_ms = workers.cpu_ms + workers.apart_cpu_ms if workers else 0.0
        return time.process_time() - self._cpu_began_s + workers_ms * self.num_steps / 1e3

    def _read_device(self, *, other_streams: bool = False) -> DeviceSteps | None:
        """The timed steps by the device's own events, on the stream of the step or on all others (host-device wait)."""
        if self.device is None:
            return None
        device = self.device.read(skip=self._untimed_on_device, other_streams=other_streams)
        self._device_timelines["copy" if other_streams else "device"] = device.timeline
        real = self.recorder.is_step()
        if len(real) != len(device.wall_ms):  # more steps than the recorder keeps
            return device
        return device._replace(self_ms=device.self_ms[real], wall_ms=device.wall_ms[real])


# Observation

MIN_TIMED_STEPS = 3
"""With fewer timed steps nothing is concluded."""


class Observation:
    """An observation of the training loop that runs in this thread.

    Complete once `num_steps` steps were timed, or the block of `observing` has ended.
    """

    def __init__(
        self,
        workers: WorkerObserver,
        recorder: StepRecorder | None = None,
        *,
        num_steps: int | None = None,
        phases: Phases = ALL_PHASES,
        functions: Mapping[CodeType, str] | None = None,
        title: str = "",
        a_step: str = "",
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`num_steps` None: time steps to the end of the block. `functions`: code -> stage, for functions that cannot
        be marked. `a_step`: a sentence that says what counts as a step, for the error about too few of them."""
        self._device: DeviceClock | None = None
        self.recorder = recorder or StepRecorder()
        self.recorder.on_pause = self._pause_in_step
        self.workers = workers
        self._num_steps, self._on_end = num_steps, on_end
        # Without a GPU nothing is traced, and nothing settles.
        self._phases_on_device, self._phases_on_host = phases, phases._replace(traced=0, settled=0)
        self._functions, self._title, self._a_step = functions or {}, title, a_step
        self._waits = WaitCounter(self._stage_apart)
        self._lines = LineCounter()
        self._counting = ExitStack()
        self._trace: DeviceTrace | None = None
        self._work: DeviceWork | None = None  # of the last trace
        self._timed: TimedSteps | None = None
        self._is_between_passes = False
        self.steps_observed = 0
        self._was_iterated_elsewhere = False
        self._measurement: Measurement | None = None
        self.is_over = False
        """Whether the observation has ended."""

    @property
    def phases(self) -> Phases:
        return self._phases_on_host if self._device is None else self._phases_on_device

    def attach_device(self) -> None:
        """Mark stages on the GPU as well, if there is one that CUDA has been initialized for (host-device wait)."""
        import torch

        if self._device is None and torch.cuda.is_available() and torch.cuda.is_initialized():
            self._device = self.recorder.device = DeviceClock()

    @contextmanager
    def observing(self) -> Iterator["Observation"]:
        """Observe the loop inside the block."""
        with ExitStack() as stack:
            stack.enter_context(self.recorder.recording())
            stack.callback(self.finish)
            yield self

    def observes_this_thread(self) -> bool:
        """Whether the calling thread is the observed one; a call from another thread is remembered."""
        is_here = clock.recorder() is self.recorder
        self._was_iterated_elsewhere |= not (is_here or self.is_over)
        return is_here

    def after_step(self) -> None:
        """Enter the next phase if it is due. To be called between two steps, after clock.step_ended."""
        if self.is_over:
            return
        self.steps_observed += 1
        if self._timed is not None:
            self._timed.step_ended()
        self._advance_phase()
        if self.steps_observed == self.phases.timing_begins:
            self._timed = TimedSteps(self.recorder, self.workers, self._device, self._functions)
        if self._num_steps is not None and self._timed is not None and self.recorder.num_steps >= self._num_steps:
            self.finish()

    def _advance_phase(self) -> None:
        seen, phases = self.steps_observed, self.phases
        if phases.is_counted(seen):
            self._waits.num_steps += 1
            self._lines.num_steps += 1
        if seen == phases.warm_up and phases.counted:
            self._counting.enter_context(self._waits.counting())
            self._counting.enter_context(self._lines.counting())
        if seen == phases.counting_ends:
            self._counting.close()
            if phases.traced:
                self._trace = DeviceTrace()
        if seen == phases.tracing_ends:
            self._end_trace(phases.traced)

    def pass_begins(self) -> None:
        """To be called before the first step of a pass over the data, where steps end with their pass."""
        self._is_between_passes = False
        if self._timed is not None:
            self._timed.discard_samples()
        if self._num_traced == 0 and self._trace is None:
            self._trace = DeviceTrace()

    def pass_ends(self) -> None:
        """To be called after the last step of a pass: what follows, up to the next pass, belongs to no step."""
        self._is_between_passes = True
        self._end_trace(self._num_traced)

    def _pause_in_step(self) -> None:
        """End a trace: the work of the step is done, and before the step ends a pause begins."""
        self._end_trace(self._num_traced + 1)

    def _end_trace(self, num_steps: int) -> None:
        """End the current trace, if any (host-device wait).

        A trace covers complete steps only: it ends where a pause between steps begins. One that had not covered a step
        by then is discarded, and started again.
        """
        if self._trace is not None:
            work = self._trace.stop(max(1, num_steps))
            self._work = work if num_steps else None
            self._trace = None

    @property
    def _num_traced(self) -> int:
        """Complete steps since tracing was due; negative if it is not due yet, or never."""
        return self.steps_observed - self.phases.counting_ends if self.phases.traced else -1

    def finish(self) -> None:
        """End the observation and summarize the steps timed so far; may be called twice."""
        if self.is_over:
            return
        self.is_over = True
        self._counting.close()
        self._end_trace(0)
        if self._timed is not None:
            self._timed.close()
            if self.recorder.num_steps >= MIN_TIMED_STEPS:
                self._measurement = self._timed.summarize(self._work, self._waits, self._lines, self._title)
        clock.stop(self.recorder)
        self._on_end()

    @property
    def is_complete(self) -> bool:
        """Whether enough steps were timed for a measurement."""
        return self._measurement is not None

    @property
    def measurement(self) -> Measurement:
        """The result. ConfigError if the loop ran in another thread or still runs, or too few steps were timed."""
        if self._measurement is None and self._was_iterated_elsewhere:
            raise ConfigError(
                "The loader was iterated in another thread than the one that entered watch(). Call watch() in the "
                "thread of the training loop, with the object that the loop itself iterates."
            )
        if self._measurement is None and not self.is_over:
            raise ConfigError("The watch has not ended yet, so there is no profile. Ask for it after the `with` block.")
        if self._measurement is None:
            raise ConfigError(f"{self.too_short} {self._a_step}".rstrip())
        return self._measurement

    @property
    def too_short(self) -> str:
        """The message for an observation with too few steps."""
        seen = "1 step was" if self.steps_observed == 1 else f"{self.steps_observed} steps were"
        return f"Only {seen} observed; a profile needs at least {self.phases.timing_begins + MIN_TIMED_STEPS}."

    @property
    def timeline(self) -> dict[str, list[Event]]:
        """Place -> events of the last steps."""
        return {"host": self.recorder.timeline} if self._timed is None else self._timed.timeline()

    def _stage_apart(self) -> str | None:
        return "between" if self._is_between_passes else pause_stage(self.recorder.innermost)
