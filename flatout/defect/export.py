"""A network for whole images as an ONNX file: scaling, patches, probabilities and stitching are all inside.

    input [B, 3, H, W] float32, 0..255 -> output [B, 3, H, W]: probability in plane 0, zeros in planes 1 and 2

Three planes go out because consumers of such files expect them. The range of the input stands in the metadata: scaling
it twice is the classical mistake.

Dimension key:  B images   C planes   H W image   T tiles   P patch side
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from flatout.defect.model import DefectNet
from flatout.defect.patches import Grid
from flatout.defect.strips.canonical import PLANES, TOP
from flatout.errors import ConfigError, ResourceError

logger = logging.getLogger(__name__)

OPSET = 17
TOLERANCE = 1e-4
INPUT_RANGE = "0..255"


Precision = Literal["float32", "float16", "int8"]


@dataclass(frozen=True)
class Exported:
    """What was written, and how far it is from the network it came from."""

    path: Path
    largest_difference: float | None
    """Of probabilities, by ONNX Runtime; None where that is not installed."""


class WholeImage(nn.Module):
    """The network as one call per image; all tiles of all images are one batch."""

    def __init__(self, network: DefectNet, grid: Grid) -> None:
        super().__init__()
        self.network = network
        self._grid = grid

    def forward(self, x_BCHW: Tensor) -> Tensor:
        grid = self._grid
        height, width = grid.patch_hw
        scaled = x_BCHW / TOP
        tiles = [scaled[:, :, y : y + height, x : x + width] for y in grid.ys for x in grid.xs]
        # [B, T, ...] so that the tiles of an image stay together; B is whatever comes in.
        stacked = torch.stack(tiles, 1)
        logits = self.network(stacked.flatten(0, 1))
        probability_BTPP = torch.softmax(logits, 1)[:, 1].unflatten(0, (-1, grid.per_image))
        stitched = self._stitched(probability_BTPP)[:, None]
        # Not zeros_like: the exporter would keep zeros for the batch it was shown, and no other batch would fit.
        nothing = stitched * 0
        return torch.cat((stitched, nothing, nothing), 1)

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


def export_onnx(network: DefectNet, grid: Grid, path: Path, *, opset: int = OPSET) -> Exported:
    """Write the network for images of the grid's size, and compare it with ONNX Runtime where that is installed."""
    onnx = _import_onnx()
    whole = WholeImage(network.eval().cpu().float(), grid).eval()
    example = torch.from_numpy(_example(grid))
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.onnx.export(
            whole,
            (example,),
            str(part),
            input_names=["input"],
            output_names=["output"],
            dynamic_axes={"input": {0: "batch"}, "output": {0: "batch"}},
            opset_version=opset,
            dynamo=False,
        )
        model = onnx.load(str(part))
        facts = {
            "input_range": INPUT_RANGE,
            "input_planes": "target, ref1, ref2",
            "output_planes": "probability of a defect, 0, 0",
            "network": network.version,
            "patches": f"{len(grid.ys)} x {len(grid.xs)} of {grid.patch_hw[0]} px, stitched by owner",
        }
        onnx.helper.set_model_props(model, facts)
        onnx.save(model, str(part))
        part.replace(path)
    except OSError as error:
        raise ResourceError(f"{path}: cannot be written: {error.strerror}. Choose another place.") from None
    finally:
        part.unlink(missing_ok=True)
    return Exported(path, _difference(whole, path, grid))


def reduce_precision(path: Path, out: Path, precision: Precision, images: Sequence[np.ndarray]) -> None:
    """A smaller file from one that `export_onnx` wrote; it is as good as a measurement says, so measure it.

    float16: weights and activations, input and output stay float32. int8: convolutions, with ranges taken from
    `images` [3, H, W] in 0..255; the first and the last convolution stay as they are, as their errors go straight to
    the heat map.
    """
    onnx = _import_onnx()
    if precision == "float16":
        float16 = import_module("onnxruntime.transformers.float16")
        onnx.save(float16.convert_float_to_float16(onnx.load(str(path)), keep_io_types=True), str(out))
        return
    quantization = import_module("onnxruntime.quantization")
    convolutions = [node.name for node in onnx.load(str(path)).graph.node if node.op_type == "Conv"]
    quantization.quantize_static(
        str(path),
        str(out),
        _Calibration(images),
        quant_format=quantization.QuantFormat.QDQ,
        op_types_to_quantize=["Conv"],
        nodes_to_exclude=[convolutions[0], convolutions[-1]],
        per_channel=True,
    )


class _Calibration:
    """Images one at a time, as ONNX Runtime asks for them."""

    def __init__(self, images: Sequence[np.ndarray]) -> None:
        self._batches: Iterator[dict[str, np.ndarray]] = ({"input": image[None]} for image in images)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._batches, None)


def _import_onnx() -> Any:
    try:
        return import_module("onnx")
    except ImportError:
        raise ConfigError("Exporting needs the package onnx: pip install flatout[export]") from None


def _difference(whole: WholeImage, path: Path, grid: Grid) -> float | None:
    """Largest difference of the file to the network, on two images at once; it must be within the tolerance."""
    try:
        onnxruntime = import_module("onnxruntime")
    except ImportError:
        logger.warning("%s was not verified: pip install onnxruntime, and export again.", path)
        return None
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    images = np.concatenate((_example(grid), 255 - _example(grid)))
    (found,) = session.run(None, {"input": images})
    with torch.inference_mode():
        expected = whole(torch.from_numpy(images)).numpy()
    difference = float(np.abs(found - expected).max())
    if not difference <= TOLERANCE:
        raise ConfigError(
            f"{path}: ONNX Runtime differs from the network by {difference:.1e}, more than {TOLERANCE:g}. The file is "
            "kept for a look; do not use it."
        )
    return difference


def _example(grid: Grid) -> np.ndarray:
    """An image of noise over all of 0..255, float32 [1, C, H, W]."""
    return np.random.default_rng(0).uniform(0, TOP, (1, PLANES, *grid.shape_hw)).astype(np.float32)
