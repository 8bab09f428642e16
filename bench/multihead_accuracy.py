"""Do several heads keep the accuracy of the one head whose weights they start from?

Trains yolov7-tiny with one head on the demo set (or on --data), gives its weights to a network with three heads, and
trains that for a few epochs, whole and with a frozen backbone: mAP@.5 must not be more than 0.02 below where it
started. Takes minutes on a GPU.
Answer: bench/results/multihead_accuracy_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.measure import arguments, facts_line, report
from bench.promises import Criterion
from flatout.yolo.demo_data.files import DemoDataConfig, write_demo_data
from flatout.yolo.options import TrainOptions
from flatout.yolo.train import train

MOST_LOST = 0.02


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--data", default="", help="data YAML to fine-tune on (default: a demo set that is drawn)")
    parser.add_argument("--epochs", type=int, nargs=2, default=(60, 15), help="of the single head, of the three")
    options = parser.parse_args()
    print(facts_line(), flush=True)
    numbers: dict[str, Any] = {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}
    criteria: list[Criterion] = []
    lines = [numbers["device"], "", *fine_tuned(numbers, criteria, options), ""]
    numbers["criteria"] = [asdict(each) | {"passed": each.passed} for each in criteria]
    report("multihead_accuracy", "\n".join([*lines, *map(str, criteria)]), numbers, options)
    return int(not all(each.passed for each in criteria))


def fine_tuned(numbers: dict[str, Any], criteria: list[Criterion], options: argparse.Namespace) -> Iterator[str]:
    """One head, then three from its weights."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = options.data
        if not data:
            write_demo_data(folder / "demo", DemoDataConfig(images=48, val=12) if options.quick else DemoDataConfig())
            data = str(folder / "demo/demo.yaml")
        common = {
            "data": data,
            "img_size": (96, 96) if options.quick else (320, 320),
            "batch_size": 16,
            "hyp": "data/hyp.demo.yaml",
            "project": str(folder / "runs"),
            "fast": torch.cuda.is_available(),
            "fast_dataloader": True,
            "workers": 2,
        }
        first, then = (2, 1) if options.quick else options.epochs
        single = train(TrainOptions(cfg="yolov7-tiny", weights="", epochs=first, name="one", **common))
        assert single is not None
        start = str(single.folder / "weights/best.pt")
        yield f"{first} epochs with one head, then {then} with three from its weights, {Path(data).name}"
        yield f"  one head     mAP@.5 {best_map50(single.folder):.3f}"
        for kind, changes in {"three heads": {}, "three heads, freeze 50": {"freeze": (50,)}}.items():
            several = train(
                TrainOptions(
                    cfg="yolov7-tiny-1b4h",
                    weights=start,
                    transfer_weights=True,
                    heads=3,
                    epochs=then,
                    name=kind.replace(" ", "").replace(",", ""),
                    **(common | changes),
                )
            )
            assert several is not None
            lost = best_map50(single.folder) - best_map50(several.folder)
            numbers[kind] = {"map50": best_map50(several.folder), "lost": lost}
            yield f"  {kind:24} mAP@.5 {best_map50(several.folder):.3f}"
            criteria.append(Criterion(promise=f"mAP@.5 lost by {kind}", value=lost, limit=MOST_LOST, unit=""))


def best_map50(folder: Path) -> float:
    return max(float(line.split()[10]) for line in (folder / "results.txt").read_text().splitlines())


if __name__ == "__main__":
    raise SystemExit(main())
