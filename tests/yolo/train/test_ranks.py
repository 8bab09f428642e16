"""Ranks under torchrun: one run folder, a shared validation, and a run that continues on more ranks."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.safefiles.container import read_container
from flatout.yolo.options import TrainOptions
from flatout.yolo.train import train

ROOT = Path(__file__).parents[3]
SEED_OF_ONE_RANK = 1


def torchrun(options: TrainOptions, *more: str) -> str:
    """train.py on two ranks, on the CPU unless `more` flags say otherwise; returns its output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(ROOT / "train.py"), "--device", "cpu", "--noautoanchor", "--workers", "0", "--weights", ""]
    for flag, value in {
        "--cfg": options.cfg,
        "--data": options.data,
        "--hyp": options.hyp,
        "--epochs": options.epochs,
        "--batch-size": options.batch_size,
        "--test-batch-size": options.test_batch_size,
        "--img-size": options.img_size[0],
        "--project": options.project,
    }.items():
        command += [flag, str(value)]
    command += more
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_a_run_of_one_rank_goes_on_with_two_that_share_the_validation(options: TrainOptions) -> None:
    options = replace(options, test_batch_size=2)
    assert train(replace(options, stop_after=2))
    output = torchrun(options)
    assert "Continuing" in output
    assert "world_size 1 -> 2: samples and their order per step stay the same" in output
    (folder,) = Path(options.project).iterdir()
    assert [line.split()[0] for line in (folder / "results.txt").read_text().splitlines()] == ["0/1", "1/1"]
    assert re.search(r"^ +all +6 ", output, re.MULTILINE), "images of both ranks are evaluated"
    assert (folder / "weights/best.pt").is_file()
    assert output.count("Model Summary") == 1, "the second rank logs nothing"
    # With YOLOv7's seed for two ranks, which is 2, they would see other images than the single rank before.
    run = read_container(folder / "weights/epoch_001.pt")["run"]
    assert isinstance(run, dict) and run["seed"] == SEED_OF_ONE_RANK
