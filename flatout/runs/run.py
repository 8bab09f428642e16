"""The life of a training run, the same for every job: from options to finished files, at any moment resumable.

    options --> ranks, device, preflight --> run folder, locked: begun, or continued
            --> the recipe's data, network, batches --> the loop of flatout.engine, until the end or an interruption
            --> last files, finished, everybody told

A job hands over a `Recipe`; nothing here knows what it trains.
"""

import io
import logging
import sys
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatout.engine import (
    Callback,
    Callbacks,
    Checkpoint,
    CheckpointStore,
    Compiled,
    IntervalStats,
    Loop,
    LoopConfig,
    RunStart,
    StoppedAfter,
    differences,
    environment,
    load_on_all_ranks,
    seed_all,
    set_determinism,
    warn_of_waiting_threads,
)
from flatout.errors import CheckpointError, ConfigError, DataError
from flatout.feed import DeviceBatches
from flatout.progress import StepProgress
from flatout.ranks import Interrupts, World, choose_devices
from flatout.ranks import world as ranks
from flatout.runs.budget import Spending
from flatout.runs.ends import EpochEnd, finishing, reporting_end
from flatout.runs.folder import Records, RunFolder, RunRequest, choose_run, finished_run
from flatout.runs.mirror import Mirror
from flatout.runs.options import RunOptions, checkpoint_to_resume, options_to_resume, run_of
from flatout.runs.preflight import check_descriptors, check_disk, check_gpus, disk_need
from flatout.runs.recipe import DataFacts, Recipe, RunContext, RunResult, Seams

logger = logging.getLogger(__name__)

NEVER = float("inf")


def train(
    job: type[Recipe],
    options: RunOptions,
    callbacks: Iterable[Callback] = (),
    *,
    spending: Spending | None = None,
    seams: Seams | None = None,
    typed: Collection[str] | None = None,
) -> RunResult:
    """Train by a job's recipe, as the options say.

    `callbacks` hear of it. `spending` is an account that was opened before, for several trainings that share a budget.
    `seams` let somebody look on. `typed` names the options that were given, for a run that is resumed; None: those that
    are not at their defaults. Raises Interrupted once a signal was obeyed and everything is saved: the same call then
    continues.
    """
    resume = checkpoint_to_resume(options)
    if resume is not None:
        options = options_to_resume(job.read_options(run_of(resume), options), options, typed)
    spending = spending or Spending(options.price, options.budget)
    world = ranks.read_world(options.local_rank)
    looks = world.is_first and not options.no_preflight
    if looks:
        check_gpus(options.device)
    device = device_of(options.device, world)
    if looks:
        check_descriptors(uses_gpu=device.type == "cuda")
    recipe = job(options, world, device, resume=None if resume is None else run_of(resume))
    mirror = Mirror(options.mirror, recipe.place[1]) if options.mirror and world.is_first else None
    told = [spending, *recipe.loggers(), *callbacks, *([mirror] if mirror else [])] if world.is_first else []
    hearers = Callbacks(told)
    if world.is_first:
        warn_of_waiting_threads(device)
    seed_all(recipe.seed)
    with ranks.process_group(world, device), ExitStack() as stack:
        wanted = _wanted(recipe, resume)
        if (over := _complete_run(recipe, wanted, mirror)) is not None:
            return RunResult(over, None, 0.0, finished=True)
        # Before the folder is made: data that cannot be used leaves nothing behind.
        data = recipe.open_data()
        folder = _open_folder(recipe, wanted, stack) if world.is_first else None
        # One rank holds the folder; the others only learn where it is.
        where, continues = world.broadcast((str(folder.folder), folder.continues) if folder else None)
        seams = seams or Seams()
        context = RunContext(
            world=world,
            device=device,
            folder=Path(where),
            continues=continues,
            interrupts=Interrupts(),
            stack=stack,
            plots=seams.plots and world.is_first,
        )
        # Other ranks need not wait for what callbacks do at the end, such as a last copy to a mirror.
        with reporting_end(hearers, context.folder) as ending, ranks.reporting_errors():
            training = _Training(recipe, data, context, hearers, spending, seams)
            result = training.go()
            if folder is not None and result.finished:
                training.finish(folder)
            ending.why = result.why
        # An account that several trainings share is not about this one alone.
        about = spending.folder or context.folder
        is_over = result.finished and about == context.folder
        logger.info("%s%s: %s.", about, "" if is_over else ", so far", spending.line())
        return result


def device_of(text: str, world: World) -> torch.device:
    """The device of this rank."""
    devices = choose_devices(text)
    if devices[0].type == "cpu":
        return devices[0]
    if world.size > 1:
        if world.local_rank >= len(devices):
            raise ConfigError(f"rank {world.local_rank} of this machine has no GPU: --device names {len(devices)}.")
        return devices[world.local_rank]
    if len(devices) > 1:
        numbers = ",".join(str(device.index) for device in devices)
        logger.warning("%d GPUs are there, one is used. For all of them add: --device %s", len(devices), numbers)
    return devices[0]


