"""An export from beginning to end: files are built, compared, written, timed and reported.

    export_network --> ExportContext --pending_files--> compared, in memory --> written --> timed --> ExportOutcome

Every file is built and compared before the first is written, so a failed export changes no file.
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

from flatout.errors import ConfigError, counted
from flatout.export import (
    TENSORRT_COMMAND,
    CardFile,
    Model,
    Ncnn,
    OpenVino,
    Precision,
    Session,
    onnx_model,
    openvino_use,
    quiet_tracing,
    refuse_missing,
    write_card,
)
from flatout.ranks import choose_device
from flatout.safefiles import write_file
from flatout.yolo.export import onnx_forms
from flatout.yolo.export.onnx_forms import PrecisionLoss, in_precision, metadata_of, precision_loss
from flatout.yolo.export.options import ExportOptions
from flatout.yolo.export.parity import Difference, ExportContext, difference_of, largest
from flatout.yolo.export.postprocess import PLUGIN, Reference, module_for, postprocess_for, predict
from flatout.yolo.find_file import find_file, shipped_folder, weights_file
from flatout.yolo.load_network import load_network
from flatout.yolo.model.network import Network
from flatout.yolo.predict.options import tile_problems

logger = logging.getLogger(__name__)

Contents = Mapping[Path, bytes]
"""What to write: one file, or the files of a folder."""
Call = Callable[[], object]
"""Runs a program once."""

# Timing

MIN_TURNS, MAX_TURNS = 3, 50
"""Timed calls of each program."""
BUDGET_S = 3.0
"""Seconds for all timed calls together, unless MIN_TURNS take longer."""


def medians_ms(calls: Mapping[str, Call], device: torch.device) -> dict[str, float]:
    """Median time of each call in milliseconds, by name; a GPU is synchronized around each call.

    The calls alternate, so that a busy moment of the machine affects all of them. The first one of each is not timed.
    """
    for call in calls.values():
        call()
    took: dict[str, list[float]] = {name: [] for name in calls}
    began = time.perf_counter()
    for turn in range(MAX_TURNS):
        if turn >= MIN_TURNS and time.perf_counter() - began > BUDGET_S:
            break
        for name, call in calls.items():
            took[name].append(_seconds(call, device))
    return {name: 1e3 * median(durations) for name, durations in took.items()}


def _seconds(call: Call, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


# TorchScript

FACTS_FILE = "config.txt"
"""Metadata inside the file: JSON, read by `_extra_files` of torch.jit.load."""


@torch.no_grad()
def scripted(form: nn.Module, example: Tensor, facts: Mapping[str, str]) -> bytes:
    """The content of a TorchScript file; the module is in evaluation mode and on the CPU."""
    with quiet_tracing():
        # Frozen, to drop what only training needs: with an auxiliary head that is a tenth of the file.
        # torch's own check of the trace is off: `compared` does that on other inputs.
        frozen = torch.jit.freeze(torch.jit.trace(form, example, strict=False, check_trace=False))
        content = io.BytesIO()
        torch.jit.save(frozen, content, _extra_files={FACTS_FILE: json.dumps(dict(facts))})
    return content.getvalue()


@torch.no_grad()
def compared(module: Any, references: Iterable[Reference], *, raw: bool) -> Difference:
    """The largest difference of the outputs of a TorchScript module from those of the network."""
    found = ((module(torch.from_numpy(each.images)), each) for each in references)
    return largest(
        difference_of([level.numpy() for level in (output if raw else [output])], each, raw=raw)
        for output, each in found
    )


# Results


@dataclass(frozen=True, kw_only=True)
class ExportedFile:
    """Path, kind, size and comparison of one file of an export, or of a folder of files that belong together."""

    path: Path
    kind: str
    """Such as `ONNX opset 12, simplified`."""
    num_bytes: int
    difference: Difference | None
    """Difference from the network; None for a file in reduced precision."""
    limit: Difference | None = None
    """The accepted difference."""
    loss: PrecisionLoss | None = None
    """Loss of a file in reduced precision; None if it outputs raw maps."""
    until: str = ""
    """Where the comparison ends, if not at the end of the graph."""
    median_ms: float | None = None
    """Median time of a call."""

    @property
    def comparison(self) -> str:
        if self.difference is not None and self.limit is not None:
            return f"largest difference {self.difference.text(self.limit)}{self.until}"
        return self.loss.text() if self.loss else "raw maps in reduced precision are not compared"

    def line(self) -> str:
        return f"{self.path}: {self.kind}, {self.num_bytes / 1e6:.1f} MB; {self.comparison}"


@dataclass(frozen=True, kw_only=True)
class ExportOutcome:
    """All files of an export, with their comparison and times."""

    files: tuple[ExportedFile, ...]
    card: Path
    """The model card that was written beside them."""
    images: str
    """The images they were compared on, such as `4 generated images`."""
    input_shapes: tuple[tuple[int, ...], ...]
    """Distinct input shapes of the comparison."""
    timed_shape: tuple[int, ...]
    """Input shape of the timed calls."""
    torch_ms: float
    """Median time of a call of the folded network on `device`."""
    device: str
    threads: int

    def __str__(self) -> str:
        return self.text()

    def text(self) -> str:
        """The lines that the command prints."""
        shapes = " and ".join(" x ".join(map(str, shape)) for shape in self.input_shapes)
        timed = " x ".join(map(str, self.timed_shape))
        lines = [f"compared with the network on {self.images}, input {shapes}"]
        lines += [file.line() for file in self.files]
        lines += [f"median time per call, input {timed}, {counted(self.threads, 'CPU thread')}:"]
        lines.append(_time_line(f"torch on {self.device}, folded", self.torch_ms, self.torch_ms))
        lines += [
            _time_line(file.path.name, file.median_ms, self.torch_ms)
            for file in self.files
            if file.median_ms is not None
        ]
        lines.append(f"model card: {self.card}")
        return "\n".join(lines)


def _time_line(name: str, median_ms: float, torch_ms: float) -> str:
    faster = "" if median_ms == torch_ms else f"   {torch_ms / median_ms:.2f} times as fast as torch"
    return f"  {name:<28} {median_ms:9.2f} ms{faster}"


# Files that are built and compared, but not yet written

TORCH = "torch"
"""Key of torch's own time."""


