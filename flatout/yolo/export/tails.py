"""What a file does with decoded boxes: nothing, NMS by ONNX's node, or NMS by TensorRT's plugin.

A tail is given decoded boxes [B, N, 5 + C] and gives what the file gives. `visible` is the part of it that any runtime
can compute, which is all of it but for the plugin: there it is what the plugin is given.

Dimension key:  B images   N boxes of an image   C classes   O = 5 + C outputs of a box   K boxes kept at most   D found
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatout.yolo.export.nms_nodes import OnnxNms, TensorRtNms
from flatout.yolo.export.options import ExportOptions

PLUGIN = "EfficientNMS_TRT"
CENTRE_SIZE, CORNERS = 1, 0
"""The plugin's names of box formats."""


class NmsSetting(NamedTuple):
    """Thresholds that are fixed in a file."""

    most: int
    iou: float
    conf: float


class Tail(nn.Module):
    """Decoded boxes as they are."""

    output_names: tuple[str, ...] = ()
    """Beside the decoded boxes themselves."""
    uses_plugin = False

    def forward(self, decoded_BNO: Tensor) -> tuple[Tensor, ...]:
        return ()

    def visible(self, decoded_BNO: Tensor) -> tuple[Tensor, ...]:
        return self(decoded_BNO)  # type: ignore[no-any-return]


class OnnxNmsTail(Tail):
    """[D, 7]: image, x1, y1, x2, y2, class, score; the best class of each box, classes kept apart by a shift."""

    output_names = ("output",)

    def __init__(self, setting: NmsSetting, shift_px: int) -> None:
        super().__init__()
        self._setting, self._shift_px = setting, shift_px

    def forward(self, decoded_BNO: Tensor) -> tuple[Tensor, ...]:
        box_BN4 = corners(decoded_BNO)
        score_BN1, class_BN1 = scores(decoded_BNO).max(2, keepdim=True)
        class_BN1 = class_BN1.float()
        shifted_BN4 = box_BN4 + class_BN1 * self._shift_px
        chosen_D3 = OnnxNms.apply(shifted_BN4, score_BN1.transpose(1, 2).contiguous(), *self._setting)
        image_D, box_D = chosen_D3[:, 0], chosen_D3[:, 2]
        row_BN6 = torch.cat((box_BN4, class_BN1, score_BN1), 2)
        # By one number per row: a plain Gather, where two would become a dozen nodes.
        row_D6 = row_BN6.flatten(0, 1).index_select(0, image_D * decoded_BNO.shape[1] + box_D)
        return (torch.cat((image_D[:, None].float(), row_D6), 1),)


class TensorRtTail(Tail):
    """num_dets [B, 1], det_boxes [B, K, 4], det_scores [B, K], det_classes [B, K]."""

    output_names = ("num_dets", "det_boxes", "det_scores", "det_classes")
    uses_plugin = True

    def __init__(self, setting: NmsSetting, coding: int) -> None:
        super().__init__()
        self._setting, self._coding = setting, coding

    def forward(self, decoded_BNO: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = TensorRtNms.apply(*self.visible(decoded_BNO), self._coding, *self._setting)
        return found

    def visible(self, decoded_BNO: Tensor) -> tuple[Tensor, ...]:
        box_BN4 = corners(decoded_BNO) if self._coding == CORNERS else decoded_BNO[..., :4]
        return box_BN4, scores(decoded_BNO)


def tail_for(options: ExportOptions) -> Tail:
    """The tail of the asked-for form; of the raw form too, as it gives no decoded boxes to do anything with."""
    setting = NmsSetting(options.topk_all, options.iou_thres, options.conf_thres)
    if options.form == "onnx-nms":
        assert options.max_wh is not None
        return OnnxNmsTail(setting, options.max_wh)
    if options.form in ("tensorrt-nms", "tensorrt-nms-corners"):
        return TensorRtTail(setting, CENTRE_SIZE if options.form == "tensorrt-nms" else CORNERS)
    return Tail()


def corners(decoded_BNO: Tensor) -> Tensor:
    """x1, y1, x2, y2, [B, N, 4]."""
    centre_BN2, half_BN2 = decoded_BNO[..., :2], decoded_BNO[..., 2:4] / 2
    return torch.cat((centre_BN2 - half_BN2, centre_BN2 + half_BN2), 2)


def scores(decoded_BNO: Tensor) -> Tensor:
    """Class times objectness, [B, N, C]; objectness alone of a single class, whose own score is never trained."""
    object_BN1 = decoded_BNO[..., 4:5]
    return object_BN1 if decoded_BNO.shape[2] == 6 else decoded_BNO[..., 5:] * object_BN1
