"""From a measurement to a verdict: all bottlenecks, the most expensive first, and what each remedy would gain."""

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
    remedy_of,
    remedy_of_end_to_end,
)
from flatout.profiler.verdict.remedy import NOTHING, Bottleneck, EndToEndTrial, Remedy, Trial, Verdict, number
from flatout.profiler.verdict.rules_host import ASSIGNER, OPTIMIZER, device_bottlenecks, host_bottlenecks
from flatout.profiler.verdict.rules_input import input_bottlenecks
from flatout.profiler.verdict.rules_network import (
    MIN_BATCH_GAIN,
    SMALL_BATCHES,
    TOO_FEW_THREADS,
    TOO_MANY_THREADS,
    network_bottlenecks,
)

MIN_GAIN = 1.03
"""Remedies with a smaller predicted gain are not offered, nor those whose gain is small for its uncertainty."""

LARGE_SHARE = 0.25
"""If this fraction of the step is unexplained, or has a cause without a remedy, the network is not called the cause."""
MAX_UNCERTAINTY = 0.9
SLOWED_DOWN = 1.5
"""Forward and backward relative to a whole step on one batch; above this ratio something else slows them down."""
HOT_SHARE = 0.3
"""A line that takes more than this fraction of the step is named even if no rule applies to it."""
ADD_MARKS = "to see more, mark the parts of your loop with flatout.clock.clock.stage(name)"


def diagnose(
    measurement: Measurement, trials: Sequence[Trial] = (), end_to_end: Sequence[EndToEndTrial] = ()
) -> Verdict:
    """The verdict on a measurement: cause, evidence, and remedies by predicted speed; or that nothing is worth doing.

    `end_to_end` trials change network and input at once. They are remedies for whatever is found, but they neither are
    a cause nor tell which bottleneck is: another network with another input may be faster whatever the bottleneck.
    """
    n = StepNumbers(measurement)
    trials = [in_ms(n, trial) for trial in trials]
    found = [*input_bottlenecks(n), *host_bottlenecks(n), *device_bottlenecks(n), *network_bottlenecks(n)]
    bottlenecks = [_with_trials(bottleneck, n, trials) for bottleneck in found]
    has_assigner = any(bottleneck.cause == ASSIGNER for bottleneck in bottlenecks)
    bottlenecks += [bottleneck_of_trial(n, trial) for trial in trials if not (has_assigner and is_of_loss(trial))]
    bottlenecks = [
        replace(bottleneck, remedies=[_with_load_uncertainty(remedy, n) for remedy in bottleneck.remedies])
        for bottleneck in bottlenecks
    ]
    bottlenecks = sorted(bottlenecks, key=lambda bottleneck: _rank(bottleneck, bottlenecks))
    bottlenecks = _with_end_to_end(bottlenecks, n, end_to_end)
    worthwhile = [bottleneck for bottleneck in bottlenecks if any(map(_is_worthwhile, bottleneck.remedies))]
    if not worthwhile:
        return _without_remedy(n, found)
    first, *others = worthwhile
    offered = (remedy for bottleneck in worthwhile for remedy in bottleneck.remedies if _is_worthwhile(remedy))
    # An end-to-end remedy may belong to several bottlenecks; remedies of two loops share a name but not their line.
    remedies = {(remedy.what, remedy.change): remedy for remedy in offered}
    return Verdict(
        cause=first.cause,
        sentence=first.sentence,
        evidence=[*first.evidence, *_limit_lines(n), *_load_lines(n)],
        remedies=sorted(remedies.values(), key=lambda remedy: -remedy.images_per_s),
        others=others,
        of_cause=next(filter(_is_worthwhile, first.remedies)),
    )


def _with_trials(bottleneck: Bottleneck, n: StepNumbers, trials: Sequence[Trial]) -> Bottleneck:
    """The bottleneck with estimates replaced by trials: what a better loss takes may have been measured."""
    if bottleneck.cause != ASSIGNER:
        return bottleneck
    tried = [remedy_of(n.m, trial) for trial in trials if is_of_loss(trial)]
    return replace(bottleneck, remedies=tried) if tried else bottleneck