@dataclass(frozen=True)
class PendingFile:
    """A file that is built and compared, to be written by `save()`."""

    file: ExportedFile
    contents: Contents
    call: Call

    def save(self) -> None:
        """Write everything, each file completely or not at all; ResourceError if the disk is full."""
        for path, content in self.contents.items():
            path.parent.mkdir(exist_ok=True)
            write_file(path, content)


def pending_files(context: ExportContext, stem: Path) -> Iterator[PendingFile]:
    """Every requested file; ParityError at the first that differs from the network."""
    if "torchscript" in context.options.formats:
        yield _torchscript(context, stem.with_name(f"{stem.name}.torchscript.pt"))
    if "onnx" in context.options.formats:
        yield from _onnx(context, stem)
    if "openvino" in context.options.formats:
        yield _openvino(context, stem)
    if "ncnn" in context.options.formats:
        yield _ncnn(context, stem)


def _pending(
    context: ExportContext, path: Path, kind: str, contents: Contents, call: Call, difference: Difference, until: str
) -> PendingFile:
    """A file that outputs what the network does; ParityError if it differs by more than is accepted."""
    num_bytes, limit = sum(map(len, contents.values())), context.accepted(difference, str(path))
    file = ExportedFile(path=path, kind=kind, num_bytes=num_bytes, difference=difference, limit=limit, until=until)
    return PendingFile(file, contents, call)


