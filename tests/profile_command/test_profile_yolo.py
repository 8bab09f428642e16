"""`flatout profile yolo` trains for a few steps, shows where the time went, and leaves only its report."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from flatout.__main__ import main
from flatout.profile_command import MIN_STEPS
from flatout.profiler.observe.observation import MIN_TIMED_STEPS
from flatout.runs.profiled import Switch
from flatout.yolo.commands.train import COMMAND
from flatout.yolo.profile import YoloTraining

ROOT = Path(__file__).parents[2]


def training_of(*flags, num_steps=3):
    return YoloTraining.from_flags(COMMAND, flags, num_steps=num_steps)


@pytest.fixture
def data(tmp_path):
    """Eight images with one box each."""
    for split in ("train", "val"):
        for part in ("images", "labels"):
            (tmp_path / part / split).mkdir(parents=True)
        for number in range(8 if split == "train" else 2):
            image = np.random.default_rng(number).integers(0, 256, (48, 64, 3), dtype=np.uint8)
            cv2.imwrite(str(tmp_path / "images" / split / f"{number}.png"), image)
            (tmp_path / "labels" / split / f"{number}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
    path = tmp_path / "set.yaml"
    path.write_text(f"train: {tmp_path}/images/train\nval: {tmp_path}/images/val\nnc: 1\nnames: [thing]\n")
    return path


@pytest.mark.slow
def test_a_training_is_profiled_and_nothing_else_is_left(data, tmp_path, monkeypatch, capsys, one_thread):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    flags = ["--data", str(data), "--cfg", str(ROOT / "cfg/training/yolov7-tiny.yaml"), "--weights", ""]
    flags += ["--hyp", str(ROOT / "data/hyp.scratch.tiny.yaml"), "--img", "32", "--batch", "2", "--device", "cpu"]
    assert main(["profile", "yolo", "--steps", "3", *flags, "--workers", "auto", "--noautoanchor"]) == 0
    output = capsys.readouterr().out
    assert "limits: compute" in output
    assert content_of_limits(work)
    assert "Verdict:" in output and "unexplained" in output and "loader workers" in output
    assert sorted(path.name for path in work.iterdir()) == ["profile"]
    assert sorted(path.name for path in (work / "profile").iterdir()) == ["profile.html", "profile.json", "trace.json"]
    content = json.loads((work / "profile" / "profile.json").read_text())
    stages = {stage for lane in content["measurement"]["lanes"] for stage in lane["stage_ms"]}
    assert {"feed.wait", "forward", "loss", "backward", "optimizer", "ema", "draw", "read"} <= stages


def content_of_limits(work):
    limits = json.loads((work / "profile" / "profile.json").read_text())["measurement"]["limits"]
    return limits["compute_ms"] > 0 and limits["input_ms"] > 0


@pytest.mark.slow
def test_network_and_input_of_a_flag_that_changes_both_are_tried_separately(data, tmp_path, monkeypatch, one_thread):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    flags = ["--data", str(data), "--cfg", "yolov7-tiny", "--weights", "", "--img", "32", "--batch", "2"]
    training = training_of(*flags, "--device", "cpu", "--workers", "1", "--noautoanchor")
    both = Switch("--both", {"channels_last": True, "cache_images": True}, covers=("a part of it",))
    tried = training.end_to_end_trial("both", both)
    assert min(tried.compute_ms, tried.input_ms) > 0 and tried.device_ms == tried.input_device_ms == 0
    assert (tried.change, tried.covers, dict(tried.switch)) == ("--both", both.covers, both.options)
    assert list((tmp_path / "cache" / "flatout" / "stores").glob("*")), "the input was tried without the change"


def test_an_unknown_job_is_refused(capsys):
    assert main(["profile", "cooking"]) == 2
    message = capsys.readouterr().err
    assert "unknown job 'cooking'" in message and "python -m flatout.profile_any train.py" in message


@pytest.mark.parametrize(
    ("device", "bf16", "flags", "tried"),
    [
        ("cuda:0", True, (), {"--fast"}),
        ("cuda:0", True, ("--fast",), set()),
        ("cpu", False, (), {"--channels-last"}),
        ("cpu", False, ("--channels-last",), set()),
        ("cpu", True, (), {"--channels-last", "--channels-last --amp bf16"}),
        ("cpu", True, ("--channels-last",), {"--amp bf16"}),
        ("cpu", True, ("--channels-last", "--amp", "bf16"), set()),
        ("cpu", True, ("--amp", "off"), {"--channels-last"}),
        ("cpu", True, ("--fast",), set()),
    ],
)
def test_a_flag_is_tried_if_it_is_not_on_already_and_helps_on_this_device(device, bf16, flags, tried, monkeypatch):
    monkeypatch.setattr("flatout.yolo.profile.choose_devices", lambda text: [torch.device(device)])
    monkeypatch.setattr("flatout.yolo.profile.has_native_bf16", lambda device: bf16)
    training = training_of(*flags)
    switches = [*training.network_switches().values(), *training.end_to_end_switches().values()]
    assert {switch.change for switch in switches} == tried
    for switch in switches:  # as typed, and as applied
        typed = training_of(*flags, *switch.change.split()).options
        assert training.with_switch(switch.options).options == typed


def test_too_few_steps_are_refused_with_the_minimum(capsys):
    assert MIN_STEPS == MIN_TIMED_STEPS
    assert main(["profile", "yolo", "--steps", "2"]) == 2
    assert "--steps 3 or more" in capsys.readouterr().err


def test_an_unwritable_output_folder_is_refused_before_anything_is_measured(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main(["profile", "yolo", "--out", str(out)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"flatout: --out {out} cannot be written: ") and "is not a writable folder" in said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_output_folder_below_one_that_may_not_be_entered_is_refused(tmp_path, monkeypatch, capsys):
    closed, stat = tmp_path / "closed", os.stat
    closed.mkdir()

    def refuse(path, **how):
        if str(path).startswith(f"{closed}/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **how)

    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed)
    assert main(["profile", "yolo", "--out", str(closed / "mine" / "profile")]) == 2
    assert f"cannot be written: {closed} is not a writable folder" in capsys.readouterr().err


class Trainings:
    """Fake of the training function that records its options."""

    def __init__(self):
        self.options = []

    def __call__(self, options, callbacks=(), *, seams):
        self.options.append(options)


def test_a_profiled_training_leaves_nothing_in_a_mirror(tmp_path, monkeypatch):
    ran = Trainings()
    monkeypatch.setattr("flatout.yolo.train.train", ran)
    training_of("--mirror", f"file://{tmp_path}/copies").observe()
    (options,) = ran.options
    assert (options.mirror, options.resume, options.fresh, options.log_to) == ("", False, True, ("none",))
    assert Path(options.project).name.startswith("flatout-profile-") and not Path(options.project).exists()


def test_a_profiled_training_validates_nothing_and_saves_nothing(tmp_path):
    brief = training_of("--epochs", "7", "--patience", "3").brief(tmp_path, 40)
    assert (brief.nosave, brief.notest, brief.no_preflight, brief.patience) == (True, True, True, 0)
    assert (brief.project, brief.stop_after, brief.log_every, brief.epochs) == (str(tmp_path), 40, 40, 40)


@pytest.mark.parametrize("is_profiled", [True, False])
def test_a_profiled_training_makes_no_plots(data, tmp_path, monkeypatch, one_thread, is_profiled):
    plotted = []
    monkeypatch.setattr("flatout.yolo.train.recipe.plot_labels", lambda *about: plotted.append("labels"))
    monkeypatch.setattr("flatout.charts.boxes.plot_batch", lambda *about: plotted.append("batch"))
    flags = ["--data", str(data), "--cfg", "yolov7-tiny", "--weights", "", "--img", "32", "--batch", "2", "--notest"]
    flags += ["--device", "cpu", "--workers", "0", "--noautoanchor", "--nosave", "--epochs", "2"]
    training = training_of(*flags, "--project", str(tmp_path / "runs"))
    if is_profiled:
        training.observe()
        assert plotted == []
    else:
        training.command.train(replace(training.options, stop_after=5, log_to=("none",)))
        assert plotted == ["labels"] + 4 * ["batch"]
