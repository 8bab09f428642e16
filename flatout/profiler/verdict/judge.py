"""From a measurement to a verdict: all findings, the costliest first, with what each remedy would be worth."""

from collections.abc import Sequence
from dataclasses import replace

from flatout.profiler.measurement import Measurement
from flatout.profiler.verdict.numbers import Numbers
from flatout.profiler.verdict.remedy import NOTHING, Finding, Remedy, Trial, Verdict, number
from flatout.profiler.verdict.rules_device import device_findings
from flatout.profiler.verdict.rules_host import ASSIGNER, host_findings
from flatout.profiler.verdict.rules_input import input_findings
from flatout.profiler.verdict.whatif import WhatIf

WORTH_IT = 1.03
"""A remedy that promises less than this is not offered."""

UNEXPLAINED_TOO_MUCH = 0.25
MARK_IT = "mark the parts of your loop with flatout.profiler.clock.stage(name) to see more"


def judge(measurement: Measurement, trials: Sequence[Trial] = ()) -> Verdict:
    """Cause, evidence, and remedies by predicted speed; says so when nothing is worth changing."""
    n = Numbers(measurement)
    trials = [_in_ms(trial, n) for trial in trials]
    findings = [*input_findings(n), *host_findings(n), *device_findings(n)]
    findings = [_with_trials(finding, n, trials) for finding in findings]
    has_loss = any(finding.cause == ASSIGNER for finding in findings)
    findings += _findings_of_trials(n, [trial for trial in trials if not (has_loss and _is_of_loss(trial))])
    findings = [_less_sure(finding, n) for finding in findings]
    worth = sorted(
        (finding for finding in findings if any(map(_is_worth, finding.remedies))),
        key=lambda finding: -_saving(finding),
    )
    if not worth:
        return _nothing(n)
    first, *others = worth
    return Verdict(
        cause=first.cause,
        sentence=first.sentence,
        evidence=[*first.evidence, *_limits_line(n), *_others_line(n)],
        remedies=sorted(
            (remedy for finding in worth for remedy in finding.remedies if _is_worth(remedy)),
            key=lambda remedy: -remedy.images_per_s,
        ),
        others=others,
    )


def _with_trials(finding: Finding, n: Numbers, trials: Sequence[Trial]) -> Finding:
    """A loss that was tried out replaces the estimate of what a better loss would take."""
    if finding.cause != ASSIGNER:
        return finding
    tried = [_remedy_of(n, trial) for trial in trials if _is_of_loss(trial)]
    return Finding(**{**vars(finding), "remedies": tried}) if tried else finding


def _findings_of_trials(n: Numbers, trials: Sequence[Trial]) -> list[Finding]:
    """Parts that were tried out and are faster, whatever else is found."""
    return [
        Finding(
            cause=trial.what,
            sentence=f"{trial.what.capitalize()}: tried out, {trial.stage} would take {trial.then_ms:.1f} ms.",
            evidence=[f"{trial.stage} now {_stage_ms(trial, n):.1f} ms, {trial.then_ms:.1f} ms when tried alone"],
            remedies=[_remedy_of(n, trial)],
            cost_ms=max(0.0, _stage_ms(trial, n) - trial.then_ms),
        )
        for trial in trials
    ]


def remedy_of(measurement: Measurement, trial: Trial) -> Remedy:
    """What the training would be with the tried part in it, whether that is worth it or not."""
    n = Numbers(measurement)
    return _remedy_of(n, _in_ms(trial, n))


def _remedy_of(n: Numbers, trial: Trial) -> Remedy:
    now_ms, what_if = _stage_ms(trial, n), WhatIf(n)
    saved_ms, device_ms = now_ms - trial.then_ms, _device_ms(trial, n)
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


def _device_ms(trial: Trial, n: Numbers) -> float | None:
    """Time of kernels per step with the remedy; None where there is no device, or no trace of it."""
    busy_ms = n.m.device_busy_ms
    if busy_ms is None:
        return None
    if trial.device_share is not None:
        return busy_ms * trial.device_share
    return max(0.0, busy_ms - _stage_ms(trial, n) + trial.then_ms)


def _less_sure(finding: Finding, n: Numbers) -> Finding:
    """Where other programs take the cores, nobody knows what this one would get of them after a change."""
    doubt = 0.2 * min(1.0, (n.m.others_cores or 0.0) / n.m.usable_cores)
    remedies = [replace(remedy, uncertainty=remedy.uncertainty + doubt) for remedy in finding.remedies]
    return replace(finding, remedies=remedies)


def _in_ms(trial: Trial, n: Numbers) -> Trial:
    return replace(trial, then_ms=trial.then_ms * _stage_ms(trial, n), is_share=False) if trial.is_share else trial


def _is_of_loss(trial: Trial) -> bool:
    return set(trial.stage.split("+")) <= {"loss", "assign"}


def _stage_ms(trial: Trial, n: Numbers) -> float:
    stages = trial.stage.split("+")
    return sum(n.worker_ms.get(stage, 0.0) for stage in stages) if trial.in_workers else n.host_ms(*stages)


def _is_worth(remedy: Remedy) -> bool:
    """It promises enough, and more than a fraction of its own uncertainty."""
    return remedy.gain >= max(WORTH_IT, 1 + remedy.uncertainty / 3)


def _saving(finding: Finding) -> float:
    """How much faster its best remedy makes the training."""
    return max((remedy.gain for remedy in finding.remedies), default=0.0)


def _nothing(n: Numbers) -> Verdict:
    """Why nothing is worth changing: the step is its network, or nobody knows what it is."""
    unexplained_ms = n.unexplained_ms
    if unexplained_ms > UNEXPLAINED_TOO_MUCH * n.step_ms:
        lines = [line for line in n.hot_lines(in_worker=False) if line.stage is None][:3]
        return Verdict(
            cause="unexplained",
            sentence=f"{n.percent(unexplained_ms)} of the step lies outside of every known stage, and no rule fits it.",
            evidence=[
                *([f"{line.ms:.1f} ms per step at {line.where}  {line.text}".rstrip() for line in lines] or [MARK_IT]),
                *_limits_line(n),
            ],
            remedies=[],
        )
    compute_ms = n.network_ms
    return Verdict(
        cause=NOTHING,
        sentence=(
            f"Nothing is worth changing: no remedy we know promises more than {100 * (WORTH_IT - 1):.0f} %. "
            f"{number(1e3 * n.images / n.step_ms)} img/s is what this network takes here."
        ),
        evidence=[
            f"waiting for data {n.percent(n.wait_ms)}, forward and backward {n.percent(compute_ms)} of the step",
            *([f"between steps {n.percent(n.between_ms)} of the time"] if n.between_ms > 0.1 * n.step_ms else []),
            *_limits_line(n),
            *_others_line(n),
        ],
        remedies=[],
    )


def _others_line(n: Numbers) -> list[str]:
    others = n.m.others_cores or 0.0
    if others < 0.2:
        return []
    return [f"other processes keep {others:.1f} of {n.m.usable_cores:g} cores busy: all numbers are worse for it"]


def _limits_line(n: Numbers) -> list[str]:
    limits = n.m.limits
    parts = [
        f"{name} {1e3 * n.images / ms:,.0f} img/s"
        for name, ms in (
            ("compute", limits.compute_ms),
            ("compute and copy", limits.transfer_ms),
            ("input", limits.input_ms),
        )
        if ms
    ]
    return [f"limits: {', '.join(parts)}"] if parts else []
