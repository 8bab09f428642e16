"""The guarantees of a resume (G1-G4, G8, G9), each with a negative control that breaks it.

Trainings are real processes; they are compared to the last bit.
"""

import random
import re
from pathlib import Path

import pytest

from tests.runs.comparing_states import differences_between, rows_of, state_of
from tests.runs.toy_ranks import samples_of
from tests.runs.toy_runs import REPEATS, Toys

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120 + 12 * REPEATS)]

EPOCHS, STEPS, WINDOW, VALIDATED = 4, 10, 2, 3
POSITIONS = [f"{epoch}:{step}" for epoch in range(EPOCHS) for step in range(STEPS + VALIDATED)]
"""Steps from 10 on are those of the validation."""


def interrupted_at(toys: Toys, project: Path, *positions: str, args: tuple[object, ...] = ()) -> Path:
    """The folder of a training that got SIGTERM at each of these positions and was started again every time."""
    for position in positions:
        run = toys.run(project, "--signal-at", f"{position}:SIGTERM", *args)
        assert run.code == 75, run.output
    run = toys.run(project, *args)
    assert run.code == 0, run.output
    return project / "toy"


@pytest.fixture(scope="session")
def at_its_beginning(toys: Toys, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that was killed at its first step."""
    project = tmp_path_factory.mktemp("beginning")
    assert toys.run(project, "--signal-at", "0:0:SIGKILL").code == -9
    return project / "toy"


def test_the_toy_really_learns(undisturbed: Path, at_its_beginning: Path):
    """Otherwise the tests below would prove nothing."""
    first, final = state_of(at_its_beginning), state_of(undisturbed)
    assert first["training.position.step"] == 0
    for name in [name for name in first if re.fullmatch(r"weights\.state\..*(weight|bias)", name)]:
        moved = (final[name] - first[name]).norm() / first[name].norm().clamp(min=0.1)
        assert moved > 1e-2, name
    scores = [row["val_accuracy"] for row in rows_of(undisturbed / "log.jsonl")]
    assert scores[-1] > scores[0]


def test_two_undisturbed_trainings_are_the_same(toys: Toys, undisturbed: Path, tmp_path: Path):
    assert toys.run(tmp_path).code == 0
    assert differences_between(undisturbed, tmp_path / "toy") == []


def test_a_resume_from_any_step_changes_nothing(toys: Toys, undisturbed: Path, tmp_path: Path, repeats: int):
    """G2: also in the middle of windows and of validations."""
    every = max(1, len(POSITIONS) // repeats)
    for position in POSITIONS[1::every]:
        folder = interrupted_at(toys, tmp_path / position, position)
        assert differences_between(undisturbed, folder) == [], position


@pytest.mark.parametrize("part", ["random", "optimizer", "meter", "job", "position", "ema", "state"])
def test_a_resume_that_does_not_restore_a_part_is_detected(part: str, toys: Toys, undisturbed: Path, tmp_path: Path):
    """Negative controls of G2: the comparison above covers each part of the state."""
    # The job's part is the length of its tables: one must have grown since the last save.
    position, code = ("2:1:SIGKILL", -9) if part == "job" else ("1:5:SIGTERM", 75)
    run = toys.run(tmp_path, "--signal-at", position)
    assert run.code == code, run.output
    assert toys.run(tmp_path, "--forget", part).code == 0
    assert differences_between(undisturbed, tmp_path / "toy") != []


def test_five_resumes_within_an_epoch_change_nothing(toys: Toys, undisturbed: Path, tmp_path: Path, repeats: int):
    """G3: random schedules of interruptions, one in every window of an epoch."""
    for attempt in range(max(1, repeats // 5)):
        chance = random.Random(attempt)
        epoch = chance.randrange(EPOCHS)
        positions = [f"{epoch}:{window + chance.randrange(WINDOW)}" for window in range(0, STEPS, WINDOW)]
        folder = interrupted_at(toys, tmp_path / str(attempt), *positions)
        assert differences_between(undisturbed, folder) == [], positions


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_number_of_workers_changes_nothing(workers: int, toys: Toys, undisturbed: Path, tmp_path: Path):
    """G1, F32: started with these workers, finished without any."""
    run = toys.run(tmp_path, "--workers", workers, "--signal-at", "2:3:SIGTERM")
    assert run.code == 75, run.output
    run.wait_until_nothing_is_left()
    assert toys.run(tmp_path).code == 0
    assert differences_between(undisturbed, tmp_path / "toy") == []


def test_a_source_that_depends_on_its_process_is_detected(toys: Toys, undisturbed: Path, tmp_path: Path):
    """Negative control of G1."""
    assert toys.run(tmp_path, "--workers", 1, "--unkeyed").code == 0
    assert "weights.state.0.weight" in differences_between(undisturbed, tmp_path / "toy")


def test_another_seed_is_another_stream_with_any_number_of_workers(toys: Toys, tmp_path: Path):
    """G9."""
    streams = {}
    for seed in (1, 2):
        for workers in (0, 2):
            args = ("--seed", seed, "--workers", workers, "--epochs", 2)
            run = toys.run(tmp_path / f"{seed}-{workers}", *args, env={"TOY_LOG": "DEBUG"})
            streams[seed, workers] = samples_of(run.output)
            assert len(streams[seed, workers]) == 2 * STEPS
    assert streams[1, 0] == streams[1, 2]
    assert streams[2, 0] == streams[2, 2]
    assert all(streams[1, 0][position] != streams[2, 0][position] for position in streams[1, 0])


def test_a_stream_that_ignores_its_seed_is_detected(toys: Toys, tmp_path: Path):
    """Negative control of G9."""
    args = ("--unseeded", "--epochs", 1)
    logs = [toys.run(tmp_path / str(seed), *args, "--seed", seed, env={"TOY_LOG": "DEBUG"}).output for seed in (1, 2)]
    assert len(samples_of(logs[0])) == STEPS
    assert samples_of(logs[0]) == samples_of(logs[1])


def test_with_two_threads_a_resume_changes_nothing_either(toys: Toys, tmp_path: Path):
    """G4: the guarantee holds for equal numbers of threads."""
    args = ("--threads", 2, "--epochs", 2)
    assert toys.run(tmp_path / "whole", *args).code == 0
    folder = interrupted_at(toys, tmp_path / "parts", "1:6", args=args)
    assert differences_between(tmp_path / "whole/toy", folder) == []


@pytest.mark.parametrize("threads", [1, 2])
def test_another_number_of_threads_is_logged_and_is_not_an_error(threads: int, toys: Toys, tmp_path: Path):
    """G4, F32; the control is the same number, which is not logged."""
    assert toys.run(tmp_path, "--signal-at", "1:5:SIGTERM").code == 75
    run = toys.run(tmp_path, "--threads", threads)
    assert run.code == 0
    is_logged = "threads 1 -> 2: sums round differently from here on; samples and schedule stay the same." in run.output
    assert is_logged == (threads == 2)
    assert ("round differently" in run.output) == is_logged


@pytest.mark.parametrize("position", ["0:4", "2:7", "3:9"])
def test_a_signal_loses_nothing_and_a_kill_at_most_the_save_interval(position: str, toys: Toys, tmp_path: Path):
    """G8: a signal finishes the current window; every sixth step is saved."""
    epoch, step = map(int, position.split(":"))
    assert toys.run(tmp_path / "signalled", "--signal-at", f"{position}:SIGTERM").code == 75
    signalled = state_of(tmp_path / "signalled/toy")
    assert signalled["training.position.epoch"] == epoch
    assert 0 < signalled["training.position.step"] - step <= WINDOW
    assert toys.run(tmp_path / "killed", "--signal-at", f"{position}:SIGKILL").code == -9
    killed = state_of(tmp_path / "killed/toy")
    saved = killed["training.position.epoch"] * STEPS + killed["training.position.step"]
    assert 0 <= epoch * STEPS + step - saved <= 6
