"""From a part that was tried out by itself to the training with that part in it."""

from dataclasses import replace

from flatout.profiler.measurement import Measurement
from flatout.profiler.verdict.numbers import Numbers
from flatout.profiler.verdict.remedy import Finding, Remedy, Trial, WholeTrial
from flatout.profiler.verdict.whatif import WhatIf


def remedy_of(measurement: Measurement, trial: Trial) -> Remedy:
    """What the training would be with the tried part in it, whether that is worth it or not."""
    n = Numbers(measurement)
    return remedy_of_trial(n, in_ms(n, trial))


def remedy_of_trial(n: Numbers, trial: Trial) -> Remedy:
    """The same, of a trial in milliseconds."""
    now_ms, what_if = stage_ms(n, trial), WhatIf(n)
    saved_ms, device_ms = now_ms - trial.then_ms, _device_ms(n, trial)
    if trial.images is not None:
        step_ms = what_if.with_batch(
            trial.images, tried_now_ms=now_ms, tried_then_ms=trial.then_ms, device_ms=device_ms or 0.0
        )
    elif trial.in_workers:
        step_ms = what_if.with_input(saved_ms)
    else:
        step_ms = what_if.with_consumer(saved_ms, device_ms=device_ms)
    return Remedy(
        what=trial.what,
        change=trial.change,
        step_ms=step_ms,
        uncertainty=trial.uncertainty,
        now_ms=n.step_ms,
        images=trial.images or n.images,
        now_images=n.images,
        switch=trial.switch,
    )


def _device_ms(n: Numbers, trial: Trial) -> float | None:
    """Time of kernels per step with the remedy; None where there is no device, or no trace of it."""
    busy_ms = n.m.device_busy_ms
    if busy_ms is None:
        return None
    if trial.device_share is not None:
        return busy_ms * trial.device_share
    return max(0.0, busy_ms - stage_ms(n, trial) + trial.then_ms)


def in_ms(n: Numbers, trial: Trial) -> Trial:
    """What was tried elsewhere as a share of its stage, in milliseconds of this training."""
    return replace(trial, then_ms=trial.then_ms * stage_ms(n, trial), is_share=False) if trial.is_share else trial


def is_of_loss(trial: Trial) -> bool:
    """Whether the loss alone was tried."""
    return set(trial.stage.split("+")) <= {"loss", "assign"}


def stage_ms(n: Numbers, trial: Trial) -> float:
    """What the tried part takes now."""
    stages = trial.stage.split("+")
    return sum(n.worker_ms.get(stage, 0.0) for stage in stages) if trial.in_workers else n.host_ms(*stages)


def finding_of_trial(n: Numbers, trial: Trial) -> Finding:
    """A part that was tried out and may be faster, whatever else is found."""
    now_ms, part = stage_ms(n, trial), _words_for(trial.stage)
    return Finding(
        cause=trial.what,
        sentence=f"With {trial.what}, {part} would take {trial.then_ms:.1f} ms, not {now_ms:.1f}: tried out.",
        evidence=[f"{part} now {now_ms:.1f} ms, {trial.then_ms:.1f} ms when tried alone"],
        remedies=[remedy_of_trial(n, trial)],
        cost_ms=max(0.0, now_ms - trial.then_ms),
    )


def _words_for(stages: str) -> str:
    """A list of nine stages helps nobody."""
    return stages if stages.count("+") < 3 else "the network's part of the step"


def remedy_of_whole(n: Numbers, whole: WholeTrial) -> Remedy:
    """What the training would be with network and input as they were tried."""
    return Remedy(
        what=whole.what,
        change=whole.change,
        step_ms=whole.step_ms(between_ms=n.between_ms),
        uncertainty=whole.uncertainty,
        now_ms=n.step_ms,
        images=whole.images or n.images,
        now_images=n.images,
        switch=whole.switch,
    )


def finding_of_whole(n: Numbers, whole: WholeTrial, answer: Remedy) -> Finding:
    """Where nothing else is found."""
    return Finding(
        cause=whole.what,
        sentence=f"Nothing stands out, but with {whole.change} a step would take {answer.step_ms:.1f} ms.",
        evidence=[f"tried by themselves: network {whole.compute_ms:.1f} ms, input {whole.input_ms:.1f} ms"],
        remedies=[answer],
        cost_ms=max(0.0, n.step_ms - answer.step_ms),
    )