def _torchscript(context: ExportContext, path: Path) -> PendingFile:
    options = _without_nms(context.options)
    metadata = metadata_of(context.folded, context.options, context.hw, options.form)
    content = scripted(module_for(context.folded, options), context.example, metadata)
    with quiet_tracing():
        module = torch.jit.load(io.BytesIO(content), map_location="cpu")
    difference = compared(module, context.references, raw=options.form == "raw")
    return _pending(context, path, "TorchScript", {path: content}, lambda: module(context.example), difference, "")


def _onnx(context: ExportContext, stem: Path) -> Iterator[PendingFile]:
    options, postprocess = context.options, postprocess_for(context.options)
    probe = onnx_forms.probe_of(context.folded, options, context.example)
    path = stem.with_name(f"{stem.name}.onnx")
    session = Session(onnx_forms.without_plugin(probe, postprocess))
    difference = onnx_forms.compared(session, context.references, options)
    kind = f"ONNX opset {onnx_model.opset_of(probe)}{', simplified' if options.simplify else ''}"
    until = f", compared up to the {PLUGIN} node" if postprocess.uses_plugin else ""
    content, call = _onnx_content(context, probe)
    yield _pending(context, path, kind, {path: content}, call, difference, until)
    precisions: list[tuple[bool, Precision, str]] = [(options.fp16, "float16", "fp16"), (options.int8, "int8", "int8")]
    for requested, precision, ending in precisions:
        if requested:
            reduced = in_precision(probe, precision, context.inputs, postprocess)
            loss = precision_loss(reduced, probe, context.inputs, options)
            path = stem.with_name(f"{stem.name}.{ending}.onnx")
            content, call = _onnx_content(context, reduced)
            kind_of_this = f"{kind}, {precision}"
            made = ExportedFile(path=path, kind=kind_of_this, num_bytes=len(content), difference=None, loss=loss)
            yield PendingFile(made, {path: content}, call)


def _onnx_content(context: ExportContext, probe: Model) -> tuple[bytes, Call]:
    """The content of the file, and a call of it for timing, up to the plugin if there is one."""
    postprocess = postprocess_for(context.options)
    model = onnx_forms.final_model(probe, postprocess)
    timed = onnx_forms.without_plugin(probe, postprocess) if postprocess.uses_plugin else model
    session = Session(timed, threads=torch.get_num_threads())
    images = {onnx_forms.INPUT: context.example.numpy()}
    return model.SerializeToString(), lambda: session(images)


def _openvino(context: ExportContext, stem: Path) -> PendingFile:
    options = _without_nms(context.options)
    probe = onnx_forms.probe_of(context.folded, options, context.example)
    model = onnx_forms.final_model(probe, postprocess_for(options))
    return _pending_folder(context, options, OpenVino(model, threads=torch.get_num_threads()), stem, "OpenVINO")


def _ncnn(context: ExportContext, stem: Path) -> PendingFile:
    options = replace(_without_nms(context.options), dynamic=False, dynamic_batch=False)
    form = module_for(context.folded, options)
    names = list(onnx_forms.output_shapes(form, options, context.example))
    runtime = Ncnn(form, context.example[:1], input_name=onnx_forms.INPUT, output_names=names)
    return _pending_folder(context, options, runtime, stem, "ncnn")


def _pending_folder(
    context: ExportContext, options: ExportOptions, runtime: OpenVino | Ncnn, stem: Path, kind: str
) -> PendingFile:
    """An OpenVINO or ncnn model, to be saved in a folder as its two files and metadata."""
    folder = stem.with_name(f"{stem.name}_{kind.lower()}")
    references = [each for each in context.references if kind != "ncnn" or each.images.shape[2:] == context.hw]
    difference = onnx_forms.compared(runtime, references, options)
    metadata = metadata_of(context.folded, options, context.hw, options.form)
    parts = {**runtime.files(), ".json": json.dumps(metadata, indent=1).encode()}
    contents = {folder / f"{stem.name}{ending}": content for ending, content in parts.items()}
    images = {onnx_forms.INPUT: context.example.numpy()}
    return _pending(context, folder, kind, contents, lambda: runtime(images), difference, "")


