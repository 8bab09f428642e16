"""The files in weights/: what each holds, and when it is written.

last.pt, last.prev.pt   everything, to continue from         (flatout.engine.generations)
best.pt                 the best network so far, with the threshold that suited it
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from flatout.engine.checkpoint.container import write_container

BEST = "best.pt"


class WeightFiles:
    """Writes the files of one run. `about` says how the network is built."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self.folder = folder
        self.about = dict(about)
        self._best: dict[str, Any] | None = None

    def keep_best(self, network: nn.Module, *, epoch: int, fitness: float | None, threshold: float | None) -> None:
        """Remember the network as it is now; `flush` writes it."""
        state = {key: tensor.detach().clone() for key, tensor in network.state_dict().items()}
        facts = {"kind": "model", "state": state, "epoch": epoch, "fitness": fitness, "threshold": threshold}
        self._best = self.about | facts

    def flush(self) -> None:
        """Write the best network, if there is a new one."""
        if self._best is not None:
            write_container(self.folder / BEST, {"weights": self._best})
            self._best = None
