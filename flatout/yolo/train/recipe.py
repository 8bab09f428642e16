"""The detection recipe: everything about `train.py` that is not common to all runs.

    TrainOptions --> YoloRecipe --flatout.runs calls its methods--> weights, results, plots

`flatout.runs` owns the order of things (folder, resume, ranks, checkpoints, callbacks) and calls the methods below from
top to bottom, as `flatout/runs/recipe.py` describes. The work itself is done by the other files of this package.
"""

import logging
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor, nn

from flatout.clock import clock, span
from flatout.config import read_config
from flatout.engine import DTYPES, Amp, Callback, EpochReport, MovingAverage, Sections, explain, has_native_bf16
from flatout.errors import ConfigError, FlatoutError, ResourceError
from flatout.feed import DeviceBatches
from flatout.ranks import World, read_world
from flatout.runs import (
    ComputeSettings,
    DataFacts,
    EpochRecord,
    Identity,
    Model,
    Recipe,
    RunContext,
    RunOptions,
    RunResult,
    Seams,
    Spending,
    ValidationResult,
    choose_loggers,
    run,
)
from flatout.yolo.data.coco import annotation_file
from flatout.yolo.data.data_yaml import require_valid
from flatout.yolo.data.image_set import ImageWeights
from flatout.yolo.data.letterbox import round_up_img_size
from flatout.yolo.data.open_data import open_data_set
from flatout.yolo.data.recorded_files import write_files
from flatout.yolo.data.tile_set import TileSet, whole_images
from flatout.yolo.evaluate import Outcome, test
from flatout.yolo.evaluate.tiles import TileConfig
from flatout.yolo.find_file import find_cfg, find_data, find_data_of_run, find_file, find_weights
from flatout.yolo.hyp import Hyp, load_hyp
from flatout.yolo.label_audit.in_step import LabelSums, sums_of_all_ranks, sums_of_whole_labels
from flatout.yolo.label_audit.set_boxes import labels_as_boxes
from flatout.yolo.label_audit.statistics import FILE_NAME, LabelStatistics, fingerprint, write_statistics
from flatout.yolo.load_network import TrainingStart, start_network
from flatout.yolo.metrics import LOSSES, YOLOV7_LOSSES, YOLOV7_RESULTS, zero_scores
from flatout.yolo.metrics.coco import is_requested
from flatout.yolo.model.info import describe
from flatout.yolo.model.network import Network
from flatout.yolo.multihead.training import WantedHeads, chosen_heads, class_aware
from flatout.yolo.options import OPTIONS_NAME, TestOptions, TrainOptions
from flatout.yolo.run_config import identity, write_options
from flatout.yolo.train import prepare
from flatout.yolo.train.autotune import input_choices
from flatout.yolo.train.choose_input import InputSettings
from flatout.yolo.train.input import (
    InputConfig,
    TileRules,
    expected_targets,
    num_workers,
    open_images,
    open_input,
)
from flatout.yolo.train.prepare import remarks
from flatout.yolo.train.step import (
    BatchPlots,
    DetectionJob,
    DetectionLoss,
    StepInputs,
    YoloSchedule,
    capacity_for,
    plot_labels,
)
from flatout.yolo.train.validate import Validation, results_line

logger = logging.getLogger(__name__)

FIRST_SEED = 2
"""YOLOv7 seeds with 2 + rank, where the rank is -1 without DDP."""
LONG_RUN_PIXELS = 1e11
"""Pixels shown to the network in a long run: about 10,000 images of 320 px for a hundred epochs."""
COCO_IOU = 0.7
"""NMS threshold of the COCO evaluation after the training."""
KEEP_EVERY = 25
"""Epochs between two checkpoints that are kept for good."""
KEEP_LAST = 5
"""Last epochs whose checkpoints are all kept."""
LATE_BEST_FROM = 200
"""Epoch from which every new best is also kept under its own name."""
ENDED = -1
"""Epoch number in the weights of a finished training."""


class TrainResult(RunResult):
    """The result of a detection training; `outcome` is that of the last validation."""

    outcome: Outcome | None

    @property
    def best_fitness(self) -> float:
        return max(0.0, self.best_score)


