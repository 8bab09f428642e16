"""How much faster is a training on a CPU with --fast, and does it learn as much?

The training of `flatout demo` (yolov7-tiny from scratch on generated images, 160 px, batch 8, 6 epochs) by three ways
that take turns: as by default; in channels-last layout; and with bf16 as well, which --fast chooses on CPUs that have
instructions for it. Images per second are the median of the epochs, whose steps do not wait for input.
Answer: bench/results/train_cpu_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from bench import noise
from bench.measure import arguments, facts_line, report
from bench.promises import Criterion
from flatout.yolo.demo_data.files import DemoDataConfig, write_demo_data

ROOT = Path(__file__).parents[1]
WAYS = {
    "default": (),
    "channels-last": ("--channels-last",),
    "channels-last, bf16": ("--channels-last", "--amp", "bf16"),
}
DEFAULT, FAST = "default", "channels-last, bf16"
SEEDS = (1, 2, 3)
MIN_SPEED_UP = 1.3


class Result(NamedTuple):
    """What one training reached."""

    way: str
    seed: int
    images_per_s: float
    map50: float


def train(way: str, seed: int, data: Path, project: Path, epochs: int) -> Result:
    """Train in a process of its own."""
    name = f"{way.replace(', ', '-')}-{seed}"
    words = [
        "--weights",
        "",
        "--cfg",
        "cfg/training/yolov7-tiny.yaml",
        "--data",
        str(data),
        "--hyp",
        "data/hyp.demo.yaml",
    ]
    words += [
        "--epochs",
        str(epochs),
        "--batch-size",
        "8",
        "--img-size",
        "160",
        "160",
        "--device",
        "cpu",
        "--workers",
        "0",
    ]
    words += ["--project", str(project), "--name", name, "--adam", "--fast-dataloader", "--nosave", "--seed", str(seed)]
    # As in the demo: waiting threads sleep instead of spinning.
    env = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    subprocess.run(
        [sys.executable, "train.py", *words, *WAYS[way]], cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    rows = [json.loads(line) for line in (project / name / "log.jsonl").read_text().splitlines()]
    epochs_of = [row for row in rows if "images_per_s" in row]
    return Result(way, seed, median(row["images_per_s"] for row in epochs_of), epochs_of[-1]["mAP_0.5"])


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--epochs", type=int, default=6, help="default: %(default)s")
    options = parser.parse_args()
    print(facts_line(), flush=True)
    load = noise.listen().line()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        data = write_demo_data(Path(folder) / "data", DemoDataConfig(), show_progress=False)
        for seed in SEEDS[:1] if options.quick else SEEDS:
            for way in WAYS:
                results.append(train(way, seed, data, Path(folder), options.epochs))
                print(results[-1], flush=True)
    lines = [load, f"{options.epochs} epochs", f"{'':22}{'img/s':>18}{'mAP@.5 by seed':>26}{'mean':>8}"]

    def by_way(way: str) -> list[Result]:
        return [each for each in results if each.way == way]

    for way in WAYS:
        own = by_way(way)
        spread = f"{min(each.images_per_s for each in own):.1f}-{max(each.images_per_s for each in own):.1f}"
        speed, score = median(each.images_per_s for each in own), mean(each.map50 for each in own)
        scores = " ".join(f"{each.map50:.3f}" for each in own)
        lines.append(f"{way:22}{speed:8.1f} {spread:>9}{scores:>26}{score:8.3f}")
    gains = [fast.images_per_s / plain.images_per_s for fast, plain in zip(by_way(FAST), by_way(DEFAULT), strict=True)]
    promise = Criterion.of_median(f"{FAST}: as fast as by default", gains, MIN_SPEED_UP, at_most=False)
    numbers = {"results": [each._asdict() for each in results]}
    report("train_cpu", "\n".join([*lines, "", str(promise)]), numbers, options)
    return int(not promise.passed)


if __name__ == "__main__":
    sys.exit(main())
