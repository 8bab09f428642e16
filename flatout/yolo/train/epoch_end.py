"""After every epoch: validate the moving average, write the results down, keep the best, decide whether to go on."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flatout.engine.distributed import World
from flatout.engine.job import EpochReport
from flatout.engine.records import Records
from flatout.errors import ResourceError
from flatout.profiler import clock
from flatout.yolo.evaluate import Outcome
from flatout.yolo.results_line import EpochResult, results_line
from flatout.yolo.train.weight_files import WeightFiles, is_kept

logger = logging.getLogger(__name__)

RESULTS = "results.txt"
COLLAPSE = 0.5
"""A fitness that falls below this share of the best one is worth a loud word, if the best was worth anything."""
WORTH = 0.1
SCORES = ("precision", "recall", "mAP_0.5", "mAP_0.5:0.95", "val_box", "val_obj", "val_cls")

Resample = Callable[[list[float], int], None]
"""(mAP of each class, empty before the first validation; first epoch to be drawn by it): sets sampling weights."""
Validate = Callable[[nn.Module, bool], Outcome | None]
"""(network, whether this is the last epoch) -> what it scored; None on all ranks but the first."""


@dataclass(frozen=True, kw_only=True)
class EpochEndConfig:
    """What happens after an epoch."""

    epochs: int
    notest: bool = False
    nosave: bool = False
    patience: int = 0


class EpochEnd:
    """Called by the job; its state is saved with the training."""

    def __init__(
        self,
        config: EpochEndConfig,
        *,
        average: nn.Module,
        validate: Validate,
        records: Records,
        files: WeightFiles,
        about: Mapping[str, Any],
        run: Mapping[str, Any],
        after: Callable[[int, Mapping[str, float]], None] = lambda epoch, scalars: None,
        resample: Resample | None = None,
        world: World | None = None,
    ) -> None:
        """`after` gets the epoch's scalars, for logs. All ranks validate, the first one writes down what they found."""
        self._config = config
        self._average = average
        self._validate = validate
        self._records = records
        self._files = files
        self._about, self._run = dict(about), dict(run)
        self._after = after
        self._resample = resample
        self._world = world or World()
        self.whole_state: Callable[[], Mapping[str, object]] = dict
        """All sections of the training, set once the loop exists."""
        self.best_fitness = 0.0
        self.best_epoch = 0
        self.fitness = 0.0
        self.epoch = -1
        """Last epoch that was worked off."""
        self.outcome: Outcome | None = None
        self.maps: list[float] = []
        """mAP of each class in the last validation; sampling weights follow from it, so it is saved."""

    def __call__(self, epoch: int, report: EpochReport, num_targets: int, width_px: int) -> bool:
        """Work off the end of an epoch; True if training is over."""
        last = epoch + 1 == self._config.epochs
        outcome = self._validated(last)
        scores = outcome.scores if outcome else (0.0,) * len(SCORES)
        self._record(epoch, report, scores, num_targets, width_px)
        stops: bool = self._world.from_first(self._judge(epoch, outcome))
        if stops and not last:
            self._validated(last=True)  # once more, with the pictures and the table of a last epoch
        self._after(epoch, self._scalars(report, scores))
        self.epoch, self.outcome = epoch, outcome or self.outcome
        if self._resample is not None:
            self.maps = outcome.evaluation.maps.tolist() if outcome else self.maps
            if not last:
                self._resample(self.maps, epoch + 1)
        if not self._config.nosave and is_kept(epoch, self._config.epochs) and self._world.is_first:
            with clock.stage("train.save"):
                self._written(self._files.save_epoch, epoch, self.whole_state())
        return stops

    def sections(self) -> dict[str, dict[str, object]]:
        weights = self._about | {"kind": "full", "epoch": self.epoch, "best_fitness": self.best_fitness}
        return {"weights": weights, "run": self._run}

    def state_dict(self) -> dict[str, Any]:
        return {
            "best_fitness": self.best_fitness,
            "best_epoch": self.best_epoch,
            "fitness": self.fitness,
            "epoch": self.epoch,
            "maps": self.maps,
            "records": self._records.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best_fitness, self.best_epoch = state["best_fitness"], state["best_epoch"]
        self.fitness, self.epoch = state["fitness"], state["epoch"]
        self._records.load_state_dict(state["records"])
        self.maps = state.get("maps", [])
        if self._resample is not None:
            self._resample(self.maps, self.epoch + 1)

    def score_again(self) -> None:
        """For a run whose epochs are all trained, by a process that is gone, and with it what it found."""
        self.outcome = self._validated(last=True)

    def flush(self) -> None:
        self._files.flush()

    def _written(self, write: Callable[..., None], *arguments: Any) -> None:
        """A disk that is too full for an extra file costs that file; what continues the training is saved elsewhere."""
        try:
            write(*arguments)
        except ResourceError as error:
            logger.warning("%s Training goes on.", error)

    def _validated(self, last: bool) -> Outcome | None:
        if self._config.notest and not last:
            return None
        return self._validate(self._average, last)

    def _record(
        self, epoch: int, report: EpochReport, scores: tuple[float, ...], num_targets: int, width_px: int
    ) -> None:
        if not self._world.is_first:
            return
        result = EpochResult(
            epoch, self._config.epochs, memory_gb(), tuple(report.items.values()), num_targets, width_px, scores
        )
        self._records.line(RESULTS, results_line(result).rstrip("\n"))
        rates = {f"lr{index}": rate for index, rate in enumerate(report.lrs)}
        row = {"epoch": epoch} | report.items | dict(zip(SCORES, scores, strict=True)) | rates
        self._records.row("results.csv", row)
        self._records.event("log.jsonl", row | report.timing())

    def _judge(self, epoch: int, outcome: Outcome | None) -> bool:
        """Keep the best; True if nothing got better for too long."""
        if outcome is None:
            return False
        self.fitness = outcome.evaluation.fitness
        if self.fitness >= self.best_fitness:  # also when equal, as in YOLOv7
            self.best_fitness, self.best_epoch = self.fitness, epoch
            if not self._config.nosave or epoch + 1 == self._config.epochs:
                with clock.stage("train.save"):
                    self._files.keep_best(self._average, epoch=epoch, fitness=self.fitness)
        elif self.best_fitness > WORTH and self.fitness < COLLAPSE * self.best_fitness:
            logger.warning(
                "Epoch %d scored %.3f after %.3f in epoch %d: the training may have collapsed. best.pt is kept.",
                epoch, self.fitness, self.best_fitness, self.best_epoch,
            )  # fmt: skip
        if self._config.patience and epoch - self.best_epoch >= self._config.patience:
            logger.info(
                "No epoch was better than %d for %d epochs: training ends.", self.best_epoch, epoch - self.best_epoch
            )
            return True
        return False

    def _scalars(self, report: EpochReport, scores: tuple[float, ...]) -> dict[str, float]:
        """As YOLOv7 names them in TensorBoard."""
        scalars = {f"train/{name}_loss": report.items[name] for name in ("box", "obj", "cls")}
        scalars |= {f"metrics/{name}": score for name, score in zip(SCORES[:4], scores, strict=False)}
        scalars |= {f"val/{name}_loss": score for name, score in zip(("box", "obj", "cls"), scores[4:], strict=True)}
        return scalars | {f"x/lr{index}": rate for index, rate in enumerate(report.lrs)}


def memory_gb() -> float:
    """Held by torch on the GPU, in 10^9 bytes; 0 on a CPU."""
    return torch.cuda.memory_reserved() / 1e9 if torch.cuda.is_available() else 0.0
