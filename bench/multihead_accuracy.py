"""Do several heads keep the accuracy of the one head whose weights they start from?

Trains yolov7-tiny with one head as `./run demo` does, transfers its weights to a network with three heads, and trains
that for as many epochs at a third of the learning rate. The convolutions of the heads start from random values, because
no tensor of the one head fits them by shape; so the layers below are frozen, as usual (--freeze 50), and mAP@.5 must
not fall by more than 0.02. For comparison the same is trained with nothing frozen. Takes nine minutes on two cores.
Answer: bench/results/multihead_accuracy_<machine>_<yyyymm>.md (rewritten with --write).
"""

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from bench.measure import arguments, facts_line, report
from bench.promises import Criterion
from flatout.yolo.commands.demo import training_options
from flatout.yolo.demo_data.files import DemoDataConfig, write_demo_data
from flatout.yolo.find_file import find_file
from flatout.yolo.options import TrainOptions
from flatout.yolo.train import train

MAX_LOST = 0.02
FROZEN = "three heads, freeze 50"
GENTLE = 1 / 3
"""Fraction of the learning rate from scratch, so that the transferred weights are not destroyed."""


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--data", default="", help="data YAML to train on (default: the demo data)")
    options = parser.parse_args()
    print(facts_line(), flush=True)
    numbers: dict[str, Any] = {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}
    criteria: list[Criterion] = []
    lines = [numbers["device"], "", *fine_tuned(numbers, criteria, options), ""]
    numbers["criteria"] = [asdict(each) | {"passed": each.passed} for each in criteria]
    report("multihead_accuracy", "\n".join([*lines, *map(str, criteria)]), numbers, options)
    return int(not all(each.passed for each in criteria))


def fine_tuned(numbers: dict[str, Any], criteria: list[Criterion], options: argparse.Namespace) -> Iterator[str]:
    """Train one head, then three from its weights."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = Path(options.data) if options.data else generate_data(folder, quick=options.quick)
        on_gpu = torch.cuda.is_available()
        first = replace(training_options(folder / "runs", data, "", on_gpu=on_gpu, seed=0), nosave=False)
        if options.quick:
            first = replace(first, img_size=(96, 96), epochs=2)
        single = map50_of(first)
        yield f"{first.epochs} epochs with one head at {first.img_size[0]} px, then as many with three"
        yield f"  {'one head':28} mAP@.5 {single:.3f}"
        hyp = yaml.safe_load(find_file(first.hyp, flag="--hyp").read_text())
        gentle = folder / "hyp.yaml"
        gentle.write_text(yaml.safe_dump(hyp | {"lr0": hyp["lr0"] * GENTLE}))
        several = replace(
            first,
            cfg="yolov7-tiny-1b4h",
            hyp=str(gentle),
            weights=str(folder / "runs/train/weights/last.pt"),
            transfer_weights=True,
            heads=3,
        )
        for kind, training in {FROZEN: replace(several, freeze=(50,)), "three heads, nothing frozen": several}.items():
            found = map50_of(replace(training, name=kind.replace(" ", "").replace(",", "")))
            numbers[kind] = {"map50": found, "lost": single - found}
            yield f"  {kind:28} mAP@.5 {found:.3f}"
        lost = numbers[FROZEN]["lost"]
        criteria.append(Criterion(promise=f"mAP@.5 lost by {FROZEN}", value=lost, limit=MAX_LOST, unit=""))


def generate_data(folder: Path, *, quick: bool) -> Path:
    return write_demo_data(folder / "demo", DemoDataConfig(images=48, val=12) if quick else DemoDataConfig())


def map50_of(training: TrainOptions) -> float:
    """Train, and return the last mAP@.5."""
    result = train(training)
    assert result is not None
    return float((result.folder / "results.txt").read_text().splitlines()[-1].split()[10])


if __name__ == "__main__":
    raise SystemExit(main())
