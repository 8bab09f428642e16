"""Findings about the input: batches come too late, and why."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from flatout.clock import PAUSES, kind_of, label_of
from flatout.profiler.demands import KEPT_DECODED
from flatout.profiler.measurement import HotLine
from flatout.profiler.verdict.predict_step import MIN_WAIT_SHARE, StepNumbers, StepPrediction, remedy
from flatout.profiler.verdict.remedy import Bottleneck, Remedy, number

DECODING = re.compile(r"decode|imread|image\.open|read_image|load_image|open_image|jpeg|np\.load|tifffile", re.I)
"""What a source line that decodes a picture looks like."""

DECODE_STAGES = ("decode", "store miss")
ON_DEVICE = "augment on the GPU"
"""The remedy's name."""
WAITING_FOR_DISK = 0.5
"""Share of a worker's work above which it mostly waits for files."""


def input_bottlenecks(n: StepNumbers) -> Iterator[Bottleneck]:
    """At most one bottleneck: the input has one main trouble at a time."""
    for bottleneck in _late_batches(n):
        # A host that waits while the device works off its queue costs no time.
        felt_ms = bottleneck.cost_ms if n.m.device_busy_ms is None else min(bottleneck.cost_ms, n.device_idle_ms)
        yield replace(bottleneck, cost_ms=felt_ms)


def _late_batches(n: StepNumbers) -> Iterator[Bottleneck]:
    lost_ms = n.wait_ms + n.serial_input_ms
    if lost_ms < MIN_WAIT_SHARE * n.step_ms:
        return
    if n.is_input_unobserved:
        yield _unobserved_input(n, lost_ms)
    elif n.m.num_workers == 0:
        yield _no_workers(n, lost_ms)
    elif n.worker_busy < 0.6:
        # What more batches under way would bring is a guess: not worth making for a short wait.
        if lost_ms > 0.1 * n.step_ms:
            yield _idle_workers(n, lost_ms)
    elif n.m.num_workers > 1.25 * n.m.usable_cores and n.cpu_ms > 0.8 * n.m.usable_cores * n.step_ms:
        yield _too_many_workers(n, lost_ms)
    else:
        yield _busy_workers(n, lost_ms)


def _unobserved_input(n: StepNumbers, lost_ms: float) -> Bottleneck:
    return Bottleneck(
        cause="input",
        sentence=f"The step waits for batches ({n.percent(lost_ms)} of it), and who makes them could not be looked at.",
        evidence=[
            *_evidence(n, lost_ms, None),
            "begin the watch before the first pass over a DataLoader with persistent workers, and give it the "
            "DataLoader itself if it is wrapped",
        ],
        remedies=[],
        cost_ms=lost_ms,
    )


def _no_workers(n: StepNumbers, lost_ms: float) -> Bottleneck:
    wanted = workers_needed(n)
    stage, decode_ms = dominant_stage(n), decode_time_ms(n)
    remedies = [_more_workers(n, wanted)] if wanted else []
    if decode_ms > 0.1 * lost_ms:
        remedies.append(_keep_decoded(n, decode_ms))
    decodes = decode_ms > 0.5 * lost_ms
    return Bottleneck(
        cause="decode" if decodes else "no workers",
        sentence=(
            f"The main thread makes every batch itself ({n.percent(lost_ms)} of the step)"
            f"{', and most of that is decoding pictures' if decodes else ' while nothing else runs'}."
        ),
        evidence=_evidence(n, lost_ms, stage),
        remedies=remedies,
        cost_ms=lost_ms,
    )


def _busy_workers(n: StepNumbers, lost_ms: float) -> Bottleneck:
    """The workers cannot keep up: too few of them, or each sample costs too much."""
    wanted, decode_ms = workers_needed(n), decode_time_ms(n)
    remedies = [_more_workers(n, wanted)] if wanted else []
    disk_bound = n.worker_blocked > WAITING_FOR_DISK
    if decode_ms > 0.1 * n.input_ms:
        remedies.append(_keep_decoded(n, decode_ms))
    if n.m.has_device and n.m.num_workers >= n.m.usable_cores * 0.9:
        remedies.append(_render_on_device(n))
    stage = dominant_stage(n)
    room = n.m.usable_cores - n.m.num_workers
    if disk_bound:
        cause, why = "storage", "and they mostly wait for files"
    elif decode_ms > 0.5 * n.input_ms:
        cause, why = "decode", "and most of their time is decoding pictures"
    elif wanted and room >= 1:
        num = "is only one" if n.m.num_workers == 1 else f"are only {n.m.num_workers}"
        cause, why = "too few workers", f"and there {num} of them for {n.m.usable_cores:g} cores"
    else:
        cause, why = "input", f"and most of their time is {label_of(stage)}" if stage else "with every core in use"
    return Bottleneck(
        cause=cause,
        sentence=f"The step waits for batches ({n.percent(lost_ms)} of it): the workers are busy all the time, {why}.",
        evidence=_evidence(n, lost_ms, stage),
        remedies=remedies,
        cost_ms=lost_ms,
    )


def _idle_workers(n: StepNumbers, lost_ms: float) -> Bottleneck:
    now = n.m.num_workers
    return Bottleneck(
        cause="hand-over",
        sentence=(
            f"The step waits for batches ({n.percent(lost_ms)} of it) although the workers are idle "
            f"{100 * (1 - n.worker_busy):.0f} % of the time: batches are lost on the way, or too few are under way."
        ),
        evidence=_evidence(n, lost_ms, dominant_stage(n)),
        remedies=[
            remedy(
                n,
                what="more batches under way",
                change="prefetch_factor=4 (feed: slots=8); pin_memory=False if the pinning thread is busy",
                # Half of the wait: nothing measured says how much of it is hand-over and how much is bad luck.
                step_ms=max(n.step_ms - 0.5 * lost_ms, n.consumer_ms, StepPrediction(n).min_step_ms),
                uncertainty=0.25,
            ),
            *([_more_workers(n, now + 1)] if now < n.m.usable_cores - 1 else []),
        ],
        cost_ms=lost_ms,
    )


