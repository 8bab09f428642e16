"""A predictor out of files of weights and options."""

from collections.abc import Sequence
from pathlib import Path

import torch

from flatout.errors import CheckpointError, ConfigError
from flatout.yolo.evaluate.networks import Subject, load_subject
from flatout.yolo.input_size import rounded_up
from flatout.yolo.nms import NmsConfig
from flatout.yolo.predict.options import PredictOptions
from flatout.yolo.predict.predictor import Predictor


def load_networks(weights: Sequence[str], device: torch.device, *, augment: bool = False) -> Subject:
    """Networks of files, side by side; CheckpointError if one cannot be used."""
    for path in weights:
        if not Path(path).is_file():
            raise CheckpointError(f"--weights {path}: no such file. Check the path.")
    return load_subject(weights, device, augment=augment)


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
