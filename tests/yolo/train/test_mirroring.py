"""A detection training that moves from machine to machine through its mirror."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.yolo.options import TrainOptions
from flatout.yolo.train import train


def test_the_same_command_on_another_machine_goes_on_and_a_finished_one_does_nothing(
    options: TrainOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each machine is a project folder here; they share nothing but the mirror."""
    caplog.set_level(logging.INFO, logger="flatout")
    options = replace(options, mirror=f"file://{tmp_path}/mirror", notest=True)
    # It is saved where an accumulation window ends: with the short last batch.
    first = train(replace(options, stop_after=2))
    assert first is not None and not first.finished
    second = train(replace(options, project=str(tmp_path / "second")))
    assert second is not None and second.finished
    assert f"Continuing {second.folder} at epoch 0, step 3" in caplog.text
    assert len((second.folder / "results.txt").read_text().splitlines()) == options.epochs
    caplog.clear()
    third = train(replace(options, project=str(tmp_path / "third")))
    assert third is not None and third.finished
    assert "this training is finished; its files are here" in caplog.text and "Model Summary" not in caplog.text
    for name in ("results.txt", "weights/best.pt", "weights/last.pt"):
        assert (third.folder / name).read_bytes() == (second.folder / name).read_bytes()
