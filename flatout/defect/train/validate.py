"""Validation inside a training: whole images of valid/, decoded once and kept for the next epoch."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from flatout.defect.evaluate.heat_map import HeatMapper
from flatout.defect.evaluate.judge import Seen, judge
from flatout.defect.evaluate.outcome import Outcome
from flatout.defect.patches import Grid
from flatout.defect.strips.find import Judged
from flatout.defect.strips.items import Strips
from flatout.engine.interrupts import Interrupts
from flatout.errors import Interrupted
from flatout.feed import Store, StoreConfig
from flatout.profiler import clock


class Validation:
    """Judges networks again and again on the same images. A context manager."""

    def __init__(
        self,
        judged: list[Judged],
        grid: Grid,
        device: torch.device,
        dtype: torch.dtype,
        interrupts: Interrupts | None,
        *,
        workers: int | str = "auto",
    ) -> None:
        """`interrupts` None: it is not stopped by a signal, because other ranks wait for its end."""
        self._judged, self._grid, self._device, self._dtype = judged, grid, device, dtype
        self._interrupts = interrupts
        strips = Strips([image.path for image in judged], shape_hw=grid.shape_hw)
        self._number = {image.path: number for number, image in enumerate(judged)}
        self._store = Store.open(strips, StoreConfig(progress=False, workers=workers))

    def __enter__(self) -> "Validation":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._store.close()

    def __call__(self, network: nn.Module) -> Outcome:
        """The network as it is now; Interrupted if a signal wants it."""
        network.eval()
        mapper = HeatMapper(network, self._grid, self._device, dtype=self._dtype)
        with clock.stage("train.validate"):
            return judge(mapper, self._judged, read=self._read, watchers=[self._stop_if_asked])

    def _read(self, path: Path) -> np.ndarray:
        return self._store[self._number[path]]

    def _stop_if_asked(self, seen: Seen) -> None:
        if self._interrupts is not None and self._interrupts.requested is not None:
            raise Interrupted.by(self._interrupts.requested)
