"""How large are exported networks, and how long does a call take in torch, TorchScript and ONNX Runtime?

Answer: bench/results/export_<machine>_<yyyymm>.md (rewrite it with --write). One run, one image per call, on the CPU;
the programs alternate, so that a busy moment affects them all. Networks are untrained: weights change neither size nor
time. Every file is compared with its network before it is timed, as in `flatout yolo export`.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.measure import arguments, report
from flatout.yolo.export import ExportOptions, export_network, files
from flatout.yolo.model.configs import load_config
from flatout.yolo.model.network import build_network

CASES = (("yolov7-tiny", 320), ("yolov7-tiny", 640), ("yolov7", 640))
QUICK = (("yolov7-tiny", 64),)
TURNS, QUICK_TURNS = 10, 1
FORMS: dict[str, dict[str, Any]] = {
    "decoded": {"grid": True, "fp16": True, "int8": True, "opset": 13},
    "with NMS": {"grid": True, "end2end": True, "max_wh": 640, "formats": ("onnx",)},
}


def main() -> None:
    options = arguments(__doc__).parse_args()
    files.MAX_TURNS = files.MIN_TURNS = QUICK_TURNS if options.quick else TURNS
    numbers: dict[str, Any] = {}
    lines = [f"one image per call, {torch.get_num_threads()} threads, medians of {files.MAX_TURNS} calls"]
    for name, size in QUICK if options.quick else CASES:
        torch.manual_seed(0)
        network = build_network(load_config(name)).eval()
        for form, flags in FORMS.items():
            lines.append(f"{name} {size} px, {form}")
            rows = measured(network, size, flags)
            numbers[f"{name} {size} {form}"] = rows
            torch_ms = rows["torch, folded"]["ms"]
            lines += [
                f"  {row:<28} {facts['MB']:8.1f} MB {facts['ms']:10.2f} ms {torch_ms / facts['ms']:6.2f} x"
                for row, facts in rows.items()
            ]
    report("export", "\n".join(lines), numbers, options)


def measured(network: Any, size: int, flags: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Megabytes and milliseconds of every file, and of torch itself."""
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"img_size": (size, size), "simplify": True, "pictures": 2, **flags}
        outcome = export_network(network, ExportOptions(**settings), stem=Path(folder, "network"))
    weights_mb = sum(value.numel() * 4 for value in network.parameters()) / 1e6
    rows = {"torch, folded": {"MB": weights_mb, "ms": outcome.torch_ms}}
    for file in outcome.files:
        assert file.median_ms is not None
        rows[file.kind.replace(", simplified", "")] = {"MB": file.num_bytes / 1e6, "ms": file.median_ms}
    return rows


if __name__ == "__main__":
    main()
