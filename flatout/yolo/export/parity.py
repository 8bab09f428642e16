"""Comparing files with their network: images, reference outputs, and accepted differences.

    ExportOptions --> ComparisonImages --> ExportContext: network, inputs, their Reference --> Difference within a limit

Rounding differs between any two programs; a mistake in a graph moves boxes by pixels. The limits lie between the two: a
ten-thousandth of the input's longer side for boxes, a thousandth for scores and raw outputs. A network that amplifies
rounding errors may differ more: up to ten times as much as float32 differs from float64 in torch itself.

Dimension key:  B images of a batch   P images of a comparison   N boxes   O = 5 + classes   H W input   h w image
"""

import copy
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.errors import DataError, ParityError, counted
from flatout.feed import DecodeError
from flatout.images import read_image
from flatout.yolo.data.data_yaml import read_data_yaml
from flatout.yolo.data.find import FoundImages, find_images
from flatout.yolo.data.letterbox import MIN_GRID, fit, letterbox, round_up_img_size
from flatout.yolo.data.open_data import images_of
from flatout.yolo.export.options import ExportOptions
from flatout.yolo.export.postprocess import Reference, reference_of
from flatout.yolo.find_file import find_file
from flatout.yolo.model.deploy import fused
from flatout.yolo.model.network import Network

logger = logging.getLogger(__name__)

# Differences and their limits

REMEDY = (
    "Try without --simplify or with another --opset. If that does not help, please report a bug, with this message and "
    "the output of flatout doctor --json."
)
MAX_BOX = 1e-4
"""Limit for box coordinates, as a share of the input's longer side: 0.064 px at 640."""
MAX_SCORE = 1e-3
MAX_RAW = 1e-3
"""Limit for raw outputs, relative for values beyond 1."""
MAX_ROUNDINGS = 10
"""Limit as a multiple of the difference between float32 and float64, for networks that amplify rounding errors."""


class Difference(NamedTuple):
    """Largest differences over all boxes of all images."""

    box_px: float = 0.0
    score: float = 0.0
    raw: float = 0.0
    """Only for files that output raw maps."""

    def times(self, factor: float) -> "Difference":
        return Difference(*(factor * each for each in self))

    def is_within(self, limit: "Difference") -> bool:
        """Whether no difference exceeds its limit; False if one is NaN."""
        return all(each <= most for each, most in zip(self, limit, strict=True))

    def text(self, limit: "Difference") -> str:
        """The difference with its limit; a limit of 0 px means that raw maps were compared."""
        if not limit.box_px:
            return f"{self.raw:.1e} in raw outputs (limit {limit.raw:.2g})"
        return f"{self.box_px:.1e} px, {self.score:.1e} in scores (limits {limit.box_px:.2g} and {limit.score:.2g})"


def limit_of_boxes(side_px: int) -> Difference:
    """The limit for decoded boxes, on inputs up to this side."""
    return Difference(box_px=MAX_BOX * side_px, score=MAX_SCORE)


LIMIT_OF_RAW = Difference(raw=MAX_RAW)


def decoded_difference(found_BNO: np.ndarray, expected_BNO: np.ndarray) -> Difference:
    """The difference of decoded boxes; ParityError if the shapes differ."""
    if found_BNO.shape != expected_BNO.shape:
        raise ParityError(_other_shape(found_BNO, expected_BNO))
    apart = np.abs(found_BNO - expected_BNO)
    return Difference(box_px=_largest(apart[..., :4]), score=_largest(apart[..., 4:]))


def raw_difference(found: np.ndarray, expected: np.ndarray) -> Difference:
    """The difference of raw maps; ParityError if the shapes differ."""
    if found.shape != expected.shape:
        raise ParityError(_other_shape(found, expected))
    return Difference(raw=_largest(np.abs(found - expected) / np.maximum(np.abs(expected), 1)))