def _too_many_workers(n: StepNumbers, lost_ms: float) -> Bottleneck:
    fitting = max(1, int(n.m.usable_cores))
    # Past the knee a step takes 15-29 % longer (measured by others, docs/profiler.md): the middle of it.
    step_ms = max(n.step_ms / 1.2, n.cpu_ms / n.m.usable_cores * 0.9, n.consumer_ms, StepPrediction(n).min_step_ms)
    fewer = remedy(
        n,
        what=f"workers {n.m.num_workers} -> {fitting}",
        change=f"--workers {fitting} (num_workers={fitting})",
        step_ms=step_ms,
        uncertainty=0.15,
        switch={"workers": fitting},
    )
    return Bottleneck(
        cause="too many workers",
        sentence=f"{n.m.num_workers} workers share {n.m.usable_cores:g} cores and get in each other's way.",
        evidence=_evidence(n, lost_ms, dominant_stage(n)),
        remedies=[fewer, *([_render_on_device(n)] if n.m.has_device else [])],
        cost_ms=lost_ms,
    )


def workers_needed(n: StepNumbers) -> int:
    """Workers with which the step would wait no more; 0 if more would not help.

    At most one per core, or two of workers that mostly wait for files: those need no core meanwhile.
    """
    enough = math.ceil(n.input_ms / max(n.consumer_ms, 1e-6) * 1.05)
    per_core = 2 if n.worker_blocked > WAITING_FOR_DISK else 1
    wanted = min(enough, int(per_core * n.m.usable_cores))
    return wanted if wanted > n.m.num_workers else 0


def decode_time_ms(n: StepNumbers) -> float:
    """Time of one core per step spent on decoding: by marks where there are some, else by sampled lines."""
    marked = sum((n.worker_ms or {}).get(stage, 0.0) for stage in DECODE_STAGES) + n.host_ms(*DECODE_STAGES)
    if marked:
        return marked
    lines = [line for line in n.m.lines if line.in_worker or (n.m.num_workers == 0 and line.stage not in PAUSES)]
    return sum(line.ms for line in lines if DECODING.search(f"{line.function} {line.text}"))


def dominant_stage(n: StepNumbers) -> str | None:
    """The input stage that takes most time."""
    host = n.m.lane("host")
    stages = n.worker_ms or (host.stage_ms if host else {})
    inputs = {stage: ms for stage, ms in stages.items() if n.worker_ms or kind_of(stage) == "input"}
    return max(inputs, key=lambda stage: inputs[stage]) if inputs else None


def _more_workers(n: StepNumbers, workers: int) -> Remedy:
    return remedy(
        n,
        what=f"workers {n.m.num_workers} -> {workers}",
        change=f"--workers {workers} (num_workers={workers})",
        step_ms=StepPrediction(n).with_workers(workers),
        # How much more a disk or a network gives is not known before it is asked.
        uncertainty=min(0.25, (0.15 if workers > n.m.usable_cores else 0.08) + 0.02 * (workers - n.m.num_workers)),
        switch={"workers": workers},
    )


def _keep_decoded(n: StepNumbers, decode_ms: float) -> Remedy:
    return remedy(
        n,
        what="keep pictures decoded",
        change="--cache-images (feed: Store(...))",
        step_ms=StepPrediction(n).with_input((1 - KEPT_DECODED) * decode_ms),
        uncertainty=0.12,
        switch={"cache_images": True},
    )


def _render_on_device(n: StepNumbers) -> Remedy:
    # Workers keep drawing numbers and boxes; painting moves to the device, where it takes a few per cent of a step.
    prediction = StepPrediction(n)
    step_ms = max(prediction.with_input(0.9 * n.input_ms), 1.04 * max(n.consumer_ms, prediction.floor_ms))
    return remedy(
        n,
        what=ON_DEVICE,
        change="--device-augment",
        step_ms=step_ms,
        uncertainty=0.15,
        switch={"device_augment": True},
    )


def _evidence(n: StepNumbers, lost_ms: float, stage: str | None) -> list[str]:
    lines = [
        f"blocked {lost_ms:.1f} of {n.step_ms:.1f} ms per step; with batches ready it would take {n.consumer_ms:.1f} ms"
    ]
    if n.m.num_workers and n.worker_ms:
        crew = "1 worker" if n.m.num_workers == 1 else f"{n.m.num_workers} workers"
        lines.append(
            f"{crew} on {n.m.usable_cores:g} usable cores, "
            f"busy {100 * n.worker_busy:.0f} % of the time; one image costs {n.input_ms / n.images:.2f} ms of a core"
        )
    if stage and (ms := n.worker_ms.get(stage, n.host_ms(stage))):
        lines.append(f"largest part of an image: {label_of(stage)}, {ms / n.images:.2f} ms")
    hottest = [line for line in n.hot_lines(in_worker=n.m.num_workers > 0) if line.in_worker or _is_input(line)]
    lines += [f"hottest line: {line.where}  {line.text}".rstrip() for line in hottest[:1]]
    if n.m.limits.input_ms:
        lines.append(f"the feed alone gives {number(1e3 * n.images / n.m.limits.input_ms)} img/s")
    return lines


def _is_input(line: HotLine) -> bool:
    return line.stage is not None and kind_of(line.stage) in ("wait", "input")
