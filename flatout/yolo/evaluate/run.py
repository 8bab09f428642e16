"""One pass of a network over a validation set: the loop, what several ranks put together, and what is drawn.

    batch -> network -> boxes -> NMS -> matched to the labels on the device -> ... -> one sum at the end

Dimension key:  B images of a batch   H W input   T targets   D detections

What `test.py` judges, and on what: networks from files of weights, and the pictures of a split on a device.
"""

import importlib.util
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from flatout.errors import ConfigError, ResourceError, counted
from flatout.feed import plan_workers
from flatout.progress import progress
from flatout.ranks import choose_device, make_current
from flatout.yolo.data.data_yaml import DataSet, Split, without_complaints
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.label_cache import default_folder
from flatout.yolo.data.letterbox import LEAST_GRID
from flatout.yolo.data.open_data import open_data_set
from flatout.yolo.data.open_set import SplitConfig, open_split
from flatout.yolo.data.scan import ScanConfig
from flatout.yolo.evaluate.validation_input import ValidationBatch, open_validation
from flatout.yolo.find_file import find_file
from flatout.yolo.load_network import load_network
from flatout.yolo.loss import LossParts
from flatout.yolo.metrics import LOSSES, Evaluation, Evaluator
from flatout.yolo.metrics.confusion_file import write_confusion
from flatout.yolo.metrics.match import Matches
from flatout.yolo.model.deploy import fused
from flatout.yolo.model.layers import Predictions
from flatout.yolo.model.network import Ensemble, Network, predict_augmented
from flatout.yolo.nms import Detections, NmsConfig, non_max_suppression
from flatout.yolo.options import TestOptions

logger = logging.getLogger(__name__)

# One evaluation by several ranks: they take turns at the batches, and one puts everything back in order.
#
#     batches 0 1 2 3 4 ... --dealt--> rank 0: 0 2 4   rank 1: 1 3  --Share each--> in_turn --> as if by one
#
# Whole batches are dealt, never parts: the same pictures go through the network together, at the same shape, so that
# the scores and losses are those of one rank, to the last bit where its arithmetic is.

T = TypeVar("T")


class Share(NamedTuple):
    """What one rank has found: plain arrays on the host, batch by batch."""

    matches: list[tuple[np.ndarray, ...]]
    losses: list[np.ndarray]
    num_images: int
    confusion: np.ndarray | None


Join = Callable[[Share], Sequence[Share]]
"""One rank's share in; those of all out, in the order of the ranks. Empty for ranks that do not sum up."""


def share_of(evaluator: Evaluator, losses: Sequence[Tensor]) -> Share:
    """Everything on the host; it waits for the device."""
    return Share(
        [tuple(column.cpu().numpy() for column in batch) for batch in evaluator.batches],
        [loss.cpu().numpy() for loss in losses],
        evaluator.num_images,
        None if evaluator.confusion is None else evaluator.confusion.counts().numpy(),
    )


def put_together(shares: Sequence[Share], evaluator: Evaluator) -> list[Tensor]:
    """Let `evaluator` hold what all have found; returns the losses of all batches, in order."""
    evaluator.batches = [
        Matches(*map(torch.from_numpy, batch)) for batch in in_turn([share.matches for share in shares])
    ]
    evaluator.num_images = sum(share.num_images for share in shares)
    if evaluator.confusion is not None:
        evaluator.confusion.hold([share.confusion for share in shares if share.confusion is not None])
    return [torch.from_numpy(loss) for loss in in_turn([share.losses for share in shares])]


def in_turn(dealt: Sequence[Sequence[T]]) -> list[T]:
    """The cards in the order they were dealt in: the first of each, then the second of each ..."""
    rounds = max(map(len, dealt), default=0)
    return [hand[number] for number in range(rounds) for hand in dealt if number < len(hand)]


# What an evaluation draws: the first batches with labels and with detections, curves, the confusion matrix.

BATCHES = 3