def train(
    options: TrainOptions,
    callbacks: Iterable[Callback] = (),
    *,
    spending: Spending | None = None,
    seams: Seams | None = None,
    typed: Collection[str] | None = None,
) -> TrainResult | None:
    """Train a detector; returns None if only a compile report was requested (`diagnose_compile`).

    `callbacks` are notified of what happens. `spending` is a budget that several trainings share. `seams` let a caller
    observe the training. `typed` names the options that were given, for a resumed run; None: those that are not at
    their defaults. Raises Interrupted after a signal, once everything is saved: the same call then continues.
    """
    if options.generations:
        raise ConfigError("evolve is a search of many trainings: call flatout.yolo.evolve.evolve(options) instead.")
    if options.diagnose_compile:
        logger.info("%s", _compile_report(options))
        return None
    result = run.train(YoloRecipe, options, callbacks, spending=spending, seams=seams, typed=typed)
    return TrainResult(**vars(result))


class YoloRecipe(Recipe):
    """How a YOLOv7 detector is trained: the parts that a run needs, made from `TrainOptions`."""

    name = "yolo"
    validates = True
    hashed_inputs = ("images", "targets")
    options: TrainOptions
    """Resolved: shortcuts such as --fast are replaced by what they switch on here."""

    def __init__(self, options: RunOptions, world: World, device: torch.device, *, resume: Path | None = None) -> None:
        assert isinstance(options, TrainOptions)
        self.unresolved = options
        """The options as given, before shortcuts are resolved; opt.yaml holds these."""
        self._cuda, self._bf16 = device.type == "cuda", has_native_bf16(device)
        super().__init__(options.resolved(cuda=self._cuda, bf16=self._bf16), world, device, resume=resume)
        _check(self.options)
        self.hyp = self._read_hyp(resume)
        data = find_data(options.data) if resume is None else find_data_of_run("", options.data, resume)
        self.data = require_valid(open_data_set(data))
        self.saves = not options.nosave
        self._seed = options.seed if options.seed is not None else FIRST_SEED - (world.size == 1)

    # Identity and configuration

    @classmethod
    def read_options(cls, folder: Path, asked: RunOptions) -> TrainOptions:
        return read_config(folder / OPTIONS_NAME, TrainOptions)

    def identity(self) -> Identity:
        return identity(self.unresolved, self.hyp, cuda=self._cuda, bf16=self._bf16)

    def write_config(self, folder: Path) -> None:
        write_options(folder, self.unresolved, self.hyp)

    @property
    def seed(self) -> int:
        return self._seed

    @property
    def amp(self) -> Amp:
        """--amp; without it float16 on a GPU, as in YOLOv7, and float32 on a CPU."""
        return self.options.amp if self.options.amp is not None else "fp16" if self._cuda else "off"

    def loggers(self) -> list[Callback]:
        return loggers_for(self.unresolved)

    # Data, network, input, step

    def open_data(self) -> DataFacts:
        logger.info("%s", self._resolved_line())
        self._images = open_images(self.data, self.options.split_config(), self.world, tile_rules(self.options))
        return DataFacts(self._images.fingerprint(), f"{self.data.file}: images or labels")

    @property
    def is_long(self) -> bool:
        options = self.options
        return options.epochs * len(self._images.train) * options.img_size[0] ** 2 > LONG_RUN_PIXELS

    def build(self, run: RunContext, saved: Sections | None) -> Model:
        self._run = run
        options, hyp = self.options, self.hyp
        names = prepare.class_names(self.data, single_cls=options.single_cls)
        if saved is None:
            start = new_network(options, hyp, names)
        else:
            start = prepare.rebuild_network(saved["weights"], names)
            # A run keeps its seed when it continues on another number of ranks, where YOLOv7 would use another seed.
            self._seed = saved["run"].get("seed", self._seed)
        network = self._network = start.network
        self._grid = prepare.grid_of(network)
        self._size, self._test_size = (round_up_img_size(size, self._grid) for size in options.img_size)
        first_epoch, epochs = prepare.start_epoch_of(start, epochs=options.epochs)
        self._more_epochs = epochs - options.epochs if saved is None else saved["run"]["more_epochs"]
        position = {"epoch": first_epoch, "step": 0} if saved is None else saved["training"]["position"]
        self._begin = position["epoch"], position["step"]
        if saved is None:
            if not options.noautoanchor:
                prepare.fit_anchors(network, self._images.train, hyp, size=self._size, seed=self._seed)
            # Rounded to half precision and back, as YOLOv7 does when it shares its anchors with the loss.
            network.half().float()
        prepare.freeze(network, options.freeze)
        network.to(self.device)
        if options.channels_last:
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = prepare.optimizer_for(network, hyp, total_batch=options.batch_size, adam=options.adam)
        average = MovingAverage(network)
        if saved is None:
            prepare.load_training_state(start, optimizer, average)
        if options.sync_bn:
            message = prepare.use_sync_batch_norm(network, ranks=self.world.size, on_gpu=self._cuda)
            if self.world.is_first:
                logger.info("%s", message)
        self._epochs = options.epochs + self._more_epochs
        return Model(
            network=network, optimizer=optimizer, average=average, first_epoch=first_epoch, epochs=self._epochs
        )  # fmt: skip

    def open_batches(self, model: Model) -> DeviceBatches:
        self._batches, self._input_settings = self._open_input()
        self._loss = detection_loss(self._network, self.options, self.hyp, size=self._size)
        self._validation = self._make_validation()
        self._files_digest = self._record_files() if self.world.is_first else ""
        self._image_weights = ImageWeights(self._images.train, self._network.nc) if self.options.image_weights else None
        if self._image_weights is not None:
            self._batches.feed.set_weights(self._image_weights(np.array(self._image_weights.initial_map)))
        return self._batches

    def job(self, model: Model) -> DetectionJob:
        options = self.options
        inputs = StepInputs(
            dtype=DTYPES[self.amp],
            channels_last=options.channels_last,
            size=self._size,
            grid=self._grid,
            seed=self._seed,
            multi_scale=options.multi_scale,
            quad=options.quad,
        )
        capacity = capacity_for(expected_targets(self._batches), self.world.batch_per_rank(options.batch_size))
        plots = BatchPlots(self._run.folder, self._network.names, self._run.background.submit)
        self._batch_plots = plots if self._run.plots else None
        if options.audit:
            num_labels = len(self._images.train.labels.class_box_T5)
            self._label_sums = LabelSums(num_labels, self._loss.anchors, self._loss.config, self.device)
        self._job = DetectionJob(
            inputs, self._loss, capacity=capacity, plots=self._batch_plots, label_sums=self._label_sums
        )
        return self._job

    def schedule(self, model: Model, steps_per_epoch: int) -> YoloSchedule:
        options = self.options
        return YoloSchedule(
            self.hyp,
            # When a finished training gets more epochs, YOLOv7's cosine keeps its original length; a linear decay of
            # that length would fall below 0.
            epochs=model.epochs if options.linear_lr else options.epochs,
            steps_per_epoch=steps_per_epoch,
            total_batch=options.batch_size,
            linear=options.linear_lr,
            adam=options.adam,
        )

    def compute_settings(self) -> ComputeSettings:
        return ComputeSettings(amp=self.amp, graphs=self.options.as_graphs)

    def preflight(self, model: Model) -> Iterator[str]:
        return remarks(
            self._images.train,
            self.hyp.augment(),
            size=self._size,
            keeps_images=self._keeps_images,
            workers=num_workers(self.options.workers, self.world.batch_per_rank(self.options.batch_size), self.world),
            ranks=self.world.size,
        )

    def num_kept_states(self, model: Model) -> int:
        return sum(keeps_checkpoint(epoch, model.epochs) for epoch in range(model.epochs))

    def started(self, model: Model) -> None:
        if self._run.plots:
            self._run.background.submit(partial(plot_labels, self._images.train, self._network.names, self._run.folder))
        if self.saves and self.world.is_first:
            content = self.describe_network(model) | {"kind": "model", "state": model.network.state_dict()}
            with span("save"):
                self._run.background.write(self._run.weights / "init.pt", {"weights": content})

    def histograms(self) -> Mapping[str, np.ndarray]:
        return {"classes": self._images.train.labels.class_box_T5[:, 0]}

    # After an epoch

    def plot_batches(self) -> None:
        if self._batch_plots is not None:
            self._batch_plots.plot()

    def is_due(self, epoch: int, *, last: bool) -> bool:
        return last or not self.options.notest

    def validate(self, model: Model, epoch: int, *, last: bool) -> ValidationResult | None:
        outcome = self._validation(model.evaluated, last)
        if outcome is None:
            return None
        return ValidationResult(outcome.evaluation.fitness, outcome.scores, outcome)

    def rows(self, epoch: int, report: EpochReport, found: ValidationResult | None) -> EpochRecord:
        scores = found.outcome.scores if found is not None else zero_scores()
        job = self._job
        losses = tuple(report.items[name] for name in YOLOV7_LOSSES)
        line = results_line(
            epoch, self._epochs, memory_gb=memory_gb(), mean_losses=losses, num_targets=int(job.last_targets),
            width_px=job.last_width_px, scores=scores,
        )  # fmt: skip
        rates = {f"lr{index}": rate for index, rate in enumerate(report.lrs)}
        first = {name: scores[name] for name in YOLOV7_RESULTS}
        # Newer scores come last, so that programs that read columns by number still find the old ones.
        row = {"epoch": epoch, **report.items, **first, **rates, **scores}
        return EpochRecord(row, _scalars(report, scores), line)

    def after_epoch(
        self, model: Model, epoch: int, found: ValidationResult | None, sections: Callable[[], Sections], *, stops: bool
    ) -> None:
        if stops:
            self.validate(model, epoch, last=True)  # once more, with the plots and the class table of a last epoch
        if self._image_weights is not None:
            self._maps = found.outcome.evaluation.maps.tolist() if found is not None else self._maps
            if epoch + 1 < model.epochs:
                self._update_image_weights(epoch + 1)
        if self.options.audit:
            self._add_label_sums()
        if self.saves and self.world.is_first and keeps_checkpoint(epoch, model.epochs):
            with clock.stage("train.save"), span("save"):
                self._run.background.write(self._run.weights / f"epoch_{epoch:03d}.pt", sections())

    # Checkpoints and weights

    def describe_network(self, model: Model) -> dict[str, Any]:
        network = self._network
        about = {"config": network.config, "names": list(network.names), "nc": network.nc, "hyp": asdict(self.hyp)}
        tiles = {"tile": self.options.tiles, "overlap": self.options.tile_overlap}
        return about if self.options.tiles is None else about | {"tiles": tiles}

    def describe_checkpoint(self, epoch: int, best_score: float) -> dict[str, Any]:
        return {"epoch": epoch, "best_fitness": max(0.0, best_score)}

    def describe_run(self) -> dict[str, Any]:
        return {"more_epochs": self._more_epochs}

    _maps: list[float] = []
    """mAP of each class in the last validation; saved, because the image weights are computed from it."""

    def input_facts(self) -> dict[str, Any] | None:
        settings = asdict(self._input_settings)
        return {
            "size": self._size,
            "grid": self._grid,
            "seed": self._seed,
            "batch_size": self.options.batch_size,
            "ranks": self.world.size,
            "steps_per_epoch": len(self._batches),
            "epochs": self._epochs,
            "device": self.device.type,
            "amp": self.amp,
            "channels_last": self.options.channels_last,
            "settings": {name: value for name, value in settings.items() if name not in ("workers", "slots")},
            "files": self._files_digest,
            "maps": self._maps if self._image_weights is not None else None,
            "versions": {"torch": str(torch.__version__), "opencv": cv2.__version__},
        }

    def replay_command(self, folder: Path, epoch: int, step: int) -> str:
        return f"flatout yolo replay {shlex.quote(str(folder))} --epoch {epoch} --step {step}"

    _label_sums: LabelSums | None = None
    """With --audit: what the steps of this epoch have seen of each label."""
    _statistics: LabelStatistics | None = None
    """The same of all epochs; on the first rank."""

    def state(self) -> dict[str, Any]:
        last = {"num_targets": int(self._job.last_targets), "width_px": self._job.last_width_px}
        state: dict[str, Any] = {"maps": self._maps, "last": last}
        if self._statistics is not None:
            state["label_statistics"] = {
                name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
                for name, value in vars(self._statistics).items()
            }
        if self._label_sums is not None:
            state["label_sums"] = self._label_sums.read() | {"fingerprint": self._fingerprint_of_sums}
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._maps = state.get("maps", [])
        self._job.last_targets, self._job.last_width_px = state["last"]["num_targets"], state["last"]["width_px"]
        # States of an older version have statistics of another kind, which are left out.
        if "epochs_T" in state.get("label_statistics", ()):
            self._statistics = LabelStatistics.from_plain(state["label_statistics"])
        if self._label_sums is not None:
            self._load_label_sums(self._label_sums, state.get("label_sums", {}))
        self._update_image_weights(state["epoch"] + 1)

    def best_weights(self, model: Model, epoch: int, found: ValidationResult | None) -> dict[str, Any]:
        return stripped(model.evaluated, 0.0 if found is None else found.score)

    def best_names(self, epoch: int) -> Iterable[str]:
        return ("best.pt", *([f"best_{epoch:03d}.pt"] if epoch >= LATE_BEST_FROM else []))

    def final_weights(
        self, model: Model, epoch: int, found: ValidationResult | None, best_score: float
    ) -> dict[str, Any]:  # fmt: skip
        return stripped(model.evaluated, max(0.0, best_score))

    def plot(self, folder: Path) -> None:
        from flatout.charts import plot_results

        plot_results(folder / "results.txt", folder / "results.png")

    def finished(self, folder: Path) -> None:
        """Evaluate last.pt and best.pt with COCO's own AP, where the data set asks for it."""
        if not (is_requested(self.data, "val") and annotation_file(self.data, "val") is not None):
            return
        for name in ("last.pt", "best.pt"):
            if not (self._run.weights / name).exists():
                continue
            options = TestOptions(
                weights=(str(self._run.weights / name),),
                data=self.unresolved.data,
                batch_size=2 * self.unresolved.batch_size,
                img_size=self.unresolved.img_size[1],
                iou_thres=COCO_IOU,
                tiles=self.unresolved.tiles,
                tile_overlap=self.unresolved.tile_overlap,
                device=self.unresolved.device,
                save_json=True,
                project=str(folder),
                name=f"coco_{Path(name).stem}",
                exist_ok=True,
            )
            try:
                logger.info("%s", test(options))
            except FlatoutError as error:
                logger.warning("%s was not evaluated with COCO's AP: %s", name, error)

    # Helpers

    @property
    def _keeps_images(self) -> bool:
        """Whether a flag asks for images to be decoded once and kept."""
        options = self.options
        return options.fast_dataloader or options.cache_images or options.device_augment

    def _read_hyp(self, resume: Path | None) -> Hyp:
        """The hyper-parameters of the resumed run, unless the command names another file; else those of --hyp."""
        options = self.unresolved
        if resume is not None and read_config(resume / "opt.yaml", TrainOptions).hyp == options.hyp:
            return load_hyp(resume / "hyp.yaml")
        hyp = load_hyp(find_file(options.hyp, flag="--hyp"))
        return hyp.for_batch(self.world.batch_per_rank(options.batch_size)) if options.auto_lr else hyp

    def _resolved_line(self) -> str:
        """One line for the log: device, input, precision, compilation."""
        options = self.options
        if options.tiles is not None:
            images = f"tiles of {options.tiles} px, cut from images that are decoded once"
        elif options.device_augment:
            images = "kept and augmented on the device"
        else:
            images = "decoded once" if options.fast_dataloader else "decoded in every epoch"
        parts = [f"device: {self.device}", f"images: {images}", f"amp: {self.amp}", f"compile: {options.compile}"]
        parts += ["channels_last"] if options.channels_last else []
        return ", ".join(parts)

    def _open_input(self) -> tuple[DeviceBatches, InputSettings]:
        options, images = self.options, self._images.train
        config = InputConfig(
            augment=self.hyp.augment(),
            size=self._size,
            batch_size=self.world.batch_per_rank(options.batch_size),
            seed=self._seed,
            grid=self._grid,
            epochs=self._epochs,
            device=self.device,
            dtype=DTYPES[self.amp],
            world=self.world,
            class_aware=class_aware(options.head_params, self._network, images) if options.class_aware_aug else None,
            rect=options.rect,
            sequential=options.sequential,
            channels_last=options.channels_last,
            persistent_workers=not options.no_persistent_workers,
            verify=options.verify_cache,
            label_ids=options.audit > 0,
            begin=self._begin,
            decode_first="--decode-first" if options.decode_first else "",
        )
        choices = input_choices(images, config, self.unresolved.asked, self._network, graphs=options.as_graphs)
        return open_input(images, config, choices, self._run.stack)

    def _record_files(self) -> str:
        """Write train_files.csv, by which a replay names files that have changed; only a warning if it cannot be."""
        try:
            return write_files(self._run.folder, whole_images(self._images.train), continues=self._run.continues)
        except ResourceError as error:
            logger.warning("%s Training goes on; a replay of its steps cannot name changed files.", error)
            return ""

    def _make_validation(self) -> Validation:
        options = self.options
        batch = options.test_batch_size or 2 * self.world.batch_per_rank(options.batch_size)
        return Validation(
            images=self._images.val,
            names=self._network.names,
            loss=self._loss,
            run=self._run,
            size=self._test_size,
            batch_size=batch,
            grid=self._grid,
            workers=num_workers(options.workers, batch, self.world),
            amp=DTYPES[self.amp],
            keeps_images=self._keeps_images,
            on_device=options.device_augment,
            persistent_workers=not options.no_persistent_workers,
            verify=options.verify_cache,
            v5_metric=options.v5_metric,
            single_cls=options.single_cls,
            tiles=None if options.tiles is None else TileConfig(tile=options.tiles, overlap=options.tile_overlap),
        )

    @cached_property
    def _fingerprint_of_sums(self) -> str:
        """Identifies the labels that steps sum up: those of tiles, in a training on tiles."""
        return fingerprint(labels_as_boxes(self._images.train.labels))

    def _load_label_sums(self, sums: LabelSums, saved: Mapping[str, Any]) -> None:
        """Continue an epoch with what its steps had summed up on the first rank, unless labels have changed since."""
        sums.clear()
        if self.world.is_first and saved.get("fingerprint") == self._fingerprint_of_sums:
            sums.load(saved)

    def _add_label_sums(self) -> None:
        """With --audit: add what the steps of this epoch saw of each label to what those before it saw."""
        assert self._label_sums is not None
        sums = sums_of_all_ranks(self._label_sums, self.world)
        self._label_sums.clear()
        if sums is None:
            return
        images = self._images.train
        labels = labels_as_boxes(whole_images(images).labels)
        if isinstance(images, TileSet):
            sums = sums_of_whole_labels(sums, images.label_L, images.shows_most_L, len(labels.class_D))
        own = fingerprint(labels)
        if self._statistics is not None and self._statistics.fingerprint != own:
            logger.warning("--audit: the labels have changed. What was seen of them before this epoch is left out.")
            self._statistics = None
        if self._statistics is None:
            self._statistics = LabelStatistics.empty(len(labels.class_D), own)
        self._statistics = self._statistics.add(sums)
        write_statistics(self._run.folder / FILE_NAME, self._statistics)

    def _update_image_weights(self, epoch: int) -> None:
        """With `--image-weights`: weight images by the scores of their classes, from `epoch` on."""
        if self._image_weights is not None:
            # Only the first rank has the scores; all ranks must draw the same images.
            maps = self.world.broadcast(self._maps) or self._image_weights.initial_map
            self._batches.epoch(epoch)  # ends the pass before, which drew by other weights
            self._batches.feed.set_weights(self._image_weights(np.array(maps)))


