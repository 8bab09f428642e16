"""A training run from options to finished files, the same for every job and resumable at any time.

    options --> ranks, device, preflight --> run folder, locked: new or continued
            --> the recipe's data, network, batches --> the loop of flatout.engine, until the end or an interruption
            --> final files, run marked as finished, callbacks notified

Everything specific to a job is in its `Recipe`.
"""

import io
import logging
import sys
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatout.clock import Spans, span, spans
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
from flatout.errors import CheckpointError, ConfigError, DataError, counted
from flatout.feed import DeviceBatches
from flatout.progress import StepProgress
from flatout.ranks import Interrupts, World, choose_devices
from flatout.ranks import world as ranks
from flatout.runs.budget import Spending
from flatout.runs.ends import RunEpochEnd, finishing, reporting_end
from flatout.runs.folder import NAMES, Records, RunFolder, RunRequest, choose_run, finished_run
from flatout.runs.mirror import Mirror
from flatout.runs.options import RunOptions, checkpoint_to_resume, options_to_resume, run_of
from flatout.runs.preflight import check_descriptors, check_disk, check_gpus, disk_need
from flatout.runs.recipe import DataFacts, Recipe, RunContext, RunResult, Seams
from flatout.runs.step_record import STEPS_NAME, StepRecord
from flatout.runs.times import STEPS, record_times

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
    """Train with a job's recipe.

    `spending` counts the cost of several trainings that share a budget; by default of this one. `seams` are hooks for
    observers. `typed` names the options that were given explicitly, which matters for a resumed run; None: those that
    differ from their defaults. Raises Interrupted after a signal, once everything is saved: the same call then
    continues.
    """
    seams = seams or Seams()
    with spans.recording() as times, ExitStack() as stack:
        resume = checkpoint_to_resume(options)
        if resume is not None:
            options = options_to_resume(job.read_options(run_of(resume), options), options, typed)
        spending = spending or Spending(options.price, options.budget)
        world = ranks.read_world(options.local_rank)
        checks = world.is_first and not options.no_preflight
        if checks:
            check_gpus(options.device)
        device = device_of(options.device, world)
        if checks:
            check_descriptors(uses_gpu=device.type == "cuda")
        recipe = job(options, world, device, resume=None if resume is None else run_of(resume))
        mirror = Mirror(options.mirror, recipe.options.name) if options.mirror and world.is_first else None
        all_callbacks = Callbacks(
            [spending, *recipe.loggers(), *callbacks, *([mirror] if mirror else [])] if world.is_first else []
        )
        if world.is_first:
            warn_of_waiting_threads(device)
        seed_all(recipe.seed)
        stack.enter_context(ranks.process_group(world, device))
        request = RunRequest.of(recipe.options, recipe.identity(), resume=resume)
        if (finished := _finished_folder(recipe, request, mirror)) is not None:
            return RunResult(finished, None, 0.0, finished=True)
        # Before the folder is created, so that unusable data leaves nothing behind.
        with span("scan"):
            data = recipe.open_data()
        folder = _open_folder(recipe, request, stack) if world.is_first else None
        # Only the first rank holds the folder; the others get its path.
        where, continues = world.broadcast((str(folder.folder), folder.continues) if folder else ("", False))
        context = RunContext(
            world=world,
            device=device,
            folder=Path(where),
            weights=Path(where) / recipe.weights_folder,
            continues=continues,
            interrupts=Interrupts(),
            stack=stack,
            plots=seams.plots and world.is_first,
        )
        if folder is not None:
            stack.callback(record_times, context.folder, times, continues=context.continues)
        # Errors are reported first: other ranks need not wait for plots and callbacks, such as a last copy to a mirror.
        # Plots come before callbacks: loggers send them at the end.
        with (
            reporting_end(all_callbacks, context.folder) as early_stop,
            context.background,
            ranks.reporting_errors(),
        ):
            training = _Training(recipe, data, context, all_callbacks, spending, seams, times)
            result = training.go()
            if folder is not None and result.finished:
                training.finish(folder)
            early_stop.why = result.why
        # If several trainings share the budget, its folder is not this one.
        counted = spending.folder or context.folder
        is_total = result.finished and counted == context.folder
        logger.info("%s%s: %s.", counted, "" if is_total else ", so far", spending.line())
        return result


