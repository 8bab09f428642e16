"""An export from beginning to end: ONNX and TorchScript files built, compared, timed, written, and reported on.

Every file is built and compared before the first is written, so a failed export leaves what was there before.
"""

import copy
import io
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from flatout.errors import ConfigError
from flatout.export import Model, Precision, Session, onnx_model, quiet_tracing, refuse_missing
from flatout.ranks import choose_device
from flatout.safefiles import replacing
from flatout.yolo.export import onnx_forms
from flatout.yolo.export.onnx_forms import Loss, facts_of, loss_of, smaller
from flatout.yolo.export.options import ExportOptions
from flatout.yolo.export.postprocess import PLUGIN, DecodedBoxes, Judged, RawLevels, Visible, tail_for
from flatout.yolo.export.work import Difference, Work, largest, of_decoded, of_raw
from flatout.yolo.find_file import find_file, shipped_folder, weights_file
from flatout.yolo.load_network import load_network
from flatout.yolo.model.network import Network

logger = logging.getLogger(__name__)

# How long a call takes: medians of programs that take turns, so that a busy moment of the machine hits them all.

WARM_UP = 1
LEAST_TURNS, MOST_TURNS = 3, 50
BUDGET_S = 3.0
"""For all turns together, unless the least number of them takes longer."""


