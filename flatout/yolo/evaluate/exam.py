"""What `test.py` judges on: the pictures of a split, on a device, at a size that fits the network."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from flatout.engine.device_choice import choose_device, make_current
from flatout.errors import ConfigError, counted
from flatout.feed import plan_workers
from flatout.yolo.data.data_yaml import DataSet, Split, without_complaints
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.label_cache import default_folder
from flatout.yolo.data.open_data import open_data_set
from flatout.yolo.data.open_set import SplitConfig, open_split
from flatout.yolo.data.scan import ScanConfig
from flatout.yolo.evaluate.networks import Subject, load_subject, warm_up
from flatout.yolo.evaluate.run import Evaluate, Outcome, Watcher
from flatout.yolo.find_file import find_file
from flatout.yolo.options import TestOptions
from flatout.yolo.validation_input import open_validation

logger = logging.getLogger(__name__)


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
