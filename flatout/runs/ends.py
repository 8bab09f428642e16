"""After every epoch: validate, write the results down, keep the best, decide whether to go on.

The end of a training: its last files, how it ended, `--on-done`, and the warnings kept in run.log.
"""

import logging
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flatout.clock import clock
from flatout.engine import Callback, Callbacks, End, EpochReport, How, RunStart, Scores, Sections
from flatout.errors import FlatoutError, Interrupted, ResourceError
from flatout.ranks import LAST_FILES, Interrupts, StopRequested
from flatout.runs.budget import Spending
from flatout.runs.folder import Records
from flatout.runs.recipe import EpochRecord, Model, Recipe, ValidationResult
from flatout.safefiles import write_container

logger = logging.getLogger(__name__)

NOTHING_YET = float("-inf")
COLLAPSE = 0.5
"""A score that falls below this share of the best one is worth a loud word, if the best was worth anything."""
WORTH = 0.1


class BestTracker:
    """The best epoch so far. Of equally good ones the newest counts, as in YOLOv7: it has been trained for longer."""

    def __init__(self) -> None:
        self.score, self.epoch = NOTHING_YET, -1

    def takes(self, epoch: int, score: float | None) -> bool:
        """Whether this epoch is the best so far, and remembers it then; of epochs without a score, the newest is."""
        if score is not None and not score >= self.score:  # what is no number is never the best
            return False
        self.epoch = epoch
        if score is not None:
            self.score = score
        return True