def medians_ms(calls: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Name -> median in milliseconds; the GPU, if it is one, is drained around each call."""
    for call in calls.values():
        for _ in range(WARM_UP):
            _seconds(call, device)
    took: dict[str, list[float]] = {name: [] for name in calls}
    began = time.perf_counter()
    for turn in range(MOST_TURNS):
        if turn >= LEAST_TURNS and time.perf_counter() - began > BUDGET_S:
            break
        for name, call in calls.items():
            took[name].append(_seconds(call, device))
    return {name: 1e3 * median(durations) for name, durations in took.items()}


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


# A network as a TorchScript file: raw maps or decoded boxes, weights folded, compared with the network.

FACTS_FILE = "config.txt"
"""Inside the file: JSON, to be read with `_extra_files` of torch.jit.load."""


@torch.no_grad()
def scripted(network: Network, example: Tensor, facts: Mapping[str, str], *, grid: bool) -> bytes:
    """The content of a TorchScript file; the network is folded, in evaluation mode and on the CPU."""
    form: nn.Module = DecodedBoxes(network) if grid else RawLevels(network)
    with quiet_tracing():
        # Frozen: what only training needs would else stay in the file, with an auxiliary head a tenth of it.
        # Not checked by torch itself: `compared` does it on other inputs.
        frozen = torch.jit.freeze(torch.jit.trace(form.eval(), example, strict=False, check_trace=False))
        content = io.BytesIO()
        torch.jit.save(frozen, content, _extra_files={FACTS_FILE: json.dumps(dict(facts))})
    return content.getvalue()


def loaded(content: bytes) -> Any:
    """The module that a TorchScript file holds, on the CPU."""
    with quiet_tracing():
        return torch.jit.load(io.BytesIO(content), map_location="cpu")


@torch.no_grad()
def compared(content: bytes, judged: Iterable[Judged], *, grid: bool) -> Difference:
    """How far the file is from the network."""
    module = loaded(content)
    return largest(_difference(module, each, grid=grid) for each in judged)


def save(content: bytes, path: Path) -> int:
    """The file, whole or not at all; returns its bytes."""
    with replacing(path, needed_bytes=len(content)) as sink:
        sink.write(content)
    return len(content)


def _difference(module: Any, judged: Judged, *, grid: bool) -> Difference:
    found = module(torch.from_numpy(judged.images))
    if grid:
        return of_decoded(found.numpy(), judged.decoded)
    return largest(of_raw(level.numpy(), expected) for level, expected in zip(found, judged.raw, strict=True))


# What an export wrote, how far it is from the network, and how fast it is.


@dataclass(frozen=True, kw_only=True)
class ExportedFile:
    """One file."""

    path: Path
    kind: str
    """Such as `ONNX opset 12, simplified`."""
    num_bytes: int
    difference: Difference | None
    """To the network; None for a file that is not meant to be the same."""
    limit: Difference | None = None
    """What it may be."""
    loss: Loss | None = None
    """Of a file in lower precision that gives boxes."""
    until: str = ""
    """Where the comparison ends, if not at the end of the file."""
    median_ms: float | None = None
    """Of a call."""

    def line(self) -> str:
        if self.difference is not None and self.limit is not None:
            compared = f"largest difference {self.difference.text(self.limit)}{self.until}"
        else:
            compared = self.loss.text() if self.loss else "raw maps in lower precision: not compared"
        return f"{self.path}: {self.kind}, {self.num_bytes / 1e6:.1f} MB; {compared}"


@dataclass(frozen=True, kw_only=True)
class ExportOutcome:
    """All files of an export."""

    files: tuple[ExportedFile, ...]
    pictures: str
    """What they were compared on."""
    input_shapes: tuple[tuple[int, ...], ...]
    """Shapes that were compared, without repetition."""
    timed_shape: tuple[int, ...]
    torch_ms: float
    """Of the folded network, on `device`."""
    device: str
    threads: int

    def __str__(self) -> str:
        return self.text()

    def text(self) -> str:
        """What the command prints."""
        shapes = " and ".join(" x ".join(map(str, shape)) for shape in self.input_shapes)
        timed = " x ".join(map(str, self.timed_shape))
        lines = [f"compared with the network on {self.pictures}, given as {shapes}"]
        lines += [file.line() for file in self.files]
        lines += [f"median time of a call with {timed}, {_threads(self.threads)} of the CPU:"]
        lines.append(_time_line(f"torch on {self.device}, folded", self.torch_ms, self.torch_ms))
        lines += [
            _time_line(file.path.name, file.median_ms, self.torch_ms)
            for file in self.files
            if file.median_ms is not None
        ]
        return "\n".join(lines)


def _threads(number: int) -> str:
    return "1 thread" if number == 1 else f"{number} threads"


def _time_line(name: str, median_ms: float, torch_ms: float) -> str:
    faster = "" if median_ms == torch_ms else f"   {torch_ms / median_ms:.2f} x as fast as torch"
    return f"  {name:<28} {median_ms:9.2f} ms{faster}"


# Files of an export that are built and compared, but not written yet; and how long a call of each takes.

TORCH = "torch"
"""Its name among the times."""


@dataclass(frozen=True)
class Candidate:
    """A file that is not written yet."""

    file: ExportedFile
    save: Callable[[], int]
    call: Callable[[], object]
    """One run of it, to be timed."""


def candidates_of(work: Work, stem: Path) -> Iterator[Candidate]:
    """Every file that was asked for; ParityError at the first that is not the network."""
    if "torchscript" in work.options.formats:
        yield _torchscript(work, stem.with_name(f"{stem.name}.torchscript.pt"))
    if "onnx" in work.options.formats:
        yield from _onnx(work, stem)


def _torchscript(work: Work, path: Path) -> Candidate:
    options = work.options
    grid = options.form != "raw"
    size_hw = (work.example.shape[2], work.example.shape[3])
    facts = facts_of(work.folded, options, size_hw, "grid" if grid else "raw")
    content = scripted(work.folded, work.example, facts, grid=grid)
    difference = compared(content, work.judged, grid=grid)
    limit = work.accepted(difference, str(path))
    module = loaded(content)
    file = ExportedFile(path=path, kind="TorchScript", num_bytes=len(content), difference=difference, limit=limit)
    return Candidate(file, lambda: save(content, path), lambda: module(work.example))


def _onnx(work: Work, stem: Path) -> Iterator[Candidate]:
    options, tail = work.options, tail_for(work.options)
    probe = onnx_forms.probe_of(work.folded, options, work.example)
    path = stem.with_name(f"{stem.name}.onnx")
    difference = onnx_forms.compared(probe, work.judged, options)
    limit = work.accepted(difference, str(path))
    kind = f"ONNX opset {onnx_model.opset_of(probe)}{', simplified' if options.simplify else ''}"
    until = f", compared up to the {PLUGIN} node" if tail.uses_plugin else ""
    file = ExportedFile(path=path, kind=kind, num_bytes=0, difference=difference, limit=limit, until=until)
    yield _onnx_candidate(work, probe, file)
    precisions: list[tuple[bool, Precision, str]] = [(options.fp16, "float16", "fp16"), (options.int8, "int8", "int8")]
    for asked, precision, ending in precisions:
        if asked:
            less = smaller(probe, precision, work.inputs, tail)
            loss = loss_of(less, probe, work.inputs, options)
            path = stem.with_name(f"{stem.name}.{ending}.onnx")
            made = ExportedFile(path=path, kind=f"{kind}, {precision}", num_bytes=0, difference=None, loss=loss)
            yield _onnx_candidate(work, less, made)


def _onnx_candidate(work: Work, probe: Model, file: ExportedFile) -> Candidate:
    tail = tail_for(work.options)
    model = onnx_forms.shipped(probe, tail)
    timed = onnx_forms.runnable(probe, tail) if tail.uses_plugin else model
    session = Session(timed, threads=torch.get_num_threads())
    images = {onnx_forms.INPUT: work.example.numpy()}
    return Candidate(file, lambda: onnx_model.save(model, file.path), lambda: session(images))


def times_of(work: Work, candidates: Sequence[Candidate], device: torch.device) -> dict[str, float]:
    """Medians by file name, and of torch itself."""
    tail = tail_for(work.options)
    form: nn.Module = RawLevels(work.folded) if work.options.form == "raw" else Visible(work.folded, tail)
    if device.type != "cpu":
        form = copy.deepcopy(form).to(device)
    example = work.example.to(device)
    calls: dict[str, Callable[[], object]] = {TORCH: lambda: form(example)}
    calls |= {candidate.file.path.name: candidate.call for candidate in candidates}
    return medians_ms(calls, device)


ENDINGS = (".torchscript.pt", ".onnx", ".pt", ".pth", ".safetensors")
"""Cut off a name before a new one is put on."""


def export(weights: str | Path, options: ExportOptions | None = None) -> ExportOutcome:
    """Write the network of a file of weights in other forms; ParityError, and no file, if one is not the same."""
    options = replace(options or ExportOptions(), weights=str(weights))
    cfg = find_file(options.cfg, flag="--cfg") if options.cfg else None
    _refuse_early(options)
    file = weights_file(weights)
    network = load_network(file, cfg=cfg).network
    return export_network(network, options, stem=stem_for(file, options.out))


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
    """Path of the files without ending: `out`, in the folder `out` under the weights' name, or beside the weights.

    Nothing is written beside weights that come with flatout: their exports go into the working directory.
    """
    if out and not Path(out).is_dir():
        return without_ending(Path(out))
    is_shipped = weights.resolve().parent == shipped_folder("weights").resolve()
    stem = without_ending(Path(weights.name) if is_shipped else weights)
    return Path(out, stem.name) if out else stem


def without_ending(path: Path) -> Path:
    """`runs/best.pt` -> `runs/best`; a name with other dots keeps them."""
    ending = next((ending for ending in ENDINGS if path.name.endswith(ending)), "")
    return path.with_name(path.name.removesuffix(ending)) if path.name != ending else path


def _refuse_early(options: ExportOptions) -> None:
    if "onnx" in options.formats:
        refuse_missing("onnx", "onnxruntime", *(["onnxslim"] if options.simplify else []))
