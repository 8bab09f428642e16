"""From a measurement to a verdict: all bottlenecks, the costliest first, with what each remedy would be worth."""

from collections.abc import Sequence
from dataclasses import replace

from flatout.clock import label_of
from flatout.profiler.measurement import Measurement
from flatout.profiler.verdict.predict_step import (
    StepNumbers,
    bottleneck_of_end_to_end,
    bottleneck_of_trial,
    in_ms,
    is_of_loss,
    remedy_of_end_to_end,
    remedy_of_trial,
)
from flatout.profiler.verdict.remedy import NOTHING, Bottleneck, EndToEndTrial, Remedy, Trial, Verdict, number
from flatout.profiler.verdict.rules_host import ASSIGNER, device_bottlenecks, host_bottlenecks
from flatout.profiler.verdict.rules_input import input_bottlenecks

MIN_GAIN = 1.03
"""A remedy that promises less than this is not offered."""

LARGE_SHARE = 0.25
"""Share of the step that is unexplained, or has a cause without a cure: then it is not said to be its network."""
MAX_UNCERTAINTY = 0.9
SLOWED_DOWN = 1.5
"""Forward and backward relative to a trial step on one batch: above this, something else slows them down."""
HOT_SHARE = 0.3
"""Share of the step above which a line is told even where nothing is wrong with it."""
THREADS = "too many threads"
ADD_MARKS = "mark the parts of your loop with flatout.clock.clock.stage(name) to see more"


def diagnose(
    measurement: Measurement, trials: Sequence[Trial] = (), end_to_end: Sequence[EndToEndTrial] = ()
) -> Verdict:
    """Cause, evidence, and remedies by predicted speed; says so when nothing is worth changing.

    `end_to_end` were tried with network and input changed at once: they answer whatever is found, and are no cause. Nor do
    they say which bottleneck is: whatever slows a training down, another network with another input may be faster.
    """
    n = StepNumbers(measurement)
    trials = [in_ms(n, trial) for trial in trials]
    found = [*input_bottlenecks(n), *host_bottlenecks(n), *device_bottlenecks(n)]
    bottlenecks = [_with_trials(bottleneck, n, trials) for bottleneck in found]
    has_loss = any(bottleneck.cause == ASSIGNER for bottleneck in bottlenecks)
    bottlenecks += [bottleneck_of_trial(n, trial) for trial in trials if not (has_loss and is_of_loss(trial))]
    bottlenecks = [
        replace(bottleneck, remedies=[_with_load_uncertainty(remedy, n) for remedy in bottleneck.remedies])
        for bottleneck in bottlenecks
    ]
    bottlenecks.sort(key=lambda bottleneck: -_best_gain(bottleneck))
    bottlenecks = _with_end_to_end(bottlenecks, n, end_to_end)
    worth = [bottleneck for bottleneck in bottlenecks if any(map(_is_worthwhile, bottleneck.remedies))]
    if not worth:
        return _without_remedy(n, found)
    first, *others = worth
    offered = (remedy for bottleneck in worth for remedy in bottleneck.remedies if _is_worthwhile(remedy))
    # Something larger may have answered several bottlenecks; two loops have remedies of one name, each its own line.
    remedies = {(remedy.what, remedy.change): remedy for remedy in offered}
    return Verdict(
        cause=first.cause,
        sentence=first.sentence,
        evidence=[*first.evidence, *_limit_lines(n), *_load_lines(n)],
        remedies=sorted(remedies.values(), key=lambda remedy: -remedy.images_per_s),
        others=others,
    )


def _with_trials(bottleneck: Bottleneck, n: StepNumbers, trials: Sequence[Trial]) -> Bottleneck:
    """A loss that was tried out replaces the estimate of what a better loss would take."""
    if bottleneck.cause != ASSIGNER:
        return bottleneck
    tried = [remedy_of_trial(n, trial) for trial in trials if is_of_loss(trial)]
    return Bottleneck(**{**vars(bottleneck), "remedies": tried}) if tried else bottleneck


def _with_end_to_end(
    bottlenecks: Sequence[Bottleneck], n: StepNumbers, end_to_end: Sequence[EndToEndTrial]
) -> list[Bottleneck]:
    """Where a remedy that is worth it is part of something larger that was tried out, that takes its place.

    What takes no place is one more remedy for the first bottleneck, and a bottleneck by itself if none is worth anything.
    """
    found = list(bottlenecks)
    for trial in end_to_end:
        answer = _with_load_uncertainty(remedy_of_end_to_end(n, trial), n)
        places = [place for place, bottleneck in enumerate(found) if _covers(trial, bottleneck)]
        for place in places:
            kept = [remedy for remedy in found[place].remedies if remedy.what not in trial.covers]
            found[place] = replace(found[place], remedies=[answer, *kept])
        if places or not _is_worthwhile(answer):
            continue
        if found and _best_gain(found[0]):
            found[0] = replace(found[0], remedies=[*found[0].remedies, answer])
        else:
            found.append(bottleneck_of_end_to_end(n, trial, answer))
    return found


def _covers(trial: EndToEndTrial, bottleneck: Bottleneck) -> bool:
    return any(remedy.what in trial.covers and _is_worthwhile(remedy) for remedy in bottleneck.remedies)


