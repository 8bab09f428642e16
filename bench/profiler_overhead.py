"""How much does observing slow a training down? Limit: 1 % of the step.

Without a GPU: a step of about 10 ms with as many marks as one of our training steps. Two things cost time: marks, which
the main thread makes between matrix products, when its caches hold nothing of Python any more; and samples, which a
separate thread takes. The first is the time between two products, observed minus unobserved (medians); the second is
the CPU time of a process that does nothing else. Their sum is the answer. Whole steps with and without observation are
shown as well, but on a shared machine they vary by more than the difference.

With a GPU: yolov7-tiny, 320 px, batch 16, as `train.py --fast` runs it, which is our shortest step; its wall time is
compared, including events on the device.
Answer: bench/results/profiler_overhead_<machine>_<yyyymm>.md (--write).
"""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from bench import noise
from bench.measure import arguments, facts_line, report, summarize
from flatout.clock import clock
from flatout.engine.job import IntervalStats
from flatout.profiler.observe.device_times import DeviceClock
from flatout.profiler.observe.engine_steps import STEP_BEGINS
from flatout.profiler.observe.recorder import Line, Sampler, StepRecorder

LIMIT = 0.01
STAGES = ("feed.wait", "train.wait", "train.inputs", "train.loss", "train.forward", "train.backward", "train.optimizer")
HYP = "hyp.scratch.tiny.yaml"
LOG_EVERY = 50
"""Steps of an interval on a GPU."""
SETTLED = 4
"""Intervals before the first that counts: graphs are captured and images uploaded in them."""

Pairs = list[tuple[float, float]]
"""Seconds of a step without and with observation."""
Answer = tuple[float, list[str], dict[str, Any]]
"""Fraction of a step, lines of the report, numbers."""


class BlockTimes(NamedTuple):
    """Times of a block of steps on the CPU: medians per step in seconds."""

    whole: float
    between: float
    """Time outside of the matrix products."""


def time_block(matrix: torch.Tensor, num_steps: int) -> BlockTimes:
    """Time steps of seven stages, each with a matrix product and a little Python."""
    steps = np.array([step(matrix) for _ in range(num_steps)])
    return BlockTimes(*(float(median) for median in np.median(steps, 0)))


def step(matrix: torch.Tensor) -> tuple[float, float]:
    """Seconds of one step, and of its time outside of matrix products."""
    began = time.perf_counter()
    products = 0.0
    for name in STAGES:
        with clock.stage(name):
            product_began = time.perf_counter()
            matrix @ matrix
            products += time.perf_counter() - product_began
            sum(range(200))
    clock.step_ended(1)
    whole = time.perf_counter() - began
    return whole, whole - products


@contextmanager
def observing(recorder: StepRecorder) -> Iterator[None]:
    """Record and sample, as an observation does in timed steps."""
    with recorder.recording():
        samples: list[tuple[Line, str | None]] = []
        sampler = Sampler(
            lambda line, stage: samples.append((line, stage)),
            label=lambda: recorder.innermost.name if recorder.innermost else None,
        )
        try:
            yield
        finally:
            sampler.close()


def sampling_share(seconds: float) -> float:
    """CPU time per second of sampling a thread that sleeps."""
    with observing(StepRecorder()):
        began, began_cpu = time.perf_counter(), time.process_time()
        time.sleep(seconds)
        return (time.process_time() - began_cpu) / (time.perf_counter() - began)


