"""What every format of an export needs: the network, folded and as it is, and what it says about some pictures."""

import copy
import logging
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flatout.yolo.export.forms import Judged, judge
from flatout.yolo.export.options import ExportOptions
from flatout.yolo.export.parity import (
    LIMIT_OF_RAW,
    MOST_ROUNDINGS,
    Difference,
    check_within,
    largest,
    limit_of_boxes,
    of_decoded,
    of_raw,
)
from flatout.yolo.export.pictures import Pictures, pictures_for
from flatout.yolo.input_size import LEAST_GRID, rounded_up
from flatout.yolo.model.fuse import fused
from flatout.yolo.model.network import Network

logger = logging.getLogger(__name__)

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
