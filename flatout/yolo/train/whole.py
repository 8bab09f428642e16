"""The whole of `train.py`: options in; weights, results and pictures in a run folder out."""

import io
import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from flatout.engine import distributed
from flatout.engine.callbacks import Callback, Callbacks, RunStart, Scores
from flatout.engine.determinism import set_determinism
from flatout.engine.ema import MovingAverage
from flatout.engine.ending import finishing, telling_end
from flatout.engine.environment import differences, environment, warn_of_waiting_threads
from flatout.engine.generations import Generation, Generations
from flatout.engine.interrupts import Interrupts
from flatout.engine.loop import Loop, StoppedAfter
from flatout.engine.precision import DTYPES
from flatout.engine.preflight.disk import disk_need
from flatout.engine.progress import StepProgress
from flatout.engine.random_state import seed_all
from flatout.engine.records import Records
from flatout.engine.run_folder import Run
from flatout.engine.shared_state import load_for_all
from flatout.engine.spending import Spending
from flatout.errors import CheckpointError, ConfigError
from flatout.yolo.compat.resume_options import config_of_run
from flatout.yolo.evaluate import Outcome
from flatout.yolo.input_size import rounded_up
from flatout.yolo.model.network import Network
from flatout.yolo.options import TrainOptions
from flatout.yolo.train import prepare
from flatout.yolo.train.audience import audience
from flatout.yolo.train.autotune import fixed_rule, is_left_to_us, is_worth_measuring, tuned
from flatout.yolo.train.batch_pictures import BatchPictures
from flatout.yolo.train.diagnose import explained
from flatout.yolo.train.epoch_end import EpochEnd, EpochEndConfig, Resample
from flatout.yolo.train.finish import finish
from flatout.yolo.train.forward import forward_of
from flatout.yolo.train.heads import class_aware
from flatout.yolo.train.image_sets import check_unchanged, open_pictures
from flatout.yolo.train.input import InputConfig, TrainingInput, num_workers, open_input
from flatout.yolo.train.job import DetectionJob, StepConfig, capacity_for
from flatout.yolo.train.label_picture import draw_labels
from flatout.yolo.train.loop_config import loop_config, schedule
from flatout.yolo.train.loss_choice import DetectionLoss
from flatout.yolo.train.mirroring import fetch_run, open_mirror
from flatout.yolo.train.preflight import check_room, num_kept
from flatout.yolo.train.setting import Setting, read_setting, resolved_line
from flatout.yolo.train.teller import Teller
from flatout.yolo.train.validate import Validation, ValidationConfig
from flatout.yolo.train.weighing import Weighing, resampling
from flatout.yolo.train.weight_files import WeightFiles

logger = logging.getLogger(__name__)

LONG_RUN_PIXELS = 1e11
"""Ten thousand pictures of 320 px for a hundred epochs, about."""


@dataclass(frozen=True)
class TrainResult:
    """What a training left behind."""

    folder: Path
    outcome: Outcome | None
    """Of the last validation; None if there was none."""
    best_fitness: float
    finished: bool
    """False if it was asked to end early; the same command then continues."""
    why: str = ""
    """Why it ended early."""


def train(
    options: TrainOptions, callbacks: Iterable[Callback] = (), *, spending: Spending | None = None
) -> TrainResult | None:
    """Train as the options say; None if only a report was asked for.

    `callbacks` hear of it. `spending` is an account that was opened before, for several trainings that share a budget.
    Raises Interrupted once a signal was obeyed and everything is saved: the same call then continues.
    """
    if options.generations:
        raise ConfigError("evolve: a search is many trainings. Use flatout.yolo.evolve.evolve(options).")
    spending = spending or Spending(options.price, options.budget)
    setting = read_setting(options)
    mirror = open_mirror(setting)
    callbacks = [*callbacks, *([mirror] if mirror else [])]
    hearers = audience(setting.options, callbacks, spending) if setting.world.is_first else Callbacks()
    if setting.world.is_first:
        warn_of_waiting_threads(setting.device)
    seed_all(setting.seed)
    if setting.options.diagnose_compile:
        logger.info("%s", explained(setting))
        return None
    with distributed.together(setting.world, setting.device), ExitStack() as stack:
        if (over := fetch_run(mirror, setting) or setting.finished_run()) is not None:
            return TrainResult(over, None, 0.0, finished=True)
        run = stack.enter_context(setting.open_run()) if setting.world.is_first else None
        # One rank holds the folder; the others only learn where it is.
        place = Place(*setting.world.from_first((str(run.folder), run.continues) if run else None))
        # Other ranks need not wait for what callbacks do at the end, such as a last copy to a mirror.
        with telling_end(hearers, place.folder) as ending, distributed.telling_ranks():
            training = _Training(setting, place, stack, hearers, spending)
            result = training.go()
            if run is not None and result.finished:
                training.finish(run)
            ending.why = result.why
        # An account that several trainings share is not about this one alone.
        about = spending.folder or place.folder
        is_over = result.finished and about == place.folder
        logger.info("%s%s: %s.", about, "" if is_over else ", so far", spending.line())
        return result