def new_network(options: TrainOptions, hyp: Hyp, names: Sequence[str]) -> TrainingStart:
    """A new network, with every tensor of the weights that fits; on the CPU, in float32.

    With `transfer_weights` it takes the tensors of the weights that fit, anchors included, and nothing else.
    """
    file, transfer = find_weights(options.weights), options.transfer_weights
    heads, cfg = chosen_heads(wanted_heads(options), num_classes=len(names)), find_cfg(options.cfg, weights=file)
    start = start_network(cfg, file, nc=len(names), anchors=hyp.anchors, heads=heads, keeps_anchors=transfer)
    start.network.names = list(names)
    logger.info("%s", describe(start.network).line())
    return start._replace(weights=None) if transfer else start


def wanted_heads(options: TrainOptions) -> WantedHeads:
    return WantedHeads(file=options.head_config, num_heads=options.heads, attention=options.head_attention)


def detection_loss(network: Network, options: TrainOptions, hyp: Hyp, *, size: int) -> DetectionLoss:
    """The loss that a network is trained with at an image size."""
    head = network.head
    config = hyp.loss(label_smoothing=options.label_smoothing)
    scaled = config.scaled(num_layers=head.nl, num_classes=head.nc, image_size_px=size)
    return DetectionLoss(head, scaled, hyp.ota, options.ota_from)


