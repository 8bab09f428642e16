"""Bottlenecks in the user's own code: the function or line that takes the time, found by samples.

Code that makes batches is named by the rules of the input (rules_input.py), with the promise made here. Code of the
main thread outside of all stages is named by this file's own rule, and so are loops of short operations inside the
network.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flatout.clock import kind_of
from flatout.profiler.measurement import WAIT, HotLine
from flatout.profiler.verdict.predict_step import StepNumbers
from flatout.profiler.verdict.remedy import Bottleneck, Remedy, number

MIN_SHARE = 0.05
"""Fraction of the step; code whose kind is known and that takes less is no bottleneck."""
MIN_SHARE_OF_OTHER = 0.15
"""The same for code of which only the time is known: every loop has some."""
MIN_SHARE_OF_INPUT = 0.4
"""A function or line is named as the slow part of the input if it takes this much of it."""
LOOPED = 8
"""Runs per step from which on a line is a loop's."""
LOOPED_IN_NETWORK = 64
"""The same inside of the network, where a loop over its layers is no bottleneck."""
SHORT_MS = 0.25
"""Duration of a looped line up to which the loop is mostly overhead of Python and of small operations."""

SLEEPING = re.compile(r"\bsleep\(")
LOGGING = re.compile(
    r"print\(|\blog(?!it|_?soft|_prob|sumexp|\()|logger|logging|writer|wandb|mlflow|add_scalar|add_histogram|flush\(|fsync|json\.dump|\.write\(|"
    r"tensorboard|csv|savefig|plt\.|\b(write|record|report)_\w+\(|statistics\(|_stats\(",
    re.I,
)
SAVING = re.compile(r"torch\.save|pickle\.dump|save_file\(|save_pretrained|np\.savez?|checkpoint|ckpt", re.I)
MAKING_BATCHES = re.compile(r"batch|load|read|fetch|sample|augment|transform|collate|dataset|__getitem__|decode", re.I)
LOSS = re.compile(r"loss|criterion|cross_entropy|objective", re.I)


@dataclass(frozen=True)
class HotCode:
    """A function of the user's code, or a single line of it, and its time per step."""

    lines: Sequence[HotLine]
    ms: float
    function: str = ""
    """Name of the function; empty: a single line."""

    @property
    def hottest(self) -> HotLine:
        return max(self.lines, key=lambda line: line.ms)

    @property
    def name(self) -> str:
        """'augment() at data.py:30' or 'data.py:30'."""
        is_named = self.function and not self.function.startswith("<")
        return f"{self.function}() at {self.hottest.where}" if is_named else self.hottest.where

    @property
    def words(self) -> str:
        """All that tells what the code does: its functions and source lines."""
        return " ".join([f"{self.function}(", *(line.text for line in self.lines)])

    @property
    def is_loop(self) -> bool:
        """Whether most of its time passes in a loop of short operations."""
        looped_ms = sum(line.ms for line in self.lines if _is_looped(line, LOOPED))
        return looped_ms > 0.5 * sum(line.ms for line in self.lines)


def hot_codes(lines: Sequence[HotLine], total_ms: float) -> list[HotCode]:
    """Lines as functions, slowest first, with times that add up to `total_ms`.

    Samples give shares; how long all of the lines take together is known better from marks.
    """
    groups: dict[tuple[str, str], list[HotLine]] = {}
    for line in lines:
        groups.setdefault((line.where.rpartition(":")[0], _function_of(line, lines)), []).append(line)
    scale = total_ms / max(sum(line.ms for line in lines), 1e-9)
    codes = [
        HotCode(group, scale * sum(line.ms for line in group), function) for (_, function), group in groups.items()
    ]
    return sorted(codes, key=lambda code: -code.ms)


def _function_of(line: HotLine, lines: Sequence[HotLine]) -> str:
    """The function of a line; a comprehension belongs to the function around it, if that was sampled."""
    if not line.function.startswith("<"):
        return line.function
    file, _, at = line.where.rpartition(":")
    around = [other for other in lines if other.where.startswith(f"{file}:") and not other.function.startswith("<")]
    near = min(around, key=lambda other: abs(int(other.where.rpartition(":")[2]) - int(at)), default=line)
    return near.function


