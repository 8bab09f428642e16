"""After every epoch: validate the moving average, write the numbers down, keep the best."""

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatout.engine.job import EpochReport
from flatout.engine.records import Records
from flatout.engine.tensorboard import TensorBoard
from flatout.spike.evaluate import Evaluation
from flatout.spike.weight_files import WeightFiles

logger = logging.getLogger(__name__)

Validate = Callable[[nn.Module, int], Evaluation]
"""(network, epoch) -> what it scored."""
NOTHING_YET = float("-inf")


@dataclass(frozen=True, kw_only=True)
class EpochEndConfig:
    """What happens after an epoch."""

    epochs: int
    steps_per_epoch: int
    """Optimizer steps."""
    validate_every: int
    """Epochs; the last one is always validated."""
    folder: Path


class EpochEnd:
    """Called by the job; its state is saved with the training."""

    def __init__(
        self,
        config: EpochEndConfig,
        *,
        average: nn.Module,
        validate: Validate | None,
        records: Records | None,
        board: TensorBoard | None,
        files: WeightFiles,
        run: Mapping[str, Any],
    ) -> None:
        """`validate` None: nothing to validate on, or not the first rank. `records` None: not the first rank."""
        self._config, self._average, self._validate = config, average, validate
        self._records, self._board, self._files, self._run = records, board, files, dict(run)
        self.best_psnr, self.best_epoch, self.epoch = NOTHING_YET, -1, -1
        self.evaluation: Evaluation | None = None

    def __call__(self, epoch: int, report: EpochReport) -> bool:
        """Work off the end of an epoch; never ends a training before its time."""
        config = self._config
        last = epoch + 1 == config.epochs
        is_due = (epoch + 1) % config.validate_every == 0 or last
        found = self._validate(self._average, epoch) if self._validate is not None and is_due else None
        if self._records is not None:
            self._record(epoch, report, found)
        if found is not None:
            self.evaluation = found
            logger.info("Epoch %d: %s", epoch, found)
        # Without a validation the newest counts as the best.
        is_better = found.psnr > self.best_psnr if found is not None else self._validate is None
        if self._records is not None and is_better:
            self.best_epoch = epoch
            if found is not None:
                self.best_psnr = found.psnr
            self._files.keep_best(self._average, epoch=epoch, psnr=found.psnr if found is not None else None)
        self.epoch = epoch
        return False

    def sections(self) -> dict[str, dict[str, object]]:
        state: dict[str, object] = {
            "best_psnr": self.best_psnr,
            "best_epoch": self.best_epoch,
            "epoch": self.epoch,
            "records": self._records.state_dict() if self._records is not None else {"bytes": {}},
        }
        return {"weights": dict(self._files.about) | {"kind": "full"}, "run": self._run, "job": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best_psnr, self.best_epoch, self.epoch = state["best_psnr"], state["best_epoch"], state["epoch"]
        if self._records is not None:
            self._records.load_state_dict(state["records"])

    def flush(self) -> None:
        self._files.flush()

    def _record(self, epoch: int, report: EpochReport, found: Evaluation | None) -> None:
        assert self._records is not None
        scores = found.plain() if found is not None else {}
        speed = report.num_samples / max(report.seconds, 1e-9)
        row = {"epoch": epoch} | report.items | {"lr": report.lrs[0] if report.lrs else 0.0, "samples_per_s": speed}
        self._records.event("log.jsonl", row | scores | {"seconds": report.seconds, "bad_steps": report.num_bad})
        steps = self._config.steps_per_epoch
        summary = row | {"start_step": epoch * steps, "end_step": (epoch + 1) * steps, "last_val_in_epoch": scores}
        self._write(f"epoch_{epoch:03d}.json", summary)
        if scores:
            self._write(f"val_step_{(epoch + 1) * steps}.json", {"step": (epoch + 1) * steps} | scores)
        if self._board is not None:
            self._board.write((epoch + 1) * steps, _scalars(report, scores, speed))

    def _write(self, name: str, values: Mapping[str, object]) -> None:
        """A file for people and plots; a full disk must not end a training."""
        with suppress(OSError):
            folder = self._config.folder / "metrics"
            folder.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(values, indent=1))


def _scalars(report: EpochReport, scores: Mapping[str, float], speed: float) -> dict[str, float]:
    """Under the tags of the early code, where there is one."""
    scalars = {"epoch/avg_loss": report.items["loss"], "epoch/avg_charb": report.items["charbonnier"]}
    scalars |= {"epoch/avg_vgg": report.items["perceptual"], "epoch/throughput_samples_per_sec": speed}
    scalars |= {"epoch/lr": report.lrs[0]} if report.lrs else {}
    if scores:
        scalars |= {"val/psnr": scores["psnr"], "val/ssim": scores["ssim"], "val/psnr_rgb": scores["ref_psnr_rgb"]}
        scalars |= {"val/psnr_y": scores["ref_psnr_y"], "val/ssim_y": scores["ref_ssim_y"]}
    if torch.cuda.is_available():
        scalars["gpu/memory_allocated_gb_gpu0"] = torch.cuda.max_memory_allocated() / 1e9
    return scalars
