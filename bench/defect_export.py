"""What do float16 and int8 ONNX files of a defect network lose in precision, and what do they gain in speed?

Answer: bench/results/defect_export_<machine>_<yyyymm>.md (rewrite it with --write). ONNX Runtime on the CPU; a network
trained briefly on generated strips and evaluated on strips that it has not seen. The files are timed in turns.
"""

import tempfile
import time
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.measure import arguments, report
from flatout.defect.data.find import list_split
from flatout.defect.demo_data import DemoDataConfig, generate_strip, write_demo_data
from flatout.defect.evaluate.evaluate import evaluate_images
from flatout.defect.evaluate.maps import HostMapMaker
from flatout.defect.export import model_for, reduce_precision
from flatout.defect.options import TrainOptions
from flatout.defect.patches import Grid
from flatout.defect.train import train
from flatout.defect.weights import load_network
from flatout.export.precision import Precision

SHAPE_HW = (256, 176)
PRECISIONS: tuple[Precision, ...] = ("float32", "float16", "int8")


class Session:
    """An ONNX file as a function from planes to a heat map."""

    def __init__(self, path: Path) -> None:
        self._session = import_module("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def __call__(self, planes_CHW: np.ndarray) -> np.ndarray:
        (found,) = self._session.run(None, {"input": np.asarray(planes_CHW, np.float32)[None]})
        return np.array(found[0, 0])


def timed_in_turns(sessions: dict[Precision, Session], repeats: int) -> dict[Precision, list[float]]:
    """Milliseconds per strip, one list per session; the first two turns are not counted."""
    strip = generate_strip(0, SHAPE_HW)
    ms: dict[Precision, list[float]] = {precision: [] for precision in sessions}
    for turn in range(repeats + 2):
        for precision, session in sessions.items():
            began = time.perf_counter()
            session(strip)
            if turn >= 2:
                ms[precision].append(1e3 * (time.perf_counter() - began))
    return ms


def main() -> None:
    options = arguments(__doc__).parse_args()
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        config = DemoDataConfig(
            images=4 if options.quick else 24, valid=1, test=2 if options.quick else 10, shape_hw=SHAPE_HW
        )
        write_demo_data(root / "data", config)
        result = train(
            TrainOptions(
                training_dataset_path=str(root / "data"), checkpoint_path=str(root / "runs"), base_width=16,
                patch_size=64, epochs=1 if options.quick else 6, num_workers=0, use_mask=False,
            )
        )  # fmt: skip
        network, _ = load_network(result.folder / "weights/best.pt")
        grid = Grid.over(SHAPE_HW, 64)
        images = list_split(root / "data", "test", "tiff")
        lines = ["ONNX Runtime on the CPU, strips of 256 x 176, network v1 of base width 16"]
        paths = {precision: root / f"{precision}.onnx" for precision in PRECISIONS}
        sessions: dict[Precision, Session] = {}
        for precision, path in paths.items():
            if precision == "float32":
                model_for(network, grid).write_onnx(path)
            else:
                reduce_precision(
                    paths["float32"], path, precision, [generate_strip(90 + n, SHAPE_HW) for n in range(8)]
                )
            sessions[precision] = Session(path)
        ms = timed_in_turns(sessions, 3 if options.quick else 30)
        for precision, session in sessions.items():
            ap, mib = evaluate_images(HostMapMaker(session), images).fitness, paths[precision].stat().st_size / 2**20
            faster = median(a / b for a, b in zip(ms["float32"], ms[precision], strict=True))
            numbers[precision] = {"AP": ap, "ms": ms[precision], "MiB": mib}
            lines.append(
                f"  {precision:<8} AP {ap:.4f}   {median(ms[precision]):8.1f} ms per strip ({faster:.2f}x the speed)   "
                f"{mib:6.2f} MiB"
            )
    report("defect_export", "\n".join(lines), numbers, options)


if __name__ == "__main__":
    main()