# Input


def slow_input_code(n: StepNumbers) -> HotCode | None:
    """The function that takes most of the time in which batches are made, if one does."""
    if n.m.num_workers:
        lines = n.hot_lines(in_worker=True)
    else:
        all_lines = n.hot_lines(in_worker=False)
        # The line of the loop itself, where a data set of an installed package is called.
        asking = {line.where for line in all_lines if line.stage == WAIT}
        lines = [
            line for line in all_lines if line.stage and kind_of(line.stage) == "input" and line.where not in asking
        ]
    total_ms = n.input_ms if n.m.num_workers else min(n.serial_input_ms, sum(line.ms for line in lines))
    for code in hot_codes(lines, total_ms)[:1]:
        share = min(1.0, code.ms / max(n.input_ms, 1e-9))
        # Few samples may show one function of several more often than it runs.
        num_samples = sum(line.samples for line in lines)
        error = math.sqrt(share * (1 - share) / num_samples) if num_samples else 0.0
        if share - error > MIN_SHARE_OF_INPUT:
            return code
    return None


def faster_input_code(n: StepNumbers, code: HotCode) -> list[Remedy]:
    """What the code promises: twice as fast, and without it."""
    predict = n.with_faster_input
    return _promises(n, code, half_ms=predict(0.5 * code.ms), none_ms=predict(0.98 * code.ms))


def promise(remedies: Sequence[Remedy]) -> str:
    """The headline of a slow line: 'Make data.py:30 2x faster: 1,203 -> 640 ms per step.'"""
    half = next((each for each in remedies if each.what.startswith("make ")), None)
    if half is None:
        return ""
    what = half.what[:1].upper() + half.what[1:]
    return f" {what}: {number(half.now_ms)} -> {number(half.step_ms)} ms per step."


def _promises(n: StepNumbers, code: HotCode, *, half_ms: float, none_ms: float) -> list[Remedy]:
    source = code.hottest.source
    return [
        n.remedy(
            what=f"without {code.name}",
            change=f"{source}: do its work once and keep the result, or not at all",
            step_ms=none_ms,
            uncertainty=0.15,
        ),
        n.remedy(what=f"make {code.name} 2x faster", change=source, step_ms=half_ms, uncertainty=0.1),
    ]


# Main thread


def code_bottlenecks(n: StepNumbers, known: Sequence[HotLine]) -> Iterator[Bottleneck]:
    """Slow code of the main thread; `known` lines have a rule of their own."""
    for code in _unmarked_codes(n, known):
        kind = _kind_of_code(code)
        if kind and code.ms > (MIN_SHARE_OF_OTHER if kind == "slow code" else MIN_SHARE) * n.step_ms:
            yield _of_code(n, code, kind, code.ms + backward_of(n, code.lines, code.ms))
    yield from _loops_in_network(n, known)


def _unmarked_codes(n: StepNumbers, known: Sequence[HotLine]) -> list[HotCode]:
    """Functions outside of all stages; of the function with the loop itself, each line separately."""
    lines = [line for line in n.hot_lines(in_worker=False) if line.stage is None]
    driving = driving_functions(n)
    codes = []
    for code in hot_codes(lines, max(0.0, n.unexplained_ms)):
        if (code.lines[0].owner[0], code.function) in driving:
            scale = code.ms / max(sum(line.ms for line in code.lines), 1e-9)
            codes += [HotCode([line], scale * line.ms) for line in code.lines]
        else:
            codes.append(code)
    return [code for code in codes if not any(line in known for line in code.lines)]


def driving_functions(n: StepNumbers) -> set[tuple[str, str]]:
    """Owners (file, function) of lines that drive the loop: they call the network, backward() or the optimizer."""
    stages = ("forward", "backward", "optimizer", "feed.wait")
    return {line.owner for line in n.hot_lines(in_worker=False) if line.stage in stages}


