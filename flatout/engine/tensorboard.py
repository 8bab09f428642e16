"""Scalars for TensorBoard, where it is installed: pip install flatout[tensorboard]."""

import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class TensorBoard:
    """An event file in the run folder; without the package, nothing. Trouble with it never stops a training."""

    def __init__(self, folder: Path) -> None:
        self._writer: Any = None
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder))

    def write(self, epoch: int, scalars: Mapping[str, float]) -> None:
        if self._writer is None:
            return
        try:
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, epoch)
            self._writer.flush()
        except OSError as error:
            self._writer = None
            logger.warning("TensorBoard's file cannot be written: %s. Training goes on without it.", error)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
