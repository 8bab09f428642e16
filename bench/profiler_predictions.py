"""How accurate are the profiler's predictions? Limits: median error 15 %, largest error 30 %.

Each case is observed, the speed with a remedy is predicted from that alone (trials of the changed part are allowed, but
never of the whole changed training), then the remedy is applied and measured. On a machine with a GPU the cases are
whole trainings by `flatout yolo train`, once each (bench/profiler_trainings.py); without one, small loops over a
flatout feed (bench/profiler_cases.py). Those alternate: before, after, before, ..., and each measurement after the
change is compared with the mean of its two neighbours, so that other programs that start or end meanwhile do not count
as errors of a prediction. The error of a case is the median of its rounds.

Answer: bench/results/profiler_predictions_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench import noise
from bench.measure import arguments, facts_line, report
from bench.profiler_cases import Parts, Setting, observe, time_alternating
from bench.profiler_trainings import QUICK, Size, run_all
from flatout.profiler.outcome import Profile
from flatout.profiler.verdict import Trial, remedy_of

MEDIAN_LIMIT, LIMIT = 0.15, 0.30


class Case(NamedTuple):
    """A training, the change, and the function that predicts the changed speed (img/s) from its profile."""

    before: Setting
    change: dict[str, Any]
    predict: Callable[[Profile, Setting, Setting], float]


def by_verdict(beginning: str) -> Callable[[Profile, Setting, Setting], float]:
    """Predicts the speed that the verdict gives for the remedy whose name begins like this."""

    def predict(profile: Profile, before: Setting, after: Setting) -> float:
        remedies = {remedy.what: remedy for remedy in profile.verdict.remedies}
        chosen = next((remedy for what, remedy in remedies.items() if what.startswith(beginning)), None)
        # If the remedy is not offered, the prediction is that nothing changes.
        return chosen.images_per_s if chosen else profile.ledger.images_per_s

    return predict


def by_trial(stage: str) -> Callable[[Profile, Setting, Setting], float]:
    """Predicts from trials of the stage alone, with and without the change, alternately."""

    def predict(profile: Profile, before: Setting, after: Setting) -> float:
        sides = {name: _work(stage, setting) for name, setting in (("now", before), ("then", after))}
        tried = time_alternating(sides, rounds=4)
        trial = Trial(
            what="tried",
            change="-",
            stage=stage,
            then_ms=tried["then"] / tried["now"],
            is_share=True,
            images=after.batch_size if after.batch_size != before.batch_size else None,
        )
        return remedy_of(profile.measurement, trial).images_per_s

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
        "store off -> on": Case(fed.changed(blurs=1), {"keeps_decoded": True}, by_verdict("cache decoded images")),
        "plain OTA twin -> batched OTA": Case(crowded, {"twin_loss": False}, by_trial("loss")),
        "channels_last": Case(setting, {"channels_last": True}, by_trial("forward+backward")),
        "batch 8 -> 16": Case(
            setting.changed(size=64, workers=1), {"batch_size": 16}, by_trial("forward+loss+backward")
        ),
    }


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--trainings", action="store_true", help="run whole trainings even without a GPU")
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="time limit of all trainings; unfinished cases are left out"
    )
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        torch.set_num_threads(1)
    print(facts_line(), flush=True)
    lines = [torch.cuda.get_device_name() if on_gpu else noise.listen().line()]
    lines.append(f"{'':32}{'before':>9}{'predicted':>11}{'measured':>10}{'error':>8}   img/s")
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        size = QUICK if options.quick or not on_gpu else Size()
        rows = (
            _trainings(Path(folder), size, options.seconds)
            if on_gpu or options.trainings
            else _small_loops(Path(folder), quick=options.quick)
        )
        num_cases = 0
        for name, rows_P3, took_s, why in rows:
            num_cases += 1
            if rows_P3 is None:
                lines.append(f"{name:32}left out: {why}")
            else:
                numbers[name] = {"turns": rows_P3.tolist(), "error": _error(rows_P3), "seconds": took_s}
                before, predicted, measured = np.median(rows_P3, 0)
                lines.append(f"{name:32}{before:9.1f}{predicted:11.1f}{measured:10.1f}{_error(rows_P3):+8.0%}")
            print(f"{lines[-1]}   ({took_s:.0f} s)", flush=True)
    errors = [abs(case["error"]) for case in numbers.values()] or [float("inf")]
    kept = float(np.median(errors)) <= MEDIAN_LIMIT and max(errors) <= LIMIT
    lines.append(
        f"{'PASS' if kept else 'FAIL'}: median error {np.median(errors):.0%} (limit {MEDIAN_LIMIT:.0%}), "
        f"largest {max(errors):.0%} (limit {LIMIT:.0%}), {len(numbers)} of {num_cases} cases"
    )
    report("profiler_predictions", "\n".join(lines), numbers, options)
    return int(not kept and not options.quick)


Rows = Iterator[tuple[str, np.ndarray | None, float, str]]
"""Case, [P, 3] for P rounds (images per second before, predicted, measured; None: not run), seconds it took, and why
it was not run."""


def _trainings(folder: Path, size: Size, seconds: float) -> Rows:
    for name, row, took_s, why in run_all(folder, size, seconds=seconds):
        yield name, None if row is None else np.array([row]), took_s, why


def _small_loops(folder: Path, *, quick: bool) -> Rows:
    num_steps, rounds = (4, 1) if quick else (10, 3)
    for name, case in cases(folder).items():
        began_s = time.monotonic()
        rows_P3 = _rounds(case, num_steps, rounds)
        yield name, rows_P3, time.monotonic() - began_s, ""


def _rounds(case: Case, num_steps: int, rounds: int) -> np.ndarray:
    """Images per second before, predicted and measured, [P, 3]."""
    after = case.before.changed(**case.change)
    rows, profile = [], observe(case.before, num_steps)
    for _ in range(rounds):
        gain = case.predict(profile, case.before, after) / profile.ledger.images_per_s
        measured = observe(after, num_steps).ledger.images_per_s
        again = observe(case.before, num_steps)
        before = (profile.ledger.images_per_s + again.ledger.images_per_s) / 2
        rows.append((before, before * gain, measured))
        profile = again
    return np.array(rows)


def _error(rows_P3: np.ndarray) -> float:
    """Median error over the rounds, relative to the measured speed."""
    return float(np.median(rows_P3[:, 1] / rows_P3[:, 2] - 1))


if __name__ == "__main__":
    sys.exit(main())
