r"""The training loop of every job: batches in, weights out, at any moment resumable.

    batch --inputs--> forward, loss, backward --(where an accumulation window ends)--> optimizer, moving average
          \-- rows of numbers stay on the device until the log interval --> one line, guards

The loop owns the position (epoch, step), number formats, the optimizer and the moving average. It knows no boxes,
defects or spikes: a `Job` says what a step computes, an `EpochEnd` what happens after an epoch. Its state is complete
wherever an accumulation window ends; there, and only there, a training is saved or stopped.
"""

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from flatout.clock import clock
from flatout.engine.callbacks import Callbacks, Saved
from flatout.engine.checkpoints import CheckpointStore, load_on_all_ranks
from flatout.engine.compile import CompileAuto
from flatout.engine.job import Batches, EpochEnd, IntervalStats, Job, NoEpochEnd, Schedule
from flatout.engine.meter import Guard, Meter, StepLog
from flatout.engine.optim import MovingAverage, apply_knobs, load_optimizer
from flatout.engine.reproducible import random_state, set_random_state
from flatout.engine.step import Amp, Precision, Step
from flatout.errors import DivergedError, Interrupted, ResourceError
from flatout.ranks import Interrupts, StopRequested, World
from flatout.safefiles import ran_out_of_room

logger = logging.getLogger(__name__)

# A GPU that is too small, in a sentence that says what would fit.

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
MARGIN = 0.9


def no_room(error: BaseException, *, batch_size: int, device: torch.device) -> ResourceError:
    """The error to raise for torch's own; the batch is never made smaller in silence."""
    used, total = _used_and_total(device)
    asked = _asked(str(error))
    fitting = fitting_batch(batch_size, used=used + asked, total=total)
    where = f"{used / 2**30:.1f} GiB of {total / 2**30:.1f} GiB were in use" if total else "its size is unknown"
    return ResourceError(
        f"out of GPU memory with {batch_size} pictures per step ({where}, {asked / 2**20:.0f} MiB more were asked). "
        f"About {fitting} would fit: use --batch-size {fitting}, a smaller --img-size, or --amp bf16. "
        "Everything up to the last saved state is kept; a smaller batch is a new run."
    )


