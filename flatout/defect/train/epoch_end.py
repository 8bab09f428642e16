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
from flatout.engine.job import EpochReport
from flatout.engine.records import Records
from flatout.engine.tensorboard import TensorBoard

logger = logging.getLogger(__name__)

Validate = Callable[[nn.Module], Outcome]
NOTHING_YET = -1.0
EXAMPLES = 8
"""Samples of the first batch that are drawn."""


@dataclass(frozen=True, kw_only=True)
class EpochEndConfig:
    """What happens after an epoch."""

    folder: Path
    patience: int = 0


class EpochEnd:
    """Called by the job; its state is saved with the training."""

    def __init__(
        self,
        config: EpochEndConfig,
        *,
        network: nn.Module,
        validate: Validate | None,
        records: Records | None,
        board: TensorBoard | None,
        files: WeightFiles,
        run: Mapping[str, Any],
    ) -> None:
        """`validate` None: nothing to validate on, or not the first rank. `records` None: not the first rank."""
        self._config, self._network, self._validate = config, network, validate
        self._records, self._board, self._files, self._run = records, board, files, dict(run)
        self._examples: tuple[Tensor, Tensor] | None = None
        self.best_fitness, self.best_epoch, self.epoch = NOTHING_YET, -1, -1
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

    def sections(self) -> dict[str, dict[str, object]]:
        state: dict[str, object] = {
            "best_fitness": self.best_fitness,
            "best_epoch": self.best_epoch,
            "epoch": self.epoch,
            "last_loss": self.last_loss,
            "records": self._records.state_dict() if self._records is not None else {"bytes": {}},
        }
        return {"weights": dict(self._files.about) | {"kind": "full"}, "run": self._run, "job": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best_fitness, self.best_epoch, self.epoch = state["best_fitness"], state["best_epoch"], state["epoch"]
        self.last_loss = state["last_loss"]
        if self._records is not None:
            self._records.load_state_dict(state["records"])

    def flush(self) -> None:
        self._files.flush()

    def _judge(self, epoch: int, found: Outcome | None) -> None:
        """Keep the best; without a validation, the newest."""
        if found is not None and found.fitness <= self.best_fitness:
            return
        self.best_epoch = epoch
        if found is not None:
            self.best_fitness = found.fitness
        self._files.keep_best(
            self._network,
            epoch=epoch,
            fitness=None if found is None else found.fitness,
            threshold=None if found is None else found.threshold,
        )

    def _record(self, epoch: int, report: EpochReport, found: Outcome | None) -> None:
        assert self._records is not None
        speed = report.num_samples / max(report.seconds, 1e-9)
        scores = found.scores() if found is not None else {}
        row: dict[str, float | None] = {"epoch": epoch, "loss": report.items["loss"], "lr": report.lrs[0]}
        self._records.row("results.csv", row | scores)
        timing: dict[str, float | None] = {
            "seconds": round(report.seconds, 3),
            "images_per_s": speed,
            "bad_steps": report.num_bad,
        }
        self._records.event("log.jsonl", row | scores | timing)
        if self._board is not None:
            known = {f"val/{name}": value for name, value in scores.items() if value is not None}
            losses = {"train/loss": report.items["loss"], "train/lr": report.lrs[0], "train/samples_per_s": speed}
            self._board.write(epoch, losses | known)

    def _draw_examples(self) -> None:
        """examples.png: what the network learned from; look at it first. Waits for the device."""
        if self._examples is None:
            return
        (images, masks), self._examples = self._examples, None
        with suppress(ImportError, OSError):
            from flatout.defect.pictures import examples_png

            examples_png(images.float().cpu().numpy(), masks.cpu().numpy()[:, 0], self._config.folder / "examples.png")
