"""G5: on a GPU a resume changes nothing where kernels are deterministic."""

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

ARGS = ("--device", "cuda", "--deterministic")


def test_a_resume_on_a_gpu_changes_nothing(toys: Toys, tmp_path: Path):
    assert toys.run(tmp_path / "whole", *ARGS).code == 0
    for place in ("0:5", "2:8", "3:11"):
        project = tmp_path / place
        interrupted = toys.run(project, *ARGS, "--signal-at", f"{place}:SIGTERM")
        assert interrupted.code == 75, interrupted.said
        assert toys.run(project, *ARGS).code == 0
        assert differences_between(tmp_path / "whole/toy", project / "toy") == [], place


def test_a_resume_on_a_gpu_that_forgets_something_is_found_out(toys: Toys, tmp_path: Path):
    """Negative control of G5."""
    assert toys.run(tmp_path / "whole", *ARGS).code == 0
    assert toys.run(tmp_path / "parts", *ARGS, "--signal-at", "1:5:SIGTERM").code == 75
    assert toys.run(tmp_path / "parts", *ARGS, "--forget", "optimizer").code == 0
    assert differences_between(tmp_path / "whole/toy", tmp_path / "parts/toy") != []


def test_begun_on_a_gpu_and_ended_on_a_cpu_it_says_so(toys: Toys, tmp_path: Path):
    """F32."""
    assert toys.run(tmp_path, *ARGS, "--signal-at", "1:5:SIGTERM").code == 75
    run = toys.run(tmp_path, env={"CUDA_VISIBLE_DEVICES": ""})
    assert run.code == 0, run.said
    assert "-> None: sums round differently from here on; samples and schedule stay the same." in run.said
