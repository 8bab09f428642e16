"""Bottlenecks of the main thread, and between host and GPU.

On the main thread: the loss, Python loops, the garbage collector, the optimizer, and what happens after steps. Between
host and GPU: copies that block, reads that wait, and kernels so small that launching them takes longer than they do.
"""

from collections.abc import Iterator

from flatout.clock import is_pause, label_of
from flatout.profiler.measurement import HotLine
from flatout.profiler.verdict.predict_step import StepNumbers
from flatout.profiler.verdict.remedy import Bottleneck
from flatout.profiler.verdict.rules_code import LOGGING, backward_of, code_bottlenecks, driving_functions

ASSIGNER = "assigner"
OPTIMIZER = "optimizer"
LOOPED_READS = 8
"""This many reads per step from one line can only come from a loop."""

MIN_STARTS = 2
"""Every training starts its workers once."""

RARE_STEPS = 1000
"""Validating or saving more often than this can be done less often."""

MIN_COLLECTIONS = 3
"""Full collections are rare: one of them in a short observation tells nothing about a long training."""

BATCHED_LOSS = 0.06
"""Time of a detection loss without loops, relative to forward + backward: 7 % in the training that started this project
(11 of 153 ms), 4 % on an H200 (1.5 of 40 ms, bench/results/loss_h200_*.md and model_step_h200_*.md)."""


# Main thread


def host_bottlenecks(n: StepNumbers) -> Iterator[Bottleneck]:
    """All bottlenecks of the main thread."""
    yield from _heavy_loss(n)
    yield from _python_loop(n)
    yield from code_bottlenecks(n, [line for lines in _loops(n) for line in lines])
    yield from _worker_start(n)
    yield from _collector(n)
    yield from _updates(n)
    yield from _after_steps(n)


def _heavy_loss(n: StepNumbers) -> Iterator[Bottleneck]:
    """A loss that takes at least half as long as the network: it loops on the host, or is simply a lot of work."""
    loss_ms, network_ms = n.kind_ms("loss"), n.network_ms
    if loss_ms < 0.15 * n.step_ms or loss_ms < 0.5 * network_ms:
        return
    if not _loops_on_host(n, loss_ms):
        yield _large_loss(n, loss_ms)
        return
    then_ms = BATCHED_LOSS * network_ms
    assign_ms = n.host_ms("assign")
    evidence = [f"loss {loss_ms:.0f} of {n.step_ms:.0f} ms per step; forward and backward together {network_ms:.0f} ms"]
    if assign_ms:
        evidence.append(f"assignment alone {assign_ms:.0f} ms")
    evidence += _load_evidence(n)
    kind = "host-device waits" if n.m.has_device else "reads of single values"
    worst = sorted(n.m.waits, key=lambda site: -site.per_step)[:3]
    evidence += [f"{site.per_step:,.0f} {kind} per step at {site.where}  {site.text}".rstrip() for site in worst]
    yield n.bottleneck(
        cause=ASSIGNER,
        sentence=(
            f"The loss takes {n.percent(loss_ms)} of the step because it assigns targets image by image on the host: "
            f"{'the GPU waits for the main thread' if n.m.has_device else 'the step waits for Python'}, not for data."
        ),
        evidence=evidence,
        what="assign targets for the whole batch at once",
        change="use the loss of `flatout yolo train`; until then, set loss_ota: 0 in the hyp file",
        # The small kernels of such a loss disappear with it: the rest of the device's work is the network.
        step_ms=n.with_faster_consumer(loss_ms - then_ms, device_ms=min(network_ms, n.m.device_busy_ms or 0.0)),
        uncertainty=0.1,
        cost_ms=loss_ms - then_ms,
    )


def _loops_on_host(n: StepNumbers, loss_ms: float) -> bool:
    """Whether the loss shows signs of a loop: an assignment stage, values read one by one, or a GPU that idles."""
    return n.host_ms("assign") > 0 or n.num_waits >= LOOPED_READS or n.device_idle_ms > 0.5 * loss_ms


