"""After every epoch: validate, write the results down, keep the best, decide whether to go on."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flatout.clock import clock
from flatout.engine import Callbacks, EpochReport, Scores, Sections
from flatout.errors import Interrupted
from flatout.runs.recipe import EpochRows, Model, Recipe, Validated
from flatout.runs.records import Records
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
        self.found: Validated | None = None
        self.losses: Mapping[str, float] = {}

    def __call__(self, epoch: int, report: EpochReport, sections: Callable[[], Sections]) -> bool:
        """Work off the end of an epoch; True if training is over."""
        recipe, last = self._recipe, epoch + 1 == self._model.epochs
        with clock.stage("train.pictures"):
            recipe.draw_batches()
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
        stops = bool(recipe.world.from_first(stops))
        self.epoch, self.found, self.losses = epoch, found or self.found, report.items
        recipe.after_epoch(self._model, epoch, found, sections, stops=stops and not last)
        return stops

    def score_again(self) -> None:
        """For a run whose epochs are all trained, by a process that is gone, and with it what it found."""
        self.found = self._recipe.validate(self._model, self._model.epochs - 1, last=True)

    def between(self, epoch: int, step: int) -> Callable[[], None] | None:
        """A validation within an epoch, if one is due after `step`; see `Loop`."""
        steps = self._recipe.due_within(epoch, step)
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
        about = self._recipe.about(self._model) | {"kind": "full"}
        about |= self._recipe.about_state(self.epoch, self.best.score)
        return {"weights": about, "run": self._run, "job": state | self._recipe.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        # Older versions of yolo called it best_fitness, and began with 0.
        self.best.score = state.get("best_score", state.get("best_fitness", NOTHING_YET))
        self.best.epoch, self.epoch = state["best_epoch"], state["epoch"]
        self.losses = state.get("losses", {})
        if self._records is not None:
            self._records.load_state_dict(state["records"])
        self._recipe.load_state(state)

    def _record(self, rows: EpochRows, report: EpochReport) -> None:
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
        scalars = self._recipe.scalars_within(steps, found)
        self._callbacks.validation(Scores(epoch=epoch - 1, at=steps, steps_done=steps_done, scalars=scalars))
        self._keep(epoch, found, last=False)

    def _judge(self, epoch: int, found: Validated | None, *, last: bool) -> bool:
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

    def _keep(self, epoch: int, found: Validated | None, *, last: bool) -> None:
        """Remember the weights as they are now, if they are the best so far; `flush` writes them."""
        is_judged = found is not None or not self._recipe.validates
        is_best = is_judged and self.best.takes(epoch, None if found is None else found.score)
        if is_best and (last or self._recipe.saves):
            with clock.stage("train.save"):
                content = self._recipe.about(self._model) | self._recipe.best_weights(self._model, epoch, found)
                self._pending = [*self._recipe.best_names(epoch)], content
