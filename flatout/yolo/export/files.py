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
    save_parts,
    write_card,
)
from flatout.ranks import choose_device
from flatout.safefiles import write_file
from flatout.yolo.export import onnx_forms
from flatout.yolo.export.onnx_forms import PrecisionLoss, in_precision, metadata_of, precision_loss
from flatout.yolo.export.options import ExportOptions
from flatout.yolo.export.parity import Difference, ExportContext, decoded_difference, largest, raw_difference
from flatout.yolo.export.postprocess import PLUGIN, DecodedBoxes, PortableOutputs, RawLevels, Reference, postprocess_for
from flatout.yolo.find_file import find_file, shipped_folder, weights_file
from flatout.yolo.load_network import load_network
from flatout.yolo.model.network import Network
from flatout.yolo.predict.options import tile_problems

logger = logging.getLogger(__name__)

# Timing

WARM_UP = 1
"""Untimed calls of each program."""
MIN_TURNS, MAX_TURNS = 3, 50
"""Timed calls of each program."""
BUDGET_S = 3.0
"""Seconds for all timed calls together, unless MIN_TURNS take longer."""


def medians_ms(calls: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Median time of each call in milliseconds, by name; a GPU is synchronized around each call.

    The calls alternate, so that a busy moment of the machine affects all of them.
    """
    for call in calls.values():
        for _ in range(WARM_UP):
            _seconds(call, device)
    took: dict[str, list[float]] = {name: [] for name in calls}
    began = time.perf_counter()
    for turn in range(MAX_TURNS):
        if turn >= MIN_TURNS and time.perf_counter() - began > BUDGET_S:
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


# TorchScript

FACTS_FILE = "config.txt"
"""Metadata inside the file: JSON, read by `_extra_files` of torch.jit.load."""


@torch.no_grad()
def scripted(network: Network, example: Tensor, facts: Mapping[str, str], *, grid: bool) -> bytes:
    """The content of a TorchScript file with decoded boxes (`grid`) or raw maps.

    The network is folded, in evaluation mode and on the CPU.
    """
    form: nn.Module = DecodedBoxes(network) if grid else RawLevels(network)
    with quiet_tracing():
        # Frozen, to drop what only training needs: with an auxiliary head that is a tenth of the file.
        # torch's own check of the trace is off: `compared` does that on other inputs.
        frozen = torch.jit.freeze(torch.jit.trace(form.eval(), example, strict=False, check_trace=False))
        content = io.BytesIO()
        torch.jit.save(frozen, content, _extra_files={FACTS_FILE: json.dumps(dict(facts))})
    return content.getvalue()


def loaded(content: bytes) -> Any:
    """The module in a TorchScript file, on the CPU."""
    with quiet_tracing():
        return torch.jit.load(io.BytesIO(content), map_location="cpu")


@torch.no_grad()
def compared(content: bytes, references: Iterable[Reference], *, grid: bool) -> Difference:
    """The largest difference of the file's outputs from those of the network."""
    module = loaded(content)
    return largest(_difference(module, each, grid=grid) for each in references)


def save(content: bytes, path: Path) -> int:
    """Write the file atomically; returns its size in bytes. ResourceError if the disk is full."""
    write_file(path, content)
    return len(content)


def _difference(module: Any, reference: Reference, *, grid: bool) -> Difference:
    found = module(torch.from_numpy(reference.images))
    if grid:
        return decoded_difference(found.numpy(), reference.decoded)
    return largest(
        raw_difference(level.numpy(), expected) for level, expected in zip(found, reference.raw, strict=True)
    )


# Results


@dataclass(frozen=True, kw_only=True)
class ExportedFile:
    """Path, kind, size and comparison of one file of an export; num_bytes is 0 until it is written."""

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

    def line(self) -> str:
        if self.difference is not None and self.limit is not None:
            compared = f"largest difference {self.difference.text(self.limit)}{self.until}"
        else:
            compared = self.loss.text() if self.loss else "raw maps in reduced precision are not compared"
        return f"{self.path}: {self.kind}, {self.num_bytes / 1e6:.1f} MB; {compared}"


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
    """A file that is built and compared, to be written by `save()`.

    Raw maps in reduced precision are not compared.
    """

    file: ExportedFile
    save: Callable[[], int]
    """Writes the file; returns its size in bytes."""
    call: Callable[[], object]
    """Runs it once, for timing."""


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


def _torchscript(context: ExportContext, path: Path) -> PendingFile:
    options = context.options
    grid = options.form != "raw"
    size_hw = (context.example.shape[2], context.example.shape[3])
    metadata = metadata_of(context.folded, options, size_hw, "grid" if grid else "raw")
    content = scripted(context.folded, context.example, metadata, grid=grid)
    difference = compared(content, context.references, grid=grid)
    limit = context.accepted(difference, str(path))
    module = loaded(content)
    file = ExportedFile(path=path, kind="TorchScript", num_bytes=len(content), difference=difference, limit=limit)
    return PendingFile(file, lambda: save(content, path), lambda: module(context.example))


def _onnx(context: ExportContext, stem: Path) -> Iterator[PendingFile]:
    options, postprocess = context.options, postprocess_for(context.options)
    probe = onnx_forms.probe_of(context.folded, options, context.example)
    path = stem.with_name(f"{stem.name}.onnx")
    difference = onnx_forms.compared(probe, context.references, options)
    limit = context.accepted(difference, str(path))
    kind = f"ONNX opset {onnx_model.opset_of(probe)}{', simplified' if options.simplify else ''}"
    until = f", compared up to the {PLUGIN} node" if postprocess.uses_plugin else ""
    file = ExportedFile(path=path, kind=kind, num_bytes=0, difference=difference, limit=limit, until=until)
    yield _pending_onnx(context, probe, file)
    precisions: list[tuple[bool, Precision, str]] = [(options.fp16, "float16", "fp16"), (options.int8, "int8", "int8")]
    for requested, precision, ending in precisions:
        if requested:
            reduced = in_precision(probe, precision, context.inputs, postprocess)
            loss = precision_loss(reduced, probe, context.inputs, options)
            path = stem.with_name(f"{stem.name}.{ending}.onnx")
            made = ExportedFile(path=path, kind=f"{kind}, {precision}", num_bytes=0, difference=None, loss=loss)
            yield _pending_onnx(context, reduced, made)


def _openvino(context: ExportContext, stem: Path) -> PendingFile:
    options = _without_nms(context.options)
    model = onnx_forms.final_model(
        onnx_forms.probe_of(context.folded, options, context.example), postprocess_for(options)
    )
    runtime = OpenVino(model, threads=torch.get_num_threads())
    return _pending_parts(context, options, runtime, stem, "OpenVINO", [each.name for each in model.graph.output])


def _ncnn(context: ExportContext, stem: Path) -> PendingFile:
    options = replace(_without_nms(context.options), dynamic=False, dynamic_batch=False)
    form: nn.Module = RawLevels(context.folded) if options.form == "raw" else DecodedBoxes(context.folded)
    names = onnx_forms.output_names(form.eval(), options, context.example)
    runtime = Ncnn(form, context.example[:1], input_name=onnx_forms.INPUT, output_names=names)
    return _pending_parts(context, options, runtime, stem, "ncnn", names)


def _pending_parts(
    context: ExportContext,
    options: ExportOptions,
    runtime: OpenVino | Ncnn,
    stem: Path,
    kind: str,
    names: Sequence[str],
) -> PendingFile:
    """An OpenVINO or ncnn model, to be saved in a folder as its two files and metadata; `names` are its outputs."""
    folder = stem.with_name(f"{stem.name}_{kind.lower()}")
    size_hw = (context.example.shape[2], context.example.shape[3])
    references = [each for each in context.references if kind != "ncnn" or each.images.shape[2:] == size_hw]
    difference = onnx_forms.compared_outputs(runtime, names, references, options)
    limit = context.accepted(difference, str(folder))
    metadata = metadata_of(context.folded, options, size_hw, options.form)
    parts = {**runtime.files(), ".json": json.dumps(metadata, indent=1).encode()}
    file = ExportedFile(path=folder, kind=kind, num_bytes=0, difference=difference, limit=limit)
    images = {onnx_forms.INPUT: context.example.numpy()}
    return PendingFile(file, lambda: save_parts(folder, stem.name, parts), lambda: runtime(images))


def _without_nms(options: ExportOptions) -> ExportOptions:
    """The options for a format without NMS inside: decoded boxes instead."""
    if options.form in ("raw", "grid"):
        return options
    return replace(options, grid=True, end2end=False, include_nms=False, max_wh=None)


def _pending_onnx(context: ExportContext, probe: Model, file: ExportedFile) -> PendingFile:
    postprocess = postprocess_for(context.options)
    model = onnx_forms.final_model(probe, postprocess)
    timed = onnx_forms.without_plugin(probe, postprocess) if postprocess.uses_plugin else model
    session = Session(timed, threads=torch.get_num_threads())
    images = {onnx_forms.INPUT: context.example.numpy()}
    return PendingFile(file, lambda: onnx_model.save(model, file.path), lambda: session(images))


def times_of(context: ExportContext, pending: Sequence[PendingFile], device: torch.device) -> dict[str, float]:
    """Median times by file name, and that of torch itself."""
    postprocess = postprocess_for(context.options)
    form: nn.Module = (
        RawLevels(context.folded) if context.options.form == "raw" else PortableOutputs(context.folded, postprocess)
    )
    if device.type != "cpu":
        form = copy.deepcopy(form).to(device)
    example = context.example.to(device)
    calls: dict[str, Callable[[], object]] = {TORCH: lambda: form(example)}
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
    files = [replace(each.file, num_bytes=each.save()) for each in pending]
    times = times_of(context, pending, device)
    timed = tuple(replace(file, median_ms=times.get(file.path.name)) for file in files)
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
    size_hw = (context.example.shape[2], context.example.shape[3])
    options = context.options
    facts = metadata_of(context.folded, options, size_hw, options.form)
    names = json.loads(facts["names"])
    nms = [f"NMS is inside the ONNX file: {facts['nms']}"] if "nms" in facts else []
    compared_on = ", ".join(Path(each).name for each in (options.data, *options.images) if each)
    rule = FREE_SHAPE_RULE if options.free_size else SHAPE_RULE
    rules = [rule.format(height=size_hw[0], width=size_hw[1], stride=facts["stride"])]
    if options.tiles is not None:
        rules.append(TILE_RULE.format(tile=options.tiles, overlap=options.tile_overlap))
    return write_card(
        stem,
        about=f"{counted(len(names), 'class')}: {', '.join(map(str, names))}.",
        inputs={title: facts[key] for key, title in CARD_TITLES.items()},
        input_rule="\n\n".join(rules),
        output="\n\n".join([f"{facts['output']}.", *nms]),
        files=[CardFile(file.path, file.line().partition("; ")[2], _use(file.path, options)) for file in files],
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