def difference_of(outputs: Sequence[np.ndarray], reference: Reference, *, raw: bool) -> Difference:
    """The difference of a file's outputs, which are raw maps or decoded boxes, from those of the network."""
    if raw:
        return largest(raw_difference(*levels) for levels in zip(outputs, reference.raw, strict=True))
    (decoded,) = outputs
    return decoded_difference(decoded, reference.decoded)


def largest(differences: Iterable[Difference]) -> Difference:
    """The maximum of each field over several comparisons."""
    rows = np.array(list(differences), dtype=np.float64)
    return Difference(*(float(column) for column in rows.max(0)))


def check_same(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    """ParityError unless ONNX Runtime and torch compute the same from the same boxes, up to rounding."""
    if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-5, atol=1e-4):
        raise ParityError(
            f"{what}: ONNX Runtime gives {_summary(found)}, torch gives {_summary(expected)} from the same boxes, so "
            f"nothing was written. {REMEDY}"
        )


def check_within(difference: Difference, limit: Difference, what: str) -> None:
    """ParityError if a difference exceeds its limit."""
    if not difference.is_within(limit):
        raise ParityError(
            f"{what}: the exported network differs from the torch network by {difference.text(limit)}, so nothing was "
            f"written. Check that all weights are finite. {REMEDY}"
        )


def _largest(apart: np.ndarray) -> float:
    return float(apart.max(initial=0))


def _other_shape(found: np.ndarray, expected: np.ndarray) -> str:
    return (
        f"The file's output has the shape {list(found.shape)}, the network's {list(expected.shape)}, "
        "so nothing was written."
    )


def _summary(values: np.ndarray) -> str:
    return f"{list(values.shape)} with a sum of {float(values.sum()):.7g}"


# Images of the comparison: from a data set, from files, or generated
#
#     file -> BGR pixels -> letterboxed to the input -> RGB, 0..1, float32 [P, 3, H, W]
#
# Real images, not noise: with noise, a trained network shows neither its range of values nor overlapping boxes.

DEMO_WH = (640, 480)
"""Size of generated images."""


class ComparisonImages(NamedTuple):
    """Decoded images of any size, uint8 [h, w, 3] BGR each."""

    images: list[np.ndarray]
    origin: str
    """Such as `8 generated images`."""

    def as_input(self, hw: tuple[int, int]) -> np.ndarray:
        """All images as inputs of the network, float32 [P, 3, H, W], RGB in 0..1."""
        boxed = [letterbox(image, fit((image.shape[0], image.shape[1]), hw)) for image in self.images]
        rgb_PHWC = np.stack(boxed)[..., ::-1]
        return np.ascontiguousarray(rgb_PHWC.transpose(0, 3, 1, 2), dtype=np.float32) / np.float32(255)


def comparison_images(options: ExportOptions) -> ComparisonImages:
    """The images that the options name; DataError if none can be read."""
    if options.data:
        data = read_data_yaml(find_file(options.data))
        return _from_files(images_of(data.entries["val"], data.names), options.pictures, options.data)
    if options.images:
        return _from_files(find_images(options.images), options.pictures, ", ".join(options.images))
    return demo_images(options.pictures)


def demo_images(count: int) -> ComparisonImages:
    """Generated scenes of the demo set, the same on every machine."""
    from flatout.yolo.demo_data.files import DemoDataConfig, generate_numbered_scene

    config = DemoDataConfig(width=DEMO_WH[0], height=DEMO_WH[1])
    images = [generate_numbered_scene(config, "val", number).image for number in range(count)]
    return ComparisonImages(images, counted(count, "generated image"))


def _from_files(found: FoundImages, count: int, origin: str) -> ComparisonImages:
    if found.absent:
        raise DataError(f"{found.absent[0]}: does not exist. Name images, folders or lists that exist.")
    images: list[np.ndarray] = []
    for image in _readable(found.paths):
        images.append(image)
        if len(images) == count:
            break
    if not images:
        raise DataError(f"{origin}: no image can be read. Name others, or none to compare on generated images.")
    return ComparisonImages(images, f"{counted(len(images), 'image')} of {origin}")


