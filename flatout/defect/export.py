"""Export of a network for whole images as an ONNX file that includes scaling, patches, probabilities and stitching.

    input [B, 3, H, W] float32, 0..255 -> output [B, 3, H, W]: probability in plane 0, zeros in planes 1 and 2

The output has three planes because consumers of such files expect them. The input range is stated in the metadata, so
that the input is not scaled twice.

Dimension key:  B images   C planes   H W image   T tiles   P patch side
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from flatout.defect.compare.align import AlignConfig
from flatout.defect.data.find import ImgFormat, list_images
from flatout.defect.data.items import MAX_GREY, PLANES, read_canonical
from flatout.defect.data.pairs import PairReader, holds_pairs, list_pair_images
from flatout.defect.model import DefectNet
from flatout.defect.options import PATCH_OF_TYPE
from flatout.defect.patches import Grid
from flatout.defect.weights import load_network
from flatout.errors import ConfigError, DataError, ParityError, ResourceError
from flatout.export import (
    CardFile,
    Model,
    OpenVino,
    Precision,
    Run,
    Session,
    in_float16,
    in_int8,
    is_installed,
    last_convolutions,
    openvino_use,
    refuse_missing,
    require_package,
    save,
    save_parts,
    set_metadata,
    traced,
    write_card,
)
from flatout.feed import DecodeError

logger = logging.getLogger(__name__)

OPSET = 17
TOLERANCE = 1e-4
INPUT_RANGE = "0..255"
MAX_CALIBRATION_IMAGES = 32
"""Maximum number of images from which the value ranges of int8 are taken."""


@dataclass(frozen=True)
class Exported:
    """The exported files, and how much they differ from the network."""

    path: Path
    largest_difference: float | None
    """Largest difference of probabilities, computed by ONNX Runtime; None if that is not installed."""
    smaller: Path | None = None
    """The additional file of reduced precision, if one was requested."""
    openvino: Path | None = None
    """The folder with the OpenVINO model, if one was requested."""
    openvino_difference: float | None = None
    """Largest difference of its probabilities, computed by OpenVINO."""
    card: Path | None = None
    """The model card that was written beside them."""


class WholeImage(nn.Module):
    """The network for whole images: all tiles of all images are processed as one batch."""

    def __init__(self, network: DefectNet, grid: Grid) -> None:
        super().__init__()
        self.network = network
        self._grid = grid

    def forward(self, x_BCHW: Tensor) -> Tensor:
        grid = self._grid
        height, width = grid.patch_hw
        scaled = x_BCHW / MAX_GREY
        tiles = [scaled[:, :, y : y + height, x : x + width] for y in grid.ys for x in grid.xs]
        # [B, T, ...] keeps the tiles of an image together, for any B.
        stacked = torch.stack(tiles, 1)
        logits = self.network(stacked.flatten(0, 1))
        probability_BTPP = torch.softmax(logits, 1)[:, 1].unflatten(0, (-1, grid.per_image))
        stitched = self._stitched(probability_BTPP)[:, None]
        # Not zeros_like: the exporter would store zeros for the traced batch size, and no other batch would fit.
        zeros = stitched * 0
        return torch.cat((stitched, zeros, zeros), 1)

    def _stitched(self, probability_BTPP: Tensor) -> Tensor:
        grid = self._grid
        rows = []
        for row, y in enumerate(grid.ys):
            own_y = slice(grid.y_cuts[row] - y, grid.y_cuts[row + 1] - y)
            parts = [
                probability_BTPP[
                    :, row * len(grid.xs) + column, own_y, grid.x_cuts[column] - x : grid.x_cuts[column + 1] - x
                ]
                for column, x in enumerate(grid.xs)
            ]
            rows.append(torch.cat(parts, 2))
        return torch.cat(rows, 1)


def export_file(
    model_path: Path,
    size_hw: tuple[int, int],
    *,
    patch_size: int | None = None,
    output: str | Path | None = None,
    precision: Precision = "float32",
    calibrate: str | Path | None = None,
    img_format: ImgFormat = "tiff",
    openvino: bool = False,
) -> Exported:
    """Export a weights file to `output`, by default beside it; float16 and int8 also write a smaller file.

    `openvino`: also write the model as `<stem>_openvino/<stem>.xml` and `.bin`, in float32.
    """
    if precision == "int8" and calibrate is None:
        raise ConfigError("--precision int8 needs --calibrate FOLDER: images from which value ranges are taken.")
    if openvino:
        refuse_missing("onnx", "openvino")
    try:
        images = [] if calibrate is None else _calibration_images(Path(calibrate), img_format)
    except (OSError, DecodeError) as error:
        raise DataError(str(error)) from None
    network, weights = load_network(model_path)
    grid = Grid.over(size_hw, patch_size or weights.patch or PATCH_OF_TYPE["strip"])
    facts = _facts(network, grid, weights.threshold)
    done = export_onnx(network, grid, Path(output or model_path.with_suffix(".onnx")), facts=facts)
    if openvino:
        folder, difference = export_openvino(network, grid, done.path, facts=facts)
        done = replace(done, openvino=folder, openvino_difference=difference)
    if precision != "float32":
        smaller = done.path.with_suffix(f".{precision}.onnx")
        reduce_precision(done.path, smaller, precision, images)
        done = replace(done, smaller=smaller)
    return replace(done, card=_write_card(done, facts, grid))


def _write_card(done: Exported, facts: Mapping[str, str], grid: Grid) -> Path:
    def compared(difference: float | None) -> str:
        return "not compared" if difference is None else f"largest difference {difference:.1e} (limit {TOLERANCE:g})"

    run = 'onnxruntime.InferenceSession("{name}")'
    files = [CardFile(done.path, compared(done.largest_difference), f"`{run.format(name=done.path.name)}`.")]
    if done.openvino is not None:
        use = openvino_use(f"{done.openvino.name}/{done.path.stem}.xml")
        files.append(CardFile(done.openvino, compared(done.openvino_difference), use))
    if done.smaller is not None:
        use = f"`{run.format(name=done.smaller.name)}`. Of reduced precision: measure its results before you use it."
        files.append(CardFile(done.smaller, "reduced precision, not compared", use))
    return write_card(
        done.path.with_suffix(""),
        about=f"Defects between dies: network {facts['network']}.",
        inputs={
            "layout": "NCHW, `input`",
            "planes": facts["input_planes"],
            "values": f"{facts['input_range']}, float32",
            "height, width": f"{grid.shape_hw[0]},{grid.shape_hw[1]}",
            "batch": "any",
        },
        input_rule="Give images of exactly this size, and do not scale their values: that is part of the file. "
        "References must be aligned to target; that is not part of it (`flatout.defect.compare.align.align` does it).",
        output=f"`output`, of the same size: {facts['output_planes']}. "
        + (
            f"A pixel at or above {facts['threshold']} counts as defect."
            if "threshold" in facts
            else "The weights hold no threshold; choose one with `flatout defect calibrate`."
        ),
        files=files,
        compared_on="noise",
    )


def _calibration_images(path: Path, img_format: ImgFormat) -> list[np.ndarray]:
    """Images of three planes from a folder, or pairs whose templates are aligned, as the network will see them."""
    if holds_pairs(path):
        pairs = list_pair_images(path)[:MAX_CALIBRATION_IMAGES]
        read_pair = PairReader(pairs, AlignConfig())
        return [np.asarray(read_pair(pair.path), np.float32) for pair in pairs]
    return [read_canonical(file) for file in list_images(path, img_format)[:MAX_CALIBRATION_IMAGES]]


def export_onnx(
    network: DefectNet, grid: Grid, path: Path, *, opset: int = OPSET, facts: Mapping[str, str] | None = None
) -> Exported:
    """Write the network for images of the grid's size; if ONNX Runtime is installed, its results are compared first.

    `facts`: metadata of the file; None: all but the threshold, which is not part of a network.
    """
    refuse_missing("onnx")
    whole = WholeImage(network.eval().cpu().float(), grid).eval()
    model = traced(
        whole,
        torch.from_numpy(_example(grid)),
        input_name="input",
        output_names=["output"],
        free_axes={"input": {0: "batch"}, "output": {0: "batch"}},
        opset=opset,
    )
    set_metadata(model, dict(facts or _facts(network, grid)))
    difference = _difference(whole, model, path, grid)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"{path}: cannot be written: {error.strerror}. Choose another folder.") from None
    save(model, path)
    return Exported(path, difference)


def export_openvino(
    network: DefectNet, grid: Grid, path: Path, *, facts: Mapping[str, str] | None = None
) -> tuple[Path, float]:
    """Convert a file that `export_onnx` wrote; returns the folder beside it, and the difference from the network."""
    runtime = OpenVino(require_package("onnx").load(str(path)))
    folder = path.with_name(f"{path.stem}_openvino")
    difference = _compared(WholeImage(network.eval().cpu().float(), grid).eval(), runtime, folder, grid)
    metadata = json.dumps(dict(facts or _facts(network, grid)), indent=1).encode()
    save_parts(folder, path.stem, {**runtime.files(), ".json": metadata})
    return folder, difference


def reduce_precision(path: Path, out: Path, precision: Precision, images: Sequence[np.ndarray]) -> None:
    """Write a smaller version of a file that `export_onnx` wrote. Its accuracy is not checked: measure it.

    float16: weights and activations; input and output stay float32. int8: convolutions, with ranges taken from
    `images` [3, H, W] in 0..255; the first and the last convolution are kept, because their errors directly affect the
    heat map.
    """
    model = require_package("onnx").load(str(path))
    if precision == "float16":
        save(in_float16(model), out)
    elif precision == "int8":
        whole = (image[None] for image in images)
        save(in_int8(model, whole, input_name="input", kept=last_convolutions(model)), out)
    else:
        raise ConfigError(f"{path}: already has the precision {precision}. Use float16 or int8.")


def _difference(whole: WholeImage, model: Model, path: Path, grid: Grid) -> float | None:
    """Largest difference of the exported `model` from the network `whole`, on two images; ParityError if too large.

    None, with a warning, if onnxruntime is not installed.
    """
    if not is_installed("onnxruntime"):
        logger.warning(
            "%s was not verified, because onnxruntime is not installed: pip install onnxruntime, and export again.",
            path,
        )
        return None
    return _compared(whole, Session(model), path, grid)


def _compared(whole: WholeImage, run: Run, path: Path, grid: Grid) -> float:
    """Largest difference of a loaded model from the network; ParityError that names `path` if above the tolerance."""
    images = np.concatenate((_example(grid), 255 - _example(grid)))
    found = run({"input": images})["output"]
    with torch.inference_mode():
        expected = whole(torch.from_numpy(images)).numpy()
    difference = float(np.abs(found - expected).max())
    if not difference <= TOLERANCE:
        raise ParityError(
            f"{path}: the exported model differs from the network by {difference:.1e}, more than {TOLERANCE:g}, so "
            "nothing was written. Try another opset, and please report it."
        )
    return difference


def _facts(network: DefectNet, grid: Grid, threshold: float | None = None) -> dict[str, str]:
    """What a consumer of the model must know; `threshold` is that of the weights, None if they have none."""
    facts = {
        "input_range": INPUT_RANGE,
        "input_planes": "target, ref1, ref2",
        "output_planes": "probability of a defect, 0, 0",
        "network": network.version,
        "patches": f"{len(grid.ys)} x {len(grid.xs)} of {grid.patch_hw[0]} px, stitched by owner",
    }
    return facts if threshold is None else facts | {"threshold": f"{threshold:.6g}"}


def _example(grid: Grid) -> np.ndarray:
    """An image of uniform noise in 0..255, float32 [1, C, H, W]."""
    return np.random.default_rng(0).uniform(0, MAX_GREY, (1, PLANES, *grid.shape_hw)).astype(np.float32)