def _without_nms(options: ExportOptions) -> ExportOptions:
    """The options for a format without NMS inside: decoded boxes instead."""
    if options.form in ("raw", "grid"):
        return options
    return replace(options, grid=True, end2end=False, include_nms=False, max_wh=None)


def times_of(context: ExportContext, pending: Sequence[PendingFile], device: torch.device) -> dict[str, float]:
    """Median times by file name, and that of torch itself, with what a runtime without plugins can compute."""
    postprocess, example = postprocess_for(context.options), context.example.to(device)
    network = context.folded if device.type == "cpu" else copy.deepcopy(context.folded).to(device)
    calls: dict[str, Call] = {TORCH: lambda: postprocess.portable(predict(network, example).decoded)}
    calls |= {each.file.path.name: each.call for each in pending}
    return medians_ms(calls, device)


# The export

SHAPE_RULE = (
    "Letterbox every image to {height} x {width} (height x width): scale it to fit, keep its aspect ratio, centre it, "
    "and fill the rest with grey (114). `flatout yolo detect` pads an image only to the next multiple of {stride}, so "
    "it sees less grey than this file, and its boxes may differ slightly."
)
FREE_SHAPE_RULE = (
    "Letterbox every image to any multiple of {stride} in height and width: scale it to fit, keep its aspect ratio, "
    "centre it, and fill the rest with grey (114). `flatout yolo detect` uses the smallest such rectangle."
)
TILE_RULE = (
    "Large images are cut into tiles of {tile} px that share at least {overlap:g} of their side with each neighbour; "
    "every tile is an image for this network. `flatout.yolo.predict_with` cuts images, runs an exported network on the "
    "tiles, and merges their boxes into those of the whole image."
)
CARD_TITLES = {
    "input_layout": "layout",
    "input_colors": "colours",
    "input_range": "values",
    "input_size_hw": "height, width",
    "input_batch": "batch",
}
"""Entries of the metadata that describe the input, and what the card calls them."""
ENDINGS = (".torchscript.pt", ".onnx", ".pt", ".pth", ".safetensors")
"""Endings that are removed from a name before a new one is added."""


def export(weights: str | Path, options: ExportOptions | None = None) -> ExportOutcome:
    """Export the network of a weights file; ParityError, and no file is written, if one differs from the network."""
    options = replace(options or ExportOptions(), weights=str(weights))
    cfg = find_file(options.cfg, flag="--cfg") if options.cfg else None
    _refuse_early(options)
    file = weights_file(weights)
    loaded = load_network(file, cfg=cfg)
    if options.tiles is None and loaded.weights.tiles is not None:
        options = _with_tiles(options, loaded.weights.tiles, file)
    return export_network(loaded.network, options, stem=stem_for(file, options.out))


def _with_tiles(options: ExportOptions, trained: Mapping[str, Any], file: Path) -> ExportOptions:
    """The options with the tiles that the weights were trained on."""
    tile, overlap = trained.get("tile"), trained.get("overlap")
    if type(tile) is not int or type(overlap) is not float or list(tile_problems(tile, overlap)):
        logger.warning("%s: what it says about tiles is not valid, and is left out.", file)
        return options
    return replace(options, tiles=tile, tile_overlap=overlap)