def _with_load_uncertainty(remedy: Remedy, n: StepNumbers) -> Remedy:
    """Where other programs take the cores, nobody knows what this one would get of them after a change."""
    doubt = 0.2 * min(1.0, (n.m.others_cores or 0.0) / n.m.usable_cores)
    return replace(remedy, uncertainty=min(MAX_UNCERTAINTY, remedy.uncertainty + doubt))


def _is_worthwhile(remedy: Remedy) -> bool:
    """It promises enough, and more than a fraction of its own uncertainty."""
    return remedy.gain >= max(MIN_GAIN, 1 + remedy.uncertainty / 3)


def _best_gain(bottleneck: Bottleneck) -> float:
    """How much faster its best remedy makes the training; 0 if none is worth it."""
    return max((remedy.gain for remedy in bottleneck.remedies if _is_worthwhile(remedy)), default=0.0)


def _without_remedy(n: StepNumbers, bottlenecks: Sequence[Bottleneck]) -> Verdict:
    """Why nothing is worth changing: the step is its network, or has no cure, or nobody knows what it is."""
    unexplained_ms = n.unexplained_ms
    worst = max(bottlenecks, key=lambda bottleneck: bottleneck.cost_ms, default=None)
    if worst is not None and worst.cost_ms > max(LARGE_SHARE * n.step_ms, unexplained_ms):
        return Verdict(
            cause=worst.cause,
            sentence=f"{worst.sentence}{_no_remedy_sentence(n)}",
            evidence=[*worst.evidence, *_limit_lines(n), *_load_lines(n)],
            remedies=[],
        )
    if unexplained_ms > LARGE_SHARE * n.step_ms:
        lines = [line for line in n.hot_lines(in_worker=False) if line.stage is None][:3]
        return Verdict(
            cause="unexplained",
            sentence=f"{n.percent(unexplained_ms)} of the step lies outside of every known stage, and no rule fits it.",
            evidence=[
                *(
                    [f"{line.ms:.1f} ms per step at {line.where}  {line.text}".rstrip() for line in lines]
                    or [ADD_MARKS]
                ),
                *_limit_lines(n),
            ],
            remedies=[],
        )
    compute_ms = n.network_ms
    if n.threads_that_fit and compute_ms > LARGE_SHARE * n.step_ms:
        return Verdict(
            cause=THREADS,
            sentence=(
                f"Torch computes with {n.m.num_threads} threads, and for {n.threads_that_fit} of them a core is free: "
                "those that run wait for those that do not, which can take many times as long as it should."
            ),
            evidence=[
                f"forward and backward {n.percent(compute_ms)} of the step",
                *_limit_lines(n),
                *_load_lines(n),
            ],
            remedies=[],
        )
    return Verdict(
        cause=NOTHING,
        sentence=(
            f"Nothing is worth changing: no remedy we know promises more than {100 * (MIN_GAIN - 1):.0f} %. "
            f"{number(1e3 * n.images / n.step_ms)} img/s is what this network takes {_beside(n)}."
        ),
        evidence=[
            f"waiting for data {n.percent(n.wait_ms)}, forward and backward {n.percent(compute_ms)} of the step",
            *([f"between steps {n.percent(n.between_ms)} of the time"] if n.between_ms > 0.1 * n.step_ms else []),
            *_hottest_line(n),
            *_limit_lines(n),
            *_load_lines(n),
        ],
        remedies=[],
    )


def _beside(n: StepNumbers) -> str:
    """Here, unless the network alone was seen to be much faster: then something slows it that is no stage of it."""
    alone_ms = n.m.limits.compute_ms
    if not alone_ms or n.network_ms < SLOWED_DOWN * alone_ms:
        return "here"
    return f"beside all else that runs here; by itself it made {number(1e3 * n.images / alone_ms)}"


def _hottest_line(n: StepNumbers) -> list[str]:
    """Of the main thread: what is slow inside of the network's own code has no rule, but it has a line."""
    return [
        f"hottest line, {line.ms:.1f} ms per step in {label_of(line.stage or 'unexplained')}: {line.where}  {line.text}"
        for line in n.hot_lines(in_worker=False)[:1]
        # That of a backward pass is the line that asks for it.
        if line.ms > HOT_SHARE * n.step_ms and line.stage != "backward"
    ]


def _no_remedy_sentence(n: StepNumbers) -> str:
    """Nothing about what nobody saw."""
    return "" if n.is_input_unobserved else f" No remedy we know promises more than {100 * (MIN_GAIN - 1):.0f} %."


def _load_lines(n: StepNumbers) -> list[str]:
    others, fitting = n.m.others_cores or 0.0, n.threads_that_fit
    lines = []
    if others >= 0.2:
        lines.append(
            f"other processes keep {others:.1f} of {n.m.usable_cores:g} cores busy: all numbers are worse for it"
        )
    if fitting and n.network_ms > LARGE_SHARE * n.step_ms:
        lines.append(
            f"torch computes with {n.m.num_threads} threads: with OMP_NUM_THREADS={fitting} in front of the command, "
            "none of them has to wait for a core"
        )
    return lines


def _limit_lines(n: StepNumbers) -> list[str]:
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