def _wanted(recipe: Recipe, resume: Path | None) -> RunRequest:
    options, (project, name) = recipe.options, recipe.place
    return RunRequest(
        project=project,
        name=name,
        identity=recipe.identity(),
        exist_ok=options.exist_ok,
        fresh=options.fresh,
        resume=resume,
        break_lock=options.break_lock,
    )


def _complete_run(recipe: Recipe, wanted: RunRequest, mirror: Mirror | None) -> Path | None:
    """The folder of a training that is over, as the mirror or, with `--once`, this machine knows; all ranks ask.

    Fetches the newest state if this machine has none as new; `--fresh` and `--resume` say where to begin.
    """
    over: Path | None = None
    if mirror is not None and not wanted.fresh and wanted.resume is None:
        fetched = mirror.fetch(wanted)
        if fetched is not None and fetched.finished:
            over = fetched.folder
            logger.info("%s: this training is over; its files are here. --fresh trains it again.", over)
    if over is None and recipe.options.once and recipe.world.is_first:
        over = finished_run(wanted)
    told: Path | None = recipe.world.broadcast(over)
    return told


def _open_folder(recipe: Recipe, wanted: RunRequest, stack: ExitStack) -> RunFolder:
    """The run folder, locked, with the options in it."""
    folder = choose_run(wanted)
    stack.callback(folder.close)
    # Before it is entered: a folder that holds nothing else when the training fails is removed again.
    recipe.write_config(folder.folder)
    return stack.enter_context(folder)