def device_of(text: str, world: World) -> torch.device:
    """The device of this rank; ConfigError if `--device` selects fewer GPUs than there are ranks."""
    devices = choose_devices(text)
    if devices[0].type == "cpu":
        return devices[0]
    if world.size > 1:
        if world.local_rank >= len(devices):
            raise ConfigError(
                f"rank {world.local_rank} of this machine has no GPU: --device selects only "
                f"{counted(len(devices), 'GPU')}. Start fewer processes, or select more GPUs."
            )
        return devices[world.local_rank]
    if len(devices) > 1:
        numbers = ",".join(str(device.index) for device in devices)
        logger.warning("Using one of %d GPUs. To train on all of them, add: --device %s", len(devices), numbers)
    return devices[0]


def _finished_folder(recipe: Recipe, request: RunRequest, mirror: Mirror | None) -> Path | None:
    """The run folder if the training is already finished, in the mirror or, with `--once`, here; a collective call.

    Also fetches the newest checkpoint from the mirror if it is newer than those of this machine, except with `--fresh`
    and `--resume`, which say where to start. With `--resume`, too, a mirror of another training is refused.
    """
    finished: Path | None = None
    if mirror is not None and not request.fresh:
        fetched = mirror.fetch(request)
        if fetched is not None and fetched.finished:
            finished = fetched.folder
            logger.info("%s: this training is finished; its files are here. Use --fresh to train again.", finished)
    if finished is None and recipe.options.once and recipe.world.is_first:
        finished = finished_run(request)
    return recipe.world.broadcast(finished)


def _open_folder(recipe: Recipe, request: RunRequest, stack: ExitStack) -> RunFolder:
    """Choose the run folder, new or that of the run that continues, write the options to it, and lock it."""
    folder = choose_run(request)
    stack.callback(folder.close)
    # Written before the folder is entered: after a failure, a new folder that contains nothing else is removed.
    recipe.write_config(folder.folder)
    return stack.enter_context(folder)


