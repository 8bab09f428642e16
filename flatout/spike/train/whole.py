"""The whole of `flatout spike train`: a config in; checkpoints, metrics and pictures in a run folder out."""

import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatout.engine import distributed
from flatout.engine.callbacks import Callback, Callbacks, RunStart, Scores
from flatout.engine.compiling import Compiled
from flatout.engine.determinism import set_determinism
from flatout.engine.distributed import World
from flatout.engine.ema import MovingAverage
from flatout.engine.ending import finishing, telling_end
from flatout.engine.environment import differences, environment, warn_of_waiting_threads
from flatout.engine.generations import Generation, Generations
from flatout.engine.interrupts import Interrupts
from flatout.engine.loggers.choose import choose_loggers
from flatout.engine.loop import Loop, LoopConfig, StoppedAfter
from flatout.engine.precision import DTYPES
from flatout.engine.preflight import check_descriptors
from flatout.engine.preflight.disk import check_disk, disk_need
from flatout.engine.preflight.gpu import check_gpus
from flatout.engine.progress import StepProgress
from flatout.engine.random_state import seed_all
from flatout.engine.records import Records
from flatout.engine.shared_state import load_for_all
from flatout.engine.spending import Spending
from flatout.errors import DataError
from flatout.spike.clip_feed import (
    ClipFeed,
    FeedWishes,
    open_resident_feed,
    open_scoring_feed,
    open_store,
    open_training_feed,
    training_source,
)
from flatout.spike.config import SpikeConfig, plain
from flatout.spike.data import ClipSet, open_training
from flatout.spike.device_clip import ToClip
from flatout.spike.evaluate import Evaluation
from flatout.spike.loader_plan import GIB, LoaderPlan, block, check_memory, plan_loader
from flatout.spike.loss import DeblurLoss
from flatout.spike.schedule import SpikeSchedule, StepPlan, plan_steps
from flatout.spike.train.epoch_end import EpochEnd, EpochEndConfig
from flatout.spike.train.job import DeblurJob
from flatout.spike.train.options import TrainOptions
from flatout.spike.train.prepare import amp_of, make_network, optimizer_for
from flatout.spike.train.run import choose_device_of, complete_run, config_of_run, open_run
from flatout.spike.train.teller import Teller
from flatout.spike.train.validate import Validation
from flatout.spike.weight_files import WeightFiles

logger = logging.getLogger(__name__)

CKPTS = "ckpts"


@dataclass(frozen=True)
class TrainResult:
    """What a training left behind."""

    folder: Path
    evaluation: Evaluation | None
    """Of the last validation; None if there was none."""
    finished: bool
    """False if it was asked to end early; the same command then continues."""
    why: str = ""
    """Why it ended early."""


def train(
    config: SpikeConfig, options: TrainOptions, callbacks: Iterable[Callback] = (), *, spending: Spending | None = None
) -> TrainResult:
    """Train as the config says. `callbacks` hear of it; `spending` is an account that was opened before.

    Raises Interrupted once a signal was obeyed and everything is saved: the same call then continues.
    """
    spending = spending or Spending(options.price, options.budget)
    world = distributed.read_world()
    if world.is_first and not options.no_preflight:
        check_gpus(options.device)
    device = choose_device_of(options.device, world)
    if world.is_first and not options.no_preflight:
        check_descriptors(uses_gpu=device.type == "cuda")
    log_to = options.log_to or (() if config.LOG.TENSORBOARD else ("none",))
    loggers = choose_loggers(log_to, board_within="logs") if world.is_first else []
    hearers = Callbacks([spending, *loggers, *callbacks] if world.is_first else ())
    if world.is_first:
        warn_of_waiting_threads(device)
    seed_all(config.SEED)
    with distributed.together(world, device), ExitStack() as stack:
        # Before the folder is made: a data set that cannot be used leaves nothing behind.
        clips = open_training(config.DATA)
        steps = plan_steps(
            len(clips[0]),
            world=world.size,
            batch=config.TRAIN.BATCH_SIZE,
            accumulation=config.TRAIN.GRADIENT_ACCUMULATION_STEPS,
        )
        epochs = config.TRAIN.EPOCHS or steps.epochs_for(config.TRAIN.TOTAL_STEPS or 1)
        if (over := world.from_first(complete_run(config, options, epochs) if world.is_first else None)) is not None:
            return TrainResult(over, None, finished=True)
        run = stack.enter_context(open_run(config, options, epochs)) if world.is_first else None
        folder, continues = world.from_first((str(run.folder), run.continues) if run else None)
        place = Place(Path(folder), continues)
        training = _Training(config, options, clips, steps, epochs, world, device, place, stack)
        with telling_end(hearers, place.folder) as ending, distributed.telling_ranks():
            result = training.go(hearers, spending)
            if run is not None and result.finished:
                # All files are there: best.pt was written before the last state.
                with finishing():
                    run.finish()
            ending.why = result.why
        if world.is_first:
            logger.info("%s%s: %s.", folder, "" if result.finished else ", so far", spending.line())
        return result


