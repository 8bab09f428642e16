"""F25, F26, F27: numbers that are not finite, and memory that does not suffice."""

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
def test_a_step_that_is_not_finite_is_left_out_and_counted(kind: str, toys: Toys, undisturbed: Path, tmp_path: Path):
    """F25: one bad batch among good ones."""
    run = toys.run(tmp_path, kind, "1:5")
    assert run.code == 0, run.said
    assert bad_steps(tmp_path / "toy") == [0, 1, 0, 0]
    assert is_finite(tmp_path / "toy")
    assert "weights.state.0.weight" in differences_between(undisturbed, tmp_path / "toy")


def test_three_in_a_row_set_the_training_back_to_where_it_was_good(toys: Toys, undisturbed: Path, tmp_path: Path):
    """F25: once trouble has passed, the end is the same as if it had never been."""
    run = toys.run(tmp_path, "--poison-loss", "1:5,1:6,1:7", "--transient")
    assert run.code == 0, run.said
    assert "Loss, gradients or weights are not finite (epoch 1 step 5: samples" in run.said
    assert "Going back to" in run.said
    assert differences_between(undisturbed, tmp_path / "toy") == []


def test_two_in_a_row_do_not(toys: Toys, tmp_path: Path):
    run = toys.run(tmp_path, "--poison-loss", "1:5,1:6")
    assert run.code == 0, run.said
    assert "Going back to" not in run.said
    # The window that step 6 begins is left out as a whole.
    assert bad_steps(tmp_path / "toy") == [0, 3, 0, 0]


def test_trouble_that_comes_back_ends_the_training_and_names_the_samples(toys: Toys, tmp_path: Path):
    """F25: exit code 6, and everything needed to look at the data."""
    run = toys.run(tmp_path, "--poison-loss", ",".join(f"1:{step}" for step in range(10)), env={"TOY_LOG": "DEBUG"})
    assert run.code == 6, run.said
    last = run.said.splitlines()[-1]
    assert last.startswith("flatout: Loss, gradients or weights are not finite (epoch 1 step ")
    told = re.findall(r"epoch 1 step (\d): samples ([\d, ]+), \.\.\.", last)
    assert len(told) == 3
    for step, numbers in told:
        assert f"epoch 1 step {step} samples [{numbers}, " in run.said
    listed = json.loads((tmp_path / "toy/weights/diverged.json").read_text())
    assert [str(bad["step"]) for bad in listed] == [step for step, _ in told]
    assert all(f"samples {bad['samples']}" in run.said for bad in listed)
    assert is_finite(tmp_path / "toy")


def test_weights_that_are_not_finite_are_never_saved(toys: Toys, tmp_path: Path):
    """F26: a save is due right after the weights broke."""
    run = toys.run(tmp_path, "--poison-weights", "1:7", "--save-every-steps", 2)
    assert run.code == 6, run.said
    for name in ("last.pt", "last.prev.pt"):
        assert is_finite(tmp_path / "toy", name)


def test_weights_that_broke_once_are_set_back(toys: Toys, undisturbed: Path, tmp_path: Path):
    """F26."""
    run = toys.run(tmp_path, "--poison-weights", "1:7", "--transient", "--save-every-steps", 2)
    assert run.code == 0, run.said
    assert differences_between(undisturbed, tmp_path / "toy") == []


def test_too_little_memory_is_told_with_a_batch_that_fits_and_the_state_is_kept(
    toys: Toys, undisturbed: Path, tmp_path: Path
):
    """F27: the batch is never made smaller in silence."""
    run = toys.run(tmp_path, "--no-memory", "2:1")
    assert run.code == 5, run.said
    assert "flatout: out of GPU memory with 12 " in run.said
    assert "--batch-size 6" in run.said
    assert toys.run(tmp_path).code == 0
    assert differences_between(undisturbed, tmp_path / "toy") == []
