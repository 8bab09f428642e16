"""F01, F02, F03, F14: a training that is interrupted or killed at random moments.

In every case the same command continues, and the result is the same to the last bit.
FLATOUT_FAULT_REPEATS is the number of repetitions (10; 100 for a nightly run).
"""

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from flatout.safefiles.container import read_container
from tests.feed.injections import open_files, status_of, wait_until
from tests.runs.comparing_states import differences_between
from tests.runs.toy_runs import REPEATS, ToyRun, Toys

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120 + 12 * REPEATS)]

SLOWLY = ("--delay-ms", 10)
TO_THE_END_S = 1.0
"""About the duration of a slow training, so that random moments fall anywhere in it."""


def after_a_while(run: ToyRun, chance: random.Random) -> None:
    run.wait_for_words("training")
    time.sleep(chance.uniform(0, TO_THE_END_S))


def finish(toys: Toys, project: Path) -> Path:
    """Run the same command again."""
    run = toys.run(project)
    assert run.code == 0, run.output
    return project / "toy"


def workers(attempt: int) -> tuple[object, ...]:
    return ("--workers", 2 * (attempt % 2))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_at_any_moment_stops_the_training_and_nothing_is_lost(
    number: signal.Signals, toys: Toys, undisturbed: Path, tmp_path: Path, repeats: int
):
    """F01; F02 and F14 are the same for Ctrl-C once and a closed terminal."""
    for attempt in range(repeats if number == signal.SIGTERM else max(1, repeats // 5)):
        project = tmp_path / str(attempt)
        run = toys.start(project, *SLOWLY, *workers(attempt))
        after_a_while(run, random.Random(attempt))
        run.send(number)
        code = run.wait(limit_s=8)
        assert code in (75, 0), run.output
        if code == 75:
            last = run.output.splitlines()[-1]
            assert re.fullmatch(rf"flatout: {number.name}: .*saved.*\. Run the same command again.*\.", last)
            finish(toys, project)
        run.wait_until_nothing_is_left()
        assert differences_between(undisturbed, project / "toy") == [], attempt


def test_ctrl_c_twice_ends_immediately_and_touches_nothing(toys: Toys, undisturbed: Path, tmp_path: Path, repeats: int):
    """F02."""
    for attempt in range(max(2, repeats // 3)):
        project = tmp_path / str(attempt)
        # In the middle of a window, where steps are unsaved: otherwise the first Ctrl-C would end it.
        place = f"{1 + attempt % 3}:{1 + 2 * (attempt % 5)}"
        run = toys.start(
            project, *workers(attempt), "--signal-at", f"{place}:SIGINT,{place}:SIGINT", "--save-every-steps", 2
        )
        assert run.wait() == 130, run.output
        assert run.output.rstrip().endswith(
            "flatout: stopped immediately; everything saved so far is kept. Run the same command again."
        )
        run.wait_until_nothing_is_left()
        read_container(project / "toy/weights/last.pt")
        assert differences_between(undisturbed, finish(toys, project)) == []


def test_a_kill_at_any_moment_costs_only_time(toys: Toys, undisturbed: Path, tmp_path: Path, repeats: int):
    """F03: killed, started again, killed again, ... with the same result in the end."""
    chance = random.Random(3)
    for attempt in range(max(1, repeats // 5)):
        project, had_saved = tmp_path / str(attempt), False
        for _ in range(5):
            run = toys.start(project, *SLOWLY, *workers(attempt), "--save-every-steps", 2)
            after_a_while(run, chance)
            # Anonymous memory is freed with its last process.
            assert not [path for pid in run.children() for path in open_files(pid) if path.startswith("/dev/shm")]
            run.send(signal.SIGKILL)
            run.wait()
            run.wait_until_nothing_is_left()
            weights = project / "toy/weights"
            readable = [path for path in weights.glob("last*.pt") if read_container(path)]
            assert readable or not had_saved
            had_saved = bool(readable)
            if run.code == 0:
                break
        assert had_saved
        if run.code != 0:
            finish(toys, project)
        assert differences_between(undisturbed, project / "toy") == []


def test_a_kill_in_the_middle_of_a_save_costs_only_time(toys: Toys, undisturbed: Path, tmp_path: Path, repeats: int):
    """F03, targeted: killed as soon as the incomplete file exists."""
    hit = 0
    for attempt in range(repeats):
        project = tmp_path / str(attempt)
        run = toys.start(project, "--save-every-steps", 2, "--delay-ms", 5)
        run.wait_for_words("training")
        weights, skipped = project / "toy/weights", attempt
        while not run.has_ended():
            if list(weights.glob(".last.pt.*.part")):
                skipped -= 1
                if skipped < 0:
                    run.send(signal.SIGKILL)
                    break
        run.wait()
        hit += bool(list(weights.glob(".last.pt.*.part")))
        for path in weights.glob("last*.pt"):
            read_container(path)
        if run.code != 0:
            finish(toys, project)
        assert differences_between(undisturbed, project / "toy") == []
        assert not list(weights.glob(".*.part"))
    assert hit > 0, "no save was hit"


def test_closing_the_terminal_does_not_matter_under_nohup(toys: Toys, undisturbed: Path, tmp_path: Path):
    """F14."""
    run = toys.run(tmp_path, "--signal-at", "1:3:SIGHUP", ignore="SIGHUP")
    assert run.code == 0, run.output
    assert differences_between(undisturbed, tmp_path / "toy") == []


def test_sigusr1_saves_and_continues(toys: Toys, undisturbed: Path, tmp_path: Path):
    args = ("--save-every-steps", 1000)
    run = toys.run(tmp_path, *args, "--signal-at", "0:5:SIGUSR1,0:9:SIGKILL")
    assert run.code == -9
    again = toys.run(tmp_path, *args)
    assert "at epoch 0, step 6." in again.output
    assert differences_between(undisturbed, tmp_path / "toy") == []


def test_without_a_handler_everything_since_the_last_save_would_be_lost(toys: Toys, tmp_path: Path):
    """Negative control of F01: the signal is ignored, then the process is killed."""
    run = toys.run(tmp_path, "--signal-at", "0:5:SIGTERM,1:0:SIGKILL", "--save-every-steps", 1000, ignore="SIGTERM")
    assert run.code == -9
    again = toys.run(tmp_path, "--save-every-steps", 1000)
    assert "at epoch 0, step 0." in again.output


def test_a_signal_in_a_long_first_step_is_handled_immediately(toys: Toys, undisturbed: Path, tmp_path: Path):
    """Nothing is unsaved then, so the end of the step need not be awaited."""
    run = toys.start(tmp_path, "--delay-ms", 60_000)
    run.wait_for_words("training")
    time.sleep(0.2)
    run.send(signal.SIGTERM)
    assert run.wait(limit_s=5) == 75, run.output
    assert run.output.endswith("flatout: SIGTERM: everything is saved. Run the same command again to continue.\n")
    assert differences_between(undisturbed, finish(toys, tmp_path)) == []


def test_a_signal_while_a_batch_is_awaited_saves_what_was_trained(toys: Toys, tmp_path: Path):
    """Between two accumulation windows, each of which is one step here."""
    # Slow enough for the training not to end before its worker is stopped, even on a busy machine.
    run = toys.start(tmp_path, "--window", 1, "--workers", 1, "--save-every-steps", 1000, "--delay-ms", 100)
    run.wait_for_words("training")
    wait_until(lambda: len(run.children()) == 2, 10)
    feeding = run.children()
    (worker,) = (pid for pid in feeding if int(status_of(pid)["PPid"]) in feeding)
    time.sleep(0.3)
    os.kill(worker, signal.SIGSTOP)
    time.sleep(1)  # until the batches it had made before are used up
    run.send(signal.SIGTERM)
    assert run.wait(limit_s=5) == 75, run.output
    found = re.search(
        r"flatout: SIGTERM: saved at epoch (\d), step (\d+)\. Run the same command again to continue\.\n$", run.output
    )
    assert found, run.output
    again = toys.run(tmp_path, "--window", 1)
    assert f"at epoch {found[1]}, step {found[2]}.\n" in again.output
    assert again.code == 0, again.output