class EpochEnd:
    """Called by the loop on every rank; the first one writes down what all have found. Its state is saved."""

    def __init__(
        self,
        recipe: Recipe,
        model: Model,
        *,
        records: Records | None,
        weights: Path,
        callbacks: Callbacks,
        run: Mapping[str, Any],
        steps_per_epoch: int,
    ) -> None:
        """`records` None: not the first rank. `weights`: the folder of weights. `run`: what files say about the run."""
        self._recipe, self._model, self._records = recipe, model, records
        self._steps_per_epoch = steps_per_epoch
        self._weights, self._callbacks, self._run = weights, callbacks, dict(run)
        self._pending: tuple[list[str], dict[str, Any]] | None = None
        """The best weights, on the device, until they are written."""
        self.best = BestTracker()
        self.epoch = -1
        """Last epoch that was worked off."""
        self.found: ValidationResult | None = None
        self.losses: Mapping[str, float] = {}

    def __call__(self, epoch: int, report: EpochReport, sections: Callable[[], Sections]) -> bool:
        """Work off the end of an epoch; True if training is over."""
        recipe, last = self._recipe, epoch + 1 == self._model.epochs
        with clock.stage("train.pictures"):
            recipe.plot_batches()
        found = recipe.validate(self._model, epoch, last=last) if recipe.is_due(epoch, last=last) else None
        stops = False
        if self._records is not None:
            if found is not None and found.text:
                logger.info("Epoch %d: %s", epoch, found.text)
            rows = recipe.rows(epoch, report, found)
            self._record(rows, report)
            stops = self._judge(epoch, found, last=last)
            at = epoch if rows.at is None else rows.at
            done = (epoch + 1) * self._steps_per_epoch
            self._callbacks.validation(Scores(epoch=epoch, at=at, steps_done=done, scalars=rows.scalars))
        stops = bool(recipe.world.broadcast(stops))
        self.epoch, self.found, self.losses = epoch, found or self.found, report.items
        recipe.after_epoch(self._model, epoch, found, sections, stops=stops and not last)
        return stops

    def score_again(self) -> None:
        """For a run whose epochs are all trained, by a process that is gone, and with it what it found."""
        self.found = self._recipe.validate(self._model, self._model.epochs - 1, last=True)

    def between(self, epoch: int, step: int) -> Callable[[], None] | None:
        """A validation within an epoch, if one is due after `step`; see `Loop`."""
        steps = self._recipe.due_mid_epoch(epoch, step)
        done = epoch * self._steps_per_epoch + step
        return None if steps is None else partial(self._validate_within, epoch, steps, done)

    def flush(self) -> None:
        """Write the best weights, if there are new ones."""
        if self._pending is not None:
            names, content = self._pending
            for name in names:
                write_container(self._weights / name, {"weights": content})
            self._pending = None

    def sections(self) -> dict[str, dict[str, object]]:
        state: dict[str, object] = {
            "best_score": self.best.score,
            "best_epoch": self.best.epoch,
            "epoch": self.epoch,
            "losses": dict(self.losses),
            "records": self._records.state_dict() if self._records is not None else {"bytes": {}},
        }
        about = self._recipe.describe_network(self._model) | {"kind": "full"}
        about |= self._recipe.describe_checkpoint(self.epoch, self.best.score)
        return {"weights": about, "run": self._run, "job": state | self._recipe.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        # Older versions of yolo called it best_fitness, and began with 0.
        self.best.score = state.get("best_score", state.get("best_fitness", NOTHING_YET))
        self.best.epoch, self.epoch = state["best_epoch"], state["epoch"]
        self.losses = state.get("losses", {})
        if self._records is not None:
            self._records.load_state_dict(state["records"])
        self._recipe.load_state(state)

    def _record(self, rows: EpochRecord, report: EpochReport) -> None:
        assert self._records is not None
        if rows.line is not None:
            self._records.line("results.txt", rows.line)
        if rows.row:
            self._records.row("results.csv", rows.row)
        known = {name: value for name, value in rows.row.items() if value is not None}
        self._records.event("log.jsonl", known | report.timing())

    def _validate_within(self, epoch: int, steps: int, steps_done: int) -> None:
        """`steps` as the job counts them, `steps_done` as the loop does."""
        try:
            found = self._recipe.validate(self._model, epoch, last=False)
        except Interrupted:
            return  # the loop hears of the signal at its next step, and saves there
        if found is None:
            return
        self.found = found
        logger.info("Step %d: %s", steps, found.text)
        # Epochs that are complete are one fewer than the one under way.
        scalars = self._recipe.mid_epoch_scalars(steps, found)
        self._callbacks.validation(Scores(epoch=epoch - 1, at=steps, steps_done=steps_done, scalars=scalars))
        self._keep(epoch, found, last=False)

    def _judge(self, epoch: int, found: ValidationResult | None, *, last: bool) -> bool:
        """Keep the best; True if nothing got better for too long."""
        before = self.best.score
        self._keep(epoch, found, last=last)
        if found is None:
            return False
        if before > WORTH and found.score < COLLAPSE * before:
            logger.warning(
                "Epoch %d scored %.3f after %.3f in epoch %d: the training may have collapsed. best.pt is kept.",
                epoch, found.score, before, self.best.epoch,
            )  # fmt: skip
        patience, waited = self._recipe.options.patience, epoch - self.best.epoch
        if patience and waited >= patience:
            logger.info("No epoch was better than %d for %d epochs: training ends.", self.best.epoch, waited)
            return True
        return False

    def _keep(self, epoch: int, found: ValidationResult | None, *, last: bool) -> None:
        """Remember the weights as they are now, if they are the best so far; `flush` writes them."""
        is_judged = found is not None or not self._recipe.validates
        is_best = is_judged and self.best.takes(epoch, None if found is None else found.score)
        if is_best and (last or self._recipe.saves):
            with clock.stage("train.save"):
                content = self._recipe.describe_network(self._model) | self._recipe.best_weights(
                    self._model, epoch, found
                )
                self._pending = [*self._recipe.best_names(epoch)], content


INTERNAL_ERROR = 70
CTRL_C = 130


@contextmanager
def finishing() -> Iterator[None]:
    """Inside the block the last files of a training are written: all is trained and saved, so signals wait for it.

    A disk that does not take them costs nothing but time: the message says how the run is completed.
    """
    with Interrupts(LAST_FILES):
        try:
            yield
        except ResourceError as error:
            raise ResourceError(
                f"{error} Every step is trained and saved: the same command then completes the run."
            ) from error.__cause__


class Ending:
    """Filled in by a training that stops early, as it was asked to."""

    why = ""


@contextmanager
def reporting_end(callbacks: Callbacks, folder: Path) -> Iterator[Ending]:
    """Tell the callbacks how the block ended. Exceptions go on their way."""
    ending = Ending()
    try:
        yield ending
    except BaseException as error:
        callbacks.end(End(how=end_by(error)[0], why=one_line(str(error)), folder=folder, epoch=callbacks.epoch))
        raise
    how: How = "stopped" if ending.why else "finished"
    callbacks.end(End(how=how, why=one_line(ending.why), folder=folder, epoch=callbacks.epoch))


def end_by(error: BaseException) -> tuple[How, int]:
    """What an exception makes of a training, and the exit code of a process that ends with it."""
    if isinstance(error, Interrupted | StopRequested):
        return "interrupted", error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", CTRL_C
    return "failed", error.exit_code if isinstance(error, FlatoutError) else INTERNAL_ERROR


def one_line(text: str) -> str:
    """Without line ends, and without the zero byte, which no environment variable can hold."""
    return " ".join(text.replace("\0", " ").split())


# `--on-done COMMAND`: a command of the user's, run when a training has ended, however it did.
#
# What happened is told in environment variables and nowhere else, so that no name or message of ours is ever read as
# shell code. The exit code of the training stays what it is.
#
#     FLATOUT_OUTCOME    finished, stopped (by a budget or a number of steps), interrupted or failed
#     FLATOUT_EXIT_CODE  what this process is about to end with
#     FLATOUT_RUN        folder of the run; empty if it failed before there was one
#     FLATOUT_EPOCH      epochs that are complete
#     FLATOUT_MESSAGE    one line; empty where everything went as planned
#     FLATOUT_SECONDS, FLATOUT_COST   spent on this run so far; the cost is empty without --price


class OnDone(Callback):
    """Context manager around a training, and a callback of it, to hear where it is. Without a command, nothing."""

    def __init__(self, command: str, spending: Spending) -> None:
        self._command, self._spending = command, spending
        self._folder, self._epoch = "", 0
        self._end: End | None = None

    def start(self, run: RunStart) -> None:
        self._folder, self._epoch = str(run.folder.resolve()), run.epoch

    def end(self, end: End) -> None:
        self._end = end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._command and os.environ.get("RANK", "0") in ("", "0"):
            self._run(self.described(error))

    def described(self, error: BaseException | None) -> dict[str, str]:
        """The environment variables."""
        how, code = end_by(error) if error is not None else (self._end.how if self._end else "finished", 0)
        cost = self._spending.cost()
        return {
            "FLATOUT_OUTCOME": how,
            "FLATOUT_EXIT_CODE": str(code),
            "FLATOUT_RUN": self._folder,
            "FLATOUT_EPOCH": str(self._end.epoch if self._end is not None else self._epoch),
            "FLATOUT_MESSAGE": one_line(str(error) if error is not None else self._end.why if self._end else ""),
            "FLATOUT_SECONDS": f"{self._spending.seconds:.0f}",
            "FLATOUT_COST": "" if cost is None else f"{cost:.2f}",
        }

    def _run(self, variables: dict[str, str]) -> None:
        try:
            # A shell, because it is the user's own line; what we add to it is data.
            # It outlives us if a signal ends us meanwhile: `subprocess.run` would kill it.
            code = subprocess.Popen(self._command, shell=True, env=os.environ | variables).wait()
        except (OSError, ValueError) as error:
            logger.warning("--on-done could not be run: %s.", error)
            return
        if code:
            logger.warning("--on-done ended with exit code %d: %s", code, self._command)


# Warnings of a training, kept in its run folder (run.log): `flatout monitor` shows the last of them.
#
# A command asks for it by adding this callback; the library itself installs no handlers.

FILE_NAME = "run.log"


class RunLog(Callback):
    """From the start of a run to its end; a continued run goes on in the same file."""

    def __init__(self) -> None:
        self._handler: _Lines | None = None

    def start(self, run: RunStart) -> None:
        self._handler = _Lines(run.folder / FILE_NAME)
        logging.getLogger("flatout").addHandler(self._handler)

    def end(self, end: End) -> None:
        if self._handler is not None:
            logging.getLogger("flatout").removeHandler(self._handler)
            self._handler = None


class _Lines(logging.Handler):
    """One line per warning, appended and closed again: a run may be killed at any moment, and warnings are rare."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self._path = path
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        # A full disk must not end a training for want of a warning.
        with suppress(OSError), self._path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(" ".join(self.format(record).split()) + "\n")