def _large_loss(n: StepNumbers, loss_ms: float) -> Bottleneck:
    """A slow loss without a loop; how fast it could be is unknown, so there is no remedy."""
    lines = [line for line in n.hot_lines(in_worker=False) if line.stage == "loss"][:3]
    return Bottleneck(
        cause="loss",
        sentence=f"The loss takes {n.percent(loss_ms)} of the step.",
        evidence=[
            f"loss {loss_ms:.1f} of {n.step_ms:.1f} ms per step; forward and backward together {n.network_ms:.1f} ms",
            *(f"{line.ms:.1f} ms per step at {line.source}" for line in lines),
        ],
        cost_ms=loss_ms,
    )


def _python_loop(n: StepNumbers) -> Iterator[Bottleneck]:
    """Loops that read values out of tensors one at a time, and the time spent in their lines."""
    for lines in _loops(n):
        loop_ms = sum(line.ms for line in lines)
        if loop_ms < 0.03 * n.step_ms:
            continue
        hottest = max(lines, key=lambda line: line.ms)
        reads = sum(site.per_step for site in n.m.waits if any(_near(site.where, line.where) for line in lines))
        loop_ms += backward_of(n, lines, loop_ms)
        # The training loop itself always writes something.
        writes = hottest.writes and hottest.owner not in driving_functions(n)
        is_logging = writes or LOGGING.search(f"{hottest.function}( {hottest.text}") is not None
        yield n.bottleneck(
            cause="logging" if is_logging else "python loop",
            sentence=(
                f"{'Logging' if is_logging else 'A Python loop'} in {hottest.function}() reads values out of tensors "
                f"one at a time, which takes {n.percent(loop_ms)} of the step."
            ),
            evidence=[
                f"{reads:.0f} reads (.item() and the like) per step near {hottest.source}",
                f"about {loop_ms:.1f} of {n.step_ms:.1f} ms per step in these lines",
                *_load_evidence(n),
            ],
            what="log less often" if is_logging else "replace the loop with one tensor operation",
            change=f"{hottest.where}: reduce the values on the device, read the result once per log interval",
            step_ms=n.with_faster_consumer(0.97 * loop_ms),
            uncertainty=0.1,
            cost_ms=loop_ms,
        )


def _collector(n: StepNumbers) -> Iterator[Bottleneck]:
    gc_ms, times = n.host_ms("gc"), n.host_times("gc")
    if gc_ms < 0.02 * n.step_ms or (times and times < MIN_COLLECTIONS):
        return
    yield n.bottleneck(
        cause="garbage collector",
        sentence=f"Python's garbage collector takes {n.percent(gc_ms)} of the step.",
        evidence=[f"{gc_ms:.1f} ms per step on average; a full collection visits every object that the program keeps"],
        what="collect garbage between epochs only",
        change="gc.collect(); gc.freeze(); gc.disable() before the loop, then gc.collect() after each epoch",
        uncertainty=0.06,
        cost_ms=gc_ms,
    )


def _updates(n: StepNumbers) -> Iterator[Bottleneck]:
    update_ms = n.kind_ms("update")
    network_ms = n.network_ms
    if update_ms < 0.2 * n.step_ms or update_ms < 0.5 * network_ms:
        return
    yield n.bottleneck(
        cause=OPTIMIZER,
        sentence=f"Updating the weights takes {n.percent(update_ms)} of the step.",
        evidence=[f"optimizer and EMA {update_ms:.1f} ms, forward and backward {network_ms:.1f} ms per step"],
        what="update all weights in a few kernels",
        change="fused=True in the optimizer, few parameter groups, an EMA by torch._foreach_lerp_",
        uncertainty=0.2,
        cost_ms=0.6 * update_ms,
    )


def _worker_start(n: StepNumbers) -> Iterator[Bottleneck]:
    """Worker processes that are started again and again."""
    start_ms, times = n.host_ms("feed.start"), n.host_times("feed.start")
    if start_ms < 0.08 * n.step_ms or (times and times < MIN_STARTS):
        return
    # The first batch of a pass is still waited for, but its workers are there, and have opened their files.
    first_batch_ms = max(0.0, n.input_ms - n.m.worker_start_ms) * times / max(1, len(n.m.wall_ms))
    saved_ms = max(0.8 * start_ms, start_ms - first_batch_ms)
    yield n.bottleneck(
        cause="worker start",
        sentence=(
            f"Starting the loader's workers, and waiting for their first batch, takes {n.percent(start_ms)} of the run."
        ),
        evidence=[f"{start_ms:.1f} ms per step on average, {times:.0f} times in {len(n.m.wall_ms)} steps"],
        what="keep the workers",
        change="persistent_workers=True, and one DataLoader for all epochs",
        step_ms=n.with_kept_workers(saved_ms),
        uncertainty=0.12,
        cost_ms=saved_ms,
    )


