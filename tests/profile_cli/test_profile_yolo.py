"""`flatout profile yolo` trains for a moment, shows where the time went, and leaves only its report."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from flatout.__main__ import main
from flatout.profile_cli import FEWEST_STEPS
from flatout.profile_cli.engine_training import Switch
from flatout.profile_cli.unpictured import unpictured
from flatout.profile_cli.yolo import YoloTraining
from flatout.profiler.observation import AT_LEAST
from flatout.yolo.train import whole
from flatout.yolo.train.batch_pictures import BatchPictures

ROOT = Path(__file__).parents[2]


@pytest.fixture
def data(tmp_path):
    """Eight pictures with one box each."""
    for split in ("train", "val"):
        for part in ("images", "labels"):
            (tmp_path / part / split).mkdir(parents=True)
        for number in range(8 if split == "train" else 2):
            picture = np.random.default_rng(number).integers(0, 256, (48, 64, 3), dtype=np.uint8)
            cv2.imwrite(str(tmp_path / "images" / split / f"{number}.png"), picture)
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
    told = capsys.readouterr().out
    assert "limits: compute" in told
    assert content_of_limits(work)
    assert "Verdict:" in told and "unexplained" in told and "loader workers" in told
    assert sorted(path.name for path in work.iterdir()) == ["profile"]
    assert sorted(path.name for path in (work / "profile").iterdir()) == ["profile.html", "profile.json", "trace.json"]
    content = json.loads((work / "profile" / "profile.json").read_text())
    stages = {stage for lane in content["measurement"]["lanes"] for stage in lane["stage_ms"]}
    assert {"feed.wait", "forward", "loss", "backward", "optimizer", "ema", "draw", "read"} <= stages


def content_of_limits(work):
    limits = json.loads((work / "profile" / "profile.json").read_text())["measurement"]["limits"]
    return limits["compute_ms"] > 0 and limits["input_ms"] > 0


@pytest.mark.slow
def test_network_and_input_of_a_flag_that_changes_both_are_tried_by_themselves(data, tmp_path, monkeypatch, one_thread):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    flags = ["--data", str(data), "--cfg", "yolov7-tiny", "--weights", "", "--img", "32", "--batch", "2"]
    training = YoloTraining.from_flags([*flags, "--device", "cpu", "--workers", "1", "--noautoanchor"], num_steps=3)
    both = Switch("--both", {"channels_last": True, "cache_images": True}, covers=("a part of it",))
    tried = training.whole_trial("both", both)
    assert min(tried.compute_ms, tried.input_ms) > 0 and tried.device_ms == tried.beside_ms == 0
    assert (tried.change, tried.covers, dict(tried.switch)) == ("--both", both.covers, both.options)
    assert list((tmp_path / "cache" / "flatout" / "stores").glob("*")), (
        "the changed input was not the one that was tried"
    )


def test_an_unknown_job_is_refused(capsys):
    assert main(["profile", "cooking"]) == 2
    assert "unknown job 'cooking'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "flags", "tried"),
    [
        ("cuda:0", (), {"--fast"}),
        ("cuda:0", ("--fast",), set()),
        ("cpu", (), {"--channels-last"}),
        ("cpu", ("--channels-last",), set()),
    ],
)
def test_what_is_switched_on_is_not_tried_out_again(device, flags, tried, monkeypatch):
    monkeypatch.setattr("flatout.engine.device_choice.choose_devices", lambda text: [torch.device(device)])
    training = YoloTraining.from_flags(list(flags), num_steps=3)
    switches = [*training.network_switches().values(), *training.whole_switches().values()]
    assert {switch.change for switch in switches} == tried


def test_too_few_steps_are_refused_with_the_least_that_is_enough(capsys):
    assert FEWEST_STEPS == AT_LEAST
    assert main(["profile", "yolo", "--steps", "2"]) == 2
    assert "--steps 3 or more" in capsys.readouterr().err


def test_a_report_that_could_not_be_written_is_refused_before_anything_is_measured(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main(["profile", "yolo", "--out", str(out)]) == 2
        assert "not a folder that can be written to" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_is_looked_at_leaves_nothing_in_a_mirror(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr("flatout.yolo.train.train", ran.append)
    YoloTraining.from_flags(["--mirror", f"file://{tmp_path}/copies"], num_steps=3).run(tmp_path, 3)
    assert (ran[0].mirror, ran[0].resume, ran[0].project) == ("", False, str(tmp_path))


def test_a_training_to_look_at_draws_no_pictures():
    with unpictured():
        assert whole.draw_labels(None, (), Path("nowhere")) is None
        kept = BatchPictures(Path("nowhere"), ())
        kept.keep(0, 0, torch.zeros(1, 3, 4, 4), torch.zeros(0, 6))
        assert not kept._kept
    kept.keep(0, 0, torch.zeros(1, 3, 4, 4), torch.zeros(0, 6))
    assert kept._kept
