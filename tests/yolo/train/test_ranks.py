"""Two ranks train together: one run folder, the same samples per step as one rank, and the same command continues."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.yolo.options import TrainOptions

ROOT = Path(__file__).parents[3]


def launch(options: TrainOptions, *, stop_after: int | None = None) -> str:
    """train.py under torchrun on the CPU; returns what it said."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", f"--master_port={port}"]
    command += [str(ROOT / "train.py"), "--device", "cpu", "--noautoanchor", "--workers", "0", "--weights", ""]
    for flag, value in {
        "--cfg": options.cfg,
        "--data": options.data,
        "--hyp": options.hyp,
        "--epochs": 2,
        "--batch-size": options.batch_size,
        "--img-size": 64,
        "--project": options.project,
    }.items():
        command += [flag, str(value)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if stop_after is not None:
        environment["FLATOUT_STOP_AFTER"] = str(stop_after)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_two_ranks_share_a_run_and_the_same_command_continues_it(options: TrainOptions) -> None:
    launch(options, stop_after=1)
    said = launch(options)
    assert "Continuing" in said
    (folder,) = Path(options.project).iterdir()
    assert [line.split()[0] for line in (folder / "results.txt").read_text().splitlines()] == ["0/1", "1/1"]
    assert (folder / "weights/best.pt").is_file()
    assert said.count("Model Summary") == 1, "the second rank is silent"
