r"""The training loop of every job: batches in, weights out, resumable at any time.

    batch --inputs--> forward, loss, backward --(where an accumulation window ends)--> optimizer, moving average
          \-- rows of numbers stay on the device until the log interval --> progress, divergence guard

The loop owns the position (epoch, step), the precision, the optimizer and the moving average. What a step computes is
up to the `Job`, what happens after an epoch is up to the `EpochEnd`. The state of a training is complete wherever an
accumulation window ends; it is saved and stopped only there.

Dimension key:  N steps of an interval   K numbers of a step
"""

import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from flatout.clock import clock, span
from flatout.engine.callbacks import Callbacks, Saved
from flatout.engine.checkpoints import Checkpoint, CheckpointStore, load_on_all_ranks
from flatout.engine.compile import CompileAuto
from flatout.engine.job import Batches, EpochEnd, IntervalStats, Job, Schedule
from flatout.engine.meter import DeviceRows, DivergenceGuard, Meter
from flatout.engine.optim import MovingAverage, apply_settings, load_optimizer
from flatout.engine.reproducible import random_state, set_random_state
from flatout.engine.step import Amp, Precision, Step
from flatout.engine.step_hash import HashedStep, HashLog
from flatout.errors import DivergedError, Interrupted, ResourceError
from flatout.ranks import Interrupts, StopRequested, World
from flatout.safefiles import ran_out_of_room

logger = logging.getLogger(__name__)

# Out of GPU memory

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
MARGIN = 0.9
"""Share of the memory that a suggested batch may use."""