class _Training:
    """The parts of one training, put together."""

    def __init__(
        self,
        recipe: Recipe,
        data: DataFacts,
        context: RunContext,
        callbacks: Callbacks,
        spending: Spending,
        seams: Seams,
    ) -> None:
        self._recipe, self._data, self._context, self._seams = recipe, data, context, seams
        self._callbacks, self._spending = callbacks, spending
        self._options, self._is_first = recipe.options, context.world.is_first
        self._checkpoints = CheckpointStore(context.folder / recipe.weights_folder)
        self._saved = self._saved_state()
        self._check_data()
        set_determinism(self._options.deterministic, long_run=recipe.is_long)
        self._model = recipe.build(context, None if self._saved is None else self._saved.sections)

    def go(self) -> RunResult:
        context, model = self._context, self._model
        if self._is_first:
            self._preflight()
            (context.folder / self._recipe.weights_folder).mkdir(exist_ok=True)
        batches = self._recipe.open_batches(model)
        # However it ends: each file that could not be read was named when it was found, perhaps days before.
        context.stack.callback(batches.feed.log_replaced)
        if self._seams.open_pass is not None:
            batches.open_pass = self._seams.open_pass
        steps = self._recipe.steps(batches)
        records = context.stack.enter_context(Records(context.folder)) if self._is_first else None
        epoch_end = self._epoch_end = EpochEnd(
            self._recipe,
            model,
            records=records,
            weights=context.folder / self._recipe.weights_folder,
            callbacks=self._callbacks,
            run=self._run_section(),
            steps_per_epoch=steps,
        )
        # Of several ranks only the first draws a bar; lines of the others are not shown either.
        progress = StepProgress(model.epochs * steps, stream=None if self._is_first else io.StringIO())
        loop = self._loop(batches, steps, epoch_end, progress)
        if self._saved is None and records is not None:
            records.clear()
        self._begin(loop)
        progress.start_at(loop.steps_done)
        was_complete = loop.is_complete
        try:
            with context.interrupts, progress:
                loop.run()
                if was_complete:
                    epoch_end.score_again()
        except StoppedAfter as stopped:
            logger.info("%s", stopped)
            return self._result(finished=False, why=str(stopped))
        batches.feed.log_replaced()  # while warnings are kept in the run folder
        return self._result(finished=True)

    def finish(self, folder: RunFolder) -> None:
        """Pictures and final files of a training that has come to its end; by the first rank.

        Killed at any moment, the same command comes here again.
        """
        with finishing():
            self._plot()
            end = self._epoch_end
            content = self._recipe.final_weights(self._model, end.epoch, end.found, end.best.score)
            if content is not None:
                self._checkpoints.write_final({"weights": self._recipe.describe_network(self._model) | content})
            # From here on the run is finished: all its files are on the disk, if not yet under their names.
            folder.finish()
            self._checkpoints.settle()
            weights = folder.folder / self._recipe.weights_folder
            logger.info("Results are in %s, the weights in %s.", folder.folder, weights)
            self._recipe.finished(folder.folder)

    def _saved_state(self) -> Checkpoint | None:
        """What the run folder holds, if this command continues it."""
        if not self._context.continues:
            if self._is_first and self._checkpoints.newest.parent.is_dir():
                self._checkpoints.forget()
            return None
        saved = load_on_all_ranks(self._checkpoints, self._context.world)
        if saved is not None and "training" not in saved.sections:
            raise CheckpointError(f"{saved.path}: this training has ended: there is nothing to resume.")
        return saved

    def _check_data(self) -> None:
        """DataError if this is not the data of the run that is continued, unless that is wished for."""
        if self._saved is None or self._saved.sections["run"]["data"] == self._data.fingerprint:
            return
        told = f"{self._data.what} have changed since this run was saved"
        if not self._options.allow_data_change:
            raise DataError(
                f"{told}. Start a new run with --fresh, or continue with the changed data with --allow-data-change."
            )
        logger.warning("%s; continuing with the changed ones, as asked.", told)

    def _preflight(self) -> None:
        """One line says what was found; what is too little is a warning, what cannot work a ResourceError."""
        if self._options.no_preflight:
            return
        model, saves = self._model, self._recipe.saves
        # A slow mirror holds a state that was replaced meanwhile.
        kept = self._recipe.num_kept_states(model) + bool(self._options.mirror) if saves else 0
        need = disk_need(model.network, model.average, model.optimizer, kept=kept, saves=saves)
        found = [check_disk(self._context.folder, need), *self._recipe.preflight(model)]
        logger.info("Preflight: %s.", "; ".join(text for text in found if text))

    def _run_section(self) -> dict[str, Any]:
        return {
            "config": dict(self._recipe.identity().config),
            "data": self._data.fingerprint,
            "environment": environment(),
            "seed": self._recipe.seed,
            **self._recipe.describe_run(),
        }

    def _loop(self, batches: DeviceBatches, steps: int, epoch_end: EpochEnd, progress: StepProgress) -> Loop:
        options, recipe, model = self._options, self._recipe, self._model
        settings = recipe.compute_settings()

        def tell(tick: IntervalStats) -> None:
            left_s = tick.step_ms / 1e3 * tick.steps_left
            progress.advance(tick.steps_done, recipe.figures(tick) | self._spending.figures(left_s))
            recipe.hint(tick)

        return Loop(
            job=recipe.job(model),
            network=model.network,
            optimizer=model.optimizer,
            schedule=recipe.schedule(model, steps),
            batches=self._seams.batches(batches),
            config=LoopConfig(
                epochs=model.epochs,
                steps_per_epoch=steps,
                amp=settings.amp,
                clip_norm=settings.clip_norm,
                log_every=min(options.log_every, steps),
                save_every_s=60 * options.save_every_minutes if recipe.saves else NEVER,
                save_every_steps=options.save_every_steps if recipe.saves else sys.maxsize,
                save_apart_s=LoopConfig.save_apart_s if recipe.saves else NEVER,
                stop_after=options.stop_after,
                graphs=settings.graphs,
                compile_auto=options.compile == "auto",
            ),
            device=self._context.device,
            epoch_end=epoch_end,
            average=model.average,
            checkpoints=self._checkpoints,
            interrupts=self._context.interrupts,
            world=self._context.world,
            forward=self._forward(),
            tell=tell,
            callbacks=self._callbacks,
            stop_early=self._spending.over if self._spending.has_budget else None,
            between=epoch_end.between,
        )

    def _forward(self) -> nn.Module:
        """The network as it is called: compiled, or with gradients that ranks share; the weights stay its own."""
        network, device = self._model.network, self._context.device
        if self._context.world.size == 1:
            return Compiled(network) if self._options.compile == "on" else network
        if self._options.compile == "on" and self._is_first:
            logger.warning("With several ranks the network is not compiled.")
        ids = [device.index] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(network, device_ids=ids)

    def _begin(self, loop: Loop) -> None:
        """Continue a saved training, or save the beginning of a new one."""
        if self._saved is None:
            loop.epoch = self._model.first_epoch
            logger.info("Beginning %s.", self._context.folder)
            self._recipe.started(self._model)
            self._callbacks.start(self._started(loop))
            if self._recipe.saves:
                loop.save()
            return
        for line in differences(self._saved.sections["run"]["environment"], environment()):
            logger.info("%s", line)
        loop.load_sections(self._saved.sections)
        self._callbacks.start(self._started(loop))
        logger.info("Continuing %s at epoch %d, step %d.", self._context.folder, loop.epoch, loop.step)

    def _started(self, loop: Loop) -> RunStart:
        return RunStart(
            job=self._recipe.name,
            folder=self._context.folder,
            config=self._recipe.identity().config,
            epoch=loop.epoch,
            epochs=self._model.epochs,
            continues=self._saved is not None,
            step=loop.step,
            steps_done=loop.steps_done,
            histograms=self._recipe.histograms(),
        )

    def _plot(self) -> None:
        if not self._context.plots:
            return
        try:
            self._recipe.plot(self._context.folder)
        except (ImportError, OSError, ValueError) as error:
            logger.warning("No picture of the results was drawn: %s.", error)

    def _result(self, *, finished: bool, why: str = "") -> RunResult:
        end = self._epoch_end
        outcome = None if end.found is None else end.found.outcome
        return RunResult(self._context.folder, outcome, end.best.score, finished, why, end.losses)
