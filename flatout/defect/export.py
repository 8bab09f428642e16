"""Export of a network for whole images as an ONNX file that includes scaling, patches, probabilities and stitching.

    input [B, 3, H, W] float32, 0..255 -> output [B, 3, H, W]: probability in plane 0, zeros in planes 1 and 2

The output has three planes because consumers of such files expect them. The input range is stated in the metadata, so
that the input is not scaled twice.

Dimension key:  B images   C planes   H W image   T tiles   P patch side
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from flatout.errors import ConfigError, DataError
from flatout.export import (
    ComparedModel,
    Exported,
    Precision,
    in_float16,
    in_int8,
    last_convolutions,
    refuse_missing,
    require_package,
    save,
    write_card,
)
from flatout.feed import DecodeError

INPUT_RANGE = "0..255"
MAX_CALIBRATION_IMAGES = 32
"""Maximum number of images from which the value ranges of int8 are taken."""


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
        # The softmax of two classes; as a softmax it takes ONNX Runtime a sixth of the time of a narrow network.
        probability = torch.sigmoid(logits[:, 1] - logits[:, 0])
        probability_BTPP = probability.unflatten(0, (-1, grid.per_image))
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
        images = [] if calibrate is None else _calibration_images(Path(calibrate), img_format, size_hw)
    except (OSError, DecodeError) as error:
        raise DataError(str(error)) from None
    network, weights = load_network(model_path)
    grid = Grid.over(size_hw, patch_size or weights.patch or PATCH_OF_TYPE["strip"])
    model = model_for(network, grid, weights.threshold)
    done = model.write_onnx(Path(output or model_path.with_suffix(".onnx")))
    if openvino:
        done = model.write_openvino(done)
    if precision != "float32":
        smaller = done.path.with_suffix(f".{precision}.onnx")
        reduce_precision(done.path, smaller, precision, images)
        done = replace(done, smaller=smaller)
    return replace(done, card=_write_card(done, model.facts, grid))


def _write_card(done: Exported, facts: Mapping[str, str], grid: Grid) -> Path:
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
        files=list(done.card_files()),
        compared_on="noise",
    )


def _calibration_images(path: Path, img_format: ImgFormat, size_hw: tuple[int, int]) -> list[np.ndarray]:
    """Images of three planes from a folder, or pairs whose templates are aligned, as the network will see them.

    Raises DataError that names the first whose size is not that of the exported network.
    """
    if holds_pairs(path):
        pairs = list_pair_images(path)[:MAX_CALIBRATION_IMAGES]
        files = [pair.path for pair in pairs]
        read: Callable[[Path], np.ndarray] = PairReader(pairs, AlignConfig())
    else:
        files, read = list_images(path, img_format)[:MAX_CALIBRATION_IMAGES], read_canonical
    images = []
    for file in files:
        image_CHW = np.asarray(read(file), np.float32)
        height, width = image_CHW.shape[1:]
        if (height, width) != size_hw:
            raise DataError(
                f"{file}: it has {width} x {height} pixels (width x height), but the network is exported for "
                f"{size_hw[1]} x {size_hw[0]}. Give --calibrate images of that size, or --size {height} {width}."
            )
        images.append(image_CHW)
    return images


def model_for(network: DefectNet, grid: Grid, threshold: float | None = None) -> ComparedModel:
    """The network for images of the grid's size, with two images of noise to compare it on.

    `threshold`: that of the weights; None: they have none.
    """
    whole = WholeImage(network.eval().cpu().float(), grid).eval()
    noise = np.random.default_rng(0).uniform(0, MAX_GREY, (1, PLANES, *grid.shape_hw)).astype(np.float32)
    examples = {"input": np.concatenate((noise, MAX_GREY - noise))}
    facts = {
        "input_range": INPUT_RANGE,
        "input_planes": "target, ref1, ref2",
        "output_planes": "probability of a defect, 0, 0",
        "network": network.version,
        "patches": f"{len(grid.ys)} x {len(grid.xs)} of {grid.patch_hw[0]} px, stitched by owner",
    }
    if threshold is not None:
        facts["threshold"] = f"{threshold:.6g}"
    return ComparedModel(whole, examples, "output", "batch", facts)


def reduce_precision(path: Path, out: Path, precision: Precision, images: Sequence[np.ndarray]) -> None:
    """Write a smaller version of the file of a `model_for`. Its accuracy is not checked: measure it.

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
