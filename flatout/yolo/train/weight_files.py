"""The files in weights/: what each holds, and when it is written.

    last.pt, last.prev.pt   everything, to continue from         (flatout.engine.generations)
    best.pt                 the best average so far, half precision
    epoch_NNN.pt            everything, now and then
    init.pt                 the network before its first step

When a training has ended, last.pt too holds just the average, in half precision, as in YOLOv7.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatout.engine.checkpoint.container import write_container

KEEP_EVERY = 25
KEEP_LAST = 5
LATE_BEST_FROM = 200
ENDED = -1
"""What a file says instead of an epoch when training has ended."""


class WeightFiles:
    """Writes the files of one run. `about` says how the network is built, without tensors."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self.folder = folder
        self._about = dict(about)
        self._best: dict[str, Any] | None = None
        self._best_names: list[str] = []

    def save_start(self, network: nn.Module) -> None:
        self._write("init.pt", self._about | {"kind": "model", "state": network.state_dict()})

    def keep_best(self, network: nn.Module, *, epoch: int, fitness: float) -> None:
        """Remember the average as it is now, on the device; `flush` writes it."""
        self._best = self._stripped(network, fitness)
        self._best_names = ["best.pt", *([f"best_{epoch:03d}.pt"] if epoch >= LATE_BEST_FROM else [])]

    def flush(self) -> None:
        """Write the best weights, if there are new ones."""
        if self._best is not None:
            for name in self._best_names:
                self._write(name, self._best)
            self._best = None

    def save_epoch(self, epoch: int, sections: Mapping[str, object]) -> None:
        """Everything, under the number of an epoch."""
        write_container(self.folder / f"epoch_{epoch:03d}.pt", sections)

    def final(self, network: nn.Module, *, fitness: float) -> dict[str, object]:
        """What last.pt holds once the training has ended."""
        return {"weights": self._stripped(network, fitness)}

    def _stripped(self, network: nn.Module, fitness: float) -> dict[str, Any]:
        state = {key: _halved(tensor) for key, tensor in network.state_dict().items()}
        return self._about | {"kind": "stripped", "state": state, "epoch": ENDED, "best_fitness": fitness}

    def _write(self, name: str, weights: Mapping[str, Any]) -> None:
        write_container(self.folder / name, {"weights": dict(weights)})


def is_kept(epoch: int, epochs: int) -> bool:
    """Whether YOLOv7 keeps the state after this epoch: the first, every 25th, the last five."""
    return epoch == 0 or (epoch + 1) % KEEP_EVERY == 0 or epoch >= epochs - KEEP_LAST


def _halved(tensor: Tensor) -> Tensor:
    """A copy, so that training may go on."""
    return tensor.detach().to(torch.float16 if tensor.is_floating_point() else tensor.dtype, copy=True)