def _with_end_to_end(
    bottlenecks: Sequence[Bottleneck], n: StepNumbers, end_to_end: Sequence[EndToEndTrial]
) -> list[Bottleneck]:
    """Replace worthwhile remedies by the end-to-end trial that includes them.

    A trial that replaces none is one more remedy for the first bottleneck, or a bottleneck of its own if no other has a
    worthwhile remedy.
    """
    found = list(bottlenecks)
    for trial in end_to_end:
        combined = _with_load_uncertainty(remedy_of_end_to_end(n, trial), n)
        covered = [index for index, bottleneck in enumerate(found) if _covers(trial, bottleneck)]
        for index in covered:
            kept = [remedy for remedy in found[index].remedies if remedy.what not in trial.covers]
            found[index] = replace(found[index], remedies=[combined, *kept])
        if covered or not _is_worthwhile(combined):
            continue
        if found and _best_gain(found[0]):
            found[0] = replace(found[0], remedies=[*found[0].remedies, combined])
        else:
            found.append(bottleneck_of_end_to_end(n, trial, combined))
    return found


def _covers(trial: EndToEndTrial, bottleneck: Bottleneck) -> bool:
    return any(remedy.what in trial.covers and _is_worthwhile(remedy) for remedy in bottleneck.remedies)


def _with_load_uncertainty(remedy: Remedy, n: StepNumbers) -> Remedy:
    """The remedy, less certain the more cores other programs use: the cores left after a change are unknown."""
    added = 0.2 * min(1.0, (n.m.others_cores or 0.0) / n.m.usable_cores)
    return replace(remedy, uncertainty=min(MAX_UNCERTAINTY, remedy.uncertainty + added))


def _is_worthwhile(remedy: Remedy) -> bool:
    """Whether the predicted gain is large enough, by itself and compared with its uncertainty."""
    return remedy.gain >= max(MIN_GAIN, 1 + remedy.uncertainty / 3)


def _best_gain(bottleneck: Bottleneck) -> float:
    """Gain of its best worthwhile remedy; 0 if there is none."""
    return max((remedy.gain for remedy in bottleneck.remedies if _is_worthwhile(remedy)), default=0.0)


def _rank(bottleneck: Bottleneck, all_found: Sequence[Bottleneck]) -> tuple[bool, float]:
    """Sorts bottlenecks by the gain that is certain; what would change the training or its surroundings comes last.

    A larger batch hides whatever a step does only once (of that, only the optimizer must), and more threads make any
    step faster: neither is the cause if something else would gain as much as they must.
    """
    least = {SMALL_BATCHES: MIN_BATCH_GAIN, TOO_FEW_THREADS: MIN_GAIN}.get(bottleneck.cause)
    others = [each for each in all_found if each.cause not in (SMALL_BATCHES, TOO_FEW_THREADS, OPTIMIZER)]
    return least is not None and any(_best_gain(each) >= least for each in others), -_certain_gain(bottleneck)


def _certain_gain(bottleneck: Bottleneck) -> float:
    """Gain of its best worthwhile remedy at the slow end of its range; 0 if there is none."""
    gains = (each.gain / (1 + each.uncertainty) for each in bottleneck.remedies if _is_worthwhile(each))
    return max(gains, default=0.0)