def _after_steps(n: StepNumbers) -> Iterator[Bottleneck]:
    """Logging, validation and checkpoints: fine from time to time, a bottleneck above a tenth of the run."""
    knobs = {
        "log": ("Logging", "log less often", "every 100 steps (flatout: --log-every 100)"),
        "validate": ("Validation", "validate less often", "every 1,000 steps or every few epochs (yolo: --notest)"),
        "checkpoint": ("Saving checkpoints", "save less often", "every 1,000 steps (flatout: --save-every-minutes 30)"),
    }
    for stage, ms in n.host.stage_ms.items():
        if stage not in knobs or ms < 0.1 * n.step_ms:
            continue
        activity, what, change = knobs[stage]
        share = 0.9 if stage == "log" else 0.75
        if runs := n.host.stage_runs.get(stage, 0.0):
            share = max(share, 1 - 1 / (RARE_STEPS * runs))
        # The device continues to work while the host logs, but not in a pause between steps.
        floor_ms = n.floor_ms - (share * ms if is_pause(stage) else 0.0)
        yield n.bottleneck(
            cause=label_of(stage),
            sentence=f"{activity} takes {n.percent(ms)} of the run.",
            evidence=[_how_often(ms, runs), *_time_in_steps(n)],
            what=what,
            change=change,
            step_ms=n.with_less_between_steps(share * ms, floor_ms=floor_ms),
            uncertainty=0.1,
            cost_ms=ms,
        )


def _how_often(ms: float, runs: float) -> str:
    """Cost and frequency of a stage, from its runs per step (0: not counted)."""
    if 0 < runs < 0.9:
        return f"{ms / runs:,.0f} ms every {1 / runs:,.0f} steps: {ms:.1f} ms per step on average"
    return f"{ms:.1f} ms per step on average"


def _time_in_steps(n: StepNumbers) -> list[str]:
    if not n.between_ms:
        return []
    return [f"steps themselves take {n.step_ms - n.between_ms:.1f} of {n.step_ms:.1f} ms, the rest is between steps"]


def _loops(n: StepNumbers) -> list[list[HotLine]]:
    """Hot lines of the main thread near a line that reads many values per step, one group per function."""
    lines = n.hot_lines(in_worker=False)
    groups: dict[tuple[str, str], list[HotLine]] = {}
    for site in n.m.waits:
        if site.per_step < LOOPED_READS:
            continue
        # A backward pass two lines above a loop is not part of it: only lines of the loop's own stage count.
        stages = {line.stage for line in lines if line.where == site.where} or {None}
        for line in lines:
            # Marked losses and optimizers have rules of their own.
            if line.stage in stages - {"loss", "assign", "optimizer"} and _near(site.where, line.where):
                group = groups.setdefault(line.owner, [])
                group += [line] if line not in group else []
    return list(groups.values())


def _near(where: str, other: str, lines: int = 3) -> bool:
    """Whether two code lines are in the same file, a few lines apart."""
    file, _, line = where.rpartition(":")
    other_file, _, other_line = other.rpartition(":")
    return file == other_file and abs(int(line) - int(other_line)) <= lines


def _load_evidence(n: StepNumbers) -> list[str]:
    """Load of main process, workers and GPU: shows whether the main thread is saturated or starved."""
    lines = []
    if n.m.main_cpu_ms:
        lines.append(f"main process uses {n.percent(n.m.main_cpu_ms)} of a core")
    if n.m.num_workers and n.worker_ms:
        lines.append(f"workers are busy {100 * n.worker_busy:.1f} % of the time: the input is not the limit")
    if n.m.device_busy_ms is not None:
        lines.append(f"the GPU is busy {100 * n.m.device_busy_ms / n.step_ms:.0f} % of the time")
    return lines


# Between host and GPU

MIN_IDLE_SHARE = 0.05

CUDA_GRAPH = "replay the step as one CUDA graph"
"""Name of the remedy. No flag of ours does this and nothing else, so it has no switch."""


def device_bottlenecks(n: StepNumbers) -> Iterator[Bottleneck]:
    """All bottlenecks between host and device; none without a device."""
    if not n.m.has_device:
        return
    yield from _blocking_copy(n)
    yield from _waits(n)
    yield from _launches(n)


