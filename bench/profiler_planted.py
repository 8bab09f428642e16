"""Does the profiler find the planted causes of foreign training scripts, and how accurate are its predictions?

Two sets of eight scripts in bench/planted were written, and their causes drawn, by somebody who had not read the
profiler; answers.json is the key. The first set was used to improve the profiler; the second was not seen before its
first run, which its result file reports. Each script runs under `python -m flatout.profile_any` as it is, and by itself
with the cause removed (`--fixed`), by turns, so that other programs disturb both alike. Compared are milliseconds per
sample: the prediction of the remedy of the cause, and the script's own clock without the cause.

Answer: bench/results/profiler_planted_<set>_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench import noise
from bench.measure import arguments, facts_line, report
from flatout.profiler import diagnose, load_measurement, make_ledger

SCRIPTS = Path(__file__).parent / "planted"
ROOT = Path(__file__).parents[1]

CLASSES = {
    "validation_too_often": {"validation"},
    "no_workers": {"no workers"},
    "logging_every_step": {"logging"},
    "slow_decode_large_images": {"decode"},
    "slow_getitem_python_loop": {"slow input code"},
    "checkpoint_too_often": {"checkpoint"},
    "too_small_batch": {"small batches"},
    "too_many_threads": {"too many threads"},
    "autograd anomaly detection left switched on": {"anomaly detection"},
    "autograd graph kept where it is not needed: frozen backbone or target network run and back-propagated with "
    "gradients on": {"unneeded gradients"},
    "batch size far too small, per-step overhead dominates the arithmetic": {"small batches"},
    "decode every sample from a compressed file in the main process: loader with num_workers=0 although decoding "
    "dominates": {"no workers", "decode"},
    "worker processes of the loader are started anew for every (short) epoch, persistent_workers off, costly data set "
    "start-up": {"worker start"},
    "thread oversubscription: many more intra-op threads than cores": {"too many threads"},
    "verbose logging: per-parameter histograms and norms computed and flushed to disk at every step": {"logging"},
    "float64 creeps in from numpy and the whole model trains in double precision": {"64-bit weights"},
}
"""Cause of the key -> causes of a verdict that are right; those of the second set were written before its first run."""

MIN_RIGHT, MAX_MEDIAN_ERROR = 7, 0.15


class Round(NamedTuple):
    """One script, once with its cause under the profiler and once without it, by itself."""

    verdict: str
    sentence: str
    remedy: str
    now_ms: float
    predicted_ms: float | None
    """Per sample, with the best remedy of the cause; None: no prediction."""
    fixed_ms: float
    """Per sample, measured by the script itself with its cause removed."""

    @property
    def error(self) -> float | None:
        return None if self.predicted_ms is None else self.predicted_ms / self.fixed_ms - 1


def observe(script: Path, steps: int) -> Round:
    """Profile a script, then time it without its cause."""
    with tempfile.TemporaryDirectory() as folder:
        run(["-m", "flatout.profile_any", "--out", folder, str(script), "--steps", str(steps)])
        measurement = load_measurement(Path(folder) / "profile.json")
    fixed = run([str(script), "--steps", str(steps), "--fixed"])
    verdict, ledger = diagnose(measurement), make_ledger(measurement)
    cure = verdict.of_cause
    return Round(
        verdict=verdict.cause,
        sentence=verdict.sentence,
        remedy=cure.what if cure else "",
        now_ms=ledger.step_ms / ledger.images,
        predicted_ms=cure.step_ms / cure.images if cure else None,
        fixed_ms=_value("ms_per_sample", fixed) or _value("ms_per_step", fixed) / ledger.images,
    )


def run(words: list[str]) -> str:
    """What a Python program prints; its own errors end the benchmark."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *words], env=env, check=True, stdout=subprocess.PIPE, text=True).stdout


def _value(name: str, text: str) -> float:
    found = re.findall(rf"^{name}: ([\d.]+)", text, re.MULTILINE)
    return float(found[-1]) if found else 0.0


class Row(NamedTuple):
    """All rounds of one script; times are medians in milliseconds per sample."""

    script: str
    cause: str
    rounds: list[Round]

    @property
    def verdict(self) -> str:
        """The most frequent verdict."""
        names = [each.verdict for each in self.rounds]
        return max(names, key=names.count)

    @property
    def is_right(self) -> bool:
        return self.verdict in CLASSES[self.cause]

    @property
    def error(self) -> float | None:
        errors = [each.error for each in self.rounds if each.error is not None]
        return float(np.median(errors)) if errors else None

    def median(self, name: str) -> float:
        values = [getattr(each, name) for each in self.rounds if getattr(each, name) is not None]
        return float(np.median(values)) if values else float("nan")

    def line(self) -> str:
        now, predicted, fixed = (self.median(name) for name in ("now_ms", "predicted_ms", "fixed_ms"))
        error = "-" if self.error is None else f"{self.error:+.0%}"
        return (
            f"{self.script:25}{self.cause:27.26}{self.verdict:18}{'right' if self.is_right else 'WRONG':>6}"
            f"{now:10.3f}{predicted:10.3f}{fixed:10.3f}{error:>7}"
        )


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--set", choices=("first", "second"), default="first", help="default: %(default)s")
    parser.add_argument("--script", action="append", help="only this script; may be repeated")
    parser.add_argument("--rounds", type=int, default=2, help="times that each script runs (default: %(default)s)")
    options = parser.parse_args()
    steps, rounds = (30, 1) if options.quick else (100, options.rounds)
    folder = SCRIPTS / options.set
    key = json.loads((folder / "answers.json").read_text())
    key = [each for each in key if not options.script or each["script"] in options.script]
    print(facts_line(), flush=True)
    rows = [Row(each["script"], each["cause"], []) for each in key]
    load = noise.listen().line()
    for _ in range(rounds):
        for row in rows:
            row.rounds.append(observe(folder / row.script, steps))
            print(row.line(), row.rounds[-1].remedy, sep="   ", flush=True)
    report(f"profiler_planted_{options.set}", "\n".join([load, *_table(rows, rounds, steps)]), _numbers(rows), options)
    return 0


def _table(rows: list[Row], rounds: int, steps: int) -> list[str]:
    errors = [abs(row.error) for row in rows if row.error is not None and row.is_right]
    right = sum(row.is_right for row in rows)
    median = float(np.median(errors)) if errors else float("nan")
    is_met = right >= MIN_RIGHT and median <= MAX_MEDIAN_ERROR
    return [
        f"{rounds} rounds of {steps} steps; milliseconds per sample, medians of the rounds",
        f"{'script':25}{'planted':27}{'verdict':24}{'now':>10}{'predicted':>10}{'fixed':>10}{'error':>7}",
        *(row.line() for row in rows),
        "",
        f"right verdicts: {right} of {len(rows)} (at least {MIN_RIGHT} wanted); median error of the predictions with a "
        f"right verdict: {median:.0%} (at most {MAX_MEDIAN_ERROR:.0%} wanted): {'met' if is_met else 'MISSED'}",
    ]


def _numbers(rows: list[Row]) -> dict[str, Any]:
    return {row.script: {"cause": row.cause, "rounds": [each._asdict() for each in row.rounds]} for row in rows}


if __name__ == "__main__":
    sys.exit(main())