def out_of_memory_error(
    error: BaseException, *, batch_size: int, device: torch.device, amp: Amp = "off", ranks: int = 1
) -> ResourceError:
    """The error to raise instead of torch's own. It suggests a batch size; the batch is never shrunk silently."""
    used, total = _used_and_total(device)
    requested = _requested_bytes(str(error))
    fitting = max(ranks, fitting_batch(batch_size, used=used + requested, total=total) // ranks * ranks)
    remedies = f"use a batch size of {fitting}, smaller images" + (", or --amp bf16" if amp == "off" else "")
    state = f"{used / 2**30:.1f} of {total / 2**30:.1f} GiB in use" if total else "memory size unknown"
    return ResourceError(
        f"out of GPU memory with {batch_size} samples per step ({state}, {requested / 2**20:.0f} MiB more requested). "
        f"About {fitting} would fit: {remedies}. The last checkpoint is kept, but a run cannot continue with another "
        "batch size: start a new one."
    )


def fitting_batch(batch_size: int, *, used: int, total: int) -> int:
    """The batch size that would fit, assuming that memory grows linearly with it; a tenth is left free.

    `used` and `total` are bytes of memory; half of the batch if one of them is 0, that is, unknown.
    """
    if not total or not used:
        return max(1, batch_size // 2)
    return max(1, min(batch_size - 1, int(MARGIN * batch_size * total / used)))


def _requested_bytes(text: str) -> int:
    found = re.search(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", text)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def _used_and_total(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory


# The loop

RANK_CHECK_STEPS = 10
"""Fewest steps between two exchanges in which ranks learn whether any of them received a signal."""


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Settings of the loop."""

    epochs: int
    steps_per_epoch: int
    amp: Amp = "off"
    clip_norm: float | None = None
    """Maximum norm of all gradients together; None: no clipping."""
    log_every: int = 20
    """Steps of a log interval, after which numbers are copied from the device."""
    save_every_s: float = 600
    save_every_steps: int = 1000
    save_apart_s: float = 15
    """Shortest time between a save and another one at the end of an epoch: epochs may take only a second."""
    stop_after: int | None = None
    """Steps of this process after which it saves and stops."""
    graphs: bool = False
    """Run steps of fixed shape as one CUDA graph."""
    compile_auto: bool = False
    """Compile the network once the step time is steady, if that pays within the run. Ignored with several ranks."""


def stopped_after(steps: int, *, requested: int) -> str:
    """How many steps were trained, and why more than requested."""
    trained = f"Stopped after {steps} step{'s' if steps > 1 else ''}"
    if steps == requested:
        return f"{trained}, as requested."
    return f"{trained}: {requested} were requested, but a training stops only after a complete optimizer step."


class StoppedAfter(Exception):
    """The training stopped at a limit that was set beforehand; it is saved and can be continued. The text says why."""


class _RolledBack(Exception):
    """Everything, including the position, was set back to a checkpoint."""


@dataclass(kw_only=True, eq=False, repr=False)
class Loop:
    """Trains from the current position to the end, or until it is interrupted."""

    job: Job
    network: nn.Module
    """Holds the weights."""
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    batches: Batches
    config: LoopConfig
    device: torch.device
    epoch_end: EpochEnd = field(default_factory=EpochEnd)
    average: MovingAverage | None = None
    checkpoints: CheckpointStore | None = None
    interrupts: Interrupts = field(default_factory=Interrupts)
    world: World = field(default_factory=World)
    forward: nn.Module | None = None
    """The network as it is called, compiled or wrapped for several ranks; None: as it is."""
    on_interval: Callable[[IntervalStats], None] = lambda stats: None
    """Called at every log interval."""
    callbacks: Callbacks = field(default_factory=Callbacks)
    stop_early: Callable[[], str | None] | None = None
    """Called wherever a training may stop; returns the reason to stop, or None."""
    sample_name: Callable[[int], str] = str
    """Names a sample in messages."""
    on_hashes: Callable[[list[HashedStep]], None] | None = None
    """With it the inputs of every step are hashed on the device; called with the hashes of past steps at every log
    interval, on all ranks."""
    hashed_inputs: Collection[str] | None = None
    """Names of the inputs that are hashed; None: all."""
    replay_command: Callable[[int, int], str] = lambda epoch, step: ""
    """Returns the command that shows a step; empty: there is none."""

    def __post_init__(self) -> None:
        config = self.config
        self.precision = Precision(config.amp, self.device)
        self.epoch, self.step = 0, 0
        """The next step to train; `step` equal to the steps per epoch: only the end of the epoch is left to do."""
        self._compile_auto = CompileAuto(self.network) if config.compile_auto and self.world.size == 1 else None
        self._log = DeviceRows(len(self.job.item_names) + 2, config.log_every, self.device)
        self._keep_before: tuple[int, int] | None = None
        """The step whose state is kept before it is trained again, because it was bad the last time."""
        self._hashes = HashLog(config.log_every, self.device) if self.on_hashes is not None else None
        self._meter = Meter(self.job.item_names)
        self._guard = DivergenceGuard(self.sample_name)
        self._training_step = Step(
            self.job,
            self.network,
            self.forward or self.network,
            self.optimizer,
            self.average,
            precision=self.precision,
            clip_norm=config.clip_norm,
            graphs=config.graphs,
            world=self.world,
        )
        self._phase: object = None
        self.steps_here = 0
        self._window_ended = True
        self._is_over = False
        self._checked_steps = self._saved_steps = 0
        self._saved_at = time.monotonic()

    def run(self) -> None:
        """Train to the end. Interrupted or StoppedAfter after everything is saved; DivergedError if rolling back does
        not help."""
        if self.stop_early is not None:
            self._stop_if_requested()
        self._update_unsaved()
        if self.is_complete:
            logger.info("All epochs are trained; only the final files of the run are missing.")
        while not self.is_complete:
            try:
                with self._training_step.own_stream():
                    self._train_epoch()
                with clock.stage("train.between"), span("epoch end"):
                    self._finish_epoch()
            except _RolledBack:
                logger.info("Continuing at epoch %d, step %d.", self.epoch, self.step)

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to train."""
        return self._is_over or self.epoch >= self.config.epochs

    @property
    def steps_done(self) -> int:
        return self.epoch * self.config.steps_per_epoch + self.step

    @property
    def steps_left(self) -> int:
        return self.config.epochs * self.config.steps_per_epoch - self.steps_done

    # One epoch

    def _train_epoch(self) -> None:
        if self.step >= self.config.steps_per_epoch:
            return
        self.network.train()
        if self.step == 0:
            self._training_step.clear_gradients()
            self._meter.begin_epoch()
        if (phase := self.job.phase(self.epoch)) != self._phase:
            self._phase = phase
            self._training_step.graphs.clear()
        self._meter.begin_interval()
        if self.step:  # the checkpoint may have been saved just before work that was due between steps
            self._work_between_steps()
        batches = iter(self.batches.epoch(self.epoch, start=self.step))
        if self.steps_here == 0:
            with span("first step"):
                self._take_step(batches)
        while self.step < self.config.steps_per_epoch:
            self._take_step(batches)
        self._process_all_numbers()

    def _take_step(self, batches: Iterator[Any]) -> None:
        """Train on the next batch."""
        began, device_wait_s = time.perf_counter(), self.batches.device_wait_s
        fill_wait_s = self.batches.fill_wait_s
        batch = self._next_batch(batches)
        # A host that is ahead of its device also waits here, but not for data.
        self._meter.waited(
            time.perf_counter() - began - (self.batches.device_wait_s - device_wait_s),
            once=self.batches.fill_wait_s - fill_wait_s,
        )
        self._train_step(batch)

    def _next_batch(self, batches: Iterator[Any]) -> Any:
        """Wait for the feed. Between two accumulation windows everything can be saved, so a signal ends the wait."""
        with clock.stage("train.wait"):
            if self.world.size > 1 or not self._window_ended:
                return next(batches)
            try:
                with self.interrupts.stopping_at_once():
                    return next(batches)
            except StopRequested:
                self._save_and_stop(self.interrupts.requested)

    def _train_step(self, batch: Any) -> None:
        if (self.epoch, self.step) == self._keep_before and self.world.is_first:
            self._keep(self._keep_before, self.sections())  # waits for the device
        settings = self.schedule(self.epoch, self.step)
        apply_settings(self.optimizer, settings)
        self._meter.lrs = settings.lrs
        try:
            with clock.stage("train.inputs"):
                inputs = self.job.inputs(batch, self.epoch, self.step)
                self._hash(inputs)
            self._log.put(self._training_step(inputs, window_ends=settings.step_optimizer))
        except torch.OutOfMemoryError as error:
            ranks, amp = self.world.size, self.config.amp
            raise out_of_memory_error(
                error, batch_size=len(batch) * ranks, device=self.device, amp=amp, ranks=ranks
            ) from error
        self._guard.add_step(self.epoch, self.step, batch.indices, ends_window=settings.step_optimizer)
        self._meter.count(len(batch) * self.world.size)
        self.step += 1
        self.steps_here += 1
        self._window_ended = settings.step_optimizer
        self._update_unsaved()
        if self.steps_here == 1:
            self.world.tighten_timeouts()
        if self.step % self.config.log_every == 0:
            with clock.stage("train.log"):
                self._report_hashes(HashLog.swap)
                self._process_numbers(self._log.swap())
        if settings.step_optimizer:
            self._at_window_end()
            self._work_between_steps()

    # Numbers of past steps

    def _process_numbers(self, rows_NK: np.ndarray) -> None:
        """Add the numbers of N steps to the means, report them, and roll back if the training has diverged."""
        bad_loss_N, bad_gradient_N = self.world.all_reduce_max(rows_NK[:, -2:] > 0).astype(bool).T
        self._meter.add(rows_NK[:, :-2], bad_loss_N | bad_gradient_N)
        if len(rows_NK):
            stats = self._meter.end_interval(
                self.epoch, self.step, steps_done=self.steps_done, steps_left=self.steps_left
            )
            self.on_interval(stats)
            self.callbacks.log(stats)
            if self._training_step.has_reverted:
                self._compile_auto = None  # steps are not compiled, so there is nothing to compare
            if self._compile_auto is not None and (forward := self._compile_auto(stats, self.steps_here)) is not None:
                self._training_step.use_forward(forward)
        if self._guard.has_diverged(bad_loss_N, bad_gradient_N, scaled=self.config.amp == "fp16"):
            self._roll_back()

    def _process_all_numbers(self) -> None:
        """Process the numbers of every step so far; waits for the device."""
        with clock.stage("train.drain"):
            self._report_hashes(HashLog.drain)
            rows_NK = self._log.drain()
        with clock.stage("train.log"):
            self._process_numbers(rows_NK)

    def _hash(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Queue the hash of a step's inputs. An error ends the record for replays, never the training."""
        if self._hashes is None:
            return
        try:
            names = inputs if self.hashed_inputs is None else self.hashed_inputs
            self._hashes.put(self.epoch, self.step, {name: inputs[name] for name in names})
        except RuntimeError as error:
            self._hashes = None
            logger.warning(
                "What the network sees is no longer recorded (%s): training goes on, but replays of later steps cannot "
                "be compared with it.",
                str(error).splitlines()[0],
            )

    def _report_hashes(self, take: Callable[[HashLog], list[HashedStep]]) -> None:
        """Pass on the hashes of past steps. Before their numbers are processed, which may end the training."""
        if self._hashes is not None and self.on_hashes is not None:
            self.on_hashes(take(self._hashes))

    def _roll_back(self) -> None:
        """Set everything back to the last good checkpoint; DivergedError if there is none or it has not helped."""
        saved = load_on_all_ranks(self.checkpoints, self.world)
        position = None if saved is None else saved.sections["training"]["position"]
        to = None if position is None else (position["epoch"], position["step"])
        self._keep_or_plan_to(saved, to)
        if not self._guard.roll_back(to) or saved is None:
            tried = (
                "There is no checkpoint to go back to."
                if saved is None
                else ("Going back to a checkpoint did not help; the last good one is kept.")
            )
            raise DivergedError(
                f"{self._guard.description()} {tried} Check these samples{self._list_of_samples()}, "
                f"or use a smaller learning rate.{self._advice_to_replay()}"
            )
        logger.warning("%s Going back to %s.", self._guard.description(), saved.path)
        self.load_sections(saved.sections)
        raise _RolledBack

    def _list_of_samples(self) -> str:
        """Write all samples of the last bad steps to a file; returns its path as a remark, on the first rank."""
        if self.checkpoints is None or not self.world.is_first:
            return ""
        steps = [bad | self._about_replay(bad["epoch"], bad["step"]) for bad in self._guard.bad_samples()]
        return f" (full list: {self.checkpoints.write_note('diverged.json', steps)})"

    def _about_replay(self, epoch: Any, step: Any) -> dict[str, object]:
        """How to look at a bad step, for a JSON file."""
        kept = self.checkpoints.kept_before(epoch, step) if self.checkpoints is not None else None
        about: dict[str, object] = {} if kept is None else {"weights": kept.name}
        command = self.replay_command(epoch, step)
        return about | ({"command": command} if command else {})

    def _advice_to_replay(self) -> str:
        """The command that shows the first bad step, as a sentence; empty if there is none."""
        bad = self._guard.first_bad
        command = self.replay_command(bad.epoch, bad.step) if bad is not None else ""
        return f" To see what the network saw in the first bad step: {command}" if command else ""

    def _keep_or_plan_to(self, saved: Checkpoint | None, to: tuple[int, int] | None) -> None:
        """Keep the weights before the first bad step: those of the checkpoint, if it was saved at that step or among
        the bad ones, which change no weight; otherwise when that step is about to be trained again."""
        if (bad := self._guard.first_bad) is None or saved is None or to is None:
            return
        self._keep_before = bad.epoch, bad.step
        if to >= self._keep_before:
            self._keep(self._keep_before, saved.sections)
            self._keep_before = None

    def _keep(self, position: tuple[int, int], sections: Mapping[str, Any]) -> None:
        if self.checkpoints is not None and self.world.is_first:
            self.checkpoints.keep_before(*position, {"weights": sections["weights"]})

    # Saving and stopping

    def _at_window_end(self) -> None:
        """Stop or save if that is due. Ranks must do so after the same step, so they synchronize every few steps."""
        if self.world.size > 1:
            # Counted from the last exchange: windows of two or four steps may never end at a multiple of ten.
            # `stop_after` is the same on all ranks and needs no exchange.
            if self.steps_here - self._checked_steps < RANK_CHECK_STEPS and not self._has_reached_limit:
                return
            self._checked_steps = self.steps_here
        name = self.interrupts.requested
        if self.world.any(name is not None):
            self._save_and_stop(name)
        self._stop_if_requested()
        save_requested = self.interrupts.take_save_request()
        if self.world.any(save_requested or self._save_is_due()):
            self.save()

    def _save_and_stop(self, signal_name: str | None) -> NoReturn:
        self.save()
        raise Interrupted(
            f"{signal_name or 'a signal to another rank'}: saved at epoch {self.epoch}, step {self.step}. "
            "Run the same command again to continue."
        )

    def _update_unsaved(self) -> None:
        """Let a signal interrupt the current step if nothing before it is unsaved. With several ranks it never may:
        they stop together."""
        self.interrupts.nothing_unsaved = self.world.size == 1 and self.steps_here == self._saved_steps

    def _work_between_steps(self) -> None:
        """Do what is due after this step, if anything; all ranks wait for it. After the last step of an epoch,
        `_finish_epoch` does it."""
        if self.step >= self.config.steps_per_epoch:
            return
        if (work := self.epoch_end.between(self.epoch, self.step)) is not None:
            self._process_all_numbers()
            with clock.stage("train.between"), span("epoch end"):
                work()
                # The barrier waits as long as the busiest rank takes; the next all-reduce has a short timeout.
                self.world.wait_for_all()
            self._meter.begin_interval()

    @property
    def _has_reached_limit(self) -> bool:
        return self.config.stop_after is not None and self.steps_here >= self.config.stop_after

    def _stop_if_requested(self) -> None:
        why = None
        if self._has_reached_limit:
            limit = self.config.stop_after or 0
            why = f"{stopped_after(self.steps_here, requested=limit)} Run the same command again to continue."
        elif self.stop_early is not None:
            # Clocks of several machines differ: the first rank decides.
            why = self.world.broadcast(self.stop_early())
        if why is not None:
            self.save()
            raise StoppedAfter(why)

    def _save_is_due(self) -> bool:
        unsaved_steps = self.steps_here - self._saved_steps
        return unsaved_steps >= self.config.save_every_steps or self._unsaved_s() >= self.config.save_every_s

    def _unsaved_s(self) -> float:
        return time.monotonic() - self._saved_at

    def _finish_epoch(self) -> None:
        """Validate, record and save at the end of an epoch, and go on to the next one."""
        if self.world.size == 1 and self.checkpoints is not None and not self.checkpoints.newest.parent.is_dir():
            self.save()  # creates the run folder again, which the work below needs
        try:
            if self.interrupts.requested is not None and self.world.size == 1:
                raise Interrupted(
                    f"{self.interrupts.requested}: saved at the end of epoch {self.epoch}. "
                    "Run the same command again to continue."
                )
            stop = self.epoch_end(self.epoch, self._meter.report(), self.sections)
        except Interrupted:
            self.save()
            raise
        self.epoch, self.step = self.epoch + 1, 0
        self._is_over = stop or self.epoch == self.config.epochs
        if not self._is_over:
            self._stop_if_requested()
        if self.world.any(self._is_over or self._unsaved_s() >= self.config.save_apart_s):
            self.save()

    def save(self) -> None:
        """Write a checkpoint; roll back instead if a weight is not finite. Waits for the device.

        All ranks wait for the one that writes, because a launcher ends all of them as soon as one ends.
        """
        if self.step > 0:
            self._process_all_numbers()
        with clock.stage("train.save"), span("save"):
            if self.checkpoints is not None and self.world.any(not self._is_finite()):
                self._roll_back()
            if self.checkpoints is not None and self.world.is_first:
                self._write_checkpoint(self.checkpoints)
                self.callbacks.checkpoint(Saved(path=self.checkpoints.newest, epoch=self.epoch, step=self.step))
            # The barrier waits as long as a slow disk takes; the next all-reduce has a short timeout.
            self.world.wait_for_all()
        self._saved_at, self._saved_steps = time.monotonic(), self.steps_here
        self._update_unsaved()

    def _write_checkpoint(self, checkpoints: CheckpointStore) -> None:
        was_removed = checkpoints.restore_folder()
        try:
            # Files that belong to the checkpoint come first: a process killed in between trains their epoch again.
            checkpoints.write_with_retry(self.epoch_end.flush)
            checkpoints.save(self.sections())
        except ResourceError as error:
            if not ran_out_of_room(error):
                raise
            raise ResourceError(f"{error} Then run the same command again to continue.") from error.__cause__
        if was_removed:
            raise ResourceError(
                f"{checkpoints.newest.parent} was removed or moved while the training was running. It was created "
                f"again with a checkpoint of epoch {self.epoch}, step {self.step}; its other files are gone. "
                "Training stopped. Run the same command again to continue."
            )

    def sections(self) -> dict[str, Any]:
        """The whole state of the training: tensors, position, random states, and the sections of the `EpochEnd`."""
        extra = self.epoch_end.sections()
        weights: dict[str, object] = extra["weights"] | {"state": self.network.state_dict()}
        if self.average is not None:
            weights |= self.average.state_dict()
        training = {
            "position": {"epoch": self.epoch, "step": self.step, "steps_per_epoch": self.config.steps_per_epoch},
            "optimizer": self.optimizer.state_dict(),
            "precision": self.precision.state_dict(),
            "random": random_state(self.device),
            "meter": self._meter.state_dict(),
            "job": extra["job"],
            "over_at": self.config.epochs if self._is_over else None,
        }
        return {"weights": weights, "training": training, "run": extra["run"]}

    def load_sections(self, sections: Mapping[str, Any]) -> None:
        """Restore the state that `sections` returned."""
        weights, training = sections["weights"], sections["training"]
        self.network.load_state_dict(weights["state"])
        if self.average is not None:
            self.average.load_state_dict(weights)
        load_optimizer(self.optimizer, training["optimizer"])
        self.precision.load_state_dict(training["precision"])
        set_random_state(training["random"], self.device)
        self.epoch, self.step = training["position"]["epoch"], training["position"]["step"]
        # Ended by patience, and no more epochs were requested since.
        self._is_over = training.get("over_at") == self.config.epochs
        self._log.drain()
        if self._hashes is not None:
            self._hashes.drain()
        self._meter.load_state_dict(training["meter"])
        self.epoch_end.load_state(training["job"])
        self._training_step.graphs.clear()
        self.optimizer.zero_grad(set_to_none=True)

    def _is_finite(self) -> bool:
        """Whether all weights and their moving average are finite."""
        tensors = list(self.network.state_dict().values())
        if self.average is not None:
            tensors += self.average.network.state_dict().values()
        floating = [tensor for tensor in tensors if tensor.is_floating_point()]
        # A norm is finite only if every entry is; an overflowing norm is a divergence as well.
        return bool(torch.isfinite(torch.stack(torch._foreach_norm(floating, 1))).all())
