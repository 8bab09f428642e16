"""`flatout profile yolo` trains for a moment, shows where the time went, and leaves only its report."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from flatout.__main__ import main

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


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_a_training_is_profiled_and_nothing_else_is_left(data, tmp_path, monkeypatch, capsys, one_thread):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    flags = ["--data", str(data), "--cfg", str(ROOT / "cfg/training/yolov7-tiny.yaml"), "--weights", ""]
    flags += ["--hyp", str(ROOT / "data/hyp.scratch.tiny.yaml"), "--img", "32", "--batch", "2", "--device", "cpu"]
    assert main(["profile", "yolo", "--steps", "3", *flags, "--workers", "1", "--noautoanchor"]) == 0
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


def test_an_unknown_job_is_refused(capsys):
    assert main(["profile", "cooking"]) == 2
    assert "unknown job 'cooking'" in capsys.readouterr().err
