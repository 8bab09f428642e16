"""What a resume promises (G1-G4, G8, G9), and controls that show that each promise can be broken.

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
PLACES = [f"{epoch}:{step}" for epoch in range(EPOCHS) for step in range(STEPS + VALIDATED)]
"""Steps from 10 on are those of the validation."""


def interrupted_at(toys: Toys, project: Path, *places: str, args: tuple[object, ...] = ()) -> Path:
    """The folder of a training that got SIGTERM at each of these places, and was started again every time."""
    for place in places:
        run = toys.run(project, "--signal-at", f"{place}:SIGTERM", *args)
        assert run.code == 75, run.said
    run = toys.run(project, *args)
    assert run.code == 0, run.said
    return project / "toy"


@pytest.fixture(scope="session")
def at_its_beginning(toys: Toys, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that was killed at its first step."""
    project = tmp_path_factory.mktemp("beginning")
    assert toys.run(project, "--signal-at", "0:0:SIGKILL").code == -9
    return project / "toy"


def test_the_toy_really_learns(undisturbed: Path, at_its_beginning: Path):
    """Else all that follows would prove nothing."""
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
    """G2: in the middle of windows and of validations too."""
    every = max(1, len(PLACES) // repeats)
    for place in PLACES[1::every]:
        folder = interrupted_at(toys, tmp_path / place, place)
        assert differences_between(undisturbed, folder) == [], place


@pytest.mark.parametrize("part", ["random", "optimizer", "meter", "job", "position", "ema", "state"])
def test_a_resume_that_forgets_something_is_found_out(part: str, toys: Toys, undisturbed: Path, tmp_path: Path):
    """Negative controls of G2: the comparison above sees each part of the state."""
    # What the job remembers is how long its tables were: one was written to since the last save.
    place, code = ("2:1:SIGKILL", -9) if part == "job" else ("1:5:SIGTERM", 75)
    run = toys.run(tmp_path, "--signal-at", place)
    assert run.code == code, run.said
    assert toys.run(tmp_path, "--forget", part).code == 0
    assert differences_between(undisturbed, tmp_path / "toy") != []


def test_five_resumes_within_an_epoch_change_nothing(toys: Toys, undisturbed: Path, tmp_path: Path, repeats: int):
    """G3: random schedules of interruptions, one in every window of an epoch."""
    for attempt in range(max(1, repeats // 5)):
        chance = random.Random(attempt)
        epoch = chance.randrange(EPOCHS)
        places = [f"{epoch}:{window + chance.randrange(WINDOW)}" for window in range(0, STEPS, WINDOW)]
        folder = interrupted_at(toys, tmp_path / str(attempt), *places)
        assert differences_between(undisturbed, folder) == [], places


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_number_of_workers_changes_nothing(workers: int, toys: Toys, undisturbed: Path, tmp_path: Path):
    """G1, and F32: begun with these workers, ended without any."""
    run = toys.run(tmp_path, "--workers", workers, "--signal-at", "2:3:SIGTERM")
    assert run.code == 75, run.said
    run.wait_until_nothing_is_left()
    assert toys.run(tmp_path).code == 0
    assert differences_between(undisturbed, tmp_path / "toy") == []


def test_a_source_that_draws_its_own_numbers_is_found_out(toys: Toys, undisturbed: Path, tmp_path: Path):
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
            streams[seed, workers] = samples_of(run.said)
            assert len(streams[seed, workers]) == 2 * STEPS
    assert streams[1, 0] == streams[1, 2]
    assert streams[2, 0] == streams[2, 2]
    assert all(streams[1, 0][place] != streams[2, 0][place] for place in streams[1, 0])


def test_a_stream_that_ignores_its_seed_is_found_out(toys: Toys, tmp_path: Path):
    """Negative control of G9."""
    args = ("--unseeded", "--epochs", 1)
    said = [toys.run(tmp_path / str(seed), *args, "--seed", seed, env={"TOY_LOG": "DEBUG"}).said for seed in (1, 2)]
    assert len(samples_of(said[0])) == STEPS
    assert samples_of(said[0]) == samples_of(said[1])


def test_with_two_threads_a_resume_changes_nothing_either(toys: Toys, tmp_path: Path):
    """G4: the promise holds for equal numbers of threads."""
    args = ("--threads", 2, "--epochs", 2)
    assert toys.run(tmp_path / "whole", *args).code == 0
    folder = interrupted_at(toys, tmp_path / "parts", "1:6", args=args)
    assert differences_between(tmp_path / "whole/toy", folder) == []


@pytest.mark.parametrize("threads", [1, 2])
def test_another_number_of_threads_is_told_and_is_no_error(threads: int, toys: Toys, tmp_path: Path):
    """G4, F32; and its control, the same number, of which nothing is said."""
    assert toys.run(tmp_path, "--signal-at", "1:5:SIGTERM").code == 75
    run = toys.run(tmp_path, "--threads", threads)
    assert run.code == 0
    told = "threads 1 -> 2: sums round differently from here on; samples and schedule stay the same." in run.said
    assert told == (threads == 2)
    assert ("round differently" in run.said) == told


@pytest.mark.parametrize("place", ["0:4", "2:7", "3:9"])
def test_a_signal_loses_nothing_and_a_kill_at_most_the_save_interval(place: str, toys: Toys, tmp_path: Path):
    """G8: a signal finishes the open window; every sixth step is saved."""
    epoch, step = map(int, place.split(":"))
    assert toys.run(tmp_path / "told", "--signal-at", f"{place}:SIGTERM").code == 75
    told = state_of(tmp_path / "told/toy")
    assert told["training.position.epoch"] == epoch
    assert 0 < told["training.position.step"] - step <= WINDOW
    assert toys.run(tmp_path / "killed", "--signal-at", f"{place}:SIGKILL").code == -9
    killed = state_of(tmp_path / "killed/toy")
    saved = killed["training.position.epoch"] * STEPS + killed["training.position.step"]
    assert 0 <= epoch * STEPS + step - saved <= 6
