"""After every epoch: validate, write the numbers down, keep the best, decide whether to go on."""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flatout.defect.evaluate.outcome import Outcome
from flatout.defect.train.weight_files import WeightFiles
from flatout.engine.epoch_keeper import EpochKeeper
from flatout.engine.job import EpochReport
from flatout.engine.records import Records

logger = logging.getLogger(__name__)

Validate = Callable[[nn.Module], Outcome]
EXAMPLES = 8
"""Samples of the first batch that are drawn."""


@dataclass(frozen=True, kw_only=True)
class EpochEndConfig:
    """What happens after an epoch."""

    folder: Path
    patience: int = 0


class EpochEnd(EpochKeeper):
    """Called by the job; its state is saved with the training."""

    def __init__(
        self,
        config: EpochEndConfig,
        *,
        network: nn.Module,
        validate: Validate | None,
        records: Records | None,
        after: Callable[[int, Mapping[str, float]], None],
        files: WeightFiles,
        run: Mapping[str, Any],
    ) -> None:
        """`validate` None: nothing to validate on, or not the first rank. `records` None: not the first rank.
        `after` gets the epoch's scalars."""
        super().__init__(records=records, files=files, run=run)
        self._config, self._network, self._validate = config, network, validate
        self._after, self._files = after, files
        self._examples: tuple[Tensor, Tensor] | None = None
        self.outcome: Outcome | None = None
        self.last_loss = 0.0

    def __call__(self, epoch: int, report: EpochReport) -> bool:
        """Work off the end of an epoch; True if training is over."""
        self._draw_examples()
        found = self._validate(self._network) if self._validate is not None else None
        self.epoch, self.last_loss = epoch, report.items["loss"]
        if self._records is None:
            return False
        if found is not None:
            self.outcome = found
            logger.info("Epoch %d: %s", epoch, found)
        self._record(epoch, report, found)
        self._judge(epoch, found)
        if found is not None and self._config.patience and epoch - self.best_epoch >= self._config.patience:
            logger.info(
                "No epoch was better than %d for %d epochs: training ends.", self.best_epoch, epoch - self.best_epoch
            )
            return True
        return False

    def keep_examples(self, epoch: int, step: int, images_BCPP: Tensor, masks_B1PP: Tensor) -> None:
        """Some samples of the very first batch, kept on the device until the epoch ends."""
        if self._records is not None and epoch == 0 and step == 0:
            self._examples = images_BCPP[:EXAMPLES].clone(), masks_B1PP[:EXAMPLES].clone()

    def own_state(self) -> dict[str, object]:
        return {"last_loss": self.last_loss}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self.last_loss = state["last_loss"]

    def _judge(self, epoch: int, found: Outcome | None) -> None:
        """Keep the best; without a validation, the newest."""
        if not self.takes(epoch, None if found is None else found.fitness):
            return
        self._files.keep_best(
            self._network,
            epoch=epoch,
            fitness=None if found is None else found.fitness,
            threshold=None if found is None else found.threshold,
        )

    def _record(self, epoch: int, report: EpochReport, found: Outcome | None) -> None:
        assert self._records is not None
        scores = found.scores() if found is not None else {}
        row: dict[str, float | None] = {"epoch": epoch, "loss": report.items["loss"], "lr": report.lrs[0]}
        self._records.row("results.csv", row | scores)
        self._records.event("log.jsonl", {**row, **scores, **report.timing()})
        known = {f"val/{name}": value for name, value in scores.items() if value is not None}
        losses = {"train/loss": report.items["loss"], "train/lr": report.lrs[0]}
        losses["train/samples_per_s"] = report.samples_per_s
        self._after(epoch, losses | known)

    def _draw_examples(self) -> None:
        """examples.png: what the network learned from; look at it first. Waits for the device."""
        if self._examples is None:
            return
        (images, masks), self._examples = self._examples, None
        with suppress(ImportError, OSError):
            from flatout.defect.pictures import examples_png

            examples_png(images.float().cpu().numpy(), masks.cpu().numpy()[:, 0], self._config.folder / "examples.png")