def tile_rules(options: TrainOptions) -> TileRules | None:
    if options.tiles is None:
        return None
    return TileRules(tile=options.tiles, overlap=options.tile_overlap, min_visible=options.tile_min_visible)


def loggers_for(options: TrainOptions) -> list[Callback]:
    """The loggers that the options ask for; ConfigError if the package of one in --log-to is missing."""
    wandb = {
        "project": "flatout" if options.project == TrainOptions.project else Path(options.project).stem,
        "entity": options.entity,
        "save_period": options.save_period,
        "alias": options.artifact_alias,
    }
    loggers = choose_loggers(options.log_to, wandb=wandb)
    if options.entity is not None and "wandb" not in options.log_to:
        # --entity switches W&B on where it is installed; without the package training goes on, as in YOLOv7.
        try:
            loggers += choose_loggers(("wandb",), wandb=wandb)
        except ConfigError as error:
            logger.warning("--entity: %s Training goes on without Weights & Biases.", error)
    if options.upload_dataset:
        logger.warning("--upload_dataset has no effect: flatout does not upload data sets to Weights & Biases.")
    if options.bbox_interval != TrainOptions.bbox_interval:
        logger.info("--bbox_interval has no effect: images with boxes are sent once, after the last epoch.")
    return loggers


def keeps_checkpoint(epoch: int, epochs: int) -> bool:
    """Whether the checkpoint of this epoch is kept, as in YOLOv7: the first, every 25th, and the last five."""
    return epoch == 0 or (epoch + 1) % KEEP_EVERY == 0 or epoch >= epochs - KEEP_LAST


