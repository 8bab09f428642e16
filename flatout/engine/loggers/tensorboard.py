"""Scalars and pictures for TensorBoard, where it is installed: pip install flatout[tb]."""

from pathlib import Path
from typing import Any

import numpy as np

from flatout.engine.callbacks import Callback, End, RunStart, Scores

PICTURES = ("*.png", "*.jpg", "visuals/*.png")


class TensorBoard(Callback):
    """An event file in the run folder, or in a folder within it."""

    def __init__(self, within: str = "") -> None:
        self._within = within
        self._folder = Path()
        self._writer: Any = None

    def start(self, run: RunStart) -> None:
        self._folder = run.folder / self._within
        if not run.continues:
            for name, values in run.histograms.items():
                self._open().add_histogram(name, values, 0)

    def validation(self, scores: Scores) -> None:
        writer = self._open()
        for name, value in scores.scalars.items():
            writer.add_scalar(name, value, scores.at)
        writer.flush()

    def end(self, end: End) -> None:
        """The pictures that a run has drawn of itself, as they are at its end."""
        if self._writer is None:
            return
        for path in (path for part in PICTURES for path in sorted(end.folder.glob(part))):
            if (picture := _read(path)) is not None:
                self._writer.add_image(
                    path.relative_to(end.folder).with_suffix("").as_posix(), picture, end.epoch, dataformats="HWC"
                )
        self._writer.close()

    def _open(self) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder))
        return self._writer


def _read(path: Path) -> np.ndarray | None:
    """uint8 [H, W, 3], RGB; None where nothing can read it."""
    try:
        import cv2
    except ImportError:
        return None
    picture = cv2.imread(str(path), cv2.IMREAD_COLOR)
    return None if picture is None else np.asarray(cv2.cvtColor(picture, cv2.COLOR_BGR2RGB))
