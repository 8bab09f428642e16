"""The modules that are traced, and their postprocessing: none, or NMS by ONNX or TensorRT.

    images --network--> decoded boxes [B, N, 5 + C] --Postprocess--> outputs of the file

Dimension key:  B images   N boxes of an image   C classes   O = 5 + C outputs of a box   K boxes kept of an image
                D detections   M boxes above the threshold   S selected boxes   A anchors   Y X cells of a map
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from flatout.yolo.export.options import ExportOptions
from flatout.yolo.model.layers import Predictions
from flatout.yolo.model.network import Network
from flatout.yolo.nms.greedy import survivors

# NMS as one node of an ONNX graph: ONNX's own, or TensorRT's plugin
#
# `symbolic` tells the exporter which node a function becomes. In torch, the first function computes what the node
# computes; the second cannot, and returns zeros of the right shapes.


class OnnxNms(torch.autograd.Function):
    """ONNX's NonMaxSuppression over one score per box: (image, 0, box) of the selected boxes, int64 [S, 3].

    Images ascending, within an image the highest score first; boxes are corners.
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
    """What `NonMaxSuppression` selects, by flatout's own kernel: scores above `conf`, no overlap above `iou`.

    The result is on the device of the boxes; the computation runs on the host.
    """
    num_images = len(score_BN)
    # float32, as in the graph: a score may lie between the threshold and its float32 value.
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
        # The exporter does not know the node, so it needs the types of its outputs.
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


PLUGIN = "EfficientNMS_TRT"
CENTRE_SIZE, CORNERS = 1, 0
"""The plugin's codes for box formats."""


# Postprocessing


class NmsSetting(NamedTuple):
    """NMS settings that are fixed in a file."""

    most: int
    """Boxes kept of an image, at most."""
    iou: float
    conf: float


class Postprocess(nn.Module):
    """No postprocessing: the file outputs the decoded boxes. Base class of the others."""

    output_names: tuple[str, ...] = ()
    """Names of the outputs besides the decoded boxes."""
    uses_plugin = False

    def forward(self, decoded_BNO: Tensor) -> tuple[Tensor, ...]:
        return ()

    def portable(self, decoded_BNO: Tensor) -> tuple[Tensor, ...]:
        """What any runtime can compute: the outputs, or the inputs of the plugin if there is one."""
        return self(decoded_BNO)  # type: ignore[no-any-return]


class OnnxNmsPostprocess(Postprocess):
    """ONNX's NMS: rows [D, 7] of image, x1, y1, x2, y2, class, score; the best class of each box.

    Boxes are shifted by class, so that classes do not suppress each other.
    """

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
        # One index per row becomes a single Gather node, two indices would become a dozen nodes.
        row_D6 = row_BN6.flatten(0, 1).index_select(0, image_D * decoded_BNO.shape[1] + box_D)
        return (torch.cat((image_D[:, None].float(), row_D6), 1),)


class TensorRtPostprocess(Postprocess):
    """TensorRT's NMS plugin: num_dets [B, 1], det_boxes [B, K, 4], det_scores [B, K], det_classes [B, K]."""

    output_names = ("num_dets", "det_boxes", "det_scores", "det_classes")
    uses_plugin = True

    def __init__(self, setting: NmsSetting, coding: int) -> None:
        super().__init__()
        self._setting, self._coding = setting, coding

    def forward(self, decoded_BNO: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = TensorRtNms.apply(*self.portable(decoded_BNO), self._coding, *self._setting)
        return found

    def portable(self, decoded_BNO: Tensor) -> tuple[Tensor, ...]:
        box_BN4 = corners(decoded_BNO) if self._coding == CORNERS else decoded_BNO[..., :4]
        return box_BN4, scores(decoded_BNO)


def postprocess_for(options: ExportOptions) -> Postprocess:
    """The postprocessing of a form; none for raw maps and decoded boxes."""
    setting = NmsSetting(options.topk_all, options.iou_thres, options.conf_thres)
    if options.form == "onnx-nms":
        assert options.max_wh is not None
        return OnnxNmsPostprocess(setting, options.max_wh)
    if options.form in ("tensorrt-nms", "tensorrt-nms-corners"):
        return TensorRtPostprocess(setting, CENTRE_SIZE if options.form == "tensorrt-nms" else CORNERS)
    return Postprocess()


def corners(decoded_BNO: Tensor) -> Tensor:
    """x1, y1, x2, y2 of the boxes, [B, N, 4]."""
    centre_BN2, half_BN2 = decoded_BNO[..., :2], decoded_BNO[..., 2:4] / 2
    return torch.cat((centre_BN2 - half_BN2, centre_BN2 + half_BN2), 2)


def scores(decoded_BNO: Tensor) -> Tensor:
    """Class score times objectness, [B, N, C]; with a single class objectness alone: its score is never trained."""
    object_BN1 = decoded_BNO[..., 4:5]
    return object_BN1 if decoded_BNO.shape[2] == 6 else decoded_BNO[..., 5:] * object_BN1


# The modules that are traced: images in, outputs of the file out

DECODED = "decoded"
"""Additional output of a model with NMS while it is compared."""


class Reference(NamedTuple):
    """An input and the network's own outputs, with which files are compared."""

    images: np.ndarray
    """float32 [B, 3, H, W], RGB in 0..1."""
    decoded: np.ndarray
    raw: list[np.ndarray]


class _OfNetwork(nn.Module):
    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network


class RawLevels(_OfNetwork):
    """One map [B, A, Y, X, 5 + C] per level (and head), before the sigmoid."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(predict(self.network, x).raw)


class DecodedBoxes(_OfNetwork):
    """[B, N, 5 + C]: cx, cy, w, h in pixels of the input, objectness and class scores in 0..1."""

    def forward(self, x: Tensor) -> Tensor:
        return predict(self.network, x).decoded


class WithPostprocess(_OfNetwork):
    """The outputs of a postprocessing, then the decoded boxes."""

    def __init__(self, network: Network, postprocess: Postprocess) -> None:
        super().__init__(network)
        self.postprocess = postprocess

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        decoded = predict(self.network, x).decoded
        return (*self.postprocess(decoded), decoded)


def module_for(network: Network, options: ExportOptions) -> nn.Module:
    """The module of a form, in evaluation mode."""
    if options.form == "raw":
        return RawLevels(network).eval()
    if options.form == "grid":
        return DecodedBoxes(network).eval()
    return WithPostprocess(network, postprocess_for(options)).eval()


@torch.no_grad()
def reference_of(network: Network, images: np.ndarray) -> Reference:
    """The outputs of a network in its own precision, in evaluation mode on the CPU."""
    found = predict(network, torch.from_numpy(images).to(network.head.anchor_grid.dtype))
    return Reference(images, found.decoded.numpy(), [level.numpy() for level in found.raw])


def predict(network: Network, x: Tensor) -> Predictions:
    """Run the network, which must be in evaluation mode."""
    found = network(x)
    assert isinstance(found, Predictions), "the network is in training mode"
    return found
