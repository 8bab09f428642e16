"""Validation inside a training: the moving average on every frame of the validation split, once."""

from pathlib import Path

import torch
from torch import nn

from flatout.engine.interrupts import Interrupts
from flatout.errors import Interrupted
from flatout.profiler import clock
from flatout.spike.clip_feed import ClipFeed
from flatout.spike.config import TestConfig
from flatout.spike.device_clip import ToClip
from flatout.spike.evaluate import Evaluation, Restore, Restored, evaluate
from flatout.spike.pictures import as_bytes, side_by_side, write_picture

PICTURES = 4


class Validation:
    """Judges networks again and again on the same clips."""

    def __init__(
        self,
        feed: ClipFeed,
        to_clip: ToClip,
        test: TestConfig,
        *,
        amp: torch.dtype,
        interrupts: Interrupts | None,
        folder: Path,
    ) -> None:
        """`interrupts` None: a signal waits until it is over, because other ranks wait for its end."""
        self._feed, self._to_clip, self._test, self._amp = feed, to_clip, test, amp
        self._interrupts, self._folder = interrupts, folder

    def __call__(self, network: nn.Module, epoch: int) -> Evaluation:
        """Interrupted if a signal wants it."""
        restore = Restore(network, self._to_clip, self._test, self._amp)
        with clock.stage("train.validate"):
            return evaluate(restore, self._feed, [self._stop_if_asked, self._draw])

    def _stop_if_asked(self, restored: Restored) -> None:
        if self._interrupts is not None and self._interrupts.requested is not None:
            raise Interrupted.by(self._interrupts.requested)

    def _draw(self, restored: Restored) -> None:
        """blur | restored | sharp of the first frame of the first clips, the newest over the older ones."""
        for row, index in enumerate(restored.indices):
            if index < PICTURES:
                frames = (restored.blur[row, 0], restored.predicted[row, 0], restored.sharp[row, 0])
                picture = side_by_side([as_bytes(each) for each in frames])
                write_picture(self._folder / f"val_{index:04d}_00.png", picture)
