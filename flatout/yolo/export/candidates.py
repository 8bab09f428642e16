"""Files of an export that are built and compared, but not written yet; and how long a call of each takes."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from flatout.export import onnx_model
from flatout.export.onnx_model import Model
from flatout.export.precision import Precision
from flatout.export.session import Session
from flatout.yolo.export import onnx_forms, torchscript
from flatout.yolo.export.facts import facts_of
from flatout.yolo.export.forms import RawLevels, Visible
from flatout.yolo.export.latency import medians_ms
from flatout.yolo.export.outcome import ExportedFile
from flatout.yolo.export.smaller import loss_of, smaller
from flatout.yolo.export.tails import PLUGIN, tail_for
from flatout.yolo.export.work import Work

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
    content = torchscript.scripted(work.folded, work.example, facts, grid=grid)
    difference = torchscript.compared(content, work.judged, grid=grid)
    limit = work.accepted(difference, str(path))
    module = torchscript.loaded(content)
    file = ExportedFile(path=path, kind="TorchScript", num_bytes=len(content), difference=difference, limit=limit)
    return Candidate(file, lambda: torchscript.save(content, path), lambda: module(work.example))


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
