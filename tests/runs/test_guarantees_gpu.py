"""G5: on a GPU a resume changes nothing if kernels are deterministic."""

from pathlib import Path

import pytest
import torch

from tests.runs.comparing_states import differences_between
from tests.runs.toy_runs import Toys

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.fault,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

ARGS = ("--device", "0", "--deterministic")


def test_a_resume_on_a_gpu_changes_nothing(toys: Toys, tmp_path: Path):
    assert toys.run(tmp_path / "whole", *ARGS).code == 0
    for position in ("0:5", "2:8", "3:11"):
        project = tmp_path / position
        interrupted = toys.run(project, *ARGS, "--signal-at", f"{position}:SIGTERM")
        assert interrupted.code == 75, interrupted.output
        assert toys.run(project, *ARGS).code == 0
        assert differences_between(tmp_path / "whole/toy", project / "toy") == [], position


def test_a_resume_on_a_gpu_that_does_not_restore_a_part_is_detected(toys: Toys, tmp_path: Path):
    """Negative control of G5."""
    assert toys.run(tmp_path / "whole", *ARGS).code == 0
    assert toys.run(tmp_path / "parts", *ARGS, "--signal-at", "1:5:SIGTERM").code == 75
    assert toys.run(tmp_path / "parts", *ARGS, "--forget", "optimizer").code == 0
    assert differences_between(tmp_path / "whole/toy", tmp_path / "parts/toy") != []


def test_continuing_a_gpu_run_on_a_cpu_is_logged(toys: Toys, tmp_path: Path):
    """F32."""
    assert toys.run(tmp_path, *ARGS, "--signal-at", "1:5:SIGTERM").code == 75
    run = toys.run(tmp_path, env={"CUDA_VISIBLE_DEVICES": ""})
    assert run.code == 0, run.output
    assert "-> None: sums round differently from here on; samples and schedule stay the same." in run.output