def _readable(paths: Sequence[str]) -> Iterator[np.ndarray]:
    for path in paths:
        try:
            yield read_image(path)
        except (OSError, DecodeError) as error:
            logger.warning("%s: skipped: %s", path, error)


# Shared by all formats

TRIED_BATCH = 3
"""Batch size that is compared besides 1, if the file accepts any."""


@dataclass(frozen=True)
class ExportContext:
    """Everything that is computed once for all files of an export."""

    options: ExportOptions
    network: Network
    """The given network, in float32 on the CPU."""
    folded: Network
    """The folded network, from which files are made."""
    images: ComparisonImages
    references: list[Reference]
    """Outputs of the given network, not of the folded one; files are compared with these."""
    example: Tensor
    """Input for tracing and timing."""

    @property
    def inputs(self) -> list[np.ndarray]:
        return [each.images for each in self.references]

    @property
    def hw(self) -> tuple[int, int]:
        """Height and width of the example."""
        return self.example.shape[2], self.example.shape[3]

    @classmethod
    def of(cls, network: Network, options: ExportOptions) -> "ExportContext":
        network = copy.deepcopy(network).cpu().float().eval().requires_grad_(False)
        grid = max(MIN_GRID, int(network.stride.max()))
        # A side that is both height and width is reported once.
        rounded = {side: round_up_img_size(side, grid) for side in dict.fromkeys(options.img_size)}
        hw = rounded[options.img_size[0]], rounded[options.img_size[1]]
        images = comparison_images(options)
        references = [reference_of(network, batch) for batch in inputs_of(images, options, hw, grid)]
        example = torch.from_numpy(_in_batches(images.as_input(hw), options.batch_size)[0])
        return cls(options, network, fused(network).requires_grad_(False), images, references, example)

    def accepted(self, difference: Difference, what: str) -> Difference:
        """The limit that a difference does not exceed; ParityError if it exceeds the wider limit, too."""
        raw = self.options.form == "raw"
        limit = LIMIT_OF_RAW if raw else limit_of_boxes(max(max(each.shape[2:]) for each in self.inputs))
        if difference.is_within(limit):
            return limit
        rounding = self._rounding(raw=raw)
        wider = largest([limit, rounding.times(MAX_ROUNDINGS)])
        check_within(difference, wider, what)
        logger.warning(
            "This network amplifies rounding errors: in torch itself float32 differs from float64 by %s. "
            "The limits are widened accordingly.",
            rounding.text(limit),
        )
        return wider

    def _rounding(self, *, raw: bool) -> Difference:
        """The difference between float32 and float64 in torch, on the same inputs."""
        exact = copy.deepcopy(self.network).double()
        return largest(
            difference_of(one.raw if raw else [one.decoded], reference_of(exact, one.images), raw=raw)
            for one in self.references
        )


def inputs_of(images: ComparisonImages, options: ExportOptions, hw: tuple[int, int], grid: int) -> list[np.ndarray]:
    """The images in batches of the file's size; with several batch sizes and two image sizes, if these are free."""
    inputs_PCHW = images.as_input(hw)
    if not options.free_batch:
        return _in_batches(inputs_PCHW, options.batch_size)
    inputs = [inputs_PCHW[:1], *_in_batches(inputs_PCHW, TRIED_BATCH)]
    if options.free_size:
        inputs.append(images.as_input((hw[0] + 2 * grid, hw[1] + grid))[:2])
    return inputs


def _in_batches(inputs_PCHW: np.ndarray, size: int) -> list[np.ndarray]:
    """Batches of exactly that size; the last one is filled up with the first images."""
    count = len(inputs_PCHW)
    index = np.arange(-(-count // size) * size) % count
    return [np.ascontiguousarray(inputs_PCHW[rows]) for rows in index.reshape(-1, size)]
