"""Logger for Weights & Biases (pip install wandb). Needs an account and a network, unless WANDB_MODE=offline is set.

A continued run keeps its W&B id, which is stored in the run folder.
"""

import shutil
from pathlib import Path
from typing import Any

from flatout.engine import Callback, End, RunStart, Saved, Scores

ID_FILE = "wandb_id.txt"
EXIT_CODES = {"finished": 0, "stopped": 0, "interrupted": 75, "failed": 1}


class WeightsAndBiases(Callback):
    """Logs scalars after every epoch, the checkpoint every `save_period` epochs (if above 0), and plots at the end."""

    def __init__(
        self, *, project: str = "flatout", entity: str | None = None, save_period: int = -1, alias: str = "latest"
    ) -> None:
        self._project, self._entity, self._save_period, self._alias = project, entity, save_period, alias
        self._run: Any = None
        self._uploaded = 0

    def start(self, run: RunStart) -> None:
        import wandb

        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            name=run.folder.name,
            dir=str(run.folder),
            config=dict(run.config) | {"job": run.job},
            id=_known_id(run),
            resume="allow",
        )
        (run.folder / ID_FILE).write_text(self._run.id)
        self._uploaded = run.epoch

    def validation(self, scores: Scores) -> None:
        if self._run is not None:
            self._run.log(dict(scores.scalars) | {"epoch": scores.epoch})

    def checkpoint(self, saved: Saved) -> None:
        if self._run is None or self._save_period < 1 or saved.epoch - self._uploaded < self._save_period:
            return
        self._uploaded = saved.epoch
        self._upload(saved.path)

    def end(self, end: End) -> None:
        if self._run is None:
            return
        import wandb

        if end.how == "finished":
            shown = sorted(end.folder.glob("*.png")) + sorted(end.folder.glob("test_batch*.jpg"))
            self._run.log({path.stem: wandb.Image(str(path)) for path in shown})
        self._run.finish(exit_code=EXIT_CODES[end.how])

    def _upload(self, path: Path) -> None:
        """Upload a copy of the file, because the next save may replace it during the upload."""
        import wandb

        artifact = wandb.Artifact(f"run_{self._run.id}_model", type="model")
        copy = Path(self._run.dir) / path.name
        shutil.copyfile(path, copy)
        artifact.add_file(str(copy))
        self._run.log_artifact(artifact, aliases=[self._alias])


def _known_id(run: RunStart) -> str | None:
    file = run.folder / ID_FILE
    return file.read_text().strip() if run.continues and file.is_file() else None
