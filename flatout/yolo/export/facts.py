"""What a file says about itself, so that nobody has to guess how to feed it."""

import json

from flatout import __version__
from flatout.yolo.export.options import ExportOptions, Form
from flatout.yolo.model.network import Network

OUTPUTS: dict[Form, str] = {
    "raw": "maps before the logistic function, one per level",
    "grid": "cx, cy, w, h in pixels of the input, objectness, class scores (not multiplied)",
    "onnx-nms": "rows of image, x1, y1, x2, y2, class, score after NMS",
    "tensorrt-nms": "num_dets, det_boxes, det_scores, det_classes of TensorRT's EfficientNMS_TRT",
    "tensorrt-nms-corners": "num_dets, det_boxes, det_scores, det_classes of TensorRT's EfficientNMS_TRT",
}


def facts_of(network: Network, options: ExportOptions, hw: tuple[int, int], form: Form) -> dict[str, str]:
    """Metadata of a file, all of it text."""
    facts = {
        "names": json.dumps(list(network.names)),
        "stride": str(int(network.stride.max())),
        "strides": ",".join(f"{stride:g}" for stride in network.stride.tolist()),
        "input_range": "0..1",
        "input_colors": "RGB",
        "input_layout": "NCHW",
        "input_size_hw": "any multiple of the stride" if options.free_size else f"{hw[0]},{hw[1]}",
        "input_batch": "any" if options.free_batch else str(options.batch_size),
        "output": OUTPUTS[form],
        "flatout": __version__,
    }
    if form not in ("raw", "grid"):
        facts["nms"] = json.dumps(
            {
                "iou_thres": options.iou_thres,
                "conf_thres": options.conf_thres,
                "topk_all": options.topk_all,
                "max_wh": options.max_wh,
            }
        )
    return facts