def stripped(network: nn.Module, fitness: float) -> dict[str, Any]:
    """The content of a weights file, without the description of the network: half precision, as in YOLOv7."""
    state = {key: _to_half(tensor) for key, tensor in network.state_dict().items()}
    return {"kind": "stripped", "state": state, "epoch": ENDED, "best_fitness": fitness}


def memory_gb() -> float:
    """GPU memory that torch has reserved, in units of 10^9 bytes; 0 on a CPU."""
    return torch.cuda.memory_reserved() / 1e9 if torch.cuda.is_available() else 0.0


def _compile_report(options: TrainOptions) -> str:
    """DIAGNOSE_COMPILE=1: a report on where `torch.compile` breaks the network's graph; nothing is trained."""
    world = read_world(options.local_rank)
    recipe = YoloRecipe(options, world, run.device_of(options.device, world))
    names = prepare.class_names(recipe.data, single_cls=options.single_cls)
    network: Network = new_network(options, recipe.hyp, names).network.to(recipe.device).train()
    size = round_up_img_size(options.img_size[0], prepare.grid_of(network))
    return explain(network, torch.zeros(options.batch_size, 3, size, size, device=recipe.device))


def _check(options: TrainOptions) -> None:
    """ConfigError for options that contradict each other."""
    if options.quad and options.device_augment:
        raise ConfigError(
            "--quad joins finished images on the CPU, so it does not work with --device-augment or --fast. "
            "Use one of them."
        )
    if options.audit and options.single_cls:
        raise ConfigError("--single-cls treats all classes as one, so that --audit cannot judge them: use one of them.")
    if options.image_weights and options.rect:
        raise ConfigError("--image-weights draws images at random, --rect sorts them by shape: use one of them.")
    if options.image_weights and options.quad:
        raise ConfigError("--image-weights and --quad exclude each other, as in YOLOv7: use one of them.")


def _scalars(report: EpochReport, scores: Mapping[str, float]) -> dict[str, float]:
    """Losses, scores and learning rates under YOLOv7's TensorBoard tags."""
    losses = {f"val_{name}": f"val/{name}_loss" for name in LOSSES}
    scalars = {f"train/{name}_loss": report.items[name] for name in LOSSES}
    scalars |= {f"metrics/{name}": score for name, score in scores.items() if name not in losses}
    scalars |= {tag: scores[name] for name, tag in losses.items()}
    return scalars | {f"x/lr{index}": rate for index, rate in enumerate(report.lrs)}


def _to_half(tensor: Tensor) -> Tensor:
    """A copy in half precision, so that training may go on; integers keep their type."""
    return tensor.detach().to(torch.float16 if tensor.is_floating_point() else tensor.dtype, copy=True)
