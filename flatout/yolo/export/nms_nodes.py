"""NMS as one node of an ONNX graph: the standard's own, or TensorRT's plugin.

Each is a function whose `symbolic` tells the exporter which node it becomes. Called in torch, the first computes what
the node computes; the second cannot, and gives empty answers of the right shapes.

Dimension key:  B images   N boxes of an image   C classes   K boxes kept of an image at most   S selected
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.yolo.nms.sweep import survivors


class OnnxNms(torch.autograd.Function):
    """ONNX's NonMaxSuppression over one score per box: (image, 0, box) of the selected ones, int64 [S, 3].

    Images ascending, within an image the best first; boxes are corners.
    """

    @staticmethod
    def forward(ctx: Any, box_BN4: Tensor, score_B1N: Tensor, most: int, iou: float, conf: float) -> Tensor:
        return select(box_BN4, score_B1N[:, 0], most=most, iou=iou, conf=conf)

    @staticmethod
    def symbolic(g: Any, box: Any, score: Any, most: int, iou: float, conf: float) -> Any:
        constants = (torch.tensor([most]), torch.tensor([iou]), torch.tensor([conf]))
        nodes = [g.op("Constant", value_t=constant) for constant in constants]
        return g.op("NonMaxSuppression", box, score, *nodes)


def select(box_BN4: Tensor, score_BN: Tensor, *, most: int, iou: float, conf: float) -> Tensor:
    """What `NonMaxSuppression` selects, by our own kernel: scores above `conf`, no overlap above `iou`.

    On the device of the boxes; the work itself is done on the host.
    """
    num_images = len(score_BN)
    # float32, as in the graph: a score may lie between the number and its float32.
    image_M, box_M = torch.nonzero(score_BN > torch.tensor(conf, dtype=torch.float32), as_tuple=True)
    falling = torch.sort(score_BN[image_M, box_M], descending=True, stable=True).indices
    order_M = falling[torch.sort(image_M[falling], stable=True).indices]
    image_M, box_M = image_M[order_M], box_M[order_M]
    count_B = torch.bincount(image_M, minlength=num_images)
    ordered_M4, count_B = box_BN4[image_M, box_M].cpu(), count_B.cpu()
    kept_S = survivors(ordered_M4.numpy(), count_B.numpy(), float(np.float32(iou)), most)
    kept = torch.from_numpy(kept_S).to(box_BN4.device)
    return torch.stack((image_M[kept], torch.zeros_like(kept), box_M[kept]), 1)


class TensorRtNms(torch.autograd.Function):
    """TensorRT's EfficientNMS_TRT: number of boxes int32 [B, 1], boxes [B, K, 4], scores and int32 classes [B, K]."""

    @staticmethod
    def forward(
        ctx: Any, box_BN4: Tensor, score_BNC: Tensor, coding: int, most: int, iou: float, conf: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        num_images = len(box_BN4)
        return (
            torch.zeros(num_images, 1, dtype=torch.int32),
            box_BN4.new_zeros(num_images, most, 4),
            box_BN4.new_zeros(num_images, most),
            torch.zeros(num_images, most, dtype=torch.int32),
        )

    @staticmethod
    def symbolic(g: Any, box: Any, score: Any, coding: int, most: int, iou: float, conf: float) -> Any:
        found = g.op(
            "TRT::EfficientNMS_TRT",
            box,
            score,
            background_class_i=-1,
            box_coding_i=coding,
            iou_threshold_f=iou,
            max_output_boxes_i=most,
            plugin_version_s="1",
            score_activation_i=0,
            score_threshold_f=conf,
            outputs=4,
        )
        # The exporter does not know the node, and so neither its outputs.
        whole = box.type().with_dtype(torch.int32)
        types = (
            whole.with_sizes([None, 1]),
            box.type().with_sizes([None, most, 4]),
            box.type().with_sizes([None, most]),
            whole.with_sizes([None, most]),
        )
        for output, its_type in zip(found, types, strict=True):
            output.setType(its_type)
        return found
