"""From a measurement to a verdict: all findings, the costliest first, with what each remedy would be worth."""

from collections.abc import Sequence
from dataclasses import replace

from flatout.clock import label_of
from flatout.profiler.measurement import Measurement
from flatout.profiler.verdict.predict_step import (
    Numbers,
    finding_of_trial,
    finding_of_whole,
    in_ms,
    is_of_loss,
    remedy_of_trial,
    remedy_of_whole,
)
from flatout.profiler.verdict.remedy import NOTHING, EndToEndTrial, Finding, Remedy, Trial, Verdict, number
from flatout.profiler.verdict.rules_host import ASSIGNER, device_findings, host_findings
from flatout.profiler.verdict.rules_input import input_findings

WORTH_IT = 1.03
"""A remedy that promises less than this is not offered."""

TOO_MUCH = 0.25
"""Share of the step that is unexplained, or has a cause without a cure: then it is not said to be its network."""
MOST_UNSURE = 0.9
ALONE = 1.5
"""Forward and backward relative to a whole step on one batch: above this, something else slows them down."""
HOT = 0.3
"""Share of the step above which a line is told even where nothing is wrong with it."""
THREADS = "too many threads"
MARK_IT = "mark the parts of your loop with flatout.clock.clock.stage(name) to see more"


def judge(measurement: Measurement, trials: Sequence[Trial] = (), wholes: Sequence[EndToEndTrial] = ()) -> Verdict:
    """Cause, evidence, and remedies by predicted speed; says so when nothing is worth changing.

    `wholes` were tried with network and input changed at once: they answer whatever is found, and are no cause. Nor do
    they say which finding is: whatever slows a training down, another network with another input may be faster.
    """
    n = Numbers(measurement)
    trials = [in_ms(n, trial) for trial in trials]
    found = [*input_findings(n), *host_findings(n), *device_findings(n)]
    findings = [_with_trials(finding, n, trials) for finding in found]
    has_loss = any(finding.cause == ASSIGNER for finding in findings)
    findings += [finding_of_trial(n, trial) for trial in trials if not (has_loss and is_of_loss(trial))]
    findings = [
        replace(finding, remedies=[_less_sure(remedy, n) for remedy in finding.remedies]) for finding in findings
    ]
    findings.sort(key=lambda finding: -_saving(finding))
    findings = _with_wholes(findings, n, wholes)
    worth = [finding for finding in findings if any(map(_is_worth, finding.remedies))]
    if not worth:
        return _nothing(n, found)
    first, *others = worth
    offered = (remedy for finding in worth for remedy in finding.remedies if _is_worth(remedy))
    # Something larger may have answered several findings; two loops have remedies of one name, each its own line.
    remedies = {(remedy.what, remedy.change): remedy for remedy in offered}
    return Verdict(
        cause=first.cause,
        sentence=first.sentence,
        evidence=[*first.evidence, *_limits_line(n), *_others_line(n)],
        remedies=sorted(remedies.values(), key=lambda remedy: -remedy.images_per_s),
        others=others,
    )


def _with_trials(finding: Finding, n: Numbers, trials: Sequence[Trial]) -> Finding:
    """A loss that was tried out replaces the estimate of what a better loss would take."""
    if finding.cause != ASSIGNER:
        return finding
    tried = [remedy_of_trial(n, trial) for trial in trials if is_of_loss(trial)]
    return Finding(**{**vars(finding), "remedies": tried}) if tried else finding


def _with_wholes(findings: Sequence[Finding], n: Numbers, wholes: Sequence[EndToEndTrial]) -> list[Finding]:
    """Where a remedy that is worth it is part of something larger that was tried out, that takes its place.

    What takes no place is one more remedy for the first finding, and a finding by itself if none is worth anything.
    """
    found = list(findings)
    for whole in wholes:
        answer = _less_sure(remedy_of_whole(n, whole), n)
        places = [place for place, finding in enumerate(found) if _covers(whole, finding)]
        for place in places:
            kept = [remedy for remedy in found[place].remedies if remedy.what not in whole.covers]
            found[place] = replace(found[place], remedies=[answer, *kept])
        if places or not _is_worth(answer):
            continue
        if found and _saving(found[0]):
            found[0] = replace(found[0], remedies=[*found[0].remedies, answer])
        else:
            found.append(finding_of_whole(n, whole, answer))
    return found


def _covers(whole: EndToEndTrial, finding: Finding) -> bool:
    return any(remedy.what in whole.covers and _is_worth(remedy) for remedy in finding.remedies)