@dataclass(frozen=True)
class Place:
    """The run folder, as every rank knows it."""

    folder: Path
    continues: bool


class _Training:
    """The parts of one training, put together."""

    def __init__(
        self,
        config: SpikeConfig,
        options: TrainOptions,
        clips: tuple[ClipSet, ClipSet | None],
        steps: StepPlan,
        epochs: int,
        world: World,
        device: torch.device,
        place: Place,
        stack: ExitStack,
    ) -> None:
        self._config, self._options, self._steps, self._epochs = config, options, steps, epochs
        self._train_clips, self._val_clips = clips
        self._world, self._device, self._place, self._stack = world, device, place, stack
        self._amp = amp_of(config, device)
        set_determinism(options.deterministic)
        self._loader = self._plan_loader()
        self._saved = self._saved_state()
        self._network = make_network(config, self._train_clips).to(device)
        if config.MODEL.CHANNELS_LAST:
            self._network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._average = MovingAverage(self._network, decay=config.TRAIN.EMA_DECAY)
        self._to_clip = ToClip(config.DATA)

    def go(self, callbacks: Callbacks, spending: Spending) -> TrainResult:
        folder = self._place.folder
        self._callbacks, self._spending = callbacks, spending
        (folder / CKPTS).mkdir(exist_ok=True)
        interrupts = Interrupts()
        source = self._stack.enter_context(self._open_input())
        epoch_end = self._epoch_end(source, interrupts)
        loop = self._loop(source, epoch_end, interrupts)
        if self._world.is_first and not self._options.no_preflight:
            check_disk(folder, disk_need(self._network, self._average, loop.optimizer, kept=0))
        self._begin(loop)
        micro = self._steps.trained_micro_batches
        try:
            with interrupts, StepProgress(self._epochs * micro, start=loop.epoch * micro + loop.step) as progress:
                if self._world.is_first:
                    loop.tell = Teller(loop, progress, spending)
                loop.run()
        except StoppedAfter as stopped:
            logger.info("%s", stopped)
            return TrainResult(folder, epoch_end.evaluation, finished=False, why=str(stopped))
        source.feed.log_replaced()  # while warnings are kept in the run folder
        if self._world.is_first:
            logger.info("Results are in %s, the best weights in %s.", folder, folder / CKPTS / "best.pt")
        return TrainResult(folder, epoch_end.evaluation, finished=True)

    def _plan_loader(self) -> LoaderPlan:
        config = self._config
        fields = training_source(self._train_clips, config.DATA).fields
        plan = plan_loader(
            config.loader,
            gpus=self._world.size,
            batch=config.TRAIN.BATCH_SIZE,
            val_batch=config.TRAIN.VAL_BATCH_SIZE,
            sample_bytes=sum(field.sample_bytes for field in fields.values()),
            cache_bytes=int(config.DATA.CACHE_SIZE_GB * GIB) if config.DATA.USE_RAM_CACHE else 0,
        )
        if self._world.is_first:
            for line in block(plan, config.LOG.LANG):
                logger.info("%s", line)
        check_memory(plan)
        return plan

    def _open_input(self) -> ClipFeed:
        data, plan = self._config.DATA, self._loader
        # The first rank decodes, the others attach to what it has made.
        if not self._world.is_first:
            self._world.wait_for_all()
        store = open_store(self._train_clips, data, budget_bytes=plan.cache_bytes, workers=plan.workers.train)
        if self._world.is_first:
            self._world.wait_for_all()
        wishes = FeedWishes(
            batch=plan.batch,
            workers=plan.workers.train,
            slots=plan.slots,
            persistent=plan.persistent,
            device=self._device,
        )
        opened = open_resident_feed if self._config.TRAIN.DEVICE_RESIDENT else open_training_feed
        return opened(
            self._train_clips,
            data,
            wishes,
            steps=self._steps,
            seed=self._config.SEED,
            epochs=self._epochs,
            world=self._world,
            store=store,
        )

    def _epoch_end(self, source: ClipFeed, interrupts: Interrupts) -> EpochEnd:
        config, folder, first = self._config, self._place.folder, self._world.is_first
        validation = None
        if first and self._val_clips is not None and self._options.validate:
            validation = self._validation(self._val_clips, source, interrupts)
        return EpochEnd(
            EpochEndConfig(
                epochs=self._epochs,
                steps_per_epoch=self._steps.steps_per_epoch,
                folder=folder,
                accumulation=self._steps.accumulation,
                validate_every=config.LOG.VAL_EVERY_STEPS or None,
            ),
            average=self._average.network,
            validate=validation,
            records=self._stack.enter_context(Records(folder)) if first else None,
            after=self._after_epoch,
            files=WeightFiles(folder / CKPTS, self._about()),
            run={
                "config": config_of_run(config, self._epochs),
                "data": self._train_clips.fingerprint(),
                "environment": environment(),
            },
        )

    def _validation(self, clips: ClipSet, source: ClipFeed, interrupts: Interrupts) -> Validation:
        config, plan = self._config, self._loader
        used = source.store.statistics().nbytes if source.store is not None else 0
        store = open_store(clips, config.DATA, budget_bytes=plan.cache_bytes - used, workers=plan.workers.val)
        wishes = FeedWishes(
            batch=plan.val_batch,
            workers=plan.workers.val,
            slots=plan.val_slots,
            persistent=False,  # idle for a whole epoch otherwise
            device=self._device,
        )
        return Validation(
            self._stack.enter_context(open_scoring_feed(clips, config.DATA, wishes, store)),
            self._to_clip,
            config.TEST,
            amp=DTYPES[self._amp],
            interrupts=interrupts if self._world.size == 1 else None,
            folder=self._place.folder / "visuals",
        )

    def _loop(self, source: ClipFeed, epoch_end: EpochEnd, interrupts: Interrupts) -> Loop:
        config, options, train = self._config, self._options, self._config.TRAIN
        micro = self._steps.trained_micro_batches
        share = 1 / (self._steps.accumulation * self._world.size)
        return Loop(
            job=DeblurJob(self._to_clip, DeblurLoss(config.LOSS).to(self._device), epoch_end, share=share),
            network=self._network,
            optimizer=optimizer_for(self._network, config),
            schedule=SpikeSchedule(
                train.OPTIM.LR, plan=self._steps, epochs=self._epochs, warmup=train.SCHED.WARMUP_STEPS
            ),
            batches=source.batches,
            config=LoopConfig(
                epochs=self._epochs,
                steps_per_epoch=micro,
                amp=self._amp,
                clip_norm=train.MAX_GRAD_NORM,
                log_every=min(config.LOG.PROGRESS_EVERY_STEPS, micro),
                save_every_s=60 * options.save_every_minutes,
                save_every_steps=options.save_every_steps,
                stop_after=options.stop_after,
                graphs=train.CUDA_GRAPHS,
            ),
            device=self._device,
            average=self._average,
            generations=Generations(self._place.folder / CKPTS),
            interrupts=interrupts,
            world=self._world,
            forward=self._forward(),
            callbacks=self._callbacks,
            stop_early=self._spending.over if self._spending.has_budget else None,
            between=epoch_end.between,
        )

    def _forward(self) -> nn.Module:
        if self._world.size > 1:
            ids = [self._device.index] if self._device.type == "cuda" else None
            return nn.parallel.DistributedDataParallel(self._network, device_ids=ids)
        return Compiled(self._network) if self._config.TRAIN.COMPILE_MODEL else self._network

    def _saved_state(self) -> Generation | None:
        """What the run folder holds, if this command continues it."""
        generations = Generations(self._place.folder / CKPTS)
        if not self._place.continues:
            if self._world.is_first and (self._place.folder / CKPTS).is_dir():
                generations.forget()
            return None
        return load_for_all(generations, self._world)

    def _begin(self, loop: Loop) -> None:
        """Continue a saved training, or save the beginning of a new one."""
        if self._saved is None:
            self._callbacks.start(self._started(loop))
            loop.save()
            return
        self._check_data(self._saved)
        for line in differences(self._saved.sections["run"]["environment"], environment()):  # type: ignore[index]
            logger.info("%s", line)
        loop.load_sections(self._saved.sections)
        self._callbacks.start(self._started(loop))
        logger.info("Continuing %s at epoch %d, micro-batch %d.", self._place.folder, loop.epoch, loop.step)

    def _started(self, loop: Loop) -> RunStart:
        return RunStart(
            job="spike",
            folder=self._place.folder,
            config=config_of_run(self._config, self._epochs),
            epoch=loop.epoch,
            epochs=self._epochs,
            continues=self._saved is not None,
        )

    def _after_epoch(self, epoch: int, steps: int, scalars: Mapping[str, float]) -> None:
        self._callbacks.validation(Scores(epoch=epoch, at=steps, scalars=scalars))

    def _check_data(self, saved: Generation) -> None:
        if saved.sections["run"]["data"] == self._train_clips.fingerprint():  # type: ignore[index]
            return
        told = f"{self._train_clips.where}: frames or streams have changed since this run was saved"
        if not self._options.allow_data_change:
            raise DataError(
                f"{told}. Start a new run with --fresh, or continue with the changed data with --allow-data-change."
            )
        logger.warning("%s; continuing with the changed ones, as asked.", told)

    def _about(self) -> dict[str, Any]:
        return {"network": self._network.about, "config": plain(self._config)}
