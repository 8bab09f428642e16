"""Ends: the work after every epoch, and the end of a training with its callbacks, `--on-done` and run.log.

After an epoch: validate, record the results, keep the best weights, decide whether to stop early.
"""

import logging
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from flatout.clock import clock, span
from flatout.engine import Callback, Callbacks, End, EpochEnd, EpochReport, RunOutcome, RunStart, Scores, Sections
from flatout.errors import CTRL_C_CODE, INTERNAL_ERROR_CODE, FlatoutError, Interrupted, ResourceError
from flatout.ranks import LAST_FILES, Interrupts, StopRequested, is_first_rank
from flatout.runs.budget import Spending
from flatout.runs.folder import Records
from flatout.runs.recipe import EpochRecord, Model, Recipe, RunContext, ValidationResult
from flatout.safefiles import write_container

logger = logging.getLogger(__name__)

# The end of an epoch

NO_SCORE = float("-inf")
COLLAPSE = 0.5
"""A score below this share of the best one causes a warning, if the best was above `MIN_SCORE_TO_WARN`."""
MIN_SCORE_TO_WARN = 0.1


class BestTracker:
    """The best epoch so far. Of equally good ones the newest counts, as in YOLOv7: it has been trained for longer."""

    def __init__(self) -> None:
        self.score, self.epoch = NO_SCORE, -1

    def update(self, epoch: int, score: float | None) -> bool:
        """Record this epoch if it is the best so far; returns whether it is. Without scores, the newest is the best."""
        if score is not None and not score >= self.score:  # NaN is never the best
            return False
        self.epoch = epoch
        if score is not None:
            self.score = score
        return True


