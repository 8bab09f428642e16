"""What every format of an export needs: the network, the pictures to compare on, and what it says about them.

How far a file is from its network, and how far it may be.

Rounding differs between any two programs; a mistake in a graph moves boxes by pixels. The limits lie between the two: a
ten-thousandth of the picture's longer side for boxes, a thousandth for scores and raw outputs. A network that enlarges
rounding errors may be further off: as far as ten times what float32 itself is off float64, in torch.

Dimension key:  B images   N boxes   O = 5 + classes
"""

import copy
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.errors import DataError, ParityError
from flatout.feed import DecodeError
from flatout.images import read_image
from flatout.yolo.data.data_yaml import read_data_yaml
from flatout.yolo.data.find import find_images
from flatout.yolo.data.letterbox import LEAST_GRID, fit, letterbox, rounded_up
from flatout.yolo.export.options import ExportOptions
from flatout.yolo.export.postprocess import Judged, judge
from flatout.yolo.find_file import find_file
from flatout.yolo.model.deploy import fused
from flatout.yolo.model.network import Network

MOST_BOX = 1e-4
"""Of the input's longer side: 0.064 px at 640."""
MOST_SCORE = 1e-3
MOST_RAW = 1e-3
"""Of a raw output, relative where it is beyond 1."""
MOST_ROUNDINGS = 10


class Difference(NamedTuple):
    """Largest differences over all boxes of all pictures."""

    box_px: float = 0.0
    score: float = 0.0
    raw: float = 0.0
    """Only of a file that gives raw maps."""

    def times(self, factor: float) -> "Difference":
        return Difference(*(factor * each for each in self))

    def is_within(self, limit: "Difference") -> bool:
        """False for what is no number, too."""
        return all(each <= most for each, most in zip(self, limit, strict=True))

    def text(self, limit: "Difference") -> str:
        """With what it may be; a limit of 0 px means that raw maps were compared."""
        if not limit.box_px:
            return f"{self.raw:.1e} of a raw output (at most {limit.raw:.2g})"
        return f"{self.box_px:.1e} px, {self.score:.1e} of a score (at most {limit.box_px:.2g} and {limit.score:.2g})"


def limit_of_boxes(side_px: int) -> Difference:
    """What decoded boxes may differ by, on inputs up to this side."""
    return Difference(box_px=MOST_BOX * side_px, score=MOST_SCORE)


LIMIT_OF_RAW = Difference(raw=MOST_RAW)


def of_decoded(found_BNO: np.ndarray, expected_BNO: np.ndarray) -> Difference:
    """Of decoded boxes."""
    if found_BNO.shape != expected_BNO.shape:
        raise ParityError(_other_shape(found_BNO, expected_BNO))
    apart = np.abs(found_BNO - expected_BNO)
    return Difference(box_px=_largest(apart[..., :4]), score=_largest(apart[..., 4:]))


def of_raw(found: np.ndarray, expected: np.ndarray) -> Difference:
    """Of raw maps."""
    if found.shape != expected.shape:
        raise ParityError(_other_shape(found, expected))
    return Difference(raw=_largest(np.abs(found - expected) / np.maximum(np.abs(expected), 1)))


def largest(differences: Iterable[Difference]) -> Difference:
    """Of several comparisons, column by column."""
    rows = np.array(list(differences), dtype=np.float64)
    return Difference(*(float(column) for column in rows.max(0)))


def check_same(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    """ParityError unless two ways to the same numbers from the same boxes agree, but for the last bits."""
    if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-5, atol=1e-4):
        raise ParityError(
            f"{what}: ONNX Runtime gives {_summary(found)}, torch gives {_summary(expected)} from the same boxes, so "
            "nothing was written. Try without --simplify or with another --opset, and report it."
        )


def check_within(difference: Difference, limit: Difference, what: str) -> None:
    """ParityError if a file is too far from its network."""
    if not difference.is_within(limit):
        raise ParityError(
            f"{what}: differs from its network by {difference.text(limit)}, so nothing was written. "
            "Are all weights finite? Try without --simplify or with another --opset, and report it."
        )


def _largest(apart: np.ndarray) -> float:
    return float(apart.max(initial=0))


def _other_shape(found: np.ndarray, expected: np.ndarray) -> str:
    return f"The file gives {list(found.shape)} where the network gives {list(expected.shape)}; nothing was written."


def _summary(values: np.ndarray) -> str:
    return f"{list(values.shape)} with a sum of {float(values.sum()):.7g}"


logger = logging.getLogger(__name__)

# Pictures to compare a file with its network on: those of a data set, of folders, or drawn ones.
#
#     file -> BGR pixels -> letterboxed to the input -> RGB, 0..1, float32 [P, 3, H, W]
#
# Real pictures and not noise: noise shows neither how far the values of a trained network go nor boxes that overlap.
#
# Dimension key:  P pictures   H, W input of the network

DRAWN_PX = (640, 480)


class Pictures(NamedTuple):
    """Decoded pictures of any size, uint8 [h, w, 3] BGR each."""

    images: list[np.ndarray]
    origin: str
    """Such as `8 drawn pictures`."""

    def as_input(self, hw: tuple[int, int]) -> np.ndarray:
        """All of them as a network sees them, float32 [P, 3, H, W], RGB in 0..1."""
        boxed = [letterbox(image, fit((image.shape[0], image.shape[1]), hw)) for image in self.images]
        rgb_PHWC = np.stack(boxed)[..., ::-1]
        return np.ascontiguousarray(rgb_PHWC.transpose(0, 3, 1, 2), dtype=np.float32) / np.float32(255)


