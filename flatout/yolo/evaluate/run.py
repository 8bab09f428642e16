"""One pass of a network over a validation set: the loop, partial results of several ranks, plots, loading of weights.

    batch -> network -> boxes -> NMS -> matched to the labels on the device -> ... -> scores at the end

On a GPU the host waits for the counts of NMS and matching, a few times per batch, and at the end; never for a clock.

Dimension key:  B images of a batch   C channels (classes in ClassCurves)   H W input   T targets   D detections
                K IoU thresholds   X points of a curve   n boxes of one image
"""

import importlib.util
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from flatout.clock import span
from flatout.errors import ConfigError, ResourceError, counted
from flatout.feed import plan_workers
from flatout.progress import progress
from flatout.ranks import choose_device, make_current
from flatout.runs import BackgroundCall
from flatout.yolo.data.data_yaml import DataSet, Split, require_valid
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.label_cache import default_folder
from flatout.yolo.data.letterbox import MIN_GRID
from flatout.yolo.data.open_data import open_data_set
from flatout.yolo.data.open_set import SplitConfig, open_split
from flatout.yolo.data.scan import ScanConfig
from flatout.yolo.evaluate.tiles import TiledInput, tile_config
from flatout.yolo.evaluate.validation_input import ValidationBatch, ValidationInput, open_validation, together
from flatout.yolo.find_file import find_data
from flatout.yolo.load_network import load_network
from flatout.yolo.loss import LossParts
from flatout.yolo.loss.losses import ITEM_NAMES
from flatout.yolo.metrics import LOSSES, Evaluation, Evaluator
from flatout.yolo.metrics.confusion_file import write_confusion
from flatout.yolo.metrics.match import Matches
from flatout.yolo.model.deploy import fused
from flatout.yolo.model.layers import Predictions
from flatout.yolo.model.network import Ensemble, Network, predict_augmented
from flatout.yolo.nms import Detections, NmsConfig, non_max_suppression
from flatout.yolo.options import TestOptions

logger = logging.getLogger(__name__)

# Several ranks: each evaluates every n-th batch, and the first rank merges the results in the order of the batches
#
#     batches 0 1 2 3 4 ... --> rank 0: 0 2 4   rank 1: 1 3  --a PartialResult each--> interleave --> as from one rank
#
# Ranks get whole batches, never parts: the same images go through the network together and at the same shape as on one
# rank, so that scores and losses are the same to the last bit wherever the arithmetic is deterministic.

T = TypeVar("T")


class PartialResult(NamedTuple):
    """The results of one rank: plain arrays on the host, batch by batch."""

    matches: list[tuple[np.ndarray, ...]]
    losses: list[np.ndarray]
    num_images: int
    confusion: np.ndarray | None


Gather = Callable[[PartialResult], Sequence[PartialResult]]
"""One rank's partial result in; those of all ranks out, in the order of the ranks. Empty on all ranks but the first."""


def partial_result(evaluator: Evaluator, losses: Sequence[Tensor]) -> PartialResult:
    """Copy the results of this rank to the host, which waits for the device."""
    return PartialResult(
        [tuple(column.cpu().numpy() for column in batch) for batch in evaluator.batches],
        [loss.cpu().numpy() for loss in losses],
        evaluator.num_images,
        None if evaluator.confusion is None else evaluator.confusion.counts().numpy(),
    )


def merge_results(partials: Sequence[PartialResult], evaluator: Evaluator) -> list[Tensor]:
    """Put the results of all ranks into `evaluator`; returns the losses of all batches, in order."""
    evaluator.batches = [
        Matches(*map(torch.from_numpy, batch)) for batch in interleave([each.matches for each in partials])
    ]
    evaluator.num_images = sum(each.num_images for each in partials)
    if evaluator.confusion is not None:
        evaluator.confusion.set_counts([each.confusion for each in partials if each.confusion is not None])
    return [torch.from_numpy(loss) for loss in interleave([each.losses for each in partials])]


def interleave(lists: Sequence[Sequence[T]]) -> list[T]:
    """The first item of each list, then the second of each, and so on; lists may differ in length."""
    longest = max(map(len, lists), default=0)
    return [items[number] for number in range(longest) for items in lists if number < len(items)]


# The loop

Loss = Callable[[Sequence[Tensor], Tensor], LossParts]
"""(raw maps of the levels, targets [T, 6]) -> loss; in validation the plain loss, whatever loss is trained with."""


