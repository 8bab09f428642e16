"""How much do spikes improve deblurring of real video, compared with the blurry input and with RGB frames alone?

spike_mini (two real clips for training, one for the test; blur and spikes simulated) with the shipped
data/spike/spike_mini.yaml: the blurry input, RGB only and RGB + spikes, three seeds each, trained by the command
`flatout spike train` for 1,000 steps (half of what the file says, but enough to distinguish them), in parallel (nothing
is timed here). The moving average after the last step is scored, not the best one so far, because there is no third
split to choose by. PSNR and SSIM as in papers, every test frame once.
--data names the folder that contains rgb/ and spike/, or one that `flatout spike prepare` or `simulate` wrote.
--config data/spike/spike_mini_stacked.yaml trains the network `stacked` for the steps in that file; its results are in
spike_quality_stacked_*, and --name changes that. Exit code 1 if the worst seed with spikes is not 2 dB (stacked:
4.5 dB; --gain changes it) above the best of everything else, or below 33.5 dB. If interrupted (Ctrl-C, SIGINT,
SIGTERM), it reports the scores so far, states that, and checks no criterion.
Answer: bench/results/spike_quality_<machine>_<yyyymm>.md and .json with every curve (rewrite them with --write).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch

from bench.cut_short import heed_signals
from bench.measure import arguments, facts_line, report
from bench.promises import Criterion

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "data/spike/spike_mini.yaml"
WAYS = {"RGB only": ("MODEL.USE_SPIKE=false",), "RGB + spikes": ()}
SPIKES = "RGB + spikes"
SEEDS = (1, 2, 3)
STEPS = 1000
MIN_GAIN_DB, MIN_DB = 2.0, 33.5
STACKED_GAIN_DB = 4.5
QUICK = (
    "TRAIN.TOTAL_STEPS=8", "TRAIN.BATCH_SIZE=2", "DATA.CROP_SIZE=32", "DATA.CLIP_LEN=2", "MODEL.WIDTH=4",
)  # fmt: skip


class Curve(NamedTuple):
    """The validations of one training, in order."""

    way: str
    seed: int
    steps: list[int]
    psnr: list[float]
    ssim: list[float]
    blurry: tuple[float, float]
    """PSNR and SSIM of the input."""


def main() -> int:
    """Train, report, and check the criteria; returns the exit code."""
    options = _parser().parse_args()
    options.is_stacked = options.config.stem.endswith("stacked")
    options.gain = options.gain or (STACKED_GAIN_DB if options.is_stacked else MIN_GAIN_DB)
    options.name = options.name or ("spike_quality_stacked" if options.is_stacked else "spike_quality")
    heed_signals()
    seeds = SEEDS[:1] if options.quick else SEEDS
    print(facts_line(), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tree = options.data
        if (tree / "rgb").is_dir():
            tree = folder / "tree"
            prepare(options.data, tree)
        steps = [] if options.is_stacked else [f"TRAIN.TOTAL_STEPS={STEPS}"]
        changes = [*steps, *(QUICK if options.quick else ()), *options.set, f"DATA.ROOT={tree}"]
        runs = {
            (way, seed): _start(folder, way, seed, [*changes, *extra], options)
            for way, extra in WAYS.items()
            for seed in seeds
        }
        _watch(folder, runs)
        curves = [_read(folder, *key) for key in runs if _validations(folder, *key)]
    is_whole = all(run.returncode == 0 for run in runs.values())
    criteria = check_criteria(curves, options.gain) if is_whole else []
    if tree == options.data:
        criteria = criteria[:1]  # another set has another blur: only the gain can be compared
    _write(curves, criteria, options)
    if options.quick:
        return int(not criteria)
    return int(not criteria or not all(each.passed for each in criteria))


def _parser() -> argparse.ArgumentParser:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with rgb/ and spike/ of spike_mini")
    parser.add_argument("--config", type=Path, default=CONFIG, help="YAML file of the trainings (default: %(default)s)")
    parser.add_argument("--gain", type=float, help="dB that spikes must gain (default: 2, stacked: 4.5)")
    parser.add_argument("--name", help="name of the results file")
    parser.add_argument("--device", default="", help="cpu, or the number of a GPU (default: a GPU if there is one)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the YAML file"
    )
    return parser


def prepare(data: Path, output: Path) -> None:
    command = [sys.executable, "-m", "flatout", "spike", "prepare", "--use_symlinks", "--output", str(output)]
    command += ["--spike_root", str(data / "spike"), "--blur_root", str(data / "rgb")]
    subprocess.run(command, check=True, env=environment())


def _start(
    folder: Path, way: str, seed: int, changes: list[str], options: argparse.Namespace
) -> "subprocess.Popen[bytes]":
    """Start a training in its own process, with two workers because several trainings share the cores."""
    command = [sys.executable, "-m", "flatout", "spike", "train", "--config", str(options.config)]
    command += ["--device", options.device]
    run = _run_folder(folder, way, seed)
    for change in (f"SEED={seed}", "DATALOADER.TOTAL_WORKERS=2", f"LOG.SAVE_DIR={run}", *changes):
        command += ["--set", change]
    return subprocess.Popen(
        command, stdout=run.with_suffix(".log").open("wb"), stderr=subprocess.STDOUT, env=environment()
    )  # fmt: skip


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}


def _watch(folder: Path, runs: "dict[tuple[str, int], subprocess.Popen[bytes]]") -> None:
    """Wait until all have ended or Ctrl-C ends them; prints their latest scores meanwhile, and their errors."""
    began, printed = time.monotonic(), 0.0
    with suppress(KeyboardInterrupt):
        while any(run.poll() is None for run in runs.values()):
            time.sleep(0.5)
            if time.monotonic() - printed > 15:
                printed = time.monotonic()
                newest = [f"{way} {seed}: {_newest(folder, way, seed)}" for way, seed in runs]
                print(f"{printed - began:4.0f} s   {'   '.join(newest)}", flush=True)
    for run in runs.values():
        if run.poll() is None:
            run.terminate()  # ends its workers too; the checkpoint that it saves is not needed
    for (way, seed), run in runs.items():
        run.wait()
        if run.returncode != 0:
            log = _run_folder(folder, way, seed).with_suffix(".log").read_text(errors="replace")
            print(f"{way}, seed {seed}: exit code {run.returncode}\n{log[-2000:]}", flush=True)


def _run_folder(folder: Path, way: str, seed: int) -> Path:
    return folder / f"{way.replace(' ', '')}-{seed}"


def _validations(folder: Path, way: str, seed: int) -> list[dict[str, float]]:
    paths = (_run_folder(folder, way, seed) / "metrics").glob("val_step_*.json")
    return sorted((json.loads(path.read_text()) for path in paths), key=lambda each: float(each["step"]))


def _newest(folder: Path, way: str, seed: int) -> str:
    try:
        found = _validations(folder, way, seed)
    except ValueError:  # the file is just being written
        return "-"
    return f"{found[-1]['psnr']:.2f} dB at {found[-1]['step']}" if found else "-"


def _read(folder: Path, way: str, seed: int) -> Curve:
    found = _validations(folder, way, seed)
    steps, psnr, ssim = ([each[name] for each in found] for name in ("step", "psnr", "ssim"))
    blurry = (found[-1]["blurry_psnr"], found[-1]["blurry_ssim"])
    return Curve(way, seed, [int(step) for step in steps], psnr, ssim, blurry)


def check_criteria(curves: list[Curve], gain_db: float = MIN_GAIN_DB) -> list[Criterion]:
    """Compare the worst seed with spikes to the best of the others."""
    worst = min(curve.psnr[-1] for curve in curves if curve.way == SPIKES)
    others = [curves[0].blurry[0], *(curve.psnr[-1] for curve in curves if curve.way != SPIKES)]
    return [
        Criterion(
            promise="spikes, worst seed, above the best without",
            value=worst - max(others), limit=gain_db, at_most=False, unit=" dB",
        ),
        Criterion(promise="spikes, worst seed", value=worst, limit=MIN_DB, at_most=False, unit=" dB"),
    ]  # fmt: skip


def _write(curves: list[Curve], criteria: list[Criterion], options: argparse.Namespace) -> None:
    if not curves:
        return
    blurry = curves[0].blurry
    on = torch.cuda.get_device_name() if torch.cuda.is_available() and options.device != "cpu" else "CPU"
    lines = [
        f"trained on {on}",
        f"{'test split, after the last step':34}{'PSNR dB, by seed':>28}{'mean':>8}{'SSIM, mean':>12}",
    ]
    lines.append(f"{'blurry input':34}{'':28}{blurry[0]:8.2f}{blurry[1]:12.4f}")
    for way in WAYS:
        own = [curve for curve in curves if curve.way == way]
        if own:
            name = f"{way}, {' '.join(sorted({str(curve.steps[-1]) for curve in own}))} steps"
            scores = " ".join(f"{curve.psnr[-1]:.2f}" for curve in own)
            means = f"{mean(c.psnr[-1] for c in own):8.2f}{mean(c.ssim[-1] for c in own):12.4f}"
            lines.append(f"{name:34}{scores:>28}{means}")
    if options.set:
        lines.append(f"changed from data/spike/{options.config.name}: {', '.join(options.set)}")
    if not criteria:
        lines.append("CUT SHORT: these are intermediate scores, not results; no criterion was checked.")
    numbers = {
        "changes": options.set,
        "curves": [curve._asdict() for curve in curves],
        "criteria": [{"promise": each.promise, "value": each.value, "passed": each.passed} for each in criteria],
    }
    report(options.name, "\n".join([*lines, *map(str, criteria)]), numbers, options)


if __name__ == "__main__":
    sys.exit(main())
