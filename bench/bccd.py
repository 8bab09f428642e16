"""Is a training as accurate as YOLOv7's own code, and how much faster is it?

yolov7-tiny from scratch on BCCD (blood cells; 292 images for training, 72 for validation, 320 px wide): size 320, batch
16, 100 epochs, hyp.scratch.tiny.yaml, no autoanchor. One training with `--fast` runs alone and is timed, start-up
included; then all variants and seeds run in parallel for their accuracy: classic (no new flag), --fast-dataloader,
--fast, and --fast with the plain loss (noota). The original reached mAP@.5 0.892 and mAP@.5:.95 0.546 in 6.8 minutes
(one seed, same kind of machine; quoted).
Give the data.yaml of the data set, with images already 320 px wide (INTER_AREA, JPEG quality 90), with --data.
Answer: bench/results/bccd_<machine>_<yyyymm>.md and .json with every curve (rewrite them with --write).
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from bench.measure import arguments, facts_line, report
from bench.promises import Criterion

ROOT = Path(__file__).parents[1]
TINY, NO_OTA = "data/hyp.scratch.tiny.yaml", "data/hyp.scratch.tiny.noota.yaml"
WAYS = {
    "classic": ("--hyp", TINY, "--workers", "3"),
    "fast-dataloader": ("--hyp", TINY, "--workers", "2", "--fast-dataloader"),
    "fast": ("--hyp", TINY, "--workers", "2", "--fast"),
    "fast, plain loss": ("--hyp", NO_OTA, "--workers", "2", "--fast"),
}
ORIGINAL_S = 6.8 * 60
LEAST_MAP50, MIN_MAP = 0.872, 0.526
SEEDS = (1, 2, 3)


class Curve(NamedTuple):
    """One training: mAP@.5 and mAP@.5:.95 after every epoch."""

    way: str
    seed: int
    map50: list[float]
    map50_95: list[float]

    @property
    def best(self) -> tuple[float, float]:
        """Scores of the epoch whose weights are in best.pt."""
        pairs = zip(self.map50, self.map50_95, strict=True)
        return max(pairs, key=lambda pair: 0.1 * pair[0] + 0.9 * pair[1])


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="data.yaml of the images")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="default: all of them")
    options = parser.parse_args()
    seeds = SEEDS[:1] if options.quick else SEEDS
    print(facts_line(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        wait(start("fast", WAYS["fast"], seeds[0], options.data, options.epochs, Path(folder) / "alone"))
        alone_s = time.perf_counter() - began
        print(f"--fast alone: {alone_s:.1f} s", flush=True)
        runs = [
            (way, seed, start(way, WAYS[way], seed, options.data, options.epochs, Path(folder) / "parallel"))
            for way in options.ways
            for seed in seeds
        ]
        ended = [(way, seed) for way, seed, process in runs if wait(process)]
        curves = [read(Path(folder) / "parallel", way, seed) for way, seed in ended]
    criteria = criteria_of(curves, alone_s)
    write(curves, criteria, alone_s, options)
    return int(not all(each.passed for each in criteria))


def start(
    way: str, flags: Sequence[str], seed: int, data: Path, epochs: int, project: Path
) -> "subprocess.Popen[bytes]":
    """Start a training in a process; `flags` come last, so that they may override the others."""
    project.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / "train.py"), "--data", str(data.resolve()), "--cfg", "yolov7-tiny"]
    command += ["--weights", "", "--img", "320", "--batch", "16", "--epochs", str(epochs), "--noautoanchor"]
    command += ["--seed", str(seed), "--project", str(project), "--name", _name(way, seed), *flags]
    log = (project / f"{_name(way, seed)}.log").open("wb")
    # One thread: a dozen trainings share the cores.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def wait(process: "subprocess.Popen[bytes]") -> bool:
    """Wait for a training; False if it failed, while the others still count."""
    if process.wait() != 0:
        print(f"a training ended with exit code {process.returncode}: {process.args!r}", flush=True)
    return process.returncode == 0


def _name(way: str, seed: int) -> str:
    return f"{way.replace(', ', '-').replace(' ', '-')}-seed-{seed}-"


def read(project: Path, way: str, seed: int) -> Curve:
    rows = [line.split() for line in (project / _name(way, seed) / "results.txt").read_text().splitlines()]
    return Curve(way, seed, [float(row[10]) for row in rows], [float(row[11]) for row in rows])


def criteria_of(curves: list[Curve], alone_s: float) -> list[Criterion]:
    """As accurate as the original in a fifth of its time; --fast-dataloader changes nothing."""
    means = {way: _means(curves, way) for way in {curve.way for curve in curves}}
    criteria = [Criterion(promise="--fast alone / original", value=alone_s / ORIGINAL_S, limit=0.2)]
    for way in ("classic", "fast"):
        if way in means:
            criteria.append(_at_least(f"{way}: mean mAP@.5", means[way][0], LEAST_MAP50))
            criteria.append(_at_least(f"{way}: mean mAP@.5:.95", means[way][1], MIN_MAP))
    if {"classic", "fast-dataloader"} <= means.keys():
        difference = abs(means["fast-dataloader"][0] - means["classic"][0])
        criteria.append(Criterion(promise="fast-dataloader - classic, mAP@.5", value=difference, limit=0.01, unit=""))
    return criteria


def _at_least(promise: str, value: float, limit: float) -> Criterion:
    return Criterion(promise=promise, value=value, limit=limit, unit="", at_most=False)


def _means(curves: list[Curve], way: str) -> tuple[float, float]:
    found = [curve.best for curve in curves if curve.way == way]
    return mean(pair[0] for pair in found), mean(pair[1] for pair in found)


def write(curves: list[Curve], criteria: list[Criterion], alone_s: float, options: object) -> None:
    lines = [f"--fast alone, start-up included: {alone_s:.1f} s (original {ORIGINAL_S:.0f} s)", ""]
    lines.append(f"{'way':20}{'seeds':>6}{'mAP@.5 of best.pt':>26}{'mAP@.5:.95':>26}{'last epoch':>18}")
    for way in dict.fromkeys(curve.way for curve in curves):
        own = [curve for curve in curves if curve.way == way]
        map50, map50_95 = ([pair[index] for pair in (curve.best for curve in own)] for index in range(2))
        last = f"{mean(c.map50[-1] for c in own):.3f} / {mean(c.map50_95[-1] for c in own):.3f}"
        lines.append(f"{way:20}{len(own):6d}{spread(map50):>26}{spread(map50_95):>26}{last:>18}")
    numbers = {
        "alone_s": alone_s,
        "curves": [curve._asdict() for curve in curves],
        "criteria": [{"promise": each.promise, "value": each.value, "passed": each.passed} for each in criteria],
    }
    report("bccd", "\n".join([*lines, "", *map(str, criteria)]), numbers, options)  # type: ignore[arg-type]


def spread(values: list[float]) -> str:
    around = f" +- {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{around}"


if __name__ == "__main__":
    raise SystemExit(main())
