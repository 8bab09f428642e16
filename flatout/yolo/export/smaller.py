"""Smaller ONNX files: half precision or 8 bits. They are not the same network, so their loss is measured, not judged.

What counts are the boxes that the whole network is sure of. Decoding stays in float32, as half precision cannot tell
apart pixels beyond 2048, and so do the convolutions before it in a file of 8 bits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flatout.export.onnx_model import Model
from flatout.export.precision import Precision, in_float16_up_to_last_convolutions, in_int8, last_convolutions
from flatout.yolo.export.onnx_forms import INPUT, decoded_by, runnable, with_plugin
from flatout.yolo.export.options import ExportOptions
from flatout.yolo.export.tails import Tail, tail_for


class Loss(NamedTuple):
    """Differences to the whole network's boxes, of those it is sure of."""

    num_boxes: int
    """Raw boxes, before NMS."""
    sure: float
    """Objectness from which on a box counts."""
    median_px: float
    largest_px: float
    largest_score: float

    def text(self) -> str:
        if not self.num_boxes:
            return f"no raw box above {self.sure:g} in these pictures, so its loss is not known"
        return (
            f"{self.num_boxes} raw boxes above {self.sure:g}: {self.median_px:.2g} px apart (median), at most "
            f"{self.largest_px:.2g} px, {self.largest_score:.2g} of a score"
        )


def smaller(probe: Model, precision: Precision, inputs: Sequence[np.ndarray], tail: Tail) -> Model:
    """The model in another precision; ranges of int8 come from the inputs."""
    model = runnable(probe, tail)
    if precision == "float16":
        less = in_float16_up_to_last_convolutions(model)
    else:
        less = in_int8(model, inputs, input_name=INPUT, kept=last_convolutions(model))
    return with_plugin(less, probe, tail)


def loss_of(model: Model, probe: Model, inputs: Sequence[np.ndarray], options: ExportOptions) -> Loss | None:
    """What became of the boxes; None for a file of raw maps."""
    if options.form == "raw":
        return None
    tail = tail_for(options)
    whole, less = (np.concatenate([each.reshape(-1, each.shape[2]) for each in decoded_by(one, inputs, tail)])
                   for one in (probe, model))  # fmt: skip
    sure = whole[:, 4] > options.conf_thres
    apart = np.abs(whole - less)[sure]
    if not len(apart):
        return Loss(0, options.conf_thres, 0.0, 0.0, 0.0)
    boxes_px = apart[:, :4].max(1)
    return Loss(
        len(apart), options.conf_thres, float(np.median(boxes_px)), float(boxes_px.max()), float(apart[:, 4:].max())
    )
