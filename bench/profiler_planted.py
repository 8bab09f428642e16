"""Does the profiler find the planted causes of foreign training scripts, and how accurate are its predictions?

Two sets of eight scripts in bench/planted were written, and their causes drawn, by somebody who had not read the
profiler; answers.json is the key. The first set was used to improve the profiler; the second was written later, and
its result file reports its first run: later runs of it are written to files of their own (`_again`), and on a busy
machine it does not begin. Each script runs under `python -m flatout.profile_any` as it is, and by itself with the cause
removed (`--fixed`), by turns, so that other programs disturb both alike. Compared are milliseconds per sample: the
prediction of the remedy of the cause, and the script's own clock without the cause.

A verdict is right if it is right in more than half of the rounds. A script that fails stays in the table and counts as
wrong. The median error is that of all scripts, a missing prediction being as wrong as can be; that of the right
verdicts alone is reported beside it.

Answer: bench/results/profiler_planted_<set>_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench import noise
from bench.measure import RESULTS, arguments, facts_line, report
from flatout.errors import FlatoutError
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
FAILED = "(script failed)"
COLUMNS = ("own now", "now", "predicted", "measured")


class Round(NamedTuple):
    """One script, once with its cause under the profiler and once without it, by itself."""

    verdict: str
    """The cause that the verdict names."""
    sentence: str
    remedy: str = ""
    now_ms: float | None = None
    """Per sample, by the profiler."""
    own_now_ms: float | None = None
    """Per sample, by the script's own clock in the same run."""
    predicted_ms: float | None = None
    """Per sample, with the best remedy of the cause; None: no prediction."""
    fixed_ms: float | None = None
    """Per sample, measured by the script itself with its cause removed."""

    @property
    def error(self) -> float | None:
        if self.predicted_ms is None or self.fixed_ms is None:
            return None
        return self.predicted_ms / self.fixed_ms - 1


def observe(script: Path, steps: int) -> Round:
    """Profile a script, then time it without its cause. A script that fails is reported, not raised."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            printed = run(["-m", "flatout.profile_any", "--out", folder, str(script), "--steps", str(steps)])
            measurement = load_measurement(Path(folder) / "profile.json")
        fixed = run([str(script), "--steps", str(steps), "--fixed"])
    except (subprocess.CalledProcessError, FlatoutError) as error:
        return Round(verdict=FAILED, sentence=str(error))
    verdict, ledger = diagnose(measurement), make_ledger(measurement)
    cure = verdict.of_cause
    return Round(
        verdict=verdict.cause,
        sentence=verdict.sentence,
        remedy=f"{cure.what}: {cure.change}" if cure else "",
        now_ms=ledger.step_ms / ledger.images,
        own_now_ms=per_sample_ms(printed, ledger.images),
        predicted_ms=cure.step_ms / cure.images if cure else None,
        fixed_ms=per_sample_ms(fixed, ledger.images),
    )


def run(words: list[str]) -> str:
    """What a Python program prints; CalledProcessError if it fails."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *words], env=env, check=True, stdout=subprocess.PIPE, text=True).stdout


def per_sample_ms(printed: str, images: float) -> float | None:
    """Milliseconds per sample by a script's own clock; of one that only knows steps, with the samples of a step."""
    if (value := _value("ms_per_sample", printed)) is not None:
        return value
    value = _value("ms_per_step", printed)
    return None if value is None else value / images


