"""What `test.py` judges, and on what: networks from files of weights, and the pictures of a split on a device."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatout.errors import ConfigError, counted
from flatout.feed import plan_workers
from flatout.ranks import choose_device, make_current
from flatout.yolo.data.data_yaml import DataSet, Split, without_complaints
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.label_cache import default_folder
from flatout.yolo.data.letterbox import LEAST_GRID
from flatout.yolo.data.open_data import open_data_set
from flatout.yolo.data.open_set import SplitConfig, open_split
from flatout.yolo.data.scan import ScanConfig
from flatout.yolo.evaluate.run import Evaluate, Outcome, Watcher
from flatout.yolo.evaluate.validation_input import open_validation
from flatout.yolo.find_file import find_file
from flatout.yolo.load_network import load_network
from flatout.yolo.model.augmented import Ensemble, predict_augmented
from flatout.yolo.model.deploy import fused
from flatout.yolo.model.heads import Predictions
from flatout.yolo.model.network import Network
from flatout.yolo.options import TestOptions

logger = logging.getLogger(__name__)

# The network that `test.py` judges: one or several files of weights, fused, on a device, with or without views.


class Subject(NamedTuple):
    """What is judged."""

    network: nn.Module
    """Gives `Predictions`; half precision on a GPU."""
    num_classes: int
    stride: int
    """Sides of the input are multiples of it."""
    names: tuple[str, ...] = ()
    """Of the classes, as the last file of weights has them."""


class Augmented(nn.Module):
    """Networks that each look at several views of a picture; all their boxes stand side by side."""

    def __init__(self, networks: Sequence[Network], stride: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(networks)
        self._stride = stride

    def forward(self, x: Tensor) -> Predictions:
        return Predictions(torch.cat([predict_augmented(member, x, self._stride) for member in self.members], 1), [])


def load_subject(paths: Sequence[str], device: torch.device, *, augment: bool = False) -> Subject:
    """Networks from files of weights, side by side; CheckpointError if one cannot be used."""
    networks = [fused(load_network(path).network) for path in paths]
    classes = {network.nc for network in networks}
    if len(classes) > 1:
        listed = ", ".join(f"{path}: {network.nc}" for path, network in zip(paths, networks, strict=True))
        raise ConfigError(f"Networks that are judged together must know the same classes, but they know {listed}.")
    stride = max(LEAST_GRID, *(int(network.stride.max()) for network in networks))
    if augment:
        network: nn.Module = Augmented(networks, stride)
    else:
        network = networks[0] if len(networks) == 1 else Ensemble(networks)
    network = network.to(device).eval()
    if device.type == "cuda":
        network = network.half().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Subject(network, classes.pop(), stride, tuple(networks[-1].names))


@torch.no_grad()
def warm_up(subject: Subject, *, batch_size: int, size: int, device: torch.device) -> None:
    """Let a GPU compile and choose its kernels before anything is timed."""
    if device.type == "cuda":
        dtype = next(subject.network.parameters()).dtype
        subject.network(torch.zeros(batch_size, 3, size, size, device=device, dtype=dtype))


@dataclass(frozen=True, kw_only=True)
class Exam:
    """The data, the device and the options of one call; networks and sizes come and go."""

    options: TestOptions
    data: DataSet
    split: Split
    images: ImageSet
    device: torch.device

    @property
    def names(self) -> tuple[str, ...]:
        """Of the classes that are judged."""
        names = self.data.names
        return ("item",) if self.options.single_cls and len(names) != 1 else names

    def load(self, weights: Sequence[str]) -> Subject:
        """The networks; ConfigError if they know other classes than the data set has."""
        subject = load_subject(weights, self.device, augment=self.options.augment)
        if subject.num_classes != len(self.data.names) and not self.options.single_cls:
            raise ConfigError(
                f"{', '.join(weights)}: knows {counted(subject.num_classes, 'class')}, but {self.data.file} names "
                f"{len(self.data.names)}. Use the data file it was trained with."
            )
        return subject

    def run(
        self,
        subject: Subject,
        size: int,
        *,
        conf_thres: float,
        iou_thres: float,
        plots: Path | None = None,
        watchers: Sequence[Watcher] = (),
    ) -> Outcome:
        """One pass over the pictures at a size that fits the network."""
        options = self.options
        evaluate = Evaluate(names=self.names, v5_metric=options.v5_metric, single_cls=options.single_cls)
        workers = min(options.workers, plan_workers("cpu*1.0").total, options.batch_size)
        batch_size = min(options.batch_size, len(self.images))
        warm_up(subject, batch_size=batch_size, size=size, device=self.device)
        with open_validation(
            self.images, size=size, batch_size=batch_size, stride=subject.stride, workers=workers, device=self.device
        ) as batches:
            return evaluate.run(
                subject.network,
                batches,
                conf_thres=conf_thres,
                iou_thres=iou_thres,
                hybrid=options.save_hybrid,
                plots=plots,
                watchers=watchers,
                shown=True,
            )


def open_exam(options: TestOptions) -> Exam:
    """Find and scan the pictures of the split that `--task` means."""
    device = choose_device(options.device)
    make_current(device)
    # A folder is a data set as well, of Pascal VOC.
    data = open_data_set(options.data if Path(options.data).is_dir() else find_file(options.data))
    split: Split = "train" if options.task == "train" else "test" if options.task == "test" else "val"
    without_complaints(data, [split])
    config = SplitConfig(
        scan=ScanConfig(strict=options.strict_labels),
        cache_folder=None if options.verify_cache else default_folder(),
        single_class=options.single_cls,
        allow_bad_labels=options.allow_bad_labels,
    )
    images = open_split(data, split, config).images
    return Exam(options=options, data=data, split=split, images=images, device=device)