def fitting_batch(batch_size: int, *, used: int, total: int) -> int:
    """Memory grows with the batch, near enough; a tenth is left free."""
    if not total or not used:
        return max(1, batch_size // 2)
    return max(1, min(batch_size - 1, int(MARGIN * batch_size * total / used)))


def _asked(text: str) -> int:
    found = re.search(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", text)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def _used_and_total(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory


ASK_RANKS_EVERY = 10
"""Least steps between two questions to the other ranks whether a signal came."""


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How the loop runs."""

    epochs: int
    steps_per_epoch: int
    amp: Amp = "off"
    clip_norm: float | None = None
    """Largest norm of all gradients together; None: they are not clipped."""
    log_every: int = 20
    """Steps between two looks at the device's numbers."""
    save_every_s: float = 600
    save_every_steps: int = 1000
    save_apart_s: float = 15
    """At the end of an epoch nothing is saved if that was done less than this ago: epochs may take a second."""
    stop_after: int | None = None
    """Steps of this process after which it saves and ends."""
    graphs: bool = False
    """Run steps of fixed shape as one CUDA graph."""
    compile_auto: bool = False
    """Compile the network once steps have settled, if that pays within the run. With several ranks nothing is."""


def stopped_after(steps: int, *, asked: int) -> str:
    """Steps that were trained, and why there are more than were asked for."""
    trained = f"Stopped after {steps} step{'s' if steps > 1 else ''}"
    if steps == asked:
        return f"{trained}, as asked."
    return f"{trained}: {asked} asked for, but a training stops only where an optimizer step is complete."


class StoppedAfter(Exception):
    """The training ends early, as was asked beforehand; it is saved and can go on. The text says why."""


class _RolledBack(Exception):
    """Everything was set back to a saved state, the position too."""


class Loop:
    """One training from its position to its end, or to an interruption."""

    def __init__(
        self,
        *,
        job: Job,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        batches: Batches,
        config: LoopConfig,
        device: torch.device,
        epoch_end: EpochEnd | None = None,
        average: MovingAverage | None = None,
        checkpoints: CheckpointStore | None = None,
        interrupts: Interrupts | None = None,
        world: World | None = None,
        forward: nn.Module | None = None,
        tell: Callable[[IntervalStats], None] = lambda tick: None,
        callbacks: Callbacks | None = None,
        stop_early: Callable[[], str | None] | None = None,
        between: Callable[[int, int], Callable[[], None] | None] | None = None,
    ) -> None:
        """`forward` is the network as it is called, compiled or for several ranks; `network` holds the weights.
        `stop_early` is asked where a training may stop, and says why it has to, or None. `between` is asked after an
        optimizer step (epoch, steps of it that are done) whether there is something to do, such as a validation within
        an epoch; all ranks must answer alike, and its time is nobody's."""
        self.job, self.network, self.optimizer = job, network, optimizer
        self._epoch_end: EpochEnd = epoch_end or NoEpochEnd()
        self.schedule, self.batches, self.config = schedule, batches, config
        self.device, self.average, self.checkpoints = device, average, checkpoints
        self.world = world or World()
        self.precision = Precision(config.amp, device)
        self.epoch, self.step = 0, 0
        """The next step to train; `step` = steps per epoch: the end of the epoch has not been worked off."""
        self._interrupts = interrupts or Interrupts()
        self._tell, self._callbacks, self._stop_early = tell, callbacks or Callbacks(), stop_early
        self._between = between
        self._compile_auto = CompileAuto(network) if config.compile_auto and self.world.size == 1 else None
        self._log = StepLog(len(job.item_names) + 2, config.log_every, device)
        self._meter = Meter(job.item_names)
        self._guard = Guard()
        self._training_step = Step(
            job,
            network,
            forward or network,
            optimizer,
            average,
            precision=self.precision,
            clip_norm=config.clip_norm,
            graphs=config.graphs,
            world=self.world,
            device=device,
        )
        self._phase: object = None
        self.steps_here = 0
        self._window_ended = True
        self._is_over = False
        self._asked_steps = self._saved_steps = 0
        self._saved_at = time.monotonic()

    def run(self) -> None:
        """Train to the end. Interrupted or StoppedAfter once all is saved; DivergedError if there is no way on."""
        if self._stop_early is not None:
            self._stop_if_long_enough()
        self._note_unsaved()
        if self.is_complete:
            logger.info("Every epoch is trained; only the last files of the run are missing.")
        while not self.is_complete:
            try:
                with self._training_step.own_stream():
                    self._train_epoch()
                with clock.stage("train.between"):
                    self._finish_epoch()
            except _RolledBack:
                logger.info("Continuing with epoch %d, step %d.", self.epoch, self.step)

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
            self._training_step.graphs.forget()
        self._meter.begin_interval()
        if self.step:  # saved where something was due, and before it was done
            self._pause_if_due()
        batches = iter(self.batches.epoch(self.epoch, start=self.step))
        while self.step < self.config.steps_per_epoch:
            began, device_wait_s = time.perf_counter(), self.batches.device_wait_s
            batch = self._next_batch(batches)
            # A host that is ahead of its device waits here too, but not for data.
            self._meter.waited(time.perf_counter() - began - (self.batches.device_wait_s - device_wait_s))
            self._train_step(batch)
        self._look_at_all()

    def _next_batch(self, batches: Iterator[Any]) -> Any:
        """Waits for the feed. A signal need not: between two windows everything can be saved."""
        with clock.stage("train.wait"):
            if self.world.size > 1 or not self._window_ended:
                return next(batches)
            try:
                with self._interrupts.stopping_at_once():
                    return next(batches)
            except StopRequested:
                self._save_and_stop(self._interrupts.requested)

    def _train_step(self, batch: Any) -> None:
        knobs = self.schedule(self.epoch, self.step)
        apply_knobs(self.optimizer, knobs)
        self._meter.lrs = knobs.lrs
        try:
            with clock.stage("train.inputs"):
                inputs = self.job.inputs(batch, self.epoch, self.step)
            self._log.put(self._training_step.work(inputs, window_ends=knobs.steps))
            if knobs.steps:
                self._log.mark(self._training_step.move())
        except torch.OutOfMemoryError as error:
            raise no_room(error, batch_size=len(batch) * self.world.size, device=self.device) from error
        self._guard.remember(self.epoch, self.step, batch.indices, ends_window=knobs.steps)
        self._meter.count(len(batch) * self.world.size)
        self.step += 1
        self.steps_here += 1
        self._window_ended = knobs.steps
        self._note_unsaved()
        if self.steps_here == 1:
            self.world.settle()
        if self.step % self.config.log_every == 0:
            with clock.stage("train.log"):
                self._look(self._log.turn())
        if knobs.steps:
            self._at_boundary()
            self._pause_if_due()

    # What the numbers say

    def _look(self, rows_NK: np.ndarray) -> None:
        """Numbers of N steps have arrived: sum up, tell, and act if they are not finite."""
        bad_loss_N, bad_gradient_N = self.world.all_reduce_max(rows_NK[:, -2:] > 0).astype(bool).T
        self._meter.add(rows_NK[:, :-2], bad_loss_N | bad_gradient_N)
        if len(rows_NK):
            tick = self._meter.tick(self.epoch, self.step, steps_done=self.steps_done, steps_left=self.steps_left)
            self._tell(tick)
            self._callbacks.log(tick)
            if self._compile_auto is not None and (compiled := self._compile_auto(tick, self.steps_here)) is not None:
                self._training_step.use_forward(compiled)
        if self._guard.is_lost(bad_loss_N, bad_gradient_N, scaled=self.config.amp == "fp16"):
            self._roll_back()

    def _look_at_all(self) -> None:
        """Host-device wait: look at the numbers of every step so far."""
        with clock.stage("train.drain"):
            rows_NK = self._log.drain()
        with clock.stage("train.log"):
            self._look(rows_NK)

    def _roll_back(self) -> None:
        """Set everything back to the last good checkpoint, or give up."""
        saved = load_on_all_ranks(self.checkpoints, self.world)
        if not self._guard.roll_back() or saved is None:
            tried = (
                "There is no saved state to go back to."
                if saved is None
                else ("Going back to a saved state did not help; the last good one is kept.")
            )
            raise DivergedError(
                f"{self._guard.complaint()} {tried} Look at these samples{self._listed_samples()}, "
                "or use a smaller lr0."
            )
        logger.warning("%s Set back to %s.", self._guard.complaint(), saved.path)
        self.load_sections(saved.sections)
        raise _RolledBack

    def _listed_samples(self) -> str:
        """Where all samples of the last bad steps can be found, as a remark."""
        if self.checkpoints is None or not self.world.is_first:
            return ""
        return f" (all of them: {self.checkpoints.leave_note('diverged.json', self._guard.bad_samples())})"

    # Saving and stopping

    def _at_boundary(self) -> None:
        """Stop or save if that is due. Ranks do both after the same step, so they ask each other now and then."""
        if self.world.size > 1:
            # Counted from the last question: windows of two or four steps may never end at a multiple of ten.
            # A number of steps that was asked for is the same on all ranks.
            if self.steps_here - self._asked_steps < ASK_RANKS_EVERY and not self._is_long_enough:
                return
            self._asked_steps = self.steps_here
        name = self._interrupts.requested
        if self.world.any(name is not None):
            self._save_and_stop(name)
        self._stop_if_long_enough()
        wished = self._interrupts.take_save_request()
        if self.world.any(wished or self._save_is_due()):
            self.save()

    def _save_and_stop(self, signal_name: str | None) -> NoReturn:
        self.save()
        raise Interrupted(
            f"{signal_name or 'a signal to another rank'}: saved at epoch {self.epoch}, step {self.step}. "
            "Run the same command again."
        )

    def _note_unsaved(self) -> None:
        """A signal need not wait for the end of a step, if the step is all that would be lost. Ranks stop together."""
        self._interrupts.nothing_unsaved = self.world.size == 1 and self.steps_here == self._saved_steps

    def _pause_if_due(self) -> None:
        """Host-device wait, if there is something to do between two steps. An epoch's end is worked off elsewhere."""
        if self._between is None or self.step >= self.config.steps_per_epoch:
            return
        if (work := self._between(self.epoch, self.step)) is not None:
            self._look_at_all()
            with clock.stage("train.between"):
                work()
                # Here they may wait for the one that has work; in the next sum of gradients not for long.
                self.world.wait_for_all()
            self._meter.begin_interval()

    @property
    def _is_long_enough(self) -> bool:
        return self.config.stop_after is not None and self.steps_here >= self.config.stop_after

    def _stop_if_long_enough(self) -> None:
        why = None
        if self._is_long_enough:
            why = f"{stopped_after(self.steps_here, asked=self.config.stop_after or 0)} The same command continues."
        elif self._stop_early is not None:
            # Clocks of several machines differ: what the first one says counts.
            why = self.world.broadcast(self._stop_early())
        if why is not None:
            self.save()
            raise StoppedAfter(why)

    def _save_is_due(self) -> bool:
        unsaved_steps = self.steps_here - self._saved_steps
        return unsaved_steps >= self.config.save_every_steps or self._unsaved_s() >= self.config.save_every_s

    def _unsaved_s(self) -> float:
        return time.monotonic() - self._saved_at

    def _finish_epoch(self) -> None:
        """Work off the end of an epoch."""
        if self.world.size == 1 and self.checkpoints is not None and not self.checkpoints.newest.parent.is_dir():
            self.save()  # which makes it again; what is done at an epoch's end would fail without it
        try:
            if self._interrupts.requested is not None and self.world.size == 1:
                raise Interrupted(
                    f"{self._interrupts.requested}: saved at the end of epoch {self.epoch}. Run the same command again."
                )
            stop = self._epoch_end(self.epoch, self._meter.report(), self.sections)
        except Interrupted:
            self.save()
            raise
        self.epoch, self.step = self.epoch + 1, 0
        self._is_over = stop or self.epoch == self.config.epochs
        if not self._is_over:
            self._stop_if_long_enough()
        if self.world.any(self._is_over or self._unsaved_s() >= self.config.save_apart_s):
            self.save()

    def save(self) -> None:
        """Write a checkpoint, unless a weight is not finite: a broken state is never saved. Waits for the device.

        All ranks wait for the one that writes: a launcher ends all of them as soon as one ends.
        """
        if self.step > 0:
            self._look_at_all()
        with clock.stage("train.save"):
            if self.checkpoints is not None and self.world.any(not self._is_sound()):
                self._roll_back()
            if self.checkpoints is not None and self.world.is_first:
                self._write_checkpoint(self.checkpoints)
                self._callbacks.checkpoint(Saved(path=self.checkpoints.newest, epoch=self.epoch, step=self.step))
            # Here they may wait as long as a slow disk takes; in the next sum of gradients they may not.
            self.world.wait_for_all()
        self._saved_at, self._saved_steps = time.monotonic(), self.steps_here
        self._note_unsaved()

    def _write_checkpoint(self, checkpoints: CheckpointStore) -> None:
        was_gone = checkpoints.restore_folder()
        try:
            # First what lies beside the checkpoint: killed in between, the epoch it comes from is trained again.
            checkpoints.retrying(self._epoch_end.flush)
            checkpoints.save(self.sections())
        except ResourceError as error:
            if not ran_out_of_room(error):
                raise
            raise ResourceError(f"{error} The same command then continues.") from error.__cause__
        if was_gone:
            raise ResourceError(
                f"{checkpoints.newest.parent} was removed or moved while the training was running. It was made again, "
                f"with the state of epoch {self.epoch}, step {self.step} in it, and the training ended; its other "
                "files are gone. Run the same command again to continue."
            )

    def sections(self) -> dict[str, Any]:
        """All that a training is: tensors, position, random states, and what the end of an epoch adds."""
        beside = self._epoch_end.sections()
        weights: dict[str, object] = beside["weights"] | {"state": self.network.state_dict()}
        if self.average is not None:
            weights |= {"ema": self.average.network.state_dict(), "updates": self.average.updates}
        training = {
            "position": {"epoch": self.epoch, "step": self.step, "steps_per_epoch": self.config.steps_per_epoch},
            "optimizer": self.optimizer.state_dict(),
            "precision": self.precision.state_dict(),
            "random": random_state(self.device),
            "meter": self._meter.state_dict(),
            "job": beside["job"],
            "over_at": self.config.epochs if self._is_over else None,
        }
        return {"weights": weights, "training": training, "run": beside["run"]}

    def load_sections(self, sections: Mapping[str, Any]) -> None:
        """Continue from what `sections` gave."""
        weights, training = sections["weights"], sections["training"]
        self.network.load_state_dict(weights["state"])
        if self.average is not None:
            self.average.load_state_dict({"state": weights["ema"], "updates": weights["updates"]})
        load_optimizer(self.optimizer, training["optimizer"])
        self.precision.load_state_dict(training["precision"])
        set_random_state(training["random"], self.device)
        self.epoch, self.step = training["position"]["epoch"], training["position"]["step"]
        # Out of patience, and not asked for more epochs since.
        self._is_over = training.get("over_at") == self.config.epochs
        self._log.drain()
        self._meter.load_state_dict(training["meter"])
        self._epoch_end.load_state(training["job"])
        self._training_step.graphs.forget()
        self.optimizer.zero_grad(set_to_none=True)

    def _is_sound(self) -> bool:
        tensors = list(self.network.state_dict().values())
        if self.average is not None:
            tensors += self.average.network.state_dict().values()
        floating = [tensor for tensor in tensors if tensor.is_floating_point()]
        # A norm is finite only if every entry is; one that overflows is a divergence as well.
        return bool(torch.isfinite(torch.stack(torch._foreach_norm(floating, 1))).all())
