"""A run in MLflow: pip install mlflow. It goes where MLFLOW_TRACKING_URI says, else where MLflow itself would put it.

A continued run goes on under the same id, which lies in the run folder.
"""

import os
from collections.abc import Mapping
from typing import Any

from flatout.engine.callbacks import Callback, End, RunStart, Scores

ID_FILE = "mlflow_id.txt"
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "interrupted": "KILLED", "failed": "FAILED"}
PATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""A server that is gone must not hold up a training for minutes, as MLflow's own defaults would."""
MOST_PARAMETER_LETTERS = 500


class MLflow(Callback):
    """Parameters at the start, metrics after every epoch, the text files of the run at the end."""

    def __init__(self, *, experiment: str = "flatout") -> None:
        self._experiment = experiment
        self._client: Any = None
        self._id = ""

    def start(self, run: RunStart) -> None:
        for name, value in PATIENT.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        client = MlflowClient()
        file = run.folder / ID_FILE
        if run.continues and file.is_file():
            self._id = file.read_text().strip()
            client.update_run(self._id, status="RUNNING")
        else:
            self._id = client.create_run(self._experiment_id(client), run_name=run.folder.name).info.run_id
            file.write_text(self._id)
            for name, value in run.config.items():
                client.log_param(self._id, _allowed(name), str(value)[:MOST_PARAMETER_LETTERS])
        # Last: one that could not be begun is not written to.
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


def _allowed(name: str) -> str:
    """MLflow takes letters, digits and _-./ and blanks in names, but no @."""
    return "".join(letter if letter.isalnum() or letter in "_-./: " else "_" for letter in name)


def _finite(scalars: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in scalars.items() if value - value == 0}
