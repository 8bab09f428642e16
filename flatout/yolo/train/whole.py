"""The whole of `train.py`: options in; weights, results and pictures in a run folder out."""

import io
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from flatout.engine import distributed
from flatout.engine.compiling import Compiled, explain
from flatout.engine.determinism import set_determinism
from flatout.engine.ema import MovingAverage
from flatout.engine.environment import differences, environment
from flatout.engine.generations import Generation, Generations
from flatout.engine.interrupts import Interrupts
from flatout.engine.loop import Loop, LoopConfig, StoppedAfter
from flatout.engine.precision import DTYPES
from flatout.engine.progress import StepProgress
from flatout.engine.random_state import seed_all
from flatout.engine.records import Records
from flatout.engine.run_folder import Run
from flatout.engine.tensorboard import TensorBoard
from flatout.errors import CheckpointError, DataError
from flatout.yolo.compat.resume_options import config_of_run
from flatout.yolo.data.label_cache import default_folder
from flatout.yolo.data.open_set import SplitConfig, open_split
from flatout.yolo.data.scan import ScanConfig
from flatout.yolo.evaluate import Outcome
from flatout.yolo.input_size import rounded_up
from flatout.yolo.model.network import Network
from flatout.yolo.options import TrainOptions
from flatout.yolo.schedule import YoloSchedule
from flatout.yolo.train import prepare
from flatout.yolo.train.batch_pictures import BatchPictures
from flatout.yolo.train.epoch_end import EpochEnd, EpochEndConfig, Resample
from flatout.yolo.train.finish import finish
from flatout.yolo.train.image_sets import Pictures
from flatout.yolo.train.input import InputConfig, TrainingInput, num_workers, open_input
from flatout.yolo.train.job import DetectionJob, StepConfig, capacity_for
from flatout.yolo.train.loss_choice import DetectionLoss
from flatout.yolo.train.setting import Setting, read_setting, resolved_line
from flatout.yolo.train.teller import Teller
from flatout.yolo.train.validate import Validation, ValidationConfig
from flatout.yolo.train.weighing import Weighing
from flatout.yolo.train.weight_files import WeightFiles

logger = logging.getLogger(__name__)

NEVER = float("inf")
LONG_RUN_PIXELS = 1e11
"""Ten thousand pictures of 320 px for a hundred epochs, about."""

After = Callable[[int, Mapping[str, float]], None]


@dataclass(frozen=True)
class TrainResult:
    """What a training left behind."""

    folder: Path
    outcome: Outcome | None
    """Of the last validation; None if there was none."""
    best_fitness: float
    finished: bool
    """False if it was asked to end early; the same command then continues."""


def train(options: TrainOptions) -> TrainResult | None:
    """Train as the options say; None if only a report was asked for.

    Raises Interrupted once a signal was obeyed and everything is saved: the same call then continues.
    """
    setting = read_setting(options)
    seed_all(setting.seed)
    if setting.options.diagnose_compile:
        logger.info("%s", _explained(setting))
        return None
    distributed.join(setting.world, setting.device)
    try:
        with ExitStack() as stack:
            run = stack.enter_context(setting.open_run()) if setting.world.is_first else None
            # One rank holds the folder; the others only learn where it is.
            place = Place(*setting.world.from_first((str(run.folder), run.continues) if run else None))
            training = _Training(setting, place, stack)
            result = training.go()
            if run is not None and result.finished:
                training.finish(run)
            return result
    finally:
        distributed.leave(setting.world)


class Place:
    """The run folder, as every rank knows it."""

    def __init__(self, folder: str, continues: bool) -> None:
        self.folder = Path(folder)
        self.continues = continues


