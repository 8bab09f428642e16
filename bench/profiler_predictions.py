"""How good are the profiler's predictions? Median error at most 15 %, none above 30 %.

Each case is observed, a remedy's speed is predicted from that alone (trials of the changed part are allowed, never of
the whole changed training), then the remedy is applied and measured. Before and after take turns; an error is that of
one pair of neighbours, a case's error the median of its pairs.

Answer: bench/results/profiler_predictions_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench import noise
from bench.measure import arguments, facts_line, report
from bench.profiler_cases import Parts, Setting, in_turns, observe
from flatout.profiler.outcome import Profile
from flatout.profiler.verdict import Trial, judge

MEDIAN_LIMIT, LIMIT = 0.15, 0.30


class Case(NamedTuple):
    """A training, what is changed in it, and who predicts the changed speed (img/s) from its profile."""

    before: Setting
    change: dict[str, Any]
    predict: Callable[[Profile, Setting, Setting], float]


def by_verdict(beginning: str) -> Callable[[Profile, Setting, Setting], float]:
    """The speed that the verdict promises for the remedy of this name."""

    def predict(profile: Profile, before: Setting, after: Setting) -> float:
        remedies = {remedy.what: remedy for remedy in profile.verdict.remedies}
        chosen = next((remedy for what, remedy in remedies.items() if what.startswith(beginning)), None)
        # A remedy that is not offered is predicted to change nothing.
        return chosen.images_per_s if chosen else profile.ledger.images_per_s

    return predict


def by_trial(stage: str) -> Callable[[Profile, Setting, Setting], float]:
    """The speed that follows from trying the stage alone, both ways in turn."""

    def predict(profile: Profile, before: Setting, after: Setting) -> float:
        sides = {name: _work(stage, setting) for name, setting in (("now", before), ("then", after))}
        tried = in_turns(sides, turns=4)
        now_ms = sum(profile.ledger.ms("host", name) for name in stage.split("+"))
        trial = Trial(
            what="tried",
            change="-",
            stage=stage,
            then_ms=now_ms * tried["then"] / tried["now"],
            images=after.batch_size if after.batch_size != before.batch_size else None,
        )
        verdict = judge(profile.measurement, [trial])
        chosen = next((remedy for remedy in verdict.remedies if remedy.what == "tried"), None)
        return chosen.images_per_s if chosen else profile.ledger.images_per_s * tried["now"] / tried["then"]

    return predict


def _work(stage: str, setting: Setting) -> Callable[[], object]:
    parts = Parts(setting)
    images = torch.randint(0, 256, (setting.batch_size, 3, setting.size, setting.size), dtype=torch.uint8)
    if stage == "loss":
        maps = parts.forward(images)
        return lambda: parts.loss(maps)
    if stage == "forward+backward":
        return lambda: sum(one_map.mean() for one_map in parts.forward(images)).backward()  # type: ignore[union-attr]
    return lambda: parts.loss(parts.forward(images)).backward()


def cases(folder: Path) -> dict[str, Case]:
    setting = Setting(folder)
    fed = setting.changed(trains_network=False, blurs=2)
    crowded = setting.changed(twin_loss=True, batch_size=16, size=64)
    return {
        "workers 1 -> 2": Case(fed, {"workers": 2}, by_verdict("workers")),
        "store off -> on": Case(fed.changed(blurs=1), {"keeps_decoded": True}, by_verdict("keep pictures decoded")),
        "plain OTA twin -> batched OTA": Case(crowded, {"twin_loss": False}, by_trial("loss")),
        "channels_last": Case(setting, {"channels_last": True}, by_trial("forward+backward")),
        "batch 8 -> 16": Case(
            setting.changed(size=64, workers=1), {"batch_size": 16}, by_trial("forward+loss+backward")
        ),
    }


def main() -> int:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    num_steps, pairs = (4, 1) if options.quick else (10, 3)
    print(facts_line())
    quiet = noise.listen().line()
    lines = [quiet, f"{'':32}{'before':>9}{'predicted':>11}{'measured':>10}{'error':>8}   img/s"]
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, case in cases(Path(folder)).items():
            rows_P3 = np.array([_pair(case, num_steps) for _ in range(pairs)])
            errors_P = rows_P3[:, 1] / rows_P3[:, 2] - 1
            before, predicted, measured = np.median(rows_P3, 0)
            error = float(np.median(errors_P))
            numbers[name] = {"pairs": rows_P3.tolist(), "error": error}
            lines.append(f"{name:32}{before:9.1f}{predicted:11.1f}{measured:10.1f}{error:+8.0%}")
            print(lines[-1], flush=True)
    errors = [abs(case["error"]) for case in numbers.values()]
    kept = float(np.median(errors)) <= MEDIAN_LIMIT and max(errors) <= LIMIT
    lines.append(
        f"{'PASS' if kept else 'FAIL'}: median error {np.median(errors):.0%} (limit {MEDIAN_LIMIT:.0%}), "
        f"largest {max(errors):.0%} (limit {LIMIT:.0%})"
    )
    report("profiler_predictions", "\n".join(lines), numbers, options)
    return int(not kept and not options.quick)


def _pair(case: Case, num_steps: int) -> tuple[float, float, float]:
    """Before, predicted, measured: images per second."""
    after = case.before.changed(**case.change)
    profile = observe(case.before, num_steps)
    predicted = case.predict(profile, case.before, after)
    return profile.ledger.images_per_s, predicted, observe(after, num_steps).ledger.images_per_s


if __name__ == "__main__":
    sys.exit(main())