def on_cpu(*, quick: bool) -> Answer:
    rounds, num_steps = (2, 5) if quick else (60, 12)
    matrix = torch.rand(440, 440)
    plain, observed = [time_block(matrix, num_steps)], []
    for _ in range(rounds):
        with observing(StepRecorder()):
            observed.append(time_block(matrix, num_steps))
        plain.append(time_block(matrix, num_steps))
    step_s = float(np.median([each.whole for each in plain]))
    marks_s = float(np.median([each.between for each in observed]) - np.median([each.between for each in plain]))
    samples = sampling_share(0.3 if quick else 5.0)
    sides = {"without": plain, "observed": observed}
    lines = [
        f"marks: {1e6 * marks_s:.1f} us of a step of {1e3 * step_s:.2f} ms, {marks_s / step_s:.2%}",
        f"samples: {samples:.2%} of a core",
        *(f"a step {name:9}{summarize([each.whole for each in side]).text()}" for name, side in sides.items()),
    ]
    numbers = {"marks_s": marks_s, "step_s": step_s, "sampling_share": samples} | sides
    return marks_s / step_s + samples, lines, numbers


class StepsOfLoop(StepRecorder):
    """A recorder that ends a step where the next one begins."""

    def opened(self, name: str) -> None:
        if name == STEP_BEGINS:
            clock.step_ended(1)
        super().opened(name)


class AlternatingIntervals:
    """Log callback that observes every second interval and keeps the step time of each."""

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self._observation = ExitStack()
        self._recorder: StepRecorder | None = None

    def __call__(self, interval: IntervalStats) -> None:
        # Made once, with a wait for the device, long before the intervals that count.
        self._recorder = self._recorder or StepsOfLoop(device=DeviceClock())
        self.step_s.append(interval.step_ms / 1e3)
        self._observation.close()
        if len(self.step_s) % 2:
            self._observation.enter_context(observing(self._recorder))

    def pairs(self) -> Pairs:
        """Neighbouring intervals, unobserved and observed."""
        self._observation.close()
        settled = self.step_s[SETTLED:]
        return [(settled[first], settled[first + 1]) for first in range(0, len(settled) - 1, 2)]


def on_gpu(*, quick: bool) -> Answer:
    from bench.augment_gpu import NoiseImages, draw_set
    from bench.train_step import Case, make_loop
    from flatout.feed import Plan
    from flatout.yolo.augment.gpu.input import DeviceInputConfig, training_input
    from flatout.yolo.find_file import shipped_folder
    from flatout.yolo.hyp import load_hyp

    case, hyp = Case("yolov7-tiny", 320, 16, None, None), load_hyp(shipped_folder("data") / HYP)
    intervals = AlternatingIntervals()
    num_steps = LOG_EVERY * (SETTLED + (4 if quick else 40))
    images = draw_set(1000, case.side_px)
    order_N = np.arange(len(images)).repeat(2 + num_steps * case.batch // len(images))
    plan = Plan(num_samples=len(images), batch_size=case.batch, order=order_N)
    with training_input(
        images, NoiseImages(images), hyp.augment(), plan, size=case.side_px, device="cuda", config=DeviceInputConfig()
    ) as batches:
        make_loop(case, hyp, batches, intervals, num_steps=num_steps, log_every=LOG_EVERY).run()
    pairs = intervals.pairs()
    plain, observed = (summarize(side) for side in zip(*pairs, strict=True))
    overhead = float(np.median([after / before - 1 for before, after in pairs]))
    lines = [f"a step without  {plain.text()}", f"a step observed {observed.text()}, median of {len(pairs)} pairs"]
    return overhead, lines, {"pairs_s": pairs}


def main() -> int:
    options = arguments(__doc__).parse_args()
    print(facts_line(), flush=True)
    if torch.cuda.is_available():
        first, answer = torch.cuda.get_device_name(), on_gpu
    else:
        torch.set_num_threads(1)
        first, answer = noise.listen().line(), on_cpu
    overhead, lines, numbers = answer(quick=options.quick)
    verdict = "PASS" if overhead < LIMIT else "FAIL"
    last = f"{verdict}: observing costs {overhead:.2%} of a step (limit {LIMIT:.0%})"
    report("profiler_overhead", "\n".join([first, *lines, last]), {"overhead": overhead, **numbers}, options)
    return int(verdict == "FAIL" and not options.quick)


if __name__ == "__main__":
    sys.exit(main())
