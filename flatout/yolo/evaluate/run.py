"""One pass of a network over a validation set.

    batch -> network -> boxes -> NMS -> matched to the labels on the device -> ... -> one sum at the end

Dimension key:  B images of a batch   H W input   T targets   D detections
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from flatout.feed.progress import progress
from flatout.yolo.evaluate.pictures import EvaluationPictures
from flatout.yolo.evaluate.shares import Join, put_together, share_of
from flatout.yolo.loss import LossParts
from flatout.yolo.metrics import Evaluation, Evaluator
from flatout.yolo.model.heads import Predictions
from flatout.yolo.nms import Detections, NmsConfig, non_max_suppression
from flatout.yolo.validation_input import ValidationBatch

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
    val_losses: tuple[float, float, float]
    """Box, objectness, class: means over the batches; zeros without a loss."""

    speed_ms: Speed

    @property
    def scores(self) -> tuple[float, ...]:
        """The seven numbers of a line of results.txt: P, R, mAP@.5, mAP@.5:.95, then the losses."""
        found = self.evaluation
        return found.precision, found.recall, found.map50, found.map50_95, *self.val_losses


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
        the shares of several ranks together, each of which runs some of the batches (shares.py).
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
                    losses.append(loss(predictions.raw, batch.targets_T6).items[:3])
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


def _mean_losses(losses: list[Tensor]) -> tuple[float, float, float]:
    """The host waits for the device, once."""
    if not losses:
        return 0.0, 0.0, 0.0
    box, obj, cls = torch.stack(losses).mean(0).tolist()
    return box, obj, cls


def _now_s(device: torch.device) -> float:
    """When everything queued on the device is done; the host waits for that."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
