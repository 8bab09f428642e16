"""Does copying batches to the GPU slow down the training step?

Two questions, each with both sides in one run: how close does the copy of a feed's slots come to a plain pinned copy
while a compute kernel runs, and how much longer is a step with a feed than one whose batch is already on the device?
Needs a CUDA GPU.

Answer: bench/results/device_copy_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import sys
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from bench.measure import Timing, arguments, facts_line, report, summarize
from flatout.feed import Feed, FeedConfig, Field, Out, Plan

BATCH, SHAPE = 384, (3, 320, 320)
BATCH_BYTES = BATCH * int(np.prod(SHAPE))
NUM_STEPS = 60


class Stamped:
    """Images that cost nothing to read: only one byte of each is written."""

    fields = {"image": Field(SHAPE)}

    def __len__(self) -> int:
        return BATCH * NUM_STEPS

    def where(self, index: int) -> str:
        return f"stamp {index}"

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        return {}

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        out["image"][:, 0, 0, 0] = indices % 256


class Compute:
    """Matrix products that take about `target_ms`, like a training step."""

    def __init__(self, target_ms: float) -> None:
        self._a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        self._repeats = 1
        self._repeats = max(1, round(target_ms / (1e3 * time_on_device(self, repeats=30).median)))

    def __call__(self) -> None:
        for _ in range(self._repeats):
            self._a @ self._a


def time_on_device(fn: Callable[[], object], repeats: int) -> Timing:
    """Device time of each of `repeats` calls, measured by events."""
    for _ in range(3):
        fn()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    return summarize([begin.elapsed_time(end) / 1e3 for begin, end in events])


def copy_durations(profiler: "torch.profiler.profile") -> list[float]:
    """Durations, in seconds, of the host-to-device copies of whole batches in a trace."""
    durations = [event.time_range.elapsed_us() for event in profiler.events() if "Memcpy HtoD" in event.name]
    # Ignore small fields and the profiler's own copies.
    return [us / 1e6 for us in durations if us > 0.2 * max(durations)]


def trace(fn: Callable[[], None]) -> "torch.profiler.profile":
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        fn()
        torch.cuda.synchronize()
    return profiler


def plain_pinned_copies(compute: Compute | None) -> None:
    """The other side: one pinned tensor that is copied repeatedly on a separate stream."""
    host = torch.empty(BATCH_BYTES, dtype=torch.uint8, pin_memory=True)
    device, stream = torch.empty_like(host, device="cuda"), torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(stream):
            device.copy_(host, non_blocking=True)
        if compute:
            compute()


def fed_steps(feed: Feed, compute: Compute, num_steps: int) -> Timing:
    """Wall time of each step with a feed, as a training loop sees it."""
    durations = []
    begin_s = time.perf_counter()
    for _, batch in zip(range(num_steps), feed.to_device("cuda"), strict=False):
        compute()
        batch["image"][:1].float().mean()
        # Like a loop that logs now and then: the host is never more than two steps ahead.
        torch.cuda.current_stream().synchronize() if batch.step % 2 else None
        durations.append(time.perf_counter() - begin_s)
        begin_s = time.perf_counter()
    return summarize([a + b for a, b in zip(durations[8:-1:2], durations[9::2], strict=False)])


def resident_steps(compute: Compute, num_steps: int) -> Timing:
    """The same loop with a batch that is already on the device."""
    image, durations = torch.zeros((BATCH, *SHAPE), dtype=torch.uint8, device="cuda"), []
    begin_s = time.perf_counter()
    for step in range(num_steps):
        compute()
        image[:1].float().mean()
        torch.cuda.current_stream().synchronize() if step % 2 else None
        durations.append(time.perf_counter() - begin_s)
        begin_s = time.perf_counter()
    return summarize([a + b for a, b in zip(durations[8:-1:2], durations[9::2], strict=False)])


def main() -> int:
    options = arguments(__doc__).parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA GPU.")
        return 1
    compute = Compute(target_ms=20)
    gigabytes = BATCH_BYTES / 1e9
    source = Stamped()
    plan = Plan(num_samples=len(source), batch_size=BATCH)
    with Feed(source, plan, FeedConfig(workers=4)) as feed:
        fed_steps(feed, compute, 10)
        idle = summarize(copy_durations(trace(lambda: plain_pinned_copies(None))))
        plain = summarize(copy_durations(trace(lambda: plain_pinned_copies(compute))))
        fed = summarize(copy_durations(trace(lambda: fed_steps(feed, compute, 30) and None)))
        pairs = [(fed_steps(feed, compute, 40).median / 2, resident_steps(compute, 40).median / 2) for _ in range(5)]
    fed_s, resident_s = (float(np.median(side)) for side in zip(*pairs, strict=True))
    ratio = plain.median / fed.median
    lines = [
        f"batch of {BATCH} x {SHAPE} uint8 = {gigabytes:.3f} GB, GPU {torch.cuda.get_device_name()}",
        f"plain pinned copy, GPU idle        {gigabytes / idle.median:6.1f} GB/s   {idle.text()}",
        f"plain pinned copy, GPU computing   {gigabytes / plain.median:6.1f} GB/s   {plain.text()}",
        f"copy of a feed's slot, computing   {gigabytes / fed.median:6.1f} GB/s   {fed.text()}",
        f"ratio feed / plain while computing {ratio:6.2f}   {'PASS' if ratio >= 0.8 else 'FAIL'} (>= 0.80)",
        f"step on a resident batch {1e3 * resident_s:.2f} ms, fed step {1e3 * fed_s:.2f} ms: "
        f"{fed_s / resident_s:.3f}x (median of 5 interleaved pairs)",
    ]
    numbers = {"ratio": ratio, "fed_gb_s": gigabytes / fed.median, "plain_gb_s": gigabytes / plain.median}
    numbers |= {"idle_gb_s": gigabytes / idle.median, "fed_step_ms": 1e3 * fed_s, "resident_step_ms": 1e3 * resident_s}
    print(facts_line())
    report("device_copy", "\n".join(lines), numbers, options)
    return 0 if ratio >= 0.8 else 1


if __name__ == "__main__":
    sys.exit(main())
