"""An export from beginning to end: weights or a network in, files and their comparison out.

Every file is built and compared before the first is written, so a failed export leaves what was there before.
"""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from flatout.engine.device_choice import choose_device
from flatout.errors import ConfigError
from flatout.export.packages import refuse_missing
from flatout.yolo.export.candidates import TORCH, candidates_of, times_of
from flatout.yolo.export.options import ExportOptions
from flatout.yolo.export.outcome import ExportOutcome
from flatout.yolo.export.work import Work
from flatout.yolo.find_file import find_file
from flatout.yolo.loading import load_network
from flatout.yolo.model.network import Network

logger = logging.getLogger(__name__)

ENDINGS = (".torchscript.pt", ".onnx", ".pt", ".pth", ".safetensors")
"""Cut off a name before a new one is put on."""


def export(weights: str | Path, options: ExportOptions | None = None) -> ExportOutcome:
    """Write the network of a file of weights in other forms; ParityError, and no file, if one is not the same."""
    options = replace(options or ExportOptions(), weights=str(weights))
    cfg = find_file(options.cfg, flag="--cfg") if options.cfg else None
    _refuse_early(options)
    network = load_network(weights, cfg=cfg).network
    return export_network(network, options, stem=stem_for(Path(weights), options.out))


@torch.no_grad()
def export_network(network: Network, options: ExportOptions, *, stem: Path) -> ExportOutcome:
    """As `export`, of a network in memory, which is left as it is; `stem` is the files' path without ending."""
    if not isinstance(network, Network):
        raise ConfigError("An ensemble is several networks, and a file holds one: export each on its own.")
    _refuse_early(options)
    if not stem.parent.is_dir():
        raise ConfigError(f"{stem.parent}: no such folder. Make it first, or choose another one with --out.")
    device = choose_device(options.device)
    for sentence in options.without_effect():
        logger.warning("%s", sentence)
    work = Work.of(network, options)
    candidates = list(candidates_of(work, stem))
    files = [replace(candidate.file, num_bytes=candidate.save()) for candidate in candidates]
    times = times_of(work, candidates, device)
    timed = tuple(replace(file, median_ms=times.get(file.path.name)) for file in files)
    return ExportOutcome(
        files=timed,
        pictures=work.pictures.origin,
        input_shapes=tuple(dict.fromkeys(each.shape for each in work.inputs)),
        timed_shape=tuple(work.example.shape),
        torch_ms=times[TORCH],
        device=str(device),
        threads=torch.get_num_threads(),
    )


def stem_for(weights: Path, out: str) -> Path:
    """Path of the files without ending: `out`, in the folder `out` under the weights' name, or beside the weights."""
    if out and not Path(out).is_dir():
        return without_ending(Path(out))
    stem = without_ending(weights)
    return Path(out, stem.name) if out else stem


def without_ending(path: Path) -> Path:
    """`runs/best.pt` -> `runs/best`; a name with other dots keeps them."""
    ending = next((ending for ending in ENDINGS if path.name.endswith(ending)), "")
    return path.with_name(path.name.removesuffix(ending)) if path.name != ending else path


def _refuse_early(options: ExportOptions) -> None:
    if "onnx" in options.formats:
        refuse_missing("onnx", "onnxruntime", *(["onnxslim"] if options.simplify else []))