@dataclass(eq=False, repr=False)
class _Training:
    """One training: builds its parts from the recipe, runs the loop and writes the final files."""

    recipe: Recipe
    data: DataFacts
    context: RunContext
    callbacks: Callbacks
    spending: Spending
    seams: Seams
    times: Spans

    def __post_init__(self) -> None:
        recipe, context = self.recipe, self.context
        self._options, self._is_first = recipe.options, context.world.is_first
        self._checkpoints = CheckpointStore(context.weights)
        with span("load"):
            self._saved = self._saved_state()
        self._check_data()
        set_determinism(self._options.deterministic, long_run=recipe.is_long)
        with span("network"):
            self._model = recipe.build(context, None if self._saved is None else self._saved.sections)

    def go(self) -> RunResult:
        context, model = self.context, self._model
        if self._is_first:
            self._preflight()
            context.weights.mkdir(exist_ok=True)
        with span("input"):
            batches = self.recipe.open_batches(model)
        # However it ends: unreadable files were logged when they were found, perhaps days ago.
        context.stack.callback(batches.feed.log_replaced)
        if self.seams.open_pass is not None:
            batches.open_pass = self.seams.open_pass
        steps = self.recipe.steps(batches)
        # A job that cannot make the input of a step again does not record its steps, and has no file for them.
        is_recorded = self.recipe.input_facts() is not None
        names = (*NAMES, STEPS_NAME) if is_recorded else NAMES
        records = context.stack.enter_context(Records(context.folder, names)) if self._is_first else None
        step_record = StepRecord(records, context.world, self.recipe.input_facts) if is_recorded else None
        epoch_end = self._epoch_end = RunEpochEnd(
            self.recipe,
            model,
            context,
            records=records,
            callbacks=self.callbacks,
            run=self._run_section(),
            steps_per_epoch=steps,
        )
        # Only the first rank shows progress.
        stream = None if self._is_first else io.StringIO()
        progress = StepProgress(model.epochs * steps, steps_per_epoch=steps, stream=stream)
        loop = self._loop(batches, steps, progress, step_record)
        if self._saved is None and records is not None:
            records.clear()
        self._begin(loop)
        progress.start_at(loop.steps_done)
        was_complete = loop.is_complete
        try:
            with context.interrupts, progress, span(STEPS):
                try:
                    loop.run()
                finally:
                    self.times.count(STEPS, max(0, loop.steps_here - 1))
                if was_complete:
                    epoch_end.score_again()
        except StoppedAfter as stopped:
            logger.info("%s", stopped)
            return self._result(finished=False, why=str(stopped))
        batches.feed.log_replaced()  # here, while warnings still go to run.log
        return self._result(finished=True)

    def finish(self, folder: RunFolder) -> None:
        """Write the plots and final files of a finished training; on the first rank.

        If the process is killed meanwhile, the same command calls it again.
        """
        with finishing(), span("last files"):
            if self.context.plots:
                self.context.background.submit(self._plot_results)
            end = self._epoch_end
            content = self.recipe.final_weights(self._model, end.epoch, end.found, end.best.score)
            if content is not None:
                self._checkpoints.write_final({"weights": self.recipe.describe_network(self._model) | content})
            with span("plots"):
                self.context.background.wait()
            # From here on the run is finished: all its files are on disk, if not yet under their final names.
            folder.finish()
            self._checkpoints.promote_final()
            self.recipe.finished(folder.folder)
            logger.info("Results are in %s, the weights in %s.", folder.folder, self.context.weights)

    def _saved_state(self) -> Checkpoint | None:
        """The checkpoint to continue from; None for a new run, or if none was saved yet."""
        if not self.context.continues:
            if self._is_first and self._checkpoints.newest.parent.is_dir():
                self._checkpoints.set_aside()
            return None
        saved = load_on_all_ranks(self._checkpoints, self.context.world)
        if saved is not None and "training" not in saved.sections:
            raise CheckpointError(
                f"{saved.path}: this training is finished, so it cannot be resumed. Start a new run without --resume."
            )
        return saved

    def _check_data(self) -> None:
        """DataError if the data has changed since the run was saved, unless that is allowed."""
        if self._saved is None or self._saved.sections["run"]["data"] == self.data.fingerprint:
            return
        message = f"{self.data.what} have changed since this run was saved"
        if not self._options.allow_data_change:
            raise DataError(
                f"{message}. Start a new run with --fresh, or continue with the changed data: --allow-data-change"
            )
        logger.warning("%s; continuing with the changed data (--allow-data-change).", message)

    def _preflight(self) -> None:
        """Log the resources in one line; shortages are warnings, and ResourceError if training cannot work."""
        if self._options.no_preflight:
            return
        model, saves = self._model, self.recipe.saves
        # A slow mirror keeps a checkpoint open that has been replaced meanwhile.
        kept = self.recipe.num_kept_states(model) + bool(self._options.mirror) if saves else 0
        need = disk_need(model, kept=kept, saves=saves)
        found = [check_disk(self.context.folder, need), *self.recipe.preflight(model)]
        logger.info("Preflight: %s.", "; ".join(text for text in found if text))

    def _run_section(self) -> dict[str, Any]:
        return {
            "config": dict(self.recipe.identity().config),
            "data": self.data.fingerprint,
            "environment": environment(self.context.world.size),
            "seed": self.recipe.seed,
            **self.recipe.describe_run(),
        }

    def _loop(
        self, batches: DeviceBatches, steps: int, progress: StepProgress, step_record: StepRecord | None
    ) -> Loop:  # fmt: skip
        options, recipe, model = self._options, self.recipe, self._model

        def on_interval(stats: IntervalStats) -> None:
            left_s = progress.update(
                stats.steps_done,
                steady_step_s=stats.steady_ms / 1e3,
                mean_step_s=(stats.step_ms - stats.fill_wait_ms) / 1e3,
                waited_once_s=batches.fill_wait_s,
                once_left_s=batches.fill_left_s,
            )
            progress.show(stats.steps_done, recipe.figures(stats) | self.spending.figures(left_s))
            recipe.hint(stats)

        return Loop(
            job=recipe.job(model),
            network=model.network,
            optimizer=model.optimizer,
            schedule=recipe.schedule(model, steps),
            batches=self.seams.batches(batches),
            config=LoopConfig(
                epochs=model.epochs,
                steps_per_epoch=steps,
                **vars(recipe.compute_settings()),
                log_every=min(options.log_every, steps),
                save_every_s=60 * options.save_every_minutes if recipe.saves else NEVER,
                save_every_steps=options.save_every_steps if recipe.saves else sys.maxsize,
                save_apart_s=LoopConfig.save_apart_s if recipe.saves else NEVER,
                stop_after=options.stop_after,
                compile_auto=options.compile == "auto",
            ),
            device=self.context.device,
            epoch_end=self._epoch_end,
            average=model.average,
            checkpoints=self._checkpoints,
            interrupts=self.context.interrupts,
            world=self.context.world,
            forward=self._forward(),
            on_interval=on_interval,
            callbacks=self.callbacks,
            stop_early=self.spending.over if self.spending.has_budget else None,
            sample_name=batches.feed.source.where,
            on_hashes=step_record,
            hashed_inputs=recipe.hashed_inputs,
            replay_command=lambda epoch, step: recipe.replay_command(self.context.folder, epoch, step),
        )

    def _forward(self) -> nn.Module:
        """The network as the loop calls it: compiled, or wrapped for several ranks; the weights are the same."""
        network, device = self._model.network, self.context.device
        if self.context.world.size == 1:
            return Compiled(network) if self._options.compile == "on" else network
        if self._options.compile == "on" and self._is_first:
            logger.warning("--compile on is ignored with several ranks.")
        ids = [device.index] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(network, device_ids=ids)

    def _begin(self, loop: Loop) -> None:
        """Load the checkpoint to continue from, or save the first one of a new training."""
        if self._saved is None:
            loop.epoch = self._model.first_epoch
            logger.info("Starting %s.", self.context.folder)
            self.recipe.started(self._model)
            self.callbacks.start(self._started(loop))
            if self.recipe.saves:
                loop.save()
            return
        here = environment(self.context.world.size)
        for line in differences(self._saved.sections["run"]["environment"], here):
            logger.info("%s", line)
        loop.load_sections(self._saved.sections)
        self.callbacks.start(self._started(loop))
        logger.info("Continuing %s at epoch %d, step %d.", self.context.folder, loop.epoch, loop.step)

    def _started(self, loop: Loop) -> RunStart:
        return RunStart(
            job=self.recipe.name,
            folder=self.context.folder,
            config=self.recipe.identity().config,
            epoch=loop.epoch,
            epochs=self._model.epochs,
            continues=self._saved is not None,
            step=loop.step,
            steps_done=loop.steps_done,
            histograms=self.recipe.histograms(),
        )

    def _plot_results(self) -> None:
        try:
            self.recipe.plot(self.context.folder)
        except (ImportError, OSError, ValueError) as error:
            logger.warning("The results could not be plotted: %s.", error)

    def _result(self, *, finished: bool, why: str = "") -> RunResult:
        end = self._epoch_end
        outcome = None if end.found is None else end.found.outcome
        return RunResult(self.context.folder, outcome, end.best.score, finished, why, end.losses)