class EvaluationPictures:
    """Writes test_batch{0,1,2}_{labels,pred}.jpg while batches come, and the rest at the end.

    Pictures are extras: without OpenCV, or where they cannot be written, one warning says so and the evaluation
    goes on.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder = folder
        self._names = names
        self._drawn = 0
        self._works = importlib.util.find_spec("cv2") is not None
        if not self._works:
            logger.warning("No pictures are drawn: OpenCV is not installed (pip install opencv-python-headless).")

    def watch(self, batch: ValidationBatch, found: Detections, native: Detections) -> None:
        """Draw the batch if it is one of the first."""
        if not self._works or self._drawn == BATCHES:
            return
        from flatout.charts import MOST_IMAGES, plot_batch, plot_detections

        try:
            head = f"test_batch{self._drawn}"
            images, targets_T6 = batch.images[:MOST_IMAGES].cpu().numpy(), batch.targets_T6.cpu().numpy()
            plot_batch(images, targets_T6, batch.paths, self._names, self._folder / f"{head}_labels.jpg")
            row_D6, image_D = found.row_D6.cpu().numpy(), found.image_D.cpu().numpy()
            plot_detections(images, row_D6, image_D, batch.paths, self._names, self._folder / f"{head}_pred.jpg")
        except OSError as error:
            self._give_up(error)
        self._drawn += 1

    def finish(self, evaluation: Evaluation) -> None:
        """Curves, if anything was found, and the confusion matrix, drawn and as numbers."""
        if not self._works:
            return
        from flatout.charts import as_shown

        try:
            plot_evaluation(evaluation, self._names, self._folder)
            if evaluation.confusion is not None:
                write_confusion(as_shown(evaluation.confusion), self._names, self._folder / "confusion_matrix.csv")
        except OSError as error:
            self._give_up(error)
        except ResourceError as error:
            logger.warning("%s The evaluation goes on.", error)

    def _give_up(self, error: OSError) -> None:
        self._works = False
        logger.warning("%s: pictures cannot be written (%s). The evaluation goes on.", self._folder, error.strerror)


def plot_evaluation(evaluation: Evaluation, names: Sequence[str], folder: Path) -> list[Path]:
    """Write PR_curve.png, F1_curve.png, P_curve.png, R_curve.png, and confusion_matrix.png if it was counted.

    There are no curves where no detection was right.
    """
    from flatout.charts import ClassCurves, plot_confusion, plot_curves

    found, curves = evaluation.classes, evaluation.classes.curves
    drawn = []
    if len(found.classes_C):
        of_classes = ClassCurves(
            classes_C=found.classes_C,
            ap50_C=found.ap_CK[:, 0],
            precision_at_recall_CX=curves.precision_at_recall_CX,
            precision_CX=curves.precision_CX,
            recall_CX=curves.recall_CX,
            f1_CX=curves.f1_CX,
        )
        drawn = plot_curves(of_classes, names, folder)
    if evaluation.confusion is not None:
        drawn.append(plot_confusion(evaluation.confusion, names, folder / "confusion_matrix.png"))
    return drawn


Loss = Callable[[Sequence[Tensor], Tensor], LossParts]
"""(raw maps of the levels, targets [T, 6]) -> loss; for validation the plain one, whatever training uses."""


class Batches(Protocol):
    """A `ValidationInput`, or whatever gives such batches."""

    @property
    def num_images(self) -> int: ...

    def epoch(self, epoch: int, start: int = 0) -> Iterator[ValidationBatch]: ...


class Watcher(Protocol):
    """Gets every batch with what was found: in pixels of the input, and in pixels of the pictures, clipped."""

    def __call__(self, batch: ValidationBatch, found: Detections, native: Detections) -> None: ...


class Speed(NamedTuple):
    """Milliseconds per image."""

    inference: float
    nms: float

    @property
    def total(self) -> float:
        return self.inference + self.nms


class Outcome(NamedTuple):
    """What an evaluation found."""

    evaluation: Evaluation
    val_losses: Mapping[str, float]
    """By the names of `LOSSES`: means over the batches; zeros without a loss."""

    speed_ms: Speed

    @property
    def scores(self) -> dict[str, float]:
        """Scores and losses, by the names that files have."""
        return {**self.evaluation.scores, **{f"val_{name}": loss for name, loss in self.val_losses.items()}}


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """How networks are judged on a data set."""

    names: Sequence[str]
    """Of the classes; their number is the number of classes."""

    v5_metric: bool = False
    """Let recall curves end at 1."""

    single_cls: bool = False
    """Whatever class a detection has counts as class 0."""

    @torch.no_grad()
    def run(
        self,
        network: nn.Module,
        batches: Batches,
        *,
        conf_thres: float = 0.001,
        iou_thres: float = 0.6,
        amp: torch.dtype | None = None,
        loss: Loss | None = None,
        hybrid: bool = False,
        plots: Path | None = None,
        watchers: Sequence[Watcher] = (),
        shown: bool = False,
        confusion: bool = False,
        join: Join | None = None,
    ) -> Outcome:
        """Judge a network that gives `Predictions`, on the device where it is; it is left in the mode it was in.

        `amp` is the precision of autocast; without it the network runs in the precision of its weights. `hybrid`
        gives the labels to NMS as certain boxes. `plots` is the folder for pictures of the first batches, curves and
        the confusion matrix, which `confusion` counts also without pictures. `shown` shows the progress. `join` puts
        the shares of several ranks together, each of which runs some of the batches (partial results).
        """
        nms = NmsConfig(conf_thres=conf_thres, iou_thres=iou_thres, multi_label=True)
        evaluator = Evaluator(len(self.names), confusion=confusion or plots is not None, v5_metric=self.v5_metric)
        pictures = None if plots is None else EvaluationPictures(plots, self.names)
        watchers = [*watchers, *([pictures.watch] if pictures else [])]
        forward = _Forward(network, amp)
        suppress_s, losses, done, nbytes = 0.0, [], 0, 0
        with _judging(network), progress("evaluating", batches.num_images, shown=shown) as advance:
            for batch in batches.epoch(0):
                predictions = forward(batch.images)
                if loss is not None:
                    losses.append(loss(predictions.raw, batch.targets_T6).items[: len(LOSSES)])
                begin_s = _now_s(batch.images.device)
                found = non_max_suppression(predictions.decoded, nms, labels=certain_boxes(batch) if hybrid else None)
                suppress_s += _now_s(batch.images.device) - begin_s
                if self.single_cls:
                    found.row_D6[:, 5] = 0
                native = evaluator.update(found, batch.targets_T6, batch.letterbox, batch.input_hw)
                for watch in watchers:
                    watch(batch, found, native)
                done, nbytes = done + len(batch.indices), nbytes + batch.images.nbytes
                advance(done, nbytes)
        if join is not None:
            losses = put_together(join(share_of(evaluator, losses)), evaluator)
        evaluation = evaluator.result()
        if pictures is not None:
            pictures.finish(evaluation)
        per_image_ms = 1e3 / max(1, done)
        speed = Speed(forward.taken_s * per_image_ms, suppress_s * per_image_ms)
        return Outcome(evaluation, _mean_losses(losses), speed)


class _Forward:
    """uint8 images to predictions, with a stopwatch."""

    def __init__(self, network: nn.Module, amp: torch.dtype | None) -> None:
        self._network = network
        self._amp = None if amp == torch.float32 else amp
        self._dtype = amp or next(network.parameters()).dtype
        self.taken_s = 0.0

    def __call__(self, images_BCHW: Tensor) -> Predictions:
        x = images_BCHW.to(self._dtype).div_(255)
        begin_s = _now_s(x.device)
        with torch.autocast(x.device.type, dtype=self._amp, enabled=self._amp is not None):
            predictions: Predictions = self._network(x)
        self.taken_s += _now_s(x.device) - begin_s
        return predictions


@contextmanager
def _judging(network: nn.Module) -> Iterator[None]:
    was_training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(was_training)


def certain_boxes(batch: ValidationBatch) -> list[Tensor]:
    """The labels as NMS takes them, per image [n, 5]: class, cx, cy, w, h in pixels of the input."""
    height, width = batch.input_hw
    label_T5 = batch.targets_T6[:, 1:] * batch.targets_T6.new_tensor([1, width, height, width, height])
    return list(label_T5.split(batch.counts_B.tolist()))


def _mean_losses(losses: list[Tensor]) -> dict[str, float]:
    """By name. The host waits for the device, once."""
    means = torch.stack(losses).mean(0).tolist() if losses else [0.0] * len(LOSSES)
    return dict(zip(LOSSES, means, strict=True))


def _now_s(device: torch.device) -> float:
    """When everything queued on the device is done; the host waits for that."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


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
