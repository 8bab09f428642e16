"""The ends of epochs without a training: scores come from a list, files are real."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from flatout.engine.callbacks import Callbacks
from flatout.engine.job import EpochReport, Sections
from flatout.ranks.world import World
from flatout.runs.background import Background
from flatout.runs.ends import RunEpochEnd
from flatout.runs.folder import Records
from flatout.runs.recipe import Model, Recipe, ValidationResult
from flatout.yolo.metrics import zero_scores
from flatout.yolo.options import TrainOptions
from flatout.yolo.train import YoloRecipe

REPORT = EpochReport(
    items={"box": 0.1, "obj": 0.1, "cls": 0.1, "total": 0.3}, lrs=(0.01,), seconds=1.0, num_samples=8, num_bad=0
)


class ScriptedRecipe(YoloRecipe):
    """A recipe whose scores come from a list; a validation with `last` takes none of them and scores 0."""

    def __init__(self, folder: Path, scores: Iterable[float], maps: Sequence[float] = (), **options: Any) -> None:
        asked = TrainOptions(**{"epochs": 300, **options})
        Recipe.__init__(self, asked, World(), torch.device("cpu"))  # no data is opened
        self.saves, self._epochs = not asked.nosave, asked.epochs
        self._script, self._class_maps = iter(scores), maps
        self.validated: list[tuple[int, bool]] = []
        """Epochs that were validated, and whether with `last`."""
        self.background = Background()
        self._run: Any = SimpleNamespace(
            folder=folder, weights=folder / self.weights_folder, background=self.background
        )
        self._job: Any = SimpleNamespace(last_targets=0, last_width_px=0)
        self._batch_plots = self._image_weights = None

    def validate(self, model: Model, epoch: int, *, last: bool) -> ValidationResult:
        self.validated.append((epoch, last))
        fitness = 0.0 if last else next(self._script)
        evaluation = SimpleNamespace(fitness=fitness, maps=np.array(self._class_maps))
        return ValidationResult(fitness, {}, SimpleNamespace(evaluation=evaluation, scores=zero_scores()))

    def describe_network(self, model: Model) -> dict[str, Any]:
        return {}


class ScriptedEnds:
    """The epoch end of a `ScriptedRecipe`, called as the loop does. A context manager."""

    def __init__(self, recipe: ScriptedRecipe, folder: Path) -> None:
        self.recipe, self._records = recipe, Records(folder)
        self.network = nn.Linear(1, 1, bias=False)
        """The network that is evaluated: its weight is the number of the epoch."""
        (folder / recipe.weights_folder).mkdir(exist_ok=True)
        optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1)
        self.epoch_end = RunEpochEnd(
            recipe,
            Model(network=self.network, optimizer=optimizer, epochs=recipe.options.epochs),
            recipe._run,
            records=self._records,
            callbacks=Callbacks(),
            run={},
            steps_per_epoch=1,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.recipe.background.__exit__(*exc_info)
        self._records.close()

    def __call__(self, epoch: int) -> bool:
        """End an epoch and save; True if that ends the training."""
        nn.init.constant_(self.network.weight, epoch)
        stops = self.epoch_end(epoch, REPORT, self._sections)
        self.epoch_end.flush()
        return stops

    @property
    def state(self) -> dict[str, object]:
        """The saved state of the job."""
        return self.epoch_end.sections()["job"]

    def _sections(self) -> Sections:
        return {"weights": {"state": self.network.state_dict()}}
