"""Bottlenecks of the network's own part of a step, from runs of it by itself: small batches, threads, slow settings."""

from collections.abc import Iterator

from flatout.errors import counted
from flatout.profiler.measurement import NetworkRun
from flatout.profiler.verdict.predict_step import StepNumbers
from flatout.profiler.verdict.remedy import Bottleneck, Remedy

MIN_OVERHEAD = 0.4
"""Fraction of the step that does not grow with the batch, above which batches are called small."""
MIN_BATCH_GAIN = 1.3
"""Another batch size is another training: it is not advised for less."""
NEARLY = 0.9
MIN_RUN_GAIN = 1.15
"""A run that is faster by less may owe it to other processes."""

SMALL_BATCHES = "small batches"
TOO_MANY_THREADS = "too many threads"
TOO_FEW_THREADS = "too few threads"

_SWITCHES = {
    "anomaly detection": "torch.autograd.set_detect_anomaly(False)",
    "oneDNN switched off": "torch.backends.mkldnn.enabled = True",
    "64-bit weights": "model.float(), and inputs in 32 bits",
    "unneeded gradients": "run that part under torch.no_grad(), or requires_grad_(False) on its parameters",
}
"""Slow settings (observe/network_runs.py), and how each is changed."""


def network_bottlenecks(n: StepNumbers) -> Iterator[Bottleneck]:
    """All bottlenecks that runs of the network show; none if it was not run by itself."""
    if not n.m.network_runs:
        return
    now, *others = n.m.network_runs
    yield from _slow_settings(n, now, [run for run in others if run.without])
    yield from _threads(n, now, [run for run in others if run.threads != now.threads])
    yield from _small_batches(n, now, [run for run in others if run.images > now.images])


def _slow_settings(n: StepNumbers, now: NetworkRun, runs: list[NetworkRun]) -> Iterator[Bottleneck]:
    for run in runs:
        if now.ms < MIN_RUN_GAIN * run.ms:
            continue
        saved_ms = n.network_ms - _then_ms(n.network_ms, now, run)
        yield n.bottleneck(
            cause=run.without,
            sentence=(
                f"The network is slowed down by {run.without}: without, it would be {now.ms / run.ms:.1f}x as fast."
            ),
            evidence=[
                f"forward and backward by themselves: {now.ms:.1f} ms as they are, {run.ms:.1f} ms without",
                *([f"gradients that no optimizer uses: {run.detail}"] if run.detail else []),
            ],
            what=f"without {run.without}",
            change=_SWITCHES.get(run.without, run.without),
            uncertainty=0.1,
            cost_ms=saved_ms,
        )


def _threads(n: StepNumbers, now: NetworkRun, runs: list[NetworkRun]) -> Iterator[Bottleneck]:
    best = min(runs, key=lambda run: run.ms, default=now)
    if now.ms < MIN_RUN_GAIN * best.ms:
        return
    computing_ms = n.network_ms + n.kind_ms("loss")
    saved_ms = computing_ms - _then_ms(computing_ms, now, best)
    if best.threads < now.threads:
        cause, step_ms = TOO_MANY_THREADS, n.with_faster_consumer(saved_ms)
        why = "they wait for each other more than they compute"
    else:
        cause, step_ms = TOO_FEW_THREADS, n.with_parallel_consumer(saved_ms)
        why = "other cores could share the work"
    yield n.bottleneck(
        cause=cause,
        sentence=f"Torch computes with {counted(now.threads, 'thread')} on {n.m.usable_cores:g} cores: {why}.",
        evidence=[
            f"forward and backward by themselves: {now.ms:.1f} ms with {counted(now.threads, 'thread')}, "
            f"{best.ms:.1f} ms with {counted(best.threads, 'thread')}"
        ],
        what=f"threads {now.threads} -> {best.threads}",
        change=f"torch.set_num_threads({best.threads}), or OMP_NUM_THREADS={best.threads}",
        step_ms=step_ms,
        uncertainty=0.15,
        cost_ms=saved_ms,
    )


def _small_batches(n: StepNumbers, now: NetworkRun, runs: list[NetworkRun]) -> Iterator[Bottleneck]:
    if not runs:
        return
    largest = max(runs, key=lambda run: run.images)
    per_image_ms = max(0.0, largest.ms - now.ms) / (largest.images - now.images)
    fixed_share = max(0.0, 1 - per_image_ms * now.images / now.ms)
    overhead_ms = n.network_ms * fixed_share + n.kind_ms("update")
    larger = sorted((_with_batch(n, now, run) for run in runs), key=lambda each: each.images)
    fastest = max(each.images_per_s for each in larger)
    # The smallest that is nearly as fast: a larger batch is another training.
    best = next(each for each in larger if each.images_per_s >= NEARLY * fastest)
    if overhead_ms < MIN_OVERHEAD * n.step_ms or best.gain < MIN_BATCH_GAIN:
        return
    yield Bottleneck(
        cause=SMALL_BATCHES,
        sentence=(
            f"Batches of {n.images:.0f} are too small: {n.percent(overhead_ms)} of the step is overhead that does not "
            "grow with the batch."
        ),
        evidence=[
            f"forward and backward by themselves: {run.ms:.1f} ms for {run.images:g} images, "
            f"{run.ms / run.images:.2f} ms for each"
            for run in (now, *runs)
        ],
        remedies=[best],
        cost_ms=overhead_ms,
    )


def _with_batch(n: StepNumbers, now: NetworkRun, run: NetworkRun) -> Remedy:
    factor = run.images / now.images
    step_ms = n.with_batch_size(
        n.images * factor,
        tried_now_ms=n.network_ms,
        tried_then_ms=n.network_ms * run.ms / now.ms,
        device_ms=(n.m.device_busy_ms or 0.0) * run.ms / now.ms,
    )
    return n.remedy(
        what=f"batch {n.images:.0f} -> {n.images * factor:.0f}",
        change="a larger batch_size, with the learning rate that suits it",
        step_ms=step_ms,
        uncertainty=0.15,
        images=n.images * factor,
    )


def _then_ms(ms: float, now: NetworkRun, run: NetworkRun) -> float:
    """The network's time in the loop, `ms` now, with the setting of `run`: in proportion, but no faster than alone."""
    return max(ms * run.ms / now.ms, min(run.ms, ms))