class _Training:
    """The parts of one training, put together in the order in which YOLOv7 makes them."""

    def __init__(self, setting: Setting, run: Place, stack: ExitStack) -> None:
        self._setting, self._run, self._stack = setting, run, stack
        options = setting.options
        logger.info("%s", resolved_line(setting))
        self._saved = self._saved_state()
        names = prepare.class_names(setting.data, single_cls=options.single_cls)
        self._start = (
            prepare.make_network(options, setting.hyp, names)
            if self._saved is None
            else prepare.network_of_run(self._section("weights"), names)
        )
        self._network: Network = self._start.network
        self._pictures = self._open_pictures()
        set_determinism(options.deterministic, long_run=self._is_long())
        self._grid = prepare.grid_of(self._network)
        self._size, self._test_size = (rounded_up(size, self._grid) for size in options.img_size)
        self._first_epoch, self._epochs = prepare.start_epoch_of(self._start, epochs=options.epochs)
        if self._saved is not None:
            self._epochs += self._section("run")["more_epochs"]
        if self._saved is None:
            prepare.fit_anchors(
                self._network, self._pictures.train, options, setting.hyp, size=self._size, seed=setting.seed
            )
            prepare.round_weights(self._network)
        prepare.freeze(self._network, options.freeze)
        self._network.to(setting.device)
        if options.channels_last:
            self._network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._optimizer = prepare.optimizer_for(
            self._network, setting.hyp, total_batch=options.batch_size, adam=options.adam
        )
        self._average = MovingAverage(self._network)

    def go(self) -> TrainResult:
        setting, options, folder = self._setting, self._setting.options, self._run.folder
        files = self._files = WeightFiles(folder / "weights", self._about())
        files.folder.mkdir(exist_ok=True)
        self._draw_labels()
        interrupts = Interrupts()
        source = self._stack.enter_context(self._open_input())
        loss = self._loss()
        validation = self._stack.enter_context(self._validation(loss, interrupts))
        records = self._stack.enter_context(Records(folder))
        epoch_end = self._epoch_end = EpochEnd(
            EpochEndConfig(
                epochs=self._epochs, notest=options.notest, nosave=options.nosave, patience=options.patience
            ),
            average=self._average.network,
            validate=validation if setting.world.is_first else None,
            records=records,
            files=files,
            about=self._about(),
            run=self._run_section(),
            after=self._after(),
            resample=self._resample(source),
        )
        loop = self._loop(source, loss, epoch_end, interrupts)
        epoch_end.whole_state = loop.sections
        if self._saved is None:
            records.clear()
        self._begin(loop, files)
        total = self._epochs * source.steps_per_epoch
        done = loop.epoch * source.steps_per_epoch + loop.step
        try:
            # Of several ranks only the first draws a bar; lines of the others are not shown either.
            screen = None if setting.world.is_first else io.StringIO()
            with interrupts, StepProgress(total, start=done, stream=screen) as progress:
                loop.tell = Teller(loop, progress, compile_auto=options.compile == "auto" and setting.world.size == 1)
                loop.run()
        except StoppedAfter as stopped:
            logger.info("Stopped after %s steps, as asked. The same command continues.", stopped)
            return TrainResult(folder, epoch_end.outcome, epoch_end.best_fitness, finished=False)
        return TrainResult(folder, epoch_end.outcome, epoch_end.best_fitness, finished=True)

    def finish(self, run: Run) -> None:
        """Pictures and final files of a training that has come to its end; by the first rank."""
        finish(self._setting, run, self._files, self._average.network, self._epoch_end.best_fitness)

    def _saved_state(self) -> Generation | None:
        """What the run folder holds, if this command continues it."""
        folder = self._run.folder / "weights"
        if not self._run.continues:
            if self._setting.world.is_first and folder.is_dir():
                Generations(folder).forget()
            return None
        saved = Generations(folder).load()
        if saved is not None and "training" not in saved.sections:
            raise CheckpointError(f"{saved.path}: this training has ended: there is nothing to resume.")
        return saved

    def _section(self, name: str) -> Mapping[str, Any]:
        """Of the saved state that is continued."""
        assert self._saved is not None
        section = self._saved.sections[name]
        assert isinstance(section, Mapping)
        return section

    def _is_long(self) -> bool:
        """Whether trying out kernels at the start is worth its time."""
        options = self._setting.options
        return options.epochs * len(self._pictures.train) * options.img_size[0] ** 2 > LONG_RUN_PIXELS

    def _open_pictures(self) -> Pictures:
        setting = self._setting
        config = SplitConfig(
            scan=ScanConfig(strict=setting.options.strict_labels),
            cache_folder=default_folder(),
            single_class=setting.options.single_cls,
        )
        # The first rank scans, the others find its cache.
        if not setting.world.is_first:
            setting.world.wait_for_all()
        pictures = Pictures(*(open_split(setting.data, split, config).images for split in ("train", "val")))
        if setting.world.is_first:
            setting.world.wait_for_all()
        return pictures

    def _open_input(self) -> TrainingInput:
        setting = self._setting
        config = InputConfig(
            augment=setting.hyp.augment(),
            size=self._size,
            batch_size=setting.world.share_of(setting.options.batch_size),
            seed=setting.seed,
            grid=self._grid,
            epochs=self._epochs,
            device=setting.device,
            dtype=DTYPES[setting.amp],
            world=setting.world,
        )
        return open_input(self._pictures.train, config, setting.options)

    def _loss(self) -> DetectionLoss:
        setting = self._setting
        head = self._network.head
        config = setting.hyp.loss(label_smoothing=setting.options.label_smoothing)
        scaled = config.scaled(num_layers=head.nl, num_classes=head.nc, image_size_px=self._size)
        return DetectionLoss(head, scaled, setting.hyp.ota, setting.options.ota_from)

    def _validation(self, loss: DetectionLoss, interrupts: Interrupts) -> Validation:
        options = self._setting.options
        batch = options.test_batch_size or 2 * self._setting.world.share_of(options.batch_size)
        config = ValidationConfig(
            size=self._test_size,
            batch_size=batch,
            grid=self._grid,
            workers=num_workers(options.workers, batch, self._setting.world),
            device=self._setting.device,
            amp=DTYPES[self._setting.amp],
            keeps_pictures=options.fast_dataloader or options.cache_images or options.device_augment,
            on_device=options.device_augment,
            interruptible=self._setting.world.size == 1,
            verify=options.verify_cache,
            v5_metric=options.v5_metric,
            single_cls=options.single_cls,
        )
        return Validation(self._pictures.val, self._network.names, config, loss, self._run.folder, interrupts)

    def _loop(self, source: TrainingInput, loss: DetectionLoss, epoch_end: EpochEnd, interrupts: Interrupts) -> Loop:
        setting, options = self._setting, self._setting.options
        batch_size = setting.world.share_of(options.batch_size)
        step_config = StepConfig(
            dtype=DTYPES[setting.amp],
            channels_last=options.channels_last,
            size=self._size,
            grid=self._grid,
            seed=setting.seed,
            multi_scale=options.multi_scale,
            quad=options.quad,
            capacity=capacity_for(source.expected_targets, batch_size),
        )
        pictures = BatchPictures(self._run.folder if setting.world.is_first else None, self._network.names)
        return Loop(
            job=DetectionJob(step_config, loss, epoch_end, pictures),
            network=self._network,
            optimizer=self._optimizer,
            schedule=YoloSchedule(
                setting.hyp,
                # Trained on beyond its end, YOLOv7's cosine keeps its length; a line of that length would fall below 0.
                epochs=self._epochs if options.linear_lr else options.epochs,
                steps_per_epoch=source.steps_per_epoch,
                total_batch=options.batch_size,
                linear=options.linear_lr,
                adam=options.adam,
            ),
            batches=source.batches,
            config=LoopConfig(
                epochs=self._epochs,
                steps_per_epoch=source.steps_per_epoch,
                amp=setting.amp,
                log_every=min(options.log_every, source.steps_per_epoch),
                save_every_s=NEVER if options.nosave else 60 * options.save_every_minutes,
                save_every_steps=sys.maxsize if options.nosave else options.save_every_steps,
                save_apart_s=NEVER if options.nosave else LoopConfig.save_apart_s,
                stop_after=options.stop_after,
                graphs=options.fast and not options.multi_scale,
            ),
            device=setting.device,
            average=self._average,
            generations=Generations(self._run.folder / "weights"),
            interrupts=interrupts,
            world=setting.world,
            forward=self._forward(),
        )

    def _forward(self) -> nn.Module:
        """The network as it is called: compiled if asked for, with gradients summed over ranks if there are several."""
        setting = self._setting
        if setting.world.size == 1:
            return Compiled(self._network) if setting.options.compile == "on" else self._network
        if setting.options.compile == "on":
            logger.warning("With several ranks the network is not compiled.")
        ids = [setting.device.index] if setting.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(self._network, device_ids=ids)

    def _begin(self, loop: Loop, files: WeightFiles) -> None:
        """Continue a saved training, or save the beginning of a new one."""
        if self._saved is None:
            loop.epoch = self._first_epoch
            prepare.take_over(self._start, self._optimizer, self._average)
            if not self._setting.options.nosave:
                if self._setting.world.is_first:
                    files.save_start(self._network)
                loop.save()
            return
        self._check_data()
        for line in differences(self._section("run")["environment"], environment()):
            logger.info("%s", line)
        loop.load_sections(self._saved.sections)
        logger.info("Continuing %s at epoch %d, step %d.", self._run.folder, loop.epoch, loop.step)

    def _draw_labels(self) -> None:
        """labels.jpg: which classes there are, and how large their boxes are and where."""
        if self._saved is not None or not self._setting.world.is_first:
            return
        try:
            from flatout.yolo.pictures.label_statistics import label_statistics

            images = self._pictures.train
            label_statistics(images.labels, self._network.names, self._run.folder / "labels.jpg")
        except (ImportError, OSError) as error:
            logger.warning("No picture of the labels was drawn: %s.", error)

    def _check_data(self) -> None:
        if self._section("run")["data"] == self._pictures.fingerprint():
            return
        told = f"{self._setting.data.file}: pictures or labels have changed since this run was saved"
        if not self._setting.options.allow_data_change:
            raise DataError(
                f"{told}. Start a new run with --fresh, or continue with the changed data with --allow-data-change."
            )
        logger.warning("%s; continuing with the changed ones, as asked.", told)

    def _about(self) -> dict[str, Any]:
        return prepare.about(self._network, asdict(self._setting.hyp))

    def _run_section(self) -> dict[str, Any]:
        return {
            "config": config_of_run(self._setting.written, self._setting.hyp),
            "data": self._pictures.fingerprint(),
            "more_epochs": self._epochs - self._setting.options.epochs,
            "environment": environment(),
        }

    def _after(self) -> After:
        """Scalars for TensorBoard, by the first rank."""
        if not self._setting.world.is_first:
            return lambda epoch, scalars: None
        board = TensorBoard(self._run.folder)
        self._stack.callback(board.close)
        return board.write

    def _resample(self, source: TrainingInput) -> Resample | None:
        """For `--image-weights`: what the score of each class says about the epochs to come."""
        if not self._setting.options.image_weights:
            return None
        weigh, world = Weighing(self._pictures.train, self._network.nc), self._setting.world

        def resample(maps: list[float], epoch: int) -> None:
            # One rank has validated; all must draw the same pictures.
            source.set_weights(weigh(np.array(world.from_first(maps) or never_found)), epoch)

        never_found = [0.0] * self._network.nc
        source.feed.set_weights(weigh(np.array(never_found)))
        return resample


def _explained(setting: Setting) -> str:
    names = prepare.class_names(setting.data, single_cls=setting.options.single_cls)
    network = prepare.make_network(setting.options, setting.hyp, names).network.to(setting.device).train()
    size = rounded_up(setting.options.img_size[0], prepare.grid_of(network))
    return explain(network, torch.zeros(setting.options.batch_size, 3, size, size, device=setting.device))
