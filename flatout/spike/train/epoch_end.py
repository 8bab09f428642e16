"""After every epoch: validate the moving average, write the numbers down, keep the best."""

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatout.engine.epoch_keeper import EpochKeeper
from flatout.engine.job import EpochReport
from flatout.engine.records import Records
from flatout.errors import Interrupted
from flatout.spike.evaluate import Evaluation
from flatout.spike.weight_files import WeightFiles

logger = logging.getLogger(__name__)

Validate = Callable[[nn.Module, int], Evaluation]
"""(network, epoch) -> what it scored."""


@dataclass(frozen=True, kw_only=True)
class EpochEndConfig:
    """What happens after an epoch."""

    epochs: int
    steps_per_epoch: int
    """Optimizer steps."""
    folder: Path
    accumulation: int = 1
    """Micro-batches of an optimizer step."""
    validate_every: int | None = None
    """Optimizer steps between two validations, wherever in an epoch they fall; None: after every epoch. The last step
    is always validated."""


class EpochEnd(EpochKeeper):
    """Called by the job; its state is saved with the training."""

    def __init__(
        self,
        config: EpochEndConfig,
        *,
        average: nn.Module,
        validate: Validate | None,
        records: Records | None,
        after: Callable[[int, int, Mapping[str, float]], None],
        files: WeightFiles,
        run: Mapping[str, Any],
    ) -> None:
        """`validate` None: nothing to validate on, or not the first rank. `records` None: not the first rank.
        `after` gets the epoch, the optimizer steps so far, and the epoch's scalars."""
        super().__init__(records=records, files=files, run=run)
        self._config, self._average, self._validate = config, average, validate
        self._after, self._files = after, files
        self.evaluation: Evaluation | None = None

    def __call__(self, epoch: int, report: EpochReport) -> bool:
        """Work off the end of an epoch; never ends a training before its time."""
        config = self._config
        last = epoch + 1 == config.epochs
        is_due = last or self._is_due((epoch + 1) * config.steps_per_epoch)
        found = self._validate(self._average, epoch) if self._validate is not None and is_due else None
        if self._records is not None:
            self._record(epoch, report, found)
        if found is not None:
            self.evaluation = found
            logger.info("Epoch %d: %s", epoch, found)
        self._keep(epoch, found)
        self.epoch = epoch
        return False

    def between(self, epoch: int, step: int) -> Callable[[], None] | None:
        """A validation within an epoch, after `step` of its micro-batches, if one is due; see `Loop`."""
        if self._config.validate_every is None:
            return None
        done = epoch * self._config.steps_per_epoch + step // self._config.accumulation
        return partial(self._validate_within, epoch, done) if self._is_due(done) else None

    def _is_due(self, steps_done: int) -> bool:
        every = self._config.validate_every
        return steps_done % every == 0 if every is not None else steps_done % self._config.steps_per_epoch == 0

    def _validate_within(self, epoch: int, steps_done: int) -> None:
        if self._validate is None:
            return
        try:
            found = self._validate(self._average, epoch)
        except Interrupted:
            return  # the loop hears of the signal at its next step, and saves there
        self.evaluation = found
        logger.info("Step %d: %s", steps_done, found)
        self._write(f"val_step_{steps_done}.json", {"step": steps_done} | found.plain())
        # Epochs that are complete are one fewer than the one under way.
        self._after(epoch - 1, steps_done, _scores(found.plain()))
        self._keep(epoch, found)

    def _keep(self, epoch: int, found: Evaluation | None) -> None:
        """Keep the best."""
        psnr = None if found is None else found.psnr
        # Without any validation the newest counts as the best.
        is_judged = found is not None or self._validate is None
        if self._records is not None and is_judged and self.takes(epoch, psnr):
            self._files.keep_best(self._average, epoch=epoch, psnr=psnr)

    def _record(self, epoch: int, report: EpochReport, found: Evaluation | None) -> None:
        assert self._records is not None
        scores = found.plain() if found is not None else {}
        speed = report.samples_per_s
        row = {"epoch": epoch} | report.items | {"lr": report.lrs[0] if report.lrs else 0.0, "samples_per_s": speed}
        self._records.event("log.jsonl", row | scores | report.timing())
        steps = self._config.steps_per_epoch
        summary = row | {"start_step": epoch * steps, "end_step": (epoch + 1) * steps, "last_val_in_epoch": scores}
        self._write(f"epoch_{epoch:03d}.json", summary)
        if scores:
            self._write(f"val_step_{(epoch + 1) * steps}.json", {"step": (epoch + 1) * steps} | scores)
        self._after(epoch, (epoch + 1) * steps, _scalars(report, scores, speed))

    def _write(self, name: str, values: Mapping[str, object]) -> None:
        """A file for people and plots; a full disk must not end a training."""
        with suppress(OSError):
            folder = self._config.folder / "metrics"
            folder.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(values, indent=1))


def _scores(scores: Mapping[str, float]) -> dict[str, float]:
    """Of a validation, under the tags of the early code, where there is one."""
    tags = {"psnr": "psnr", "ssim": "ssim", "psnr_rgb": "ref_psnr_rgb", "psnr_y": "ref_psnr_y", "ssim_y": "ref_ssim_y"}
    return {f"val/{tag}": scores[name] for tag, name in tags.items()}


def _scalars(report: EpochReport, scores: Mapping[str, float], speed: float) -> dict[str, float]:
    """Under the tags of the early code, where there is one."""
    scalars = {"epoch/avg_loss": report.items["loss"], "epoch/avg_charb": report.items["charbonnier"]}
    scalars |= {"epoch/avg_vgg": report.items["perceptual"], "epoch/throughput_samples_per_sec": speed}
    scalars |= {"epoch/lr": report.lrs[0]} if report.lrs else {}
    scalars |= _scores(scores) if scores else {}
    if torch.cuda.is_available():
        scalars["gpu/memory_allocated_gb_gpu0"] = torch.cuda.max_memory_allocated() / 1e9
    return scalars