@dataclass(eq=False, repr=False)
class RunEpochEnd(EpochEnd):
    """Called by the loop after every epoch, on all ranks; the first one records the results. Saved in checkpoints."""

    recipe: Recipe
    model: Model
    context: RunContext
    records: Records | None
    """None on all ranks but the first."""
    callbacks: Callbacks
    run: dict[str, Any]
    """The section "run" of checkpoints."""
    steps_per_epoch: int

    def __post_init__(self) -> None:
        self._pending: tuple[list[str], dict[str, Any]] | None = None
        """File names and content of the best weights, on the device, until they are written."""
        self.best = BestTracker()
        self.epoch = -1
        """The last epoch that was completed."""
        self.found: ValidationResult | None = None
        """The result of the last validation."""
        self.losses: Mapping[str, float] = {}

    def __call__(self, epoch: int, report: EpochReport, sections: Callable[[], Sections]) -> bool:
        """Complete an epoch; returns whether the training stops early."""
        recipe, last = self.recipe, epoch + 1 == self.model.epochs
        with clock.stage("train.pictures"), span("plots"):
            recipe.plot_batches()
        found = self._validate(epoch, last=last) if recipe.is_due(epoch, last=last) else None
        stops = False
        if self.records is not None:
            if found is not None and found.text:
                logger.info("Epoch %d: %s", epoch, found.text)
            rows = recipe.rows(epoch, report, found)
            self._record(rows, report)
            stops = self._keep_best(epoch, found, last=last)
            at = epoch if rows.at is None else rows.at
            done = (epoch + 1) * self.steps_per_epoch
            self.callbacks.validation(Scores(epoch=epoch, at=at, steps_done=done, scalars=rows.scalars))
        stops = recipe.world.broadcast(stops)
        self.epoch, self.found, self.losses = epoch, found or self.found, report.items
        recipe.after_epoch(self.model, epoch, found, sections, stops=stops and not last)
        return stops

    def score_again(self) -> None:
        """Validate again, for a run whose last epoch was validated by a process that ended before it finished."""
        self.found = self._validate(self.model.epochs - 1, last=True)

    def between(self, epoch: int, step: int) -> Callable[[], None] | None:
        """A validation within the epoch, if one is due after `step`."""
        steps = self.recipe.due_mid_epoch(epoch, step)
        done = epoch * self.steps_per_epoch + step
        return None if steps is None else partial(self._validate_within, epoch, steps, done)

    def flush(self) -> None:
        """Write the best weights if there are new ones; waits until all files of earlier epochs are written, too."""
        self.context.background.wait_for_files()
        if self._pending is not None:
            names, content = self._pending
            for name in names:
                write_container(self.context.weights / name, {"weights": content})
            self._pending = None

    def sections(self) -> dict[str, dict[str, object]]:
        state: dict[str, object] = {
            "best_score": self.best.score,
            "best_epoch": self.best.epoch,
            "epoch": self.epoch,
            "losses": dict(self.losses),
            "records": self.records.state_dict() if self.records is not None else {"bytes": {}},
        }
        about = self.recipe.describe_network(self.model) | {"kind": "full"}
        about |= self.recipe.describe_checkpoint(self.epoch, self.best.score)
        return {"weights": about, "run": self.run, "job": state | self.recipe.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        # Older versions of yolo called it best_fitness and started with 0.
        self.best.score = state.get("best_score", state.get("best_fitness", NO_SCORE))
        self.best.epoch, self.epoch = state["best_epoch"], state["epoch"]
        self.losses = state.get("losses", {})
        if self.records is not None:
            self.records.load_state_dict(state["records"])
        self.recipe.load_state(state)

    def _record(self, rows: EpochRecord, report: EpochReport) -> None:
        assert self.records is not None
        if rows.line is not None:
            self.records.line("results.txt", rows.line)
        if rows.row:
            self.records.row("results.csv", rows.row)
        known = {name: value for name, value in rows.row.items() if value is not None}
        self.records.event("log.jsonl", known | report.timing())

    def _validate(self, epoch: int, *, last: bool) -> ValidationResult | None:
        with span("validation"):
            return self.recipe.validate(self.model, epoch, last=last)

    def _validate_within(self, epoch: int, steps: int, steps_done: int) -> None:
        """Validate within an epoch. `steps` as the job counts them, `steps_done` as the loop does."""
        try:
            found = self._validate(epoch, last=False)
        except Interrupted:
            return  # the loop checks for the signal after its next step, and saves there
        if found is None:
            return
        self.found = found
        logger.info("Step %d: %s", steps, found.text)
        # The last completed epoch is the one before.
        scalars = self.recipe.mid_epoch_scalars(steps, found)
        self.callbacks.validation(Scores(epoch=epoch - 1, at=steps, steps_done=steps_done, scalars=scalars))
        self._keep_if_best(epoch, found, last=False)

    def _keep_best(self, epoch: int, found: ValidationResult | None, *, last: bool) -> bool:
        """Keep the weights if they are the best so far; returns whether there was no improvement for too long."""
        before = self.best.score
        self._keep_if_best(epoch, found, last=last)
        if found is None:
            return False
        if before > MIN_SCORE_TO_WARN and found.score < COLLAPSE * before:
            logger.warning(
                "Epoch %d scored %.3f after %.3f in epoch %d: the training may have collapsed. best.pt is "
                "kept. If the next epochs are no better, stop, and train again with a lower learning rate.",
                epoch, found.score, before, self.best.epoch,
            )  # fmt: skip
        patience, waited = self.recipe.options.patience, epoch - self.best.epoch
        if patience and waited >= patience:
            logger.info("No improvement for %d epochs since epoch %d: training stops.", waited, self.best.epoch)
            return True
        return False

    def _keep_if_best(self, epoch: int, found: ValidationResult | None, *, last: bool) -> None:
        """Copy the current weights if they are the best so far; `flush` writes them."""
        counts = found is not None or not self.recipe.validates
        is_best = counts and self.best.update(epoch, None if found is None else found.score)
        if is_best and (last or self.recipe.saves):
            with clock.stage("train.save"), span("save"):
                content = self.recipe.describe_network(self.model) | self.recipe.best_weights(self.model, epoch, found)
                self._pending = [*self.recipe.best_names(epoch)], content


# The end of a training


@contextmanager
def finishing() -> Iterator[None]:
    """For the block that writes the final files: everything is trained and saved, so signals wait for its end.

    If the disk is full nothing is lost, and the message says how to complete the run.
    """
    with Interrupts(LAST_FILES):
        try:
            yield
        except ResourceError as error:
            raise ResourceError(
                f"{error} All steps are trained and saved: run the same command again to complete the run."
            ) from error.__cause__


class EarlyStop:
    """Why a training stopped before its end; empty if it did not. Set by the caller of `reporting_end`."""

    why = ""


@contextmanager
def reporting_end(callbacks: Callbacks, folder: Path) -> Iterator[EarlyStop]:
    """Notify the callbacks of how the block ended. Exceptions are passed on."""
    early_stop = EarlyStop()
    try:
        yield early_stop
    except BaseException as error:  # also KeyboardInterrupt: callbacks must learn of any end
        callbacks.end(End(how=outcome_of(error)[0], why=single_line(str(error)), folder=folder, epoch=callbacks.epoch))
        raise
    how: RunOutcome = "stopped" if early_stop.why else "finished"
    callbacks.end(End(how=how, why=single_line(early_stop.why), folder=folder, epoch=callbacks.epoch))


def outcome_of(error: BaseException) -> tuple[RunOutcome, int]:
    """The outcome of a training that ends with this exception, and the exit code of its process."""
    if isinstance(error, Interrupted | StopRequested):
        return "interrupted", error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", CTRL_C_CODE
    return "failed", error.exit_code if isinstance(error, FlatoutError) else INTERNAL_ERROR_CODE


def single_line(text: str) -> str:
    """The text without line breaks, and without null bytes, which environment variables cannot hold."""
    return " ".join(text.replace("\0", " ").split())


# `--on-done COMMAND`: a shell command of the user, run when a training has ended, whatever the outcome
#
# Details are passed only in environment variables, so that no file name or message is ever interpreted as shell code.
# The exit code of the training does not change.
#
#     FLATOUT_OUTCOME    finished, stopped (by a budget or a number of steps), interrupted or failed
#     FLATOUT_EXIT_CODE  the exit code of this process
#     FLATOUT_RUN        the run folder; empty if the training failed before there was one
#     FLATOUT_EPOCH      completed epochs
#     FLATOUT_MESSAGE    the reason in one line; empty if the training finished normally
#     FLATOUT_SECONDS, FLATOUT_COST   spent on this run so far; the cost is empty without --price


class OnDone(Callback, AbstractContextManager["OnDone"]):
    """Runs the command of `--on-done` after a training: a context manager around it, and one of its callbacks.

    Does nothing if the command is empty.
    """

    def __init__(self, command: str, spending: Spending) -> None:
        self._command, self._spending = command, spending
        self._folder, self._epoch = "", 0
        self._end: End | None = None

    def start(self, run: RunStart) -> None:
        self._folder, self._epoch = str(run.folder.resolve()), run.epoch

    def end(self, end: End) -> None:
        self._end = end

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._command and is_first_rank():
            self._run(self.variables(error))

    def variables(self, error: BaseException | None) -> dict[str, str]:
        """The environment variables for the command."""
        how, code = outcome_of(error) if error is not None else (self._end.how if self._end else "finished", 0)
        cost = self._spending.cost()
        return {
            "FLATOUT_OUTCOME": how,
            "FLATOUT_EXIT_CODE": str(code),
            "FLATOUT_RUN": self._folder,
            "FLATOUT_EPOCH": str(self._end.epoch if self._end is not None else self._epoch),
            "FLATOUT_MESSAGE": single_line(str(error) if error is not None else self._end.why if self._end else ""),
            "FLATOUT_SECONDS": f"{self._spending.seconds:.0f}",
            "FLATOUT_COST": "" if cost is None else f"{cost:.2f}",
        }

    def _run(self, variables: dict[str, str]) -> None:
        try:
            # A shell, because it is the user's own command line; nothing of ours is inserted into it.
            # Not `subprocess.run`, which would kill the command if a signal ends this process meanwhile.
            code = subprocess.Popen(self._command, shell=True, env=os.environ | variables).wait()
        except (OSError, ValueError) as error:
            logger.warning("--on-done could not be run: %s.", error)
            return
        if code:
            logger.warning("--on-done ended with exit code %d: %s", code, self._command)


# Warnings in run.log

FILE_NAME = "run.log"


class RunLog(Callback, logging.Handler):
    """Appends the warnings of a training to run.log in its run folder; `flatout monitor` shows the last of them.

    Commands add this callback; the library itself installs no logging handlers.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))

    def start(self, run: RunStart) -> None:
        self._path = run.folder / FILE_NAME
        logging.getLogger("flatout").addHandler(self)

    def end(self, end: End) -> None:
        logging.getLogger("flatout").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        # Opened each time, because a run may be killed, and warnings are rare. A full disk must not end a training
        # because of a warning.
        with suppress(OSError), self._path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(" ".join(self.format(record).split()) + "\n")
