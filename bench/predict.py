"""How many images per second does detection process, and what do threads for reading and plotting gain?

Both sides in one run over the same folder of JPEG images, with the same network, thresholds and output files: detect.py
(threads prefetch and write), against a plain loop that decodes, letterboxes, runs the network, plots and encodes one
image after another, with the same functions. The two alternate; both must find the same boxes.
Runs on the GPU if there is one, else, or with --cpu, on the host.

Answer: bench/results/predict_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import cv2
import numpy as np
import torch

from bench import noise
from bench.measure import arguments, facts_line, report
from flatout.charts.canvas import write_image
from flatout.feed import plan_workers
from flatout.yolo.demo_data.scene import generate_scene
from flatout.yolo.evaluate.run import InferenceModel
from flatout.yolo.model.configs import load_config
from flatout.yolo.model.deploy import fused
from flatout.yolo.model.network import build_network
from flatout.yolo.nms import NmsConfig
from flatout.yolo.predict.files import Files, Frame, Origin, find_sources, frames_of, read_frame
from flatout.yolo.predict.options import DetectOptions
from flatout.yolo.predict.outputs import Outputs
from flatout.yolo.predict.result import Result
from flatout.yolo.predict.results import Predictor, results_of


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Size of the measurement."""

    pictures: int
    width: int = 1280
    height: int = 960
    img_size: int = 320
    turns: int = 5
    num_classes: int = 80


WAITING = "OMP_WAIT_POLICY"
MAX_BOXES = 12
"""Boxes per image, about as many as in a photo of a street."""

CPU = Setting(pictures=32)
GPU = Setting(pictures=160, img_size=640)
QUICK = Setting(pictures=4, width=320, height=240, img_size=64, turns=2)


def write_images(folder: Path, setting: Setting) -> Files:
    """Write JPEG images of the size of camera photos."""
    for number in range(setting.pictures):
        scene = generate_scene(320, 240, np.random.default_rng([7, number]))
        large = cv2.resize(scene.image, (setting.width, setting.height), interpolation=cv2.INTER_CUBIC)
        cv2.imwrite(str(folder / f"{number:04}.jpg"), large)
    found = find_sources(str(folder))
    assert isinstance(found, Files)
    return found


def make_predictor(setting: Setting, device: torch.device) -> Predictor:
    """yolov7-tiny, untrained, with objectness raised so that every image has some boxes."""
    torch.manual_seed(0)
    network = build_network(load_config("yolov7-tiny"), nc=setting.num_classes).eval()
    with torch.no_grad():
        coarsest: Any = network.head.m[-1]
        coarsest.bias.view(3, 5 + setting.num_classes)[:, 4:6] += 8
    network = fused(network).to(device)
    if device.type == "cuda":
        network = network.half().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    names = tuple(f"class {number}" for number in range(setting.num_classes))
    model = InferenceModel(network, setting.num_classes, 32, names)
    return Predictor(model, size=setting.img_size, device=device, nms=NmsConfig(max_det=MAX_BOXES))


def plain_loop(files: Files, predictor: Predictor, out: Path) -> list[Result]:
    """One step after another, one image at a time."""
    results = []
    for number, path in enumerate(files.images):
        frame = read_frame(Origin(path, "image", number, len(files)))
        assert isinstance(frame, Frame)
        (result,) = predictor([predictor.prepare(frame)])
        write_image(out / Path(path).name, result.plot())
        results.append(result)
    return results


def with_threads(files: Files, predictor: Predictor, out: Path) -> list[Result]:
    """The same as detect.py."""
    threads = min(8, plan_workers("cpu*1.0").total)
    results = []
    with Outputs(out, DetectOptions(), threads=threads) as outputs:
        for result in results_of(frames_of(files), predictor, threads=threads):
            assert isinstance(result, Result)
            outputs.add(result)
            results.append(result)
    return results


Side = Callable[[Files, Predictor, Path], list[Result]]
SIDES: dict[str, Side] = {"plain": plain_loop, "detect": with_threads}


def compare(files: Files, predictor: Predictor, out: Path, turns: int) -> tuple[dict[str, list[float]], bool]:
    """Images per second of each side in every turn but the first, and whether both found the same boxes."""
    rates: dict[str, list[float]] = {name: [] for name in SIDES}
    found: dict[str, list[Result]] = {}
    for _ in range(turns + 1):
        for name, side in SIDES.items():
            begin_s = time.perf_counter()
            found[name] = side(files, predictor, out)
            rates[name].append(len(files) / (time.perf_counter() - begin_s))
    pairs = zip(found["plain"], found["detect"], strict=True)
    same = all(one.path == other.path and len(one) == len(other) for one, other in pairs)
    return {name: each[1:] for name, each in rates.items()}, same


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--cpu", action="store_true", help="measure on the host even if there is a GPU")
    options = parser.parse_args()
    if WAITING not in os.environ:  # detect.py sets it, too; torch reads it when it is loaded
        words = [sys.executable, "-m", "bench.predict", *sys.argv[1:]]
        os.execve(sys.executable, words, {**os.environ, WAITING: "PASSIVE"})
    device = torch.device("cuda" if torch.cuda.is_available() and not options.cpu else "cpu")
    setting = QUICK if options.quick else GPU if device.type == "cuda" else CPU
    print(facts_line(), flush=True)
    before = noise.listen().line()
    print(before, file=sys.stderr, flush=True)
    predictor = make_predictor(setting, device)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "in").mkdir()
        (Path(folder) / "out").mkdir()
        files = write_images(Path(folder) / "in", setting)
        rates, same = compare(files, predictor, Path(folder) / "out", setting.turns)
    ratios = [ours / plain for ours, plain in zip(rates["detect"], rates["plain"], strict=True)]
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    lines = [
        before,
        f"{where}; yolov7-tiny at {setting.img_size} px, {setting.pictures} JPEG images of {setting.width} x "
        f"{setting.height}, boxes plotted, JPEG written; {setting.turns} turns",
        *(f"{name:7} {median(each):8.1f} img/s ({min(each):.1f} to {max(each):.1f})" for name, each in rates.items()),
        f"ratio   {median(ratios):8.2f} ({min(ratios):.2f} to {max(ratios):.2f}), turn by turn",
        f"the same boxes: {'yes' if same else 'NO'}",
    ]
    if options.quick:
        lines.append("a quick run shows that the script works, its figures mean nothing")
    numbers = {"noise": before, "where": where, "setting": asdict(setting), "img_per_s": rates, "ratios": ratios}
    report("predict", "\n".join(lines), numbers | {"same": same}, options)
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
