"""How many steps per second does a deblurring training make, and how good is it after ten minutes of them?

spike_mini with the shipped data/spike/spike_mini_stacked.yaml, clips resident on the device, by `flatout spike train`.
First a short training alone: its steps per second, from the second half of its log. Then one training of as many steps
as fit in --minutes at that rate, its schedule stretched over all of them; it may share the device with other programs,
because its score depends on the number of steps alone. PSNR and SSIM of the moving average on the test split.
Answer: bench/results/spike_minutes_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch

from bench.measure import arguments, facts_line, report
from bench.spike_quality import ROOT, environment, prepare

CONFIG = ROOT / "data/spike/spike_mini_stacked.yaml"
VALIDATIONS = 20


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with rgb/ and spike/ of spike_mini")
    parser.add_argument("--device", default="0", help="cpu, or the number of a GPU (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=10, help="length of the training (default: %(default)g)")
    parser.add_argument("--probe", type=int, default=1500, help="steps of the short training (default: %(default)s)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the YAML file"
    )
    options = parser.parse_args()
    if options.quick:
        options.probe, options.minutes = 24, 0.02
    print(facts_line(), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(options.data, folder / "tree")
        probe = _train(folder, "probe", options.probe, options.probe, options)
        steps_per_s = 1000 / median(_steps_ms(probe)[len(_steps_ms(probe)) // 2 :])
        num_steps = max(int(60 * options.minutes * steps_per_s), VALIDATIONS)
        print(f"{steps_per_s:.1f} steps/s; {options.minutes:g} minutes are {num_steps} steps", flush=True)
        run = _train(folder, "run", num_steps, max(num_steps // VALIDATIONS, 1), options)
        found = sorted(
            (json.loads(path.read_text()) for path in (run / "metrics").glob("val_step_*.json")),
            key=lambda each: float(each["step"]),
        )
        shared_ms = median(_steps_ms(run))
    on = torch.cuda.get_device_name() if options.device != "cpu" else "CPU"
    lines = [
        f"{CONFIG.name} on {on}, clips resident on the device, alone: {steps_per_s:.1f} steps/s",
        f"{num_steps} steps, as {options.minutes:g} minutes hold at that rate (in this run: {shared_ms:.2f} ms/step)",
        f"{'minutes':>8}{'steps':>9}{'PSNR dB':>9}{'SSIM':>8}",
        f"{'blurry':>17}{found[-1]['blurry_psnr']:9.2f}{found[-1]['blurry_ssim']:8.4f}",
    ]
    lines += [
        f"{each['step'] / steps_per_s / 60:8.2f}{each['step']:9}{each['psnr']:9.2f}{each['ssim']:8.4f}"
        for each in found
    ]
    if options.set:
        lines.append(f"changed from {CONFIG.name}: {', '.join(options.set)}")
    report("spike_minutes", "\n".join(lines), {"steps_per_s": steps_per_s, "validations": found}, options)
    return 0


def _train(folder: Path, name: str, num_steps: int, val_every: int, options: argparse.Namespace) -> Path:
    run = folder / name
    changes = [
        *options.set, f"TRAIN.TOTAL_STEPS={num_steps}", f"LOG.VAL_EVERY_STEPS={val_every}", f"LOG.SAVE_DIR={run}",
        f"DATA.ROOT={folder / 'tree'}", "TRAIN.DEVICE_RESIDENT=true", "SEED=1",
    ]  # fmt: skip
    command = [sys.executable, "-m", "flatout", "spike", "train", "--config", str(CONFIG)]
    command += ["--device", options.device, "--log-to", "none"]
    for change in changes:
        command += ["--set", change]
    subprocess.run(command, check=True, env=environment())
    return run


def _steps_ms(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [float(line["step_ms"]) for line in lines if "step_ms" in line]


if __name__ == "__main__":
    sys.exit(main())
