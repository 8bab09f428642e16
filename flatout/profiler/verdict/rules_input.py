"""Bottlenecks of the input: batches come too late, and why."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from flatout.clock import PAUSES, kind_of, label_of
from flatout.errors import counted
from flatout.profiler.demands import KEPT_DECODED, Demands
from flatout.profiler.measurement import HotLine
from flatout.profiler.verdict.predict_step import MIN_WAIT_SHARE, StepNumbers
from flatout.profiler.verdict.remedy import Bottleneck, Remedy, number
from flatout.profiler.verdict.rules_code import HotCode, faster_input_code, promise, slow_input_code

DECODING = re.compile(r"decode|imread|image\.open|read_image|load_image|open_image|jpeg|np\.load|tifffile", re.I)
"""Matches source lines that decode an image."""

SCALING = re.compile(r"resize|thumbnail|rescale|INTER_AREA", re.I)
"""Matches source lines that scale an image; after decoding, the result is the same each time."""

DECODE_STAGES = ("decode", "store miss")
ON_DEVICE = "augment on the GPU"
"""Name of the remedy."""
WAITING_FOR_DISK = 0.5
"""Fraction of the time in which batches are made that is spent blocked, above which it is mostly waiting."""
WAITS_FOR = "for files, a network or a sleep"
MOST_OF_THE_WAIT = 0.6
SLOW_CODE = "slow input code"
"""A function of the data set or of the collation that no number of workers makes up for."""


def input_bottlenecks(n: StepNumbers) -> Iterator[Bottleneck]:
    """The main bottleneck of the input, if it has one."""
    for bottleneck in _late_batches(n):
        # A host that waits while the device works through its queue costs no time.
        felt_ms = bottleneck.cost_ms if n.m.device_busy_ms is None else min(bottleneck.cost_ms, n.device_idle_ms)
        yield replace(bottleneck, cost_ms=felt_ms)


def _late_batches(n: StepNumbers) -> Iterator[Bottleneck]:
    lost_ms = n.wait_ms + n.serial_input_ms
    if lost_ms < MIN_WAIT_SHARE * n.step_ms:
        return
    if n.is_input_unobserved:
        yield _unobserved_input(n, lost_ms)
    elif n.m.num_workers == 0:
        yield _slow_input(n, lost_ms)
    elif n.worker_busy < 0.6:
        # The gain of more prefetching is a guess, which a short wait does not justify.
        if lost_ms > 0.1 * n.step_ms:
            yield _idle_workers(n, lost_ms)
    elif n.m.num_workers > 1.25 * n.m.usable_cores and n.cpu_ms > 0.8 * n.m.usable_cores * n.step_ms:
        yield _too_many_workers(n, lost_ms)
    else:
        yield _slow_input(n, lost_ms)


def _unobserved_input(n: StepNumbers, lost_ms: float) -> Bottleneck:
    return Bottleneck(
        cause="input",
        sentence=(
            f"The step spends {n.percent(lost_ms)} of its time waiting for batches, but how they are made could not be "
            "observed."
        ),
        evidence=[
            *_evidence(n, lost_ms, None),
            "to see why: begin watch() before the first pass over a DataLoader with persistent workers, and pass it "
            "the DataLoader itself if yours is wrapped",
        ],
        cost_ms=lost_ms,
    )


def _slow_input(n: StepNumbers, lost_ms: float) -> Bottleneck:
    """Batches that take too long to make, for the main thread or for workers that cannot keep up. `lost_ms`: the wait
    per step."""
    wanted, decode_ms, code = workers_needed(n), decode_time_ms(n), slow_input_code(n)
    remedies = [_more_workers(n, wanted)] if wanted else []
    if decode_ms > 0.1 * n.input_ms:
        remedies += _keep_decoded(n, decode_ms)
    if n.m.has_device and n.m.num_workers >= n.m.usable_cores * 0.9:
        remedies.append(_render_on_device(n))
    promised = faster_input_code(n, code) if code else []
    if n.m.num_workers:
        cause, why = _cause_in_workers(n, wanted, decode_ms, code)
        late = f"The step spends {n.percent(lost_ms)} of its time waiting for batches."
        sentence = f"{late} The workers cannot keep up: {why}."
    else:
        cause, why = _cause_in_main_thread(n, wanted, decode_ms, code)
        sentence = f"The main thread makes every batch itself, which takes {n.percent(lost_ms)} of the step, {why}."
    return _late(n, lost_ms, cause, f"{sentence}{promise(promised)}", _cure_first(cause, [*remedies, *promised]))


def _cause_in_main_thread(n: StepNumbers, wanted: int, decode_ms: float, code: HotCode | None) -> tuple[str, str]:
    """Why batches take long, as a cause and the end of a sentence."""
    if n.worker_blocked > WAITING_FOR_DISK:
        return "storage", f"most of it waiting ({WAITS_FOR}), which takes no core"
    if not _workers_suffice(n, wanted):
        if decode_ms > 0.5 * n.input_ms:
            return "decode", "most of it for decoding images"
        if code:
            return SLOW_CODE, f"most of it in {code.name}"
    return "no workers", "and nothing else runs meanwhile"


def _cause_in_workers(n: StepNumbers, wanted: int, decode_ms: float, code: HotCode | None) -> tuple[str, str]:
    """As `_cause_in_main_thread`: there are too few workers, or each sample takes too long."""
    has_room = wanted > 0 and n.m.usable_cores - n.m.num_workers >= 1
    if n.worker_blocked > WAITING_FOR_DISK:
        return "storage", f"they mostly wait ({WAITS_FOR}), which takes no core"
    if decode_ms > 0.5 * n.input_ms:
        return "decode", "they mostly decode images"
    if code and not (has_room and _workers_suffice(n, wanted)):
        return SLOW_CODE, f"most of their time passes in {code.name}"
    if has_room:
        num = "is only one" if n.m.num_workers == 1 else f"are only {n.m.num_workers}"
        return "too few workers", f"there {num} of them for {n.m.usable_cores:g} cores"
    stage = dominant_stage(n)
    return "input", f'they spend most of their time in "{label_of(stage)}"' if stage else "every core is in use"


def _workers_suffice(n: StepNumbers, wanted: int) -> bool:
    """Whether that many workers would win back most of the time that the step waits for its input.

    On a machine of its own: a cause does not depend on what else runs at the moment, only the gain does.
    """
    now = Demands(n.consumer_ms, n.input_ms, n.cpu_ms, n.m.num_workers, n.m.usable_cores)
    if n.is_crowded and n.m.num_workers and not n.m.has_device:  # times include waiting for a core: count CPU time
        input_ms = n.cpu_ms - n.m.main_cpu_ms + (n.m.worker_blocked_ms or 0.0)
        now = replace(now, consumer_ms=n.m.main_cpu_ms, input_ms=input_ms)
    saved_ms = now.step_ms - replace(now, workers=wanted).step_ms
    return wanted > 0 and saved_ms >= MOST_OF_THE_WAIT * (now.step_ms - now.consumer_ms)


def _cure_first(cause: str, remedies: list[Remedy]) -> list[Remedy]:
    """The remedies, the one that removes the cause first."""
    names = {"decode": ("keep", "cache"), SLOW_CODE: ("without",), "storage": ("without",)}.get(cause, ("workers",))
    return sorted(remedies, key=lambda each: not each.what.startswith(names))


def _idle_workers(n: StepNumbers, lost_ms: float) -> Bottleneck:
    now = n.m.num_workers
    sentence = (
        f"The step spends {n.percent(lost_ms)} of its time waiting for batches although the workers are idle "
        f"{100 * (1 - n.worker_busy):.0f} % of the time: handing batches over takes too long (a DataLoader "
        "pickles whatever is not a tensor), or too few are prefetched."
    )
    prefetch = n.remedy(
        what="prefetch more batches",
        change="prefetch_factor=4 (flatout.feed: slots=8); pin_memory=False if the pinning thread is busy",
        # Half of the wait: no measurement tells how much of it is handing over and how much is chance.
        step_ms=max(n.step_ms - 0.5 * lost_ms, n.consumer_ms, n.min_step_ms),
        uncertainty=0.25,
    )
    more = [_more_workers(n, now + 1)] if now < n.m.usable_cores - 1 else []
    return _late(n, lost_ms, "hand-over", sentence, [prefetch, *more])


def _too_many_workers(n: StepNumbers, lost_ms: float) -> Bottleneck:
    fitting = max(1, int(n.m.usable_cores))
    # With too many workers a step takes 15-29 % longer (measured by others); this is the middle.
    step_ms = max(n.step_ms / 1.2, n.cpu_ms / n.m.usable_cores * 0.9, n.consumer_ms, n.min_step_ms)
    sentence = f"{n.m.num_workers} workers compete for {n.m.usable_cores:g} cores and slow each other down."
    remedies = [_other_workers(n, fitting, step_ms, 0.15), *([_render_on_device(n)] if n.m.has_device else [])]
    return _late(n, lost_ms, "too many workers", sentence, remedies)


def _late(n: StepNumbers, lost_ms: float, cause: str, sentence: str, remedies: list[Remedy]) -> Bottleneck:
    """Batches that are late for this cause; `lost_ms`: the wait per step."""
    evidence = _evidence(n, lost_ms, dominant_stage(n))
    return Bottleneck(cause=cause, sentence=sentence, evidence=evidence, remedies=remedies, cost_ms=lost_ms)


def workers_needed(n: StepNumbers) -> int:
    """Number of workers with which the step would no longer wait; 0 if more would not help.

    At most one per core, or two if they mostly wait for files and need no core meanwhile.
    """
    enough = math.ceil(n.input_ms / max(n.consumer_ms, 1e-6) * 1.05)
    per_core = 2 if n.worker_blocked > WAITING_FOR_DISK else 1
    wanted = min(enough, int(per_core * n.m.usable_cores))
    return wanted if wanted > n.m.num_workers else 0


def decode_time_ms(n: StepNumbers) -> float:
    """Time of one core per step spent on decoding: from marks if there are any, else from sampled lines."""
    marked = sum((n.worker_ms or {}).get(stage, 0.0) for stage in DECODE_STAGES) + n.host_ms(*DECODE_STAGES)
    if marked:
        return marked
    return sum(line.ms for line in _input_lines(n) if DECODING.search(f"{line.function} {line.text}"))


def dominant_stage(n: StepNumbers) -> str | None:
    """The input stage that takes the most time."""
    stages = n.worker_ms or n.host.stage_ms
    inputs = {stage: ms for stage, ms in stages.items() if n.worker_ms or kind_of(stage) == "input"}
    return max(inputs, key=lambda stage: inputs[stage]) if inputs else None


def _more_workers(n: StepNumbers, workers: int) -> Remedy:
    # How much more a disk or a network can deliver is unknown until it is tried.
    uncertainty = min(0.25, (0.15 if workers > n.m.usable_cores else 0.08) + 0.02 * (workers - n.m.num_workers))
    return _other_workers(n, workers, n.with_workers(workers), uncertainty)


def _other_workers(n: StepNumbers, workers: int, step_ms: float, uncertainty: float) -> Remedy:
    return n.remedy(
        what=f"workers {n.m.num_workers} -> {workers}",
        change=f"--workers {workers} (DataLoader: num_workers={workers})",
        step_ms=step_ms,
        uncertainty=uncertainty,
        switch={"workers": workers},
    )


def _keep_decoded(n: StepNumbers, decode_ms: float) -> list[Remedy]:
    """Keeping decoded images; and if they are scaled after that, keeping them at the size that is used."""
    scaling_ms = sum(line.ms for line in _input_lines(n) if SCALING.search(line.text))
    if scaling_ms < 0.1 * n.input_ms:
        return [_cache_decoded(n, decode_ms)]
    scaled = n.remedy(
        what="keep images decoded and scaled",
        change="store them at the size that is used, or decode at reduced size (cv2.IMREAD_REDUCED_*, draft() of PIL)",
        step_ms=n.with_faster_input((1 - KEPT_DECODED) * (decode_ms + scaling_ms)),
        uncertainty=0.15,
    )
    return [scaled, _cache_decoded(n, decode_ms)]


def _input_lines(n: StepNumbers) -> list[HotLine]:
    """Hot lines of the making of batches: of the workers, or without workers of the main thread outside of pauses."""
    return [line for line in n.m.lines if line.in_worker or (n.m.num_workers == 0 and line.stage not in PAUSES)]


def _cache_decoded(n: StepNumbers, decode_ms: float) -> Remedy:
    return n.remedy(
        what="cache decoded images",
        change="--cache-images (your own loop: keep decoded images in a flatout.Store)",
        step_ms=n.with_faster_input((1 - KEPT_DECODED) * decode_ms),
        uncertainty=0.12,
        switch={"cache_images": True},
    )


def _render_on_device(n: StepNumbers) -> Remedy:
    # Workers still draw parameters and boxes; rendering moves to the device, where it takes a few per cent of a step.
    step_ms = max(n.with_faster_input(0.9 * n.input_ms), 1.04 * max(n.consumer_ms, n.floor_ms))
    return n.remedy(
        what=ON_DEVICE,
        change="--device-augment (your own loop: a flatout.DeviceFeed)",
        step_ms=step_ms,
        uncertainty=0.15,
        switch={"device_augment": True},
    )


def _evidence(n: StepNumbers, lost_ms: float, stage: str | None) -> list[str]:
    lines = [
        f"the input blocks {lost_ms:.1f} of {n.step_ms:.1f} ms per step; with batches always ready a step would take "
        f"{n.consumer_ms:.1f} ms"
    ]
    if n.m.num_workers and n.worker_ms:
        workers = counted(n.m.num_workers, "worker")
        lines.append(
            f"{workers} on {n.m.usable_cores:g} usable cores, busy {100 * n.worker_busy:.0f} % of the time; an image "
            f"takes {n.input_ms / n.images:.2f} ms of {'one core' if n.worker_blocked < 0.2 else 'a worker'}"
        )
    if n.worker_blocked >= 0.2 and not n.is_input_unobserved:
        lines.append(
            f"{100 * n.worker_blocked:.0f} % of the time in which batches are made is waiting ({WAITS_FOR}), not "
            "computing"
        )
    if stage and (ms := n.worker_ms.get(stage, n.host_ms(stage))):
        lines.append(f"most expensive stage: {label_of(stage)}, {ms / n.images:.2f} ms per image")
    hottest = [line for line in n.hot_lines(in_worker=n.m.num_workers > 0) if line.in_worker or _is_input(line)]
    lines += [f"hottest line: {line.source}" for line in hottest[:1]]
    if n.m.limits.input_ms:
        lines.append(f"the input alone delivers {number(1e3 * n.images / n.m.limits.input_ms)} img/s")
    return lines


def _is_input(line: HotLine) -> bool:
    return line.stage is not None and kind_of(line.stage) in ("wait", "input")