def _blocking_copy(n: StepNumbers) -> Iterator[Bottleneck]:
    copy_ms = n.kind_ms("copy")
    if copy_ms < 0.03 * n.step_ms:
        return
    yield n.bottleneck(
        cause="blocking copy",
        sentence=f"The main thread is blocked while batches are copied to the GPU: {n.percent(copy_ms)} of the step.",
        evidence=[f"copies take {copy_ms:.1f} ms per step: memory is not pinned, or non_blocking=True is missing"],
        what="copy from pinned memory, asynchronously",
        change="DataLoader(pin_memory=True) and batch.to(device, non_blocking=True)",
        uncertainty=0.1,
        cost_ms=0.9 * copy_ms,
    )


def _waits(n: StepNumbers) -> Iterator[Bottleneck]:
    """A few waits per step keep the host from running ahead, so the GPU idles until the next kernels are launched."""
    busy_ms, sites = n.m.device_busy_ms, [site for site in n.m.waits if 0.5 <= site.per_step < LOOPED_READS]
    if busy_ms is None or not sites or n.device_idle_ms < MIN_IDLE_SHARE * n.step_ms:
        return
    # Without waits host and device work in parallel: the slower one sets the step.
    launching_ms = (n.m.launches or 0.0) * (n.m.launch_us or 5.0) / 1e3
    then_ms = max(n.between_ms + max(busy_ms, launching_ms), n.consumer_ms - n.device_idle_ms)
    num = sum(site.per_step for site in sites)
    yield n.bottleneck(
        cause="logging sync" if all(_looks_like_logging(site.text) for site in sites) else "host-device waits",
        sentence=(
            f"The host waits for the GPU in every step ({num:.1f} times on average), so the GPU idles for "
            f"{n.percent(n.device_idle_ms)} of the step until new work is launched."
        ),
        evidence=[f"{site.per_step:.0f} per step at {site.where}  {site.text}".rstrip() for site in sites[:5]]
        + [f"GPU busy {busy_ms:.1f} of {n.step_ms - n.between_ms:.1f} ms per step"],
        what="read values once per log interval",
        change=f"{sites[0].where}: keep the tensor (loss.detach()) and read it every 50 steps",
        step_ms=max(then_ms, n.with_faster_consumer(n.device_idle_ms)),
        uncertainty=0.12,
        cost_ms=n.device_idle_ms,
    )


def _launches(n: StepNumbers) -> Iterator[Bottleneck]:
    """Kernels so small that launching them takes longer than running them."""
    busy_ms, launches = n.m.device_busy_ms, n.m.launches
    if busy_ms is None or not launches or n.num_waits >= LOOPED_READS:
        return
    queueing_ms = _queueing_ms(n)
    if queueing_ms < 1.1 * busy_ms or n.device_idle_ms < 0.1 * n.step_ms or n.wait_ms > 0.3 * n.step_ms:
        return
    yield n.bottleneck(
        cause="kernel launches",
        sentence=(
            f"Launching {launches:,.0f} kernels per step takes the host longer than the GPU needs to run them, so the "
            f"GPU idles for {n.percent(n.device_idle_ms)} of the step."
        ),
        evidence=[
            f"launches take {queueing_ms:.1f} ms of the main thread; the GPU is busy for {busy_ms:.1f} ms per step",
            f"{n.images:.0f} images per step",
        ],
        what=CUDA_GRAPH,
        change="torch.cuda.graph or torch.compile(mode='reduce-overhead'); flatout: --fast (graphs and more)",
        step_ms=n.with_faster_consumer(queueing_ms, device_ms=1.05 * busy_ms),
        uncertainty=0.15,
        cost_ms=n.device_idle_ms,
    )


def _queueing_ms(n: StepNumbers) -> float:
    """Time of the main thread for launching kernels.

    If the thread waits for the device, its stages include those waits; then this is the least that launches cost.
    """
    if n.num_waits >= 0.5:
        return (n.m.launches or 0.0) * (n.m.launch_us or 5.0) / 1e3
    return sum(map(n.kind_ms, ("compute", "loss", "update")))


def _looks_like_logging(text: str) -> bool:
    return any(word in text for word in ("loss", "log", "print", "writer", "meter", "total", "running"))
