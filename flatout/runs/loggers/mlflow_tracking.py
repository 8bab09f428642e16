"""A run in MLflow: pip install mlflow. It goes where MLFLOW_TRACKING_URI says, else where MLflow itself would put it.

A continued run goes on under the same id, which lies in the run folder.
"""

import os
from collections.abc import Mapping
from typing import Any

from flatout.engine import Callback, End, RunStart, Scores
from flatout.errors import ConfigError, one_line

ID_FILE = "mlflow_id.txt"
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "interrupted": "KILLED", "failed": "FAILED"}
DEFAULTS = {
    # A server that is gone must not hold up a training for minutes, as MLflow's own defaults would.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    # Since 3.17 MLflow refuses a folder unless this is set; whoever names one (file:///...) means it.
    "MLFLOW_ALLOW_FILE_STORE": "true",
}
"""Environment variables of MLflow that are set unless they are already."""
MOST_PARAMETER_LETTERS = 500


class MLflow(Callback):
    """Parameters at the start, metrics after every epoch, the text files of the run at the end."""

    def __init__(self, *, experiment: str = "flatout") -> None:
        """ConfigError if MLflow cannot open its store."""
        _check_store()
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


def _check_store() -> None:
    """ConfigError if MLflow cannot open the store that it would write to. A server is not asked yet."""
    try:
        _open_client()
    except Exception as error:  # each store has errors of its own, and after any of them nothing would be logged
        raise ConfigError(
            f"MLflow cannot open its store: {one_line(error, 200).removesuffix('.')}. Name a folder or a server, "
            "MLFLOW_TRACKING_URI=file:///folder or http://host:5000; a database such as sqlite:///mlflow.db needs "
            "more of MLflow: python -m pip install mlflow."
        ) from error


def _open_client() -> Any:
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    return MlflowClient()


def _allowed(name: str) -> str:
    """MLflow takes letters, digits and _-./ and blanks in names, but no @."""
    return "".join(letter if letter.isalnum() or letter in "_-./: " else "_" for letter in name)


def _finite(scalars: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in scalars.items() if value - value == 0}