class Place:
    """The run folder, as every rank knows it."""

    def __init__(self, folder: str, continues: bool) -> None:
        self.folder = Path(folder)
        self.continues = continues


class _Training:
    """The parts of one training: the data first, because it is what is most often wrong, then the network."""

    def __init__(
        self, setting: Setting, run: Place, stack: ExitStack, callbacks: Callbacks, spending: Spending
    ) -> None:
        self._setting, self._run, self._stack = setting, run, stack
        self._callbacks, self._spending = callbacks, spending
        options = setting.options
        logger.info("%s", resolved_line(setting))
        self._pictures = open_pictures(setting)
        self._saved = self._saved_state()
        # A run keeps its seed when it goes on with another number of ranks, for which YOLOv7 has another one.
        self._seed: int = setting.seed if self._saved is None else self._section("run").get("seed", setting.seed)
        names = prepare.class_names(setting.data, single_cls=options.single_cls)
        self._start = (
            prepare.make_network(options, setting.hyp, names)
            if self._saved is None
            else prepare.network_of_run(self._section("weights"), names)
        )
        self._network: Network = self._start.network
        set_determinism(options.deterministic, long_run=self._is_long())
        self._grid = prepare.grid_of(self._network)
        self._size, self._test_size = (rounded_up(size, self._grid) for size in options.img_size)
        self._first_epoch, self._epochs = prepare.start_epoch_of(self._start, epochs=options.epochs)
        if self._saved is not None:
            self._epochs += self._section("run")["more_epochs"]
        if self._saved is None:
            prepare.fit_anchors(
                self._network, self._pictures.train, options, setting.hyp, size=self._size, seed=self._seed
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
        if setting.world.is_first and not options.no_preflight:
            # A slow mirror holds a state that was replaced meanwhile.
            kept, saves = (0, False) if options.nosave else (num_kept(self._epochs) + bool(options.mirror), True)
            need = disk_need(self._network, self._average, self._optimizer, kept=kept, saves=saves)
            check_room(folder, need, self._pictures.train, setting, size=self._size)
        if setting.world.is_first:
            files.folder.mkdir(exist_ok=True)
        if self._saved is None and setting.world.is_first:
            draw_labels(self._pictures.train, self._network.names, folder)
        interrupts = Interrupts()
        source = self._stack.enter_context(self._open_input())
        loss = self._loss()
        validation = self._stack.enter_context(self._validation(loss, interrupts))
        records = self._stack.enter_context(Records(folder) if setting.world.is_first else Records(folder, names=()))
        epoch_end = self._epoch_end = EpochEnd(
            EpochEndConfig(
                epochs=self._epochs, notest=options.notest, nosave=options.nosave, patience=options.patience
            ),
            average=self._average.network,
            validate=validation,
            world=setting.world,
            records=records,
            files=files,
            about=self._about(),
            run=self._run_section(),
            after=self._after_epoch,
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
            was_complete = loop.is_complete
            with interrupts, StepProgress(total, start=done, stream=screen) as progress:
                compile_auto = options.compile == "auto" and setting.world.size == 1
                loop.tell = Teller(loop, progress, self._spending, compile_auto=compile_auto)
                loop.run()
                if was_complete:
                    epoch_end.score_again()
        except StoppedAfter as stopped:
            logger.info("%s", stopped)
            return TrainResult(folder, epoch_end.outcome, epoch_end.best_fitness, finished=False, why=str(stopped))
        source.feed.log_replaced()  # while warnings are kept in the run folder
        return TrainResult(folder, epoch_end.outcome, epoch_end.best_fitness, finished=True)

    def finish(self, run: Run) -> None:
        """Pictures and final files of a training that has come to its end; by the first rank."""
        with finishing():
            finish(self._setting, run, self._files, self._average.network, self._epoch_end.best_fitness)

    def _saved_state(self) -> Generation | None:
        """What the run folder holds, if this command continues it."""
        folder = self._run.folder / "weights"
        if not self._run.continues:
            if self._setting.world.is_first and folder.is_dir():
                Generations(folder).forget()
            return None
        saved = load_for_all(Generations(folder), self._setting.world)
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
        """Whether trying out kernels is worth its time."""
        options = self._setting.options
        return options.epochs * len(self._pictures.train) * options.img_size[0] ** 2 > LONG_RUN_PIXELS

    def _open_input(self) -> TrainingInput:
        setting = self._setting
        config = InputConfig(
            augment=setting.hyp.augment(),
            size=self._size,
            batch_size=setting.world.share_of(setting.options.batch_size),
            seed=self._seed,
            grid=self._grid,
            epochs=self._epochs,
            device=setting.device,
            dtype=DTYPES[setting.amp],
            world=setting.world,
            class_aware=class_aware(setting.options, self._network, self._pictures.train),
        )
        images, options = self._pictures.train, setting.options
        if is_left_to_us(options):
            if is_worth_measuring(images, config):
                return open_input(images, *tuned(images, config, options, self._network))
            logger.info("%s", fixed_rule(config, options))
        return open_input(images, config, options)

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
            persistent_workers=not options.no_persistent_workers,
            world=self._setting.world,
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
            seed=self._seed,
            multi_scale=options.multi_scale,
            quad=options.quad,
            capacity=capacity_for(source.expected_targets, batch_size),
        )
        pictures = BatchPictures(self._run.folder if setting.world.is_first else None, self._network.names)
        return Loop(
            job=DetectionJob(step_config, loss, epoch_end, pictures),
            network=self._network,
            optimizer=self._optimizer,
            schedule=schedule(setting, epochs=self._epochs, steps_per_epoch=source.steps_per_epoch),
            batches=source.batches,
            config=loop_config(setting, epochs=self._epochs, steps_per_epoch=source.steps_per_epoch),
            device=setting.device,
            average=self._average,
            generations=Generations(self._run.folder / "weights"),
            interrupts=interrupts,
            world=setting.world,
            forward=forward_of(self._network, setting),
            callbacks=self._callbacks,
            stop_early=self._spending.over if self._spending.has_budget else None,
        )

    def _begin(self, loop: Loop, files: WeightFiles) -> None:
        """Continue a saved training, or save the beginning of a new one."""
        if self._saved is None:
            loop.epoch = self._first_epoch
            prepare.take_over(self._start, self._optimizer, self._average)
            self._callbacks.start(self._started(loop))
            if not self._setting.options.nosave:
                if self._setting.world.is_first:
                    files.save_start(self._network)
                loop.save()
            return
        check_unchanged(self._section("run")["data"], self._pictures, self._setting)
        for line in differences(self._section("run")["environment"], environment()):
            logger.info("%s", line)
        loop.load_sections(self._saved.sections)
        self._callbacks.start(self._started(loop))
        logger.info("Continuing %s at epoch %d, step %d.", self._run.folder, loop.epoch, loop.step)

    def _started(self, loop: Loop) -> RunStart:
        return RunStart(
            job="yolo",
            folder=self._run.folder,
            config=config_of_run(self._setting.written, self._setting.hyp),
            epoch=loop.epoch,
            epochs=self._epochs,
            continues=self._run.continues,
            histograms={"classes": self._pictures.train.labels.class_box_T5[:, 0]},
        )

    def _after_epoch(self, epoch: int, scalars: Mapping[str, float]) -> None:
        self._callbacks.validation(Scores(epoch=epoch, at=epoch, scalars=scalars))

    def _about(self) -> dict[str, Any]:
        return prepare.about(self._network, asdict(self._setting.hyp))

    def _run_section(self) -> dict[str, Any]:
        return {
            "config": config_of_run(self._setting.written, self._setting.hyp),
            "data": self._pictures.fingerprint(),
            "more_epochs": self._epochs - self._setting.options.epochs,
            "environment": environment(),
            "seed": self._seed,
        }

    def _resample(self, source: TrainingInput) -> Resample | None:
        """For `--image-weights`: what the score of each class says about the epochs to come."""
        if not self._setting.options.image_weights:
            return None
        return resampling(source, Weighing(self._pictures.train, self._network.nc), self._setting.world)
