"""The background of a run: order, errors, and that no plot and no file is missing at the end."""

import logging
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from flatout.errors import ResourceError
from flatout.runs import Background
from flatout.safefiles import read_container


def test_plots_are_made_in_order_and_beside_the_caller():
    made, go_on = list[int](), threading.Event()
    with Background() as background:
        background.submit(go_on.wait)
        for number in range(5):
            background.submit(partial(made.append, number))
        assert made == []
        go_on.set()
        background.wait()
        assert made == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("error", [OSError("no room"), ValueError("bad value"), RuntimeError("a bug")])
def test_an_error_is_a_warning_and_later_plots_are_made(error: Exception, caplog: pytest.LogCaptureFixture):
    def fail() -> None:
        raise error

    made = list[str]()
    with caplog.at_level(logging.WARNING), Background() as background:
        background.submit(fail)
        background.submit(partial(made.append, "later"))
    assert made == ["later"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(error) in caplog.text


def test_no_plot_is_lost_when_the_training_is_interrupted():
    made, go_on = list[int](), threading.Event()
    background = Background()
    background.submit(go_on.wait)
    background.submit(partial(made.append, 1))
    threading.Timer(0.05, go_on.set).start()
    with pytest.raises(KeyboardInterrupt), background:
        raise KeyboardInterrupt
    assert made == [1]


def test_without_plots_there_is_no_thread():
    before = threading.active_count()
    with Background() as background:
        background.wait()
        assert threading.active_count() == before


def test_a_file_has_the_values_of_the_call_that_wrote_it(tmp_path: Path):
    weight, whole = torch.ones(3), torch.arange(10.0)
    counts = {"epoch": 3, "states": [weight, (whole[2:4], "text")]}
    go_on = threading.Event()
    with Background() as background:
        background.submit(go_on.wait)
        background.write(tmp_path / "state.pt", {"job": counts})
        weight.zero_()
        whole.zero_()
        counts["epoch"] = 4
        go_on.set()
    job = read_container(tmp_path / "state.pt")["job"]
    assert isinstance(job, dict)
    assert job["epoch"] == 3
    first, (second, text) = job["states"]
    assert (first.tolist(), second.tolist(), text) == ([1, 1, 1], [2, 3], "text")


def test_files_that_were_begun_are_on_disk_after_waiting_for_them(tmp_path: Path):
    """What a checkpoint does before it is written, so that no epoch counts as saved whose file is missing."""
    with Background() as background:
        background.wait_for_files()  # returns if there is none
        for number in range(3):
            background.write(tmp_path / f"epoch_{number:03d}.pt", {"job": {"number": number}})
        background.wait_for_files()
        assert [read_container(path)["job"] for path in sorted(tmp_path.glob("epoch_*.pt"))] == [
            {"number": 0},
            {"number": 1},
            {"number": 2},
        ]


def test_a_file_that_cannot_be_written_is_named_and_nobody_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(path: Path, sections: object) -> None:
        raise ResourceError(f"{path}: not enough disk space.")

    monkeypatch.setattr("flatout.runs.background.write_container", full)
    with caplog.at_level(logging.WARNING), Background() as background:
        background.write(tmp_path / "epoch_024.pt", {})
        background.write(tmp_path / "epoch_049.pt", {})
        background.wait_for_files()
    assert caplog.messages == [
        f"{tmp_path}/epoch_{epoch}.pt: not enough disk space. Training goes on." for epoch in ("024", "049")
    ]


def test_a_value_that_no_file_can_hold_is_an_error_where_it_was_given(tmp_path: Path):
    with Background() as background, pytest.raises(TypeError, match=r"^job.when is a builtins.object; container files"):
        background.write(tmp_path / "state.pt", {"job": {"when": object()}})
    assert not list(tmp_path.iterdir())