BatchObserver = Callable[[ValidationBatch, Detections, Detections], None]
"""Called with every batch and its detections, in pixels of the input and, clipped, in pixels of the images."""


class Speed(NamedTuple):
    """Milliseconds per image."""

    inference: float
    nms: float

    @property
    def total(self) -> float:
        return self.inference + self.nms


class Outcome(NamedTuple):
    """The result of an evaluation: scores, losses and speed."""

    evaluation: Evaluation
    val_losses: Mapping[str, float]
    """Means over the batches by the names of `LOSSES`; zeros if no loss was given."""

    speed_ms: Speed

    @property
    def scores(self) -> dict[str, float]:
        """Scores and losses under the names used in results.csv."""
        return {**self.evaluation.scores, **{f"val_{name}": loss for name, loss in self.val_losses.items()}}


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Evaluates networks on a data set."""

    names: Sequence[str]
    """Names of the classes, one per class."""

    v5_metric: bool = False
    """Let recall curves end at 1, as in YOLOv5."""

    single_cls: bool = False
    """Count detections of any class as class 0."""

    @torch.no_grad()
    def run(
        self,
        network: nn.Module,
        batches: ValidationInput | TiledInput,
        *,
        conf_thres: float = 0.001,
        iou_thres: float = 0.6,
        amp: torch.dtype | None = None,
        loss: Loss | None = None,
        hybrid: bool = False,
        plots: Path | None = None,
        submit: Callable[[BackgroundCall], object] = lambda call: call(),
        observers: Sequence[BatchObserver] = (),
        watch: Callable[[], object] = lambda: None,
        show_progress: bool = False,
        confusion: bool = False,
        gather: Gather | None = None,
        pixels_at_once: int = 0,
    ) -> Outcome:
        """Evaluate a network that returns `Predictions`, on its device; restores its mode afterwards.

        `amp` is the precision of autocast; without it the network runs in the precision of its weights. `hybrid` adds
        the labels to NMS as certain boxes. `plots` is the folder for plots of the first batches, curves and confusion
        matrix; `submit` makes them, by default at once; `confusion`: count that matrix even without plots. `loss`
        computes validation losses; a `TiledInput` gives none. `observers` see every batch with its detections. `watch`
        is called after every batch, and after every tile of a `TiledInput`; what it raises ends the evaluation.
        `gather` collects the partial results of several ranks, each of which evaluates some of the batches.
        `pixels_at_once`: consecutive batches of one shape go through the network together, up to so many pixels; their
        losses stay apart. Ignored with plots, observers or `gather`, which are about single batches.
        """
        nms = NmsConfig(conf_thres=conf_thres, iou_thres=iou_thres, multi_label=True)
        evaluator = Evaluator(len(self.names), confusion=confusion or plots is not None, v5_metric=self.v5_metric)
        plotter = None if plots is None else EvaluationPlots(plots, self.names, submit)
        observers = [*observers, *([plotter.on_batch] if plotter else [])]
        forward, suppression = Forward(network, amp), DeviceWatch()
        if observers or gather is not None:
            pixels_at_once = 0
        losses: list[Tensor] = []
        done, nbytes = 0, 0

        def decoded(images_BCHW: Tensor) -> Tensor:
            predictions = forward(images_BCHW)
            if images_BCHW.is_cuda:
                torch.cuda.synchronize(images_BCHW.device)  # tiles are timed by the clock of the host
            return predictions.decoded

        def on_tiles(done: int) -> None:
            watch()
            advance(done, 0)

        def detected() -> Iterator[tuple[ValidationBatch, Detections]]:
            if isinstance(batches, TiledInput):
                yield from batches.detected(decoded, nms, on_tiles)
                return
            for batch, parts in together(batches.epoch(0), pixels_at_once):
                predictions = forward(batch.images)
                if loss is not None:
                    losses.extend(_losses_of(parts, predictions.raw, loss))
                with suppression.timing(batch.images.device):
                    labels = labels_for_nms(batch) if hybrid else None
                    found = non_max_suppression(predictions.decoded, nms, labels=labels)
                yield batch, found

        total, unit = batches.num_images, "images"
        if isinstance(batches, TiledInput):  # there are few images, and each may take minutes
            total, unit = batches.num_tiles, "tiles"
        with eval_mode(network), progress("evaluating", total, unit=unit, shown=show_progress) as advance:
            for batch, found in detected():
                if self.single_cls:
                    found.row_D6[:, 5] = 0
                native = evaluator.update(found, batch.targets_T6, batch.letterbox, batch.input_hw)
                for observe in observers:
                    observe(batch, found, native)
                done, nbytes = done + len(batch.indices), nbytes + batch.images.nbytes
                watch()
                if not isinstance(batches, TiledInput):
                    advance(done, nbytes)
        if gather is not None:
            losses = merge_results(gather(partial_result(evaluator, losses)), evaluator)
        evaluation = evaluator.result()
        if plotter is not None:
            plotter.finish(evaluation)
        per_image_ms = 1e3 / max(1, done)
        suppress_s = batches.nms_s if isinstance(batches, TiledInput) else suppression.seconds
        speed = Speed(forward.watch.seconds * per_image_ms, suppress_s * per_image_ms)
        return Outcome(evaluation, _mean_losses(losses), speed)


class DeviceWatch:
    """Adds up what blocks of work take: on a GPU by events there, for which the host does not wait."""

    def __init__(self) -> None:
        self._host_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timing(self, device: torch.device) -> Iterator[None]:
        """Time the work of the block, on the current stream of the device."""
        if device.type != "cuda":
            begin_s = time.perf_counter()
            yield
            self._host_s += time.perf_counter() - begin_s
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(torch.cuda.current_stream(device))
        yield
        end.record(torch.cuda.current_stream(device))
        self._events.append((begin, end))

    @property
    def seconds(self) -> float:
        """All blocks so far; waits until they are done."""
        for _, end in self._events[-1:]:
            end.synchronize()
        device_ms = sum(float(begin.elapsed_time(end)) for begin, end in self._events)
        return self._host_s + device_ms / 1e3


class Forward:
    """Runs the network on uint8 images and adds up the time."""

    def __init__(self, network: nn.Module, amp: torch.dtype | None) -> None:
        self._network = network
        self._amp = None if amp == torch.float32 else amp
        self._dtype = amp or next(network.parameters()).dtype
        self.watch = DeviceWatch()
        """The time of the network so far."""

    def __call__(self, images_BCHW: Tensor) -> Predictions:
        x = images_BCHW.to(self._dtype).div_(255)
        with (
            self.watch.timing(x.device),
            torch.autocast(x.device.type, dtype=self._amp, enabled=self._amp is not None),
        ):
            predictions: Predictions = self._network(x)
        return predictions


@contextmanager
def eval_mode(network: nn.Module) -> Iterator[None]:
    """Put the network into evaluation mode for the block."""
    if not any(module.training for module in network.modules()):
        # A moving average always is: setting the mode of each of its modules takes longer, twice per validation.
        yield
        return
    was_training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(was_training)


def labels_for_nms(batch: ValidationBatch) -> list[Tensor]:
    """The labels of each image in the form that NMS takes, [n, 5]: class, cx, cy, w, h in pixels of the input."""
    height, width = batch.input_hw
    label_T5 = batch.targets_T6[:, 1:] * batch.targets_T6.new_tensor([1, width, height, width, height])
    return list(label_T5.split(batch.counts_B.tolist()))


def _losses_of(batches: Sequence[ValidationBatch], raw: Sequence[Tensor], loss: Loss) -> Iterator[Tensor]:
    """The losses of batches that went through the network together."""
    begin = 0
    for batch in batches:
        end = begin + len(batch.indices)
        yield loss([level[begin:end] for level in raw], batch.targets_T6).items
        begin = end


def _mean_losses(losses: list[Tensor]) -> dict[str, float]:
    """Mean losses by name. The host waits for the device, once."""
    if not losses:
        return dict.fromkeys(LOSSES, 0.0)
    all_items = torch.stack(losses)
    means = torch.stack([all_items[:, ITEM_NAMES.index(name)] for name in LOSSES], dim=1).mean(0).tolist()
    return dict(zip(LOSSES, means, strict=True))


# Plots

BATCHES = 3
"""Batches that are plotted."""


class EvaluationPlots:
    """Plots test_batch{0,1,2}_{labels,pred}.jpg during the evaluation, curves and confusion matrix at its end.

    Plots are optional: without OpenCV, or if they cannot be written, the evaluation goes on with one warning.
    """

    def __init__(self, folder: Path, names: Sequence[str], submit: Callable[[BackgroundCall], object]) -> None:
        """`submit` makes the plots, in order."""
        self._folder, self._names, self._submit = folder, names, submit
        self._num_plotted = 0
        self._works = importlib.util.find_spec("cv2") is not None
        if not self._works:
            logger.warning("No plots: OpenCV is not installed. To get them: pip install opencv-python-headless")

    def on_batch(self, batch: ValidationBatch, found: Detections, native: Detections) -> None:
        """Submit plots of the batch if it is one of the first."""
        if not self._works or self._num_plotted == BATCHES:
            return
        from flatout.charts import MAX_IMAGES

        with span("plots"):
            # Copies, because the buffers of a batch are used again.
            parts = (batch.images[:MAX_IMAGES], batch.targets_T6, found.row_D6, found.image_D)
            arrays = [part.to("cpu", copy=True).numpy() for part in parts]
            head = f"test_batch{self._num_plotted}"
            self._submit(partial(self._make, partial(self._plot_batch, head, list(batch.paths), *arrays)))
        self._num_plotted += 1

    def finish(self, evaluation: Evaluation) -> None:
        """Submit the curves, if any detection was right, and the confusion matrix as a plot and as CSV."""
        with span("plots"):
            self._submit(partial(self._make, partial(self._plot_scores, evaluation)))

    def _make(self, plot: BackgroundCall) -> None:
        """Make a plot, unless an earlier one could not be written."""
        if not self._works:
            return
        try:
            plot()
        except OSError as error:
            self._works = False
            logger.warning("%s: plots cannot be written (%s). The evaluation goes on.", self._folder, error.strerror)
        except ResourceError as error:
            logger.warning("%s The evaluation goes on.", error)

    def _plot_scores(self, evaluation: Evaluation) -> None:
        from flatout.charts import as_shown

        plot_evaluation(evaluation, self._names, self._folder)
        if evaluation.confusion is not None:
            write_confusion(as_shown(evaluation.confusion), self._names, self._folder / "confusion_matrix.csv")

    def _plot_batch(self, head: str, paths: Sequence[str], *arrays: np.ndarray) -> None:
        from flatout.charts import plot_batch, plot_detections

        images_BCHW, targets_T6, row_D6, image_D = arrays
        plot_batch(images_BCHW, targets_T6, paths, self._names, self._folder / f"{head}_labels.jpg")
        plot_detections(images_BCHW, row_D6, image_D, paths, self._names, self._folder / f"{head}_pred.jpg")


def plot_evaluation(evaluation: Evaluation, names: Sequence[str], folder: Path) -> list[Path]:
    """Write PR_curve.png, F1_curve.png, P_curve.png, R_curve.png, and confusion_matrix.png if it was counted.

    No curves are written if no detection was right. Returns the paths of the files.
    """
    from flatout.charts import ClassCurves, plot_confusion, plot_curves

    found, curves = evaluation.classes, evaluation.classes.curves
    written = []
    if len(found.classes_C):
        of_classes = ClassCurves(
            classes_C=found.classes_C,
            ap50_C=found.ap_CK[:, 0],
            precision_at_recall_CX=curves.precision_at_recall_CX,
            precision_CX=curves.precision_CX,
            recall_CX=curves.recall_CX,
            f1_CX=curves.f1_CX,
        )
        written = plot_curves(of_classes, names, folder)
    if evaluation.confusion is not None:
        written.append(plot_confusion(evaluation.confusion, names, folder / "confusion_matrix.png"))
    return written


# Weights on a device, as `test.py` and `detect.py` use them


class InferenceModel(NamedTuple):
    """A network ready for inference, from one or several weights files: fused, on its device."""

    network: nn.Module
    """Returns `Predictions`; in half precision on a GPU."""
    num_classes: int
    stride: int
    """The sides of the input are multiples of it."""
    names: tuple[str, ...] = ()
    """Names of the classes, from the last weights file."""
    tiles: int | None = None
    """Side of the tiles that it was trained on, according to the last weights file."""


class AugmentedEnsemble(nn.Module):
    """Networks that each predict several views of an image (test-time augmentation); all boxes are concatenated."""

    def __init__(self, networks: Sequence[Network], stride: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(networks)
        self._stride = stride

    def forward(self, x: Tensor) -> Predictions:
        return Predictions(torch.cat([predict_augmented(member, x, self._stride) for member in self.members], 1), [])


def load_inference_model(paths: Sequence[str], device: torch.device, *, augment: bool = False) -> InferenceModel:
    """A model from one weights file, or an ensemble of several. `augment`: test-time augmentation.

    CheckpointError if a file cannot be used, ConfigError if the files have different numbers of classes.
    """
    loaded = [load_network(path) for path in paths]
    networks = [fused(each.network) for each in loaded]
    classes = {network.nc for network in networks}
    if len(classes) > 1:
        listed = ", ".join(f"{path}: {network.nc}" for path, network in zip(paths, networks, strict=True))
        raise ConfigError(
            f"The networks of an ensemble need the same number of classes, but they have {listed}. Give weights that "
            "were trained on the same data set."
        )
    stride = max(MIN_GRID, *(int(network.stride.max()) for network in networks))
    if augment:
        network: nn.Module = AugmentedEnsemble(networks, stride)
    else:
        network = networks[0] if len(networks) == 1 else Ensemble(networks)
    network = network.to(device).eval()
    if device.type == "cuda":
        network = network.half().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    tile = (loaded[-1].weights.tiles or {}).get("tile")
    tiles = tile if type(tile) is int else None
    return InferenceModel(network, classes.pop(), stride, tuple(networks[-1].names), tiles)


@torch.no_grad()
def warm_up(model: InferenceModel, *, batch_size: int, size: int, device: torch.device) -> None:
    """Run once on a GPU, so that kernels are compiled and chosen before anything is timed."""
    if device.type == "cuda":
        dtype = next(model.network.parameters()).dtype
        model.network(torch.zeros(batch_size, 3, size, size, device=device, dtype=dtype))


@dataclass(frozen=True, kw_only=True)
class EvaluationRun:
    """The data, the device and the options of one test; evaluates any number of models at any size."""

    options: TestOptions
    data: DataSet
    split: Split
    images: ImageSet
    device: torch.device

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the classes that are evaluated."""
        names = self.data.names
        return ("item",) if self.options.single_cls and len(names) != 1 else names

    def load(self, weights: Sequence[str]) -> InferenceModel:
        """Load weights; ConfigError if their number of classes is not that of the data set."""
        model = load_inference_model(weights, self.device, augment=self.options.augment)
        if model.num_classes != len(self.data.names) and not self.options.single_cls:
            raise ConfigError(
                f"{', '.join(weights)}: trained for {counted(model.num_classes, 'class')}, but {self.data.file} names "
                f"{len(self.data.names)}. Use the data file that the weights were trained with."
            )
        return model

    def evaluate(
        self,
        model: InferenceModel,
        size: int,
        *,
        conf_thres: float,
        iou_thres: float,
        plots: Path | None = None,
        observers: Sequence[BatchObserver] = (),
    ) -> Outcome:
        """One pass over the images; `size` is a multiple of the model's stride."""
        options = self.options
        evaluate = Evaluate(names=self.names, v5_metric=options.v5_metric, single_cls=options.single_cls)
        workers = min(options.workers, plan_workers("cpu*1.0").total, options.batch_size)
        batch_size = min(options.batch_size, len(self.images))
        warm_up(model, batch_size=batch_size, size=size, device=self.device)
        with self._open(model, size, batch_size, workers) as batches:
            return evaluate.run(
                model.network,
                batches,
                conf_thres=conf_thres,
                iou_thres=iou_thres,
                hybrid=options.save_hybrid,
                plots=plots,
                observers=observers,
                show_progress=True,
            )

    def _open(
        self, model: InferenceModel, size: int, batch_size: int, workers: int
    ) -> AbstractContextManager[ValidationInput | TiledInput]:
        common: dict[str, Any] = {"size": size, "stride": model.stride, "device": self.device}
        if (config := tile_config(self.options, model.tiles)) is None:
            return open_validation(self.images, batch_size=batch_size, workers=workers, **common)
        batch_size = self.options.batch_size
        return nullcontext(TiledInput(self.images, config, threads=workers, batch_size=batch_size, **common))


def open_evaluation_run(options: TestOptions) -> EvaluationRun:
    """Find and scan the images of the split that `--task` names; ConfigError or DataError if they cannot be used."""
    device = choose_device(options.device)
    make_current(device)
    data = open_data_set(find_data(options.data))
    split: Split = "train" if options.task == "train" else "test" if options.task == "test" else "val"
    require_valid(data, [split])
    config = SplitConfig(
        scan=ScanConfig(strict=options.strict_labels, large=options.tiles is not None),
        cache_folder=None if options.verify_cache else default_folder(),
        single_class=options.single_cls,
        allow_bad_labels=options.allow_bad_labels,
    )
    images = open_split(data, split, config).images
    return EvaluationRun(options=options, data=data, split=split, images=images, device=device)