def _less_sure(remedy: Remedy, n: Numbers) -> Remedy:
    """Where other programs take the cores, nobody knows what this one would get of them after a change."""
    doubt = 0.2 * min(1.0, (n.m.others_cores or 0.0) / n.m.usable_cores)
    return replace(remedy, uncertainty=min(MOST_UNSURE, remedy.uncertainty + doubt))


def _is_worth(remedy: Remedy) -> bool:
    """It promises enough, and more than a fraction of its own uncertainty."""
    return remedy.gain >= max(WORTH_IT, 1 + remedy.uncertainty / 3)


def _saving(finding: Finding) -> float:
    """How much faster its best remedy makes the training; 0 if none is worth it."""
    return max((remedy.gain for remedy in finding.remedies if _is_worth(remedy)), default=0.0)


def _nothing(n: Numbers, findings: Sequence[Finding]) -> Verdict:
    """Why nothing is worth changing: the step is its network, or has no cure, or nobody knows what it is."""
    unexplained_ms = n.unexplained_ms
    worst = max(findings, key=lambda finding: finding.cost_ms, default=None)
    if worst is not None and worst.cost_ms > max(TOO_MUCH * n.step_ms, unexplained_ms):
        return Verdict(
            cause=worst.cause,
            sentence=f"{worst.sentence}{_no_cure(n)}",
            evidence=[*worst.evidence, *_limits_line(n), *_others_line(n)],
            remedies=[],
        )
    if unexplained_ms > TOO_MUCH * n.step_ms:
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
    if n.threads_that_fit and compute_ms > TOO_MUCH * n.step_ms:
        return Verdict(
            cause=THREADS,
            sentence=(
                f"Torch computes with {n.m.num_threads} threads, and for {n.threads_that_fit} of them a core is free: "
                "those that run wait for those that do not, which can take many times as long as it should."
            ),
            evidence=[
                f"forward and backward {n.percent(compute_ms)} of the step",
                *_limits_line(n),
                *_others_line(n),
            ],
            remedies=[],
        )
    return Verdict(
        cause=NOTHING,
        sentence=(
            f"Nothing is worth changing: no remedy we know promises more than {100 * (WORTH_IT - 1):.0f} %. "
            f"{number(1e3 * n.images / n.step_ms)} img/s is what this network takes {_beside(n)}."
        ),
        evidence=[
            f"waiting for data {n.percent(n.wait_ms)}, forward and backward {n.percent(compute_ms)} of the step",
            *([f"between steps {n.percent(n.between_ms)} of the time"] if n.between_ms > 0.1 * n.step_ms else []),
            *_hottest_line(n),
            *_limits_line(n),
            *_others_line(n),
        ],
        remedies=[],
    )


def _beside(n: Numbers) -> str:
    """Here, unless the network alone was seen to be much faster: then something slows it that is no stage of it."""
    alone_ms = n.m.limits.compute_ms
    if not alone_ms or n.network_ms < ALONE * alone_ms:
        return "here"
    return f"beside all else that runs here; by itself it made {number(1e3 * n.images / alone_ms)}"


def _hottest_line(n: Numbers) -> list[str]:
    """Of the main thread: what is slow inside of the network's own code has no rule, but it has a line."""
    return [
        f"hottest line, {line.ms:.1f} ms per step in {label_of(line.stage or 'unexplained')}: {line.where}  {line.text}"
        for line in n.hot_lines(in_worker=False)[:1]
        # That of a backward pass is the line that asks for it.
        if line.ms > HOT * n.step_ms and line.stage != "backward"
    ]


def _no_cure(n: Numbers) -> str:
    """Nothing about what nobody saw."""
    return "" if n.are_makers_unseen else f" No remedy we know promises more than {100 * (WORTH_IT - 1):.0f} %."


def _others_line(n: Numbers) -> list[str]:
    others, fitting = n.m.others_cores or 0.0, n.threads_that_fit
    lines = []
    if others >= 0.2:
        lines.append(
            f"other processes keep {others:.1f} of {n.m.usable_cores:g} cores busy: all numbers are worse for it"
        )
    if fitting and n.network_ms > TOO_MUCH * n.step_ms:
        lines.append(
            f"torch computes with {n.m.num_threads} threads: with OMP_NUM_THREADS={fitting} in front of the command, "
            "none of them has to wait for a core"
        )
    return lines


def _limits_line(n: Numbers) -> list[str]:
    limits = n.m.limits
    parts = [
        f"{name} {number(1e3 * n.images / ms)} img/s"
        for name, ms in (
            ("compute", limits.compute_ms),
            ("compute and copy", limits.transfer_ms),
            ("input", limits.input_ms),
        )
        if ms
    ]
    return [f"limits: {', '.join(parts)}"] if parts else []