def _without_remedy(n: StepNumbers, bottlenecks: Sequence[Bottleneck]) -> Verdict:
    """The verdict if no remedy is worthwhile: a cause without one, unexplained time, threads, or the network itself."""
    unexplained_ms, around = n.unexplained_ms, [*_limit_lines(n), *_load_lines(n)]
    worst = max(bottlenecks, key=lambda bottleneck: bottleneck.cost_ms, default=None)
    if worst is not None and worst.cost_ms > max(LARGE_SHARE * n.step_ms, unexplained_ms):
        return Verdict(
            cause=worst.cause,
            sentence=f"{worst.sentence}{_no_remedy_sentence(n)}",
            evidence=[*worst.evidence, *around],
        )
    if unexplained_ms > LARGE_SHARE * n.step_ms:
        lines = [line for line in n.hot_lines(in_worker=False) if line.stage is None][:3]
        return Verdict(
            cause="unexplained",
            sentence=f"{n.percent(unexplained_ms)} of the step is outside of all known stages, and no rule applies.",
            evidence=[
                *([f"{line.ms:.1f} ms per step at {line.source}" for line in lines] or [ADD_MARKS]),
                *_limit_lines(n),
            ],
        )
    compute_ms = n.network_ms
    if n.threads_that_fit and not _fewer_threads_were_tried(n) and compute_ms > LARGE_SHARE * n.step_ms:
        return Verdict(
            cause=TOO_MANY_THREADS,
            sentence=(
                f"Torch computes with {n.m.num_threads} threads, but there are free cores for only "
                f"{n.threads_that_fit} of them. Threads that run wait for those that do not, which can slow a step "
                "down many times."
            ),
            evidence=[f"forward and backward {n.percent(compute_ms)} of the step", *around],
        )
    return Verdict(
        cause=NOTHING,
        sentence=(
            f"Nothing is worth changing: no known remedy is likely to gain {100 * (MIN_GAIN - 1):.0f} % or more. "
            f"{number(1e3 * n.images / n.step_ms)} img/s is the speed of this network {_network_speed(n)}."
        ),
        evidence=[
            f"waiting for data {n.percent(n.wait_ms)}, forward and backward {n.percent(compute_ms)} of the step",
            *([f"{n.percent(n.between_ms)} of the time is between steps"] if n.between_ms > 0.1 * n.step_ms else []),
            *_hottest_line(n),
            *around,
        ],
    )


def _fewer_threads_were_tried(n: StepNumbers) -> bool:
    """Whether the network was run with fewer threads; if that had been faster, a rule would have said so."""
    return any(run.threads < n.m.network_runs[0].threads for run in n.m.network_runs)


def _network_speed(n: StepNumbers) -> str:
    """End of the sentence about the network's speed: if it was much faster alone, something else slows it down."""
    alone_ms = n.m.limits.compute_ms
    if not alone_ms or n.network_ms < SLOWED_DOWN * alone_ms:
        return "on this machine"
    return f"next to everything else that runs here; alone it reached {number(1e3 * n.images / alone_ms)} img/s"


def _hottest_line(n: StepNumbers) -> list[str]:
    """The hottest line of the main thread: no rule covers slow code inside of the network, but a line names it."""
    return [
        f"hottest line, {line.ms:.1f} ms per step in {label_of(line.stage or 'unexplained')}: {line.where}  {line.text}"
        for line in n.hot_lines(in_worker=False)[:1]
        # In the backward stage the only line is the call of backward().
        if line.ms > HOT_SHARE * n.step_ms and line.stage != "backward"
    ]


def _no_remedy_sentence(n: StepNumbers) -> str:
    """A sentence that no remedy helps; empty if the input was not observed."""
    return "" if n.is_input_unobserved else f" No known remedy would gain more than {100 * (MIN_GAIN - 1):.0f} %."


def _load_lines(n: StepNumbers) -> list[str]:
    """Evidence about other processes and about torch's threads."""
    others, fitting = n.m.others_cores or 0.0, n.threads_that_fit
    lines = []
    if others >= 0.2:
        lines.append(
            f"other processes keep {others:.1f} of {n.m.usable_cores:g} cores busy, which slows this training down"
        )
    if fitting and n.network_ms > LARGE_SHARE * n.step_ms:
        lines.append(
            f"torch computes with {n.m.num_threads} threads: with OMP_NUM_THREADS={fitting} in front of the command "
            "none would have to wait for a core"
        )
    return lines


def _limit_lines(n: StepNumbers) -> list[str]:
    limits = n.m.limits
    times_ms = {"compute": limits.compute_ms, "compute and copy": limits.transfer_ms, "input": limits.input_ms}
    parts = [f"{name} {number(1e3 * n.images / ms)} img/s" for name, ms in times_ms.items() if ms]
    return [f"limits: {', '.join(parts)}"] if parts else []
