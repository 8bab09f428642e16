"""Logger for MLflow (pip install mlflow-skinny). Logs to MLFLOW_TRACKING_URI, else to MLflow's default store.

A continued run keeps its MLflow id, which is stored in the run folder.
"""

import os
from collections.abc import Mapping
from typing import Any

from flatout.engine import Callback, End, RunStart, Scores
from flatout.errors import ConfigError, one_line

ID_FILE = "mlflow_id.txt"
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "interrupted": "KILLED", "failed": "FAILED"}
DEFAULTS = {
    # An unreachable server must not block a training for minutes, as with MLflow's own defaults.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    # Since 3.17 MLflow refuses a folder (file:///...) unless this is set.
    "MLFLOW_ALLOW_FILE_STORE": "true",
}
"""Environment variables for MLflow that are set unless they are already."""
MAX_PARAMETER_CHARACTERS = 500


class MLflow(Callback):
    """Logs parameters at the start, metrics after every epoch, and text files of the run at the end."""

    def __init__(self, *, experiment: str = "flatout") -> None:
        """ConfigError if MLflow cannot open its store."""
        try:
            _open_client()  # does not contact a server yet
        except Exception as error:  # each store has its own errors, and after any of them nothing would be logged
            raise ConfigError(
                f"MLflow cannot open its store: {one_line(error, 200).removesuffix('.')}. Set a folder or a server, "
                "MLFLOW_TRACKING_URI=file:///folder or http://host:5000; a database such as sqlite:///mlflow.db needs "
                "the full package: python -m pip install mlflow"
            ) from error
        self._experiment = experiment
        self._client: Any = None
        self._id = ""

    def start(self, run: RunStart) -> None:
        client = _open_client()
        file = run.folder / ID_FILE
        if run.continues and file.is_file():
            self._id = file.read_text().strip()
            client.update_run(self._id, status="RUNNING")
        else:
            self._id = client.create_run(self._experiment_id(client), run_name=run.folder.name).info.run_id
            file.write_text(self._id)
            for name, value in run.config.items():
                client.log_param(self._id, _allowed(name), str(value)[:MAX_PARAMETER_CHARACTERS])
        # Set last, so that nothing is logged to a run that could not be started.
        self._client = client

    def validation(self, scores: Scores) -> None:
        if self._client is None:
            return
        for name, value in _finite(scores.scalars).items():
            self._client.log_metric(self._id, _allowed(name), value, step=scores.at)

    def end(self, end: End) -> None:
        if self._client is None:
            return
        for name in ("results.csv", "results.png", "opt.yaml", "hyp.yaml"):
            if (end.folder / name).is_file():
                self._client.log_artifact(self._id, str(end.folder / name))
        self._client.set_terminated(self._id, STATUS[end.how])

    def _experiment_id(self, client: Any) -> str:
        known = client.get_experiment_by_name(self._experiment)
        return str(known.experiment_id if known is not None else client.create_experiment(self._experiment))


def _open_client() -> Any:
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    return MlflowClient()


def _allowed(name: str) -> str:
    """The name with characters replaced that MLflow does not allow, such as @."""
    return "".join(letter if letter.isalnum() or letter in "_-./: " else "_" for letter in name)


def _finite(scalars: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in scalars.items() if value - value == 0}