def pictures_for(options: ExportOptions) -> Pictures:
    """What the options name; DataError if there is nothing that can be read."""
    if options.data:
        data = read_data_yaml(find_file(options.data))
        return _from_files(data.entries["val"], options.pictures, options.data)
    if options.images:
        return _from_files(options.images, options.pictures, ", ".join(options.images))
    return drawn(options.pictures)


def drawn(count: int) -> Pictures:
    """Scenes of the demo set; the same on every machine."""
    from flatout.yolo.demo_data.files import DemoDataConfig, draw_number

    config = DemoDataConfig(width=DRAWN_PX[0], height=DRAWN_PX[1])
    images = [draw_number(config, "val", number).image for number in range(count)]
    return Pictures(images, f"{count} drawn {_pictures(count)}")


def _from_files(entries: Sequence[str], count: int, origin: str) -> Pictures:
    found = find_images(entries)
    if found.absent:
        raise DataError(f"{found.absent[0]}: does not exist. Name pictures, folders or lists that are there.")
    images: list[np.ndarray] = []
    for image in _readable(found.paths):
        images.append(image)
        if len(images) == count:
            break
    if not images:
        raise DataError(f"{origin}: no picture that can be read. Name others, or none: then drawn ones are used.")
    return Pictures(images, f"{len(images)} {_pictures(len(images))} of {origin}")


def _readable(paths: Sequence[str]) -> Iterator[np.ndarray]:
    for path in paths:
        try:
            yield read_image(path)
        except (OSError, DecodeError) as error:
            logger.warning("%s: left out: %s", path, error)


def _pictures(count: int) -> str:
    return "picture" if count == 1 else "pictures"


BATCH_TRIED = 3
"""Pictures at once, beside one alone, where any number may be given."""


@dataclass(frozen=True)
class Work:
    """Everything that is computed once."""

    options: ExportOptions
    network: Network
    """As it was given, in float32 on the CPU."""
    folded: Network
    """What files are made of."""
    pictures: Pictures
    judged: list[Judged]
    """What files are compared with: what the network as it was given says, not folded."""
    example: Tensor

    @property
    def inputs(self) -> list[np.ndarray]:
        return [each.images for each in self.judged]

    @classmethod
    def of(cls, network: Network, options: ExportOptions) -> "Work":
        network = copy.deepcopy(network).cpu().float().eval().requires_grad_(False)
        grid = max(LEAST_GRID, int(network.stride.max()))
        # Told once of a side that is both.
        rounded = {side: rounded_up(side, grid) for side in dict.fromkeys(options.img_size)}
        hw = rounded[options.img_size[0]], rounded[options.img_size[1]]
        pictures = pictures_for(options)
        judged = [judge(network, images) for images in inputs_of(pictures, options, hw, grid)]
        example = torch.from_numpy(_in_batches(pictures.as_input(hw), options.batch_size)[0])
        return cls(options, network, fused(network).requires_grad_(False), pictures, judged, example)

    def accepted(self, difference: Difference, what: str) -> Difference:
        """The limit that a difference keeps; ParityError if it keeps none."""
        raw = self.options.form == "raw"
        limit = LIMIT_OF_RAW if raw else limit_of_boxes(max(max(each.shape[2:]) for each in self.inputs))
        if difference.is_within(limit):
            return limit
        rounding = self._rounding(raw=raw)
        wider = largest([limit, rounding.times(MOST_ROUNDINGS)])
        check_within(difference, wider, what)
        logger.warning(
            "This network enlarges rounding errors: in torch, too, float32 differs from float64 by %s.",
            rounding.text(limit),
        )
        return wider

    def _rounding(self, *, raw: bool) -> Difference:
        """How far torch's float32 is from its float64 on the same inputs."""
        exact = copy.deepcopy(self.network).double()
        pairs = [(each, judge(exact, each.images)) for each in self.judged]
        if raw:
            return largest(of_raw(*levels) for one, other in pairs for levels in zip(one.raw, other.raw, strict=True))
        return largest(of_decoded(one.decoded, other.decoded) for one, other in pairs)


def inputs_of(pictures: Pictures, options: ExportOptions, hw: tuple[int, int], grid: int) -> list[np.ndarray]:
    """The pictures in batches of the file's size; of several sizes, and in two resolutions, where any may be given."""
    whole = pictures.as_input(hw)
    if not options.free_batch:
        return _in_batches(whole, options.batch_size)
    inputs = [whole[:1], *_in_batches(whole, BATCH_TRIED)]
    if options.free_size:
        inputs.append(pictures.as_input((hw[0] + 2 * grid, hw[1] + grid))[:2])
    return inputs


def _in_batches(whole_PCHW: np.ndarray, size: int) -> list[np.ndarray]:
    """Batches of exactly that size; the first pictures fill up the last one."""
    count = len(whole_PCHW)
    index = np.arange(-(-count // size) * size) % count
    return [np.ascontiguousarray(whole_PCHW[rows]) for rows in index.reshape(-1, size)]
