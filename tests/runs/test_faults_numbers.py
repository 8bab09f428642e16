"""F25, F26, F27: numbers that are not finite, and out of memory."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.runs.comparing_states import differences_between, rows_of, state_of
from tests.runs.toy_runs import Toys

pytestmark = pytest.mark.fault


def is_finite(folder: Path, name: str = "last.pt") -> bool:
    tensors = [value for value in state_of(folder, name).values() if isinstance(value, torch.Tensor)]
    return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor.is_floating_point())


def bad_steps(folder: Path) -> list[int]:
    return [row["bad_steps"] for row in rows_of(folder / "log.jsonl")]


@pytest.mark.parametrize("kind", ["--poison-loss", "--poison-input"])
def test_a_step_that_is_not_finite_is_skipped_and_counted(kind: str, toys: Toys, undisturbed: Path, tmp_path: Path):
    """F25: one bad batch among good ones."""
    run = toys.run(tmp_path, kind, "1:5")
    assert run.code == 0, run.output
    assert bad_steps(tmp_path / "toy") == [0, 1, 0, 0]
    assert is_finite(tmp_path / "toy")
    assert "weights.state.0.weight" in differences_between(undisturbed, tmp_path / "toy")


def test_three_in_a_row_set_the_training_back_to_a_good_checkpoint(toys: Toys, undisturbed: Path, tmp_path: Path):
    """F25: after transient faults, the result is the same as without them."""
    run = toys.run(tmp_path, "--poison-loss", "1:5,1:6,1:7", "--transient")
    assert run.code == 0, run.output
    assert "Loss, gradients or weights are not finite (epoch 1 step 5: samples" in run.output
    assert "Going back to" in run.output
    assert differences_between(undisturbed, tmp_path / "toy") == []


def test_two_in_a_row_do_not(toys: Toys, tmp_path: Path):
    run = toys.run(tmp_path, "--poison-loss", "1:5,1:6")
    assert run.code == 0, run.output
    assert "Going back to" not in run.output
    # The whole window that step 6 begins is skipped.
    assert bad_steps(tmp_path / "toy") == [0, 3, 0, 0]


def test_a_permanent_fault_ends_the_training_and_names_the_samples(toys: Toys, tmp_path: Path):
    """F25: exit code 6, and everything needed to check the data."""
    run = toys.run(tmp_path, "--poison-loss", ",".join(f"1:{step}" for step in range(10)), env={"TOY_LOG": "DEBUG"})
    assert run.code == 6, run.output
    last = run.output.splitlines()[-1]
    assert last.startswith("flatout: Loss, gradients or weights are not finite (epoch 1 step ")
    listed = json.loads((tmp_path / "toy/weights/diverged.json").read_text())
    first, *others = listed
    assert (first["epoch"], first["step"], len(others)) == (1, 0, 3)
    assert first["weights"] == "before_e001_s0000.pt"
    assert is_finite(tmp_path / "toy", first["weights"])
    for bad in others:
        assert f"epoch 1 step {bad['step']}: samples {', '.join(bad['names'][:3])}, ..." in last
        assert f"epoch 1 step {bad['step']} samples {bad['samples']}" in run.output
        assert [re.sub(r"\D", "", name) for name in bad["names"]] == list(map(str, bad["samples"]))
    assert is_finite(tmp_path / "toy")


def test_weights_that_are_not_finite_are_never_saved(toys: Toys, tmp_path: Path):
    """F26: a save is due right after the weights became NaN."""
    run = toys.run(tmp_path, "--poison-weights", "1:7", "--save-every-steps", 2)
    assert run.code == 6, run.output
    for name in ("last.pt", "last.prev.pt"):
        assert is_finite(tmp_path / "toy", name)


def test_weights_that_were_not_finite_once_are_set_back(toys: Toys, undisturbed: Path, tmp_path: Path):
    """F26."""
    run = toys.run(tmp_path, "--poison-weights", "1:7", "--transient", "--save-every-steps", 2)
    assert run.code == 0, run.output
    assert differences_between(undisturbed, tmp_path / "toy") == []


def test_out_of_memory_suggests_a_batch_that_fits_and_the_checkpoint_is_kept(
    toys: Toys, undisturbed: Path, tmp_path: Path
):
    """F27: the batch is never shrunk silently."""
    run = toys.run(tmp_path, "--no-memory", "2:1")
    assert run.code == 5, run.output
    assert "flatout: out of GPU memory with 12 " in run.output
    assert "a batch size of 6" in run.output
    assert toys.run(tmp_path).code == 0
    assert differences_between(undisturbed, tmp_path / "toy") == []