def _kind_of_code(code: HotCode) -> str | None:
    """The cause that a piece of code is; None if it is part of what every loop does."""
    if SLEEPING.search(code.hottest.text):
        return "sleeping"
    if SAVING.search(code.words):
        return "checkpoint"
    if MAKING_BATCHES.search(code.function):
        return "input"
    # Before loops: statistics are often computed in one, and the remedy is to write them less often.
    if LOGGING.search(code.words) or (code.function and any(line.writes for line in code.lines)):
        return "logging"
    if code.is_loop:
        return "python loop"
    return "slow code" if code.function or not LOSS.search(code.words) else None


_SENTENCES = {
    "sleeping": "The main thread sleeps for {share} of the step.",
    "checkpoint": "Saving takes {share} of the step.",
    "input": "The main thread makes every batch itself, in {name}, which takes {share} of the step.",
    "python loop": "A Python loop in {name} runs short operations one by one, which takes {share} of the step.",
    "logging": "Logging takes {share} of the step.",
    "slow code": "{name} takes {share} of the step.",
}


def _of_code(n: StepNumbers, code: HotCode, kind: str, cost_ms: float) -> Bottleneck:
    predict = n.with_faster_consumer
    hottest = code.hottest
    if kind == "python loop":
        what, change = "replace the loop with one tensor operation", hottest.source
        remedies = [n.remedy(what=what, change=change, step_ms=predict(0.97 * cost_ms), uncertainty=0.15)]
    elif kind in ("logging", "checkpoint"):
        what = "log less often" if kind == "logging" else "save less often"
        change = f"{hottest.where}: every 100 steps instead of every step"
        remedies = [n.remedy(what=what, change=change, step_ms=predict(0.99 * cost_ms), uncertainty=0.1)]
    else:
        remedies = _promises(n, code, half_ms=predict(0.5 * cost_ms), none_ms=predict(0.98 * cost_ms))
    sentence = _SENTENCES[kind].format(share=n.percent(cost_ms), name=code.name)
    return Bottleneck(
        cause=kind,
        sentence=f"{sentence}{promise(remedies)}",
        evidence=_evidence(n, code),
        remedies=remedies,
        cost_ms=cost_ms,
    )


def _loops_in_network(n: StepNumbers, known: Sequence[HotLine]) -> Iterator[Bottleneck]:
    """Loops of many short operations in a forward pass or a loss, and their part of the backward pass."""
    for stage in ("forward", "loss"):
        lines = [line for line in n.hot_lines(in_worker=False) if line.stage == stage]
        for code in hot_codes(lines, n.host_ms(stage)):
            looped = [line for line in code.lines if _is_looped(line, LOOPED_IN_NETWORK) and line not in known]
            share = sum(line.ms for line in looped) / max(sum(line.ms for line in code.lines), 1e-9)
            loop = HotCode(looped, share * code.ms, code.function)
            if not looped or loop.ms < MIN_SHARE_OF_OTHER * n.step_ms:
                continue
            cost_ms = loop.ms + n.host_ms("backward") * loop.ms / max(_graph_ms(n), loop.ms)
            yield _of_code(n, loop, "python loop", cost_ms)


def backward_of(n: StepNumbers, lines: Sequence[HotLine], ms: float) -> float:
    """The part of the backward pass that goes through some lines' operations, as many there as in the forward pass."""
    if not any(line.in_graph for line in lines):
        return 0.0
    return n.host_ms("backward") * ms / (ms + _graph_ms(n))


def _graph_ms(n: StepNumbers) -> float:
    return n.host_ms("forward") + n.kind_ms("loss")


def _is_looped(line: HotLine, least: int) -> bool:
    return line.runs >= least and line.ms / line.runs < SHORT_MS


def _evidence(n: StepNumbers, code: HotCode) -> list[str]:
    lines = sorted(code.lines, key=lambda line: -line.ms)[:3]
    return [f"{code.ms:.1f} of {n.step_ms:.1f} ms per step", *(_line_evidence(line) for line in lines)]


def _line_evidence(line: HotLine) -> str:
    runs = f", {line.runs:,.0f} times per step" if line.runs >= LOOPED else ""
    return f"{line.ms:.1f} ms per step{runs} at {line.source}"
