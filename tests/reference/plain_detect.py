"""A plain reference of detection in one image, step by step as specified, for `flatout.yolo.predict`.

Dimension key:  n detections   H W image   h w input
"""

import cv2
import numpy as np
import torch
from torch import nn

from flatout.yolo.nms import NmsConfig
from tests.reference.plain_nms import best_suppress, plain_nms


@torch.no_grad()
def plain_detect(network: nn.Module, image_HWC: np.ndarray, *, size: int, stride: int, config: NmsConfig) -> np.ndarray:
    """x1, y1, x2, y2 in pixels of the image, score, class: float64 [n, 6], highest score first."""
    input_hwc = rectangle(image_HWC, size=size, stride=stride)
    x = torch.from_numpy(np.ascontiguousarray(input_hwc[..., ::-1].transpose(2, 0, 1)))[None]
    dtype = next(network.parameters()).dtype
    _, suppress = best_suppress()
    (found_n6,) = plain_nms(network(x.to(dtype) / 255).decoded, config, suppress=suppress)
    return to_native(found_n6.double().numpy(), input_hwc.shape[:2], image_HWC.shape[:2])


def rectangle(image_HWC: np.ndarray, *, size: int, stride: int) -> np.ndarray:
    """Scale so that the longer side is `size`, and pad with grey to the next multiple of the stride."""
    height, width = image_HWC.shape[:2]
    scale = min(size / height, size / width)
    inner_w, inner_h = round(width * scale), round(height * scale)
    pad_w, pad_h = ((size - side) % stride / 2 for side in (inner_w, inner_h))
    if (inner_w, inner_h) != (width, height):
        image_HWC = cv2.resize(image_HWC, (inner_w, inner_h), interpolation=cv2.INTER_LINEAR)
    top, bottom, left, right = round(pad_h - 0.1), round(pad_h + 0.1), round(pad_w - 0.1), round(pad_w + 0.1)
    return cv2.copyMakeBorder(image_HWC, top, bottom, left, right, cv2.BORDER_CONSTANT, value=(114, 114, 114))


def to_native(found_n6: np.ndarray, input_hw: tuple[int, ...], native_hw: tuple[int, ...]) -> np.ndarray:
    """Boxes from pixels of the input to pixels of the image, clipped to it."""
    gain = min(input_hw[0] / native_hw[0], input_hw[1] / native_hw[1])
    for axis, (side, native) in enumerate(zip(input_hw[::-1], native_hw[::-1], strict=True)):
        columns = [axis, axis + 2]
        found_n6[:, columns] = ((found_n6[:, columns] - (side - native * gain) / 2) / gain).clip(0, native)
    return found_n6
