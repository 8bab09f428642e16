"""Batches of prepared pictures through the network and NMS, and the boxes back in the pictures' own pixels.

Dimension key:  B pictures   h w input   D detections
"""

import time
from collections.abc import Sequence

import numpy as np
import torch

from flatout.errors import ConfigError
from flatout.yolo.boxes import Letterbox, to_native
from flatout.yolo.data.letterbox import rounded_up
from flatout.yolo.evaluate.evaluation_run import Subject, load_subject
from flatout.yolo.find_file import weights_files
from flatout.yolo.nms import NmsConfig, non_max_suppression
from flatout.yolo.predict.frames import Prepare, Prepared
from flatout.yolo.predict.options import PredictOptions
from flatout.yolo.predict.result import Result

AT_ONCE = {"cuda": 16, "cpu": 1}
"""Pictures per call. One keeps all cores of a CPU busy, and its result comes soonest."""


class Predictor:
    """A network with its thresholds, on a device."""

    def __init__(self, subject: Subject, *, size: int, device: torch.device, nms: NmsConfig) -> None:
        """`size`: longer side of the input, a multiple of the network's stride."""
        self._network, self._device, self._nms = subject.network, device, nms
        self._dtype = next(subject.network.parameters()).dtype
        self.names = subject.names
        self.prepare = Prepare(size, subject.stride)

    @property
    def usual_at_once(self) -> int:
        """How many pictures a batch should have on this device."""
        return AT_ONCE["cuda" if self._device.type == "cuda" else "cpu"]

    @torch.no_grad()
    def __call__(self, batch: Sequence[Prepared]) -> list[Result]:
        """What is in pictures whose inputs have one shape; the host waits for the device."""
        begin_s = time.perf_counter()
        images_B3hw = torch.from_numpy(np.stack([prepared.input_3hw for prepared in batch]))
        if self._device.type == "cuda":
            images_B3hw = images_B3hw.pin_memory()
        x = images_B3hw.to(self._device, non_blocking=True).to(self._dtype).div_(255)
        found = non_max_suppression(self._network(x).decoded, self._nms)
        input_hw = int(x.shape[2]), int(x.shape[3])
        native_hw = [prepared.frame.image.shape[:2] for prepared in batch]
        letterbox = Letterbox.centred(input_hw, native_hw, str(self._device))
        found.row_D6[:, :4] = to_native(found.box_D4, found.image_D, letterbox)
        rows = found._replace(row_D6=found.row_D6.cpu(), image_D=found.image_D.cpu()).per_image()
        each_ms = 1e3 * (time.perf_counter() - begin_s) / len(batch)
        return [self._result(prepared, row_n6.numpy(), each_ms) for prepared, row_n6 in zip(batch, rows, strict=True)]

    def _result(self, prepared: Prepared, row_n6: np.ndarray, each_ms: float) -> Result:
        return Result(
            boxes=row_n6[:, :4].copy(),
            scores=row_n6[:, 4].copy(),
            classes=row_n6[:, 5].astype(np.int64),
            names=self.names,
            image=prepared.frame.image,
            origin=prepared.frame.origin,
            ms=each_ms,
        )


# A predictor out of files of weights and options.


def load_networks(weights: Sequence[str], device: torch.device, *, augment: bool = False) -> Subject:
    """Networks of files or of names of weights, side by side; CheckpointError if one cannot be used."""
    return load_subject(weights_files(weights), device, augment=augment)


def predictor_for(subject: Subject, device: torch.device, options: PredictOptions) -> Predictor:
    """The networks with the thresholds of the options; ConfigError for classes that they do not know."""
    if unknown := [kind for kind in options.classes or () if kind >= subject.num_classes]:
        raise ConfigError(f"--classes {unknown[0]}: the network knows the classes 0 to {subject.num_classes - 1}.")
    nms = NmsConfig(
        conf_thres=options.conf_thres,
        iou_thres=options.iou_thres,
        classes=options.classes,
        agnostic=options.agnostic_nms,
    )
    return Predictor(subject, size=rounded_up(options.img_size, subject.stride), device=device, nms=nms)