@torch.no_grad()
def export_network(network: Network, options: ExportOptions, *, stem: Path) -> ExportOutcome:
    """Like `export`, for a network in memory, which is not changed; `stem` is the path of the files without ending."""
    if not isinstance(network, Network):
        raise ConfigError("A file holds one network, so an ensemble cannot be exported: export each of its networks.")
    _refuse_early(options)
    if not stem.parent.is_dir():
        raise ConfigError(f"{stem.parent}: no such folder. Create it first, or choose another one with --out.")
    device = choose_device(options.device)
    for sentence in options.without_effect():
        logger.warning("%s", sentence)
    context = ExportContext.of(network, options)
    pending = list(pending_files(context, stem))
    for each in pending:
        each.save()
    times = times_of(context, pending, device)
    timed = tuple(replace(each.file, median_ms=times.get(each.file.path.name)) for each in pending)
    card = _write_card(context, timed, stem)
    return ExportOutcome(
        files=timed,
        card=card,
        images=context.images.origin,
        input_shapes=tuple(dict.fromkeys(each.shape for each in context.inputs)),
        timed_shape=tuple(context.example.shape),
        torch_ms=times[TORCH],
        device=str(device),
        threads=torch.get_num_threads(),
    )


def _write_card(context: ExportContext, files: Sequence[ExportedFile], stem: Path) -> Path:
    options, (height, width) = context.options, context.hw
    facts = metadata_of(context.folded, options, context.hw, options.form)
    names = json.loads(facts["names"])
    nms = [f"NMS is inside the ONNX file: {facts['nms']}"] if "nms" in facts else []
    compared_on = ", ".join(Path(each).name for each in (options.data, *options.images) if each)
    rule = FREE_SHAPE_RULE if options.free_size else SHAPE_RULE
    rules = [rule.format(height=height, width=width, stride=facts["stride"])]
    if options.tiles is not None:
        rules.append(TILE_RULE.format(tile=options.tiles, overlap=options.tile_overlap))
    return write_card(
        stem,
        about=f"{counted(len(names), 'class')}: {', '.join(map(str, names))}.",
        inputs={title: facts[key] for key, title in CARD_TITLES.items()},
        input_rule="\n\n".join(rules),
        output="\n\n".join([f"{facts['output']}.", *nms]),
        files=[CardFile(file.path, file.comparison, _use(file.path, options)) for file in files],
        compared_on=f"{counted(len(context.images.images), 'image')} of {compared_on}"
        if compared_on
        else context.images.origin,
    )


def _use(path: Path, options: ExportOptions) -> str:
    """How to open an exported file, for the card."""
    has_nms = options.form not in ("raw", "grid")
    boxes = " It outputs decoded boxes, as of `--grid`, without NMS." if has_nms else ""
    if path.name.endswith(".torchscript.pt"):
        return f'`torch.jit.load("{path.name}")`.{boxes}'
    if path.name.endswith("_openvino"):
        return openvino_use(f"{path.name}/{path.name.removesuffix('_openvino')}.xml") + boxes
    if path.name.endswith("_ncnn"):
        return f"`ncnn.Net()`; the input is the blob `in0`, without a batch, the outputs are `out0`, `out1`, ...{boxes}"
    if postprocess_for(options).uses_plugin:
        command = TENSORRT_COMMAND.format(onnx=path.name, engine=path.with_suffix(".engine").name)
        return (
            f"`{command}` on the machine that will run it (not tested by flatout). Nothing but TensorRT has this NMS."
        )
    use = f'`onnxruntime.InferenceSession("{path.name}")`, input `{onnx_forms.INPUT}`.'
    if has_nms:
        return (
            f"{use} OpenCV 4's dnn cannot read it, because it has no layer for NMS: export with `--grid` alone for it."
        )
    return f"{use} OpenCV 4's dnn cannot read it, because it needs fixed sizes." if options.free_size else use


def stem_for(weights: Path, out: str) -> Path:
    """Path of the files without ending: `out`; the weights' name in it if `out` is a folder; else beside the weights.

    Exports of weights that come with flatout go into the working directory, not beside the weights.
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
    if "openvino" in options.formats:
        refuse_missing("onnx", "openvino", *(["onnxslim"] if options.simplify else []))
    if "ncnn" in options.formats:
        refuse_missing("ncnn", "pnnx")
