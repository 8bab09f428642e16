"""Callbacks: five events in order, and one that fails does no harm (F34)."""

import logging
import re
import socket
import sys
import urllib.request
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import cv2
import numpy as np
import pytest

from flatout.engine.callbacks import Callback, Callbacks, End, RunStart, Saved, Scores
from flatout.engine.job import IntervalStats
from flatout.errors import ConfigError, DivergedError, Interrupted
from flatout.runs.ends import reporting_end
from flatout.runs.loggers.choose import choose_loggers

STATS = IntervalStats(epoch=0, step=2, items={"loss": 1.0}, lr=0.1, step_ms=1.0, wait_ms=0.0, samples_per_s=8.0)


def start_of(folder: Path, *, continues: bool = False) -> RunStart:
    return RunStart(
        job="yolo", folder=folder, config={"lr": 0.1}, epoch=0, epochs=2, continues=continues,
        histograms={"classes": np.array([0.0, 1.0, 1.0])},
    )  # fmt: skip


def scores(epoch: int, **scalars: float) -> Scores:
    return Scores(epoch=epoch, at=epoch, scalars={f"train/{name}": value for name, value in scalars.items()})


def end_of(folder: Path) -> End:
    return End(how="finished", folder=folder, epoch=2)


class Recorder(Callback):
    """Records the events it receives."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.ends: list[End] = []

    def start(self, run: RunStart) -> None:
        self.events.append("start")

    def log(self, stats: IntervalStats) -> None:
        self.events.append("log")

    def validation(self, scores: Scores) -> None:
        self.events.append("validation")

    def checkpoint(self, saved: Saved) -> None:
        self.events.append("checkpoint")

    def end(self, end: End) -> None:
        self.events.append("end")
        self.ends.append(end)


class Raising(Callback):
    calls = 0

    def log(self, stats: IntervalStats) -> None:
        self.calls += 1
        raise RuntimeError("no\nmore")


class Posting(Callback):
    """A logger whose server is not there."""

    def __init__(self, url: str) -> None:
        self._url = url

    def log(self, stats: IntervalStats) -> None:
        urllib.request.urlopen(self._url, data=b"{}", timeout=5)


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that is bound but not listened on, so that connections to it are refused."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_callback_is_disabled_after_three_errors_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    raising, recorder = Raising(), Recorder()
    callbacks = Callbacks([raising, recorder])
    for _ in range(5):
        callbacks.log(STATS)
    assert (raising.calls, recorder.events) == (3, ["log"] * 5)
    assert warnings_in(caplog) == [
        "Raising.log failed: RuntimeError: no more. Error 1 of 3; training goes on.",
        "Raising.log failed: RuntimeError: no more. Error 2 of 3; training goes on.",
        "Raising.log failed: RuntimeError: no more. It will not be called again; training goes on.",
    ]


def test_a_logger_whose_server_is_gone_is_disabled(caplog: pytest.LogCaptureFixture, closed_port: int) -> None:
    callbacks = Callbacks([Posting(f"http://127.0.0.1:{closed_port}/")])
    for _ in range(4):
        callbacks.log(STATS)
    assert len(warnings_in(caplog)) == 3
    assert all("Connection refused" in warning for warning in warnings_in(caplog))


def test_ctrl_c_inside_a_callback_is_not_swallowed() -> None:
    class Interrupting(Callback):
        def log(self, stats: IntervalStats) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Callbacks([Interrupting()]).log(STATS)


@pytest.mark.parametrize(
    ("error", "how"),
    [(Interrupted("SIGTERM"), "interrupted"), (DivergedError("nan"), "failed"), (ZeroDivisionError("x"), "failed")],
)
def test_the_end_is_reported_once_also_for_a_training_that_fails(tmp_path: Path, error: Exception, how: str) -> None:
    recorder = Recorder()
    callbacks = Callbacks([recorder])
    callbacks.start(start_of(tmp_path))
    callbacks.validation(scores(0, loss=1.0))
    with pytest.raises(type(error)), reporting_end(callbacks, tmp_path):
        raise error
    (end,) = recorder.ends
    assert (end.how, end.why, end.epoch) == (how, str(error), 1)


def test_without_a_start_there_is_no_end(tmp_path: Path) -> None:
    recorder = Recorder()
    with reporting_end(Callbacks([recorder]), tmp_path):
        pass
    assert recorder.events == []


def test_the_example_in_the_documentation_receives_all_five_events(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs/callbacks.md").read_text()
    code = text.split("```python\n")[1].split("diary = Diary()")[0]
    names: dict[str, Any] = {}
    exec(compile(code, "docs/callbacks.md", "exec"), names)
    diary = names["Diary"]()
    callbacks = Callbacks([diary])
    callbacks.start(start_of(tmp_path))
    callbacks.log(STATS._replace(items={"box": 0.5}))
    callbacks.checkpoint(Saved(path=tmp_path / "last.pt", epoch=0, step=2))
    callbacks.validation(Scores(epoch=0, at=0, scalars={"metrics/mAP_0.5:0.95": 0.25}))
    callbacks.end(End(how="finished", folder=tmp_path, epoch=1))
    assert diary.lines[1:] == [
        "step 2: 8 img/s, box 0.5000", "saved last.pt", "epoch 0: mAP 0.250", "finished after 1 epochs ",
    ]  # fmt: skip


# -- loggers -------------------------------------------------------------------------------------------------------


def test_a_logger_that_is_not_installed_is_refused_with_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="wandb is not installed: python -m pip install wandb"):
        choose_loggers(("wandb",))
    assert choose_loggers(("none",)) == []


def test_a_training_without_tensorboard_says_once_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    caplog.set_level("INFO")
    assert choose_loggers(("none",)) == [] and caplog.messages == []
    assert choose_loggers(()) == []
    (line,) = caplog.messages
    assert line.startswith("TensorBoard is not installed") and line.endswith("python -m pip install tensorboard")


def test_a_long_warning_is_cut_between_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Talkative(Callback):
        def start(self, run: RunStart) -> None:
            raise RuntimeError("first\nline " + "word " * 100)

    Callbacks([Talkative()]).start(start_of(tmp_path))
    (warning,) = warnings_in(caplog)
    assert re.fullmatch(r"Talkative.start failed: RuntimeError: first line( word)+ \.\.\. Error 1 of 3; .*", warning)


def test_tensorboard_gets_scalars_by_epoch_and_the_histogram_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cv2.imwrite(str(tmp_path / "examples.png"), np.full((6, 9, 3), 200, np.uint8))
    (tmp_path / "broken.png").write_bytes(b"no image")
    for epoch, continues in ((0, False), (1, True)):
        callbacks = Callbacks(choose_loggers(("tensorboard",)))
        callbacks.start(start_of(tmp_path, continues=continues))
        callbacks.validation(scores(epoch, box_loss=0.5 - epoch / 4))
        callbacks.end(end_of(tmp_path))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/box_loss")] == [(0, 0.5), (1, 0.25)]
    (histogram,) = events.Histograms("classes")
    assert histogram.histogram_value.num == 3
    assert [(image.width, image.height) for image in events.Images("examples")] == [(9, 6)] * 2
    assert events.Tags()["images"] == ["examples"], "files that cannot be read are left out"


def test_wandb_works_offline_and_continues_under_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    (tmp_path / "last.pt").write_bytes(b"weights")
    cv2.imwrite(str(tmp_path / "results.png"), np.zeros((8, 8, 3), np.uint8))
    for continues in (False, True):
        callbacks = Callbacks(choose_loggers(("wandb",), wandb={"save_period": 1, "alias": "mine"}))
        callbacks.start(start_of(tmp_path, continues=continues))
        callbacks.validation(scores(0, box_loss=0.5))
        callbacks.checkpoint(Saved(path=tmp_path / "last.pt", epoch=1, step=0))
        callbacks.end(end_of(tmp_path))
        ids.append((tmp_path / "wandb_id.txt").read_text())
    assert ids[0] == ids[1]
    assert warnings_in(caplog) == []
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{ids[0]}"))) >= 1


def test_mlflow_keeps_metrics_in_files_and_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    folder = tmp_path / "exp"
    folder.mkdir()
    for epoch, continues in ((0, False), (1, True)):
        callbacks = Callbacks(choose_loggers(("mlflow",)))
        callbacks.start(start_of(folder, continues=continues))
        callbacks.validation(scores(epoch, box_loss=0.5))
        callbacks.end(end_of(folder))
    client = tracking.MlflowClient()
    run = client.get_run((folder / "mlflow_id.txt").read_text())
    assert (run.info.status, run.data.params["lr"]) == ("FINISHED", "0.1")
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "train/box_loss")] == [0, 1]


def test_a_store_that_mlflow_cannot_open_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like mlflow-skinny, which has no database stores."""

    class Refusing:
        def __init__(self) -> None:
            raise ValueError("got unsupported URI 'sqlite:///mlflow.db'.")

    for name in ("mlflow", "mlflow.tracking"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    monkeypatch.setattr(sys.modules["mlflow.tracking"], "MlflowClient", Refusing, raising=False)
    with pytest.raises(ConfigError, match=r"cannot open its store: .*sqlite:///mlflow\.db'\. Set a folder or a server"):
        choose_loggers(("mlflow",))


def test_mlflow_without_its_server_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, closed_port: int
) -> None:
    pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{closed_port}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    callbacks = Callbacks(choose_loggers(("mlflow",)))
    callbacks.start(start_of(tmp_path))
    callbacks.validation(scores(0, box_loss=0.5))
    (warning,) = [text for text in warnings_in(caplog) if "MLflow" in text]
    assert "MLflow.start failed" in warning