def _value(name: str, text: str) -> float | None:
    found = re.findall(rf"^{name}: ([\d.]+)", text, re.MULTILINE)
    return float(found[-1]) if found and float(found[-1]) > 0 else None


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
    def num_right(self) -> int:
        return sum(each.verdict in CLASSES[self.cause] for each in self.rounds)

    @property
    def is_right(self) -> bool:
        return 2 * self.num_right > len(self.rounds)

    @property
    def error(self) -> float | None:
        errors = [each.error for each in self.rounds if each.error is not None]
        return float(np.median(errors)) if errors else None

    def cell(self, name: str) -> str:
        values = [getattr(each, name) for each in self.rounds if getattr(each, name) is not None]
        return f"{float(np.median(values)):10.3f}" if values else f"{'-':>10}"

    def line(self) -> str:
        error = "-" if self.error is None else f"{self.error:+.0%}"
        rounds = f"{self.num_right}/{len(self.rounds)} {'right' if self.is_right else 'WRONG'}"
        cells = "".join(self.cell(name) for name in ("own_now_ms", "now_ms", "predicted_ms", "fixed_ms"))
        return f"{self.script:25}{self.verdict:20}{rounds:>10}{cells}{error:>7}"

    def details(self) -> list[str]:
        """The planted cause, and what was said in every round."""
        said = [f"    {each.verdict}: {each.sentence} [{each.remedy or 'no remedy'}]" for each in self.rounds]
        return [f"{self.script}: planted: {self.cause}", *dict.fromkeys(said)]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--set", choices=("first", "second"), default="first", help="default: %(default)s")
    parser.add_argument("--script", action="append", help="only this script; may be repeated")
    parser.add_argument("--rounds", type=int, default=3, help="times that each script runs (default: %(default)s)")
    options = parser.parse_args()
    steps, rounds = (30, 1) if options.quick else (100, options.rounds)
    folder = SCRIPTS / options.set
    noise_now = noise.listen()
    if options.set == "second" and not noise_now.verdict.startswith(("quiet", "UNSTEADY")):
        print(f"{noise_now.line()}. The first run of this set counts: it was not started.", file=sys.stderr)
        return 2
    key = json.loads((folder / "answers.json").read_text())
    key = [each for each in key if not options.script or each["script"] in options.script]
    unknown = [each["script"] for each in key if each["cause"] not in CLASSES or not (folder / each["script"]).exists()]
    if unknown:
        print(f"{', '.join(unknown)}: no such script, or its cause is not in CLASSES", file=sys.stderr)
        return 2
    print(facts_line(), flush=True)
    rows = [Row(each["script"], each["cause"], []) for each in key]
    for _ in range(rounds):
        for row in rows:
            row.rounds.append(observe(folder / row.script, steps))
            print(row.line(), flush=True)
    table, is_met = table_of(rows, rounds, steps)
    report(result_name(options), "\n".join([noise_now.line(), *table]), _numbers(rows), options)
    return int(not is_met and not options.quick)


def result_name(options: argparse.Namespace) -> str:
    """The name of the result file: that of a first run is never written over."""
    name = f"profiler_planted_{options.set}"
    is_first = options.set == "first" or not list(RESULTS.glob(f"{name}_{options.machine}_*.md"))
    return name if is_first else f"{name}_again"


def table_of(rows: Sequence[Row], rounds: int, steps: int) -> tuple[list[str], bool]:
    """The lines of the report, and whether the limits are met."""
    right = sum(row.is_right for row in rows)
    # A missing prediction is the worst there can be, not one less to be wrong with.
    everything = float(np.median([float("inf") if row.error is None else abs(row.error) for row in rows]))
    of_right = [abs(row.error) for row in rows if row.error is not None and row.is_right]
    is_met = right >= MIN_RIGHT and everything <= MAX_MEDIAN_ERROR
    lines = [
        f"{rounds} rounds of {steps} steps; milliseconds per sample, medians of the rounds",
        "now: as the script is, by its own clock and by the profiler; measured: without the cause, by its own clock",
        f"{'script':25}{'verdict':20}{'rounds':>10}" + "".join(f"{head:>10}" for head in COLUMNS) + f"{'error':>7}",
        *(row.line() for row in rows),
        "",
        f"right verdicts: {right} of {len(rows)} (at least {MIN_RIGHT} wanted)",
        f"median error of all predictions: {everything:.0%} (at most {MAX_MEDIAN_ERROR:.0%} wanted); "
        f"of those with a right verdict: {float(np.median(of_right)) if of_right else float('nan'):.0%}",
        "met" if is_met else "MISSED",
        "",
        *(line for row in rows for line in row.details()),
        "",
        f"profiler: {profiler_digest()}",
    ]
    return lines, is_met


def profiler_digest() -> str:
    """SHA-256 of the profiler's sources, which shows whether two runs had the same profiler."""
    files = sorted([*(ROOT / "flatout/profiler").rglob("*.py"), ROOT / "flatout/profile_any.py"])
    content = b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)
    return hashlib.sha256(content).hexdigest()


def _numbers(rows: list[Row]) -> dict[str, Any]:
    return {
        "profiler": profiler_digest(),
        "scripts": {
            row.script: {"cause": row.cause, "rounds": [each._asdict() for each in row.rounds]} for row in rows
        },
    }


if __name__ == "__main__":
    sys.exit(main())
