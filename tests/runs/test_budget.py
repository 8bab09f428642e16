"""The cost of a training, the end of a budget, and the variables of --on-done."""

import json
import logging
from pathlib import Path

import pytest

from flatout.engine.callbacks import Callbacks, End, RunStart, Saved
from flatout.errors import ConfigError, DataError, Interrupted
from flatout.runs.budget import Spending, budget_s
from flatout.runs.ends import OnDone


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def start_of(folder: Path, *, continues: bool) -> RunStart:
    return RunStart(job="yolo", folder=folder, config={}, epoch=3, epochs=9, continues=continues)


@pytest.mark.parametrize(
    ("text", "price", "seconds"),
    [
        ("5.00", 2.5, 7200), ("5", 0.5, 36000), (".5", 1, 1800), ("2h30m", None, 9000), ("90m", 7, 5400),
        ("1d", None, 86400), ("1.5h", None, 5400), ("45s", None, 45), ("1d2h3m4s", None, 93784),
    ],
)  # fmt: skip
def test_a_budget_is_money_or_time(text: str, price: float | None, seconds: float) -> None:
    assert budget_s(text, price) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["5 dollars", "2h 30m", "h", "30m2h", "-5", "1e3x", "$5"])
def test_what_is_neither_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"money such as 5\.00 \(with --price\), or a time such as 2h30m"):
        budget_s(text, 1.0)


def test_money_needs_a_price() -> None:
    with pytest.raises(ConfigError, match=r"--budget 5 is an amount of money and needs a --price above 0"):
        Spending(None, "5")
    assert budget_s("", None) is None


def test_what_was_spent_is_counted_over_all_processes_of_a_run(tmp_path: Path, clock: Clock) -> None:
    first = Spending(2.0, "1h", clock=clock)
    first.start(start_of(tmp_path, continues=False))
    clock.now_s += 1800
    first.checkpoint(Saved(path=tmp_path / "last.pt", epoch=0, step=1))
    clock.now_s += 60  # killed before the next save: not recorded
    assert json.loads((tmp_path / "spent.json").read_text())["seconds"] == 1800
    second = Spending(2.0, "1h", clock=clock)
    second.start(start_of(tmp_path, continues=True))
    clock.now_s += 1799
    assert second.over() is None and second.cost() == pytest.approx(2.0, abs=1e-2)
    clock.now_s += 1
    assert second.over() == (
        "The budget of 1h is used up (1:00:00, cost 2.00 at 2.00 an hour). Everything is saved: run the same command "
        "with a larger --budget to continue."
    )
    fresh = Spending(2.0, "1h", clock=clock)
    fresh.start(start_of(tmp_path, continues=False))
    assert fresh.seconds == 0


def test_the_progress_line_shows_what_it_costs_now_and_in_the_end(clock: Clock) -> None:
    spending = Spending(3.0, clock=clock)
    clock.now_s += 600
    assert spending.figures(left_s=3600) == {"cost": "0.50 of about 3.50"}
    assert Spending(clock=clock).figures(3600) == {}


# -- --on-done -----------------------------------------------------------------------------------------------------

WRITE_VARIABLES = "env | grep ^FLATOUT_ | sort > variables.txt"


def variables_in(folder: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (folder / "variables.txt").read_text().splitlines())


def test_the_command_gets_the_outcome_of_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLATOUT_DATA", raising=False)
    run = tmp_path / "a run; touch $(echo injected) `touch injected`"
    run.mkdir()
    with OnDone(WRITE_VARIABLES, Spending(1.0, clock=clock)) as done:
        callbacks = Callbacks([done])
        callbacks.start(start_of(run, continues=True))
        clock.now_s += 3600
        callbacks.end(End(how="stopped", why='"; touch injected; echo "', folder=run, epoch=7))
    variables = variables_in(tmp_path)
    assert variables == {
        "FLATOUT_OUTCOME": "stopped", "FLATOUT_EXIT_CODE": "0", "FLATOUT_RUN": str(run), "FLATOUT_EPOCH": "7",
        "FLATOUT_MESSAGE": '"; touch injected; echo "', "FLATOUT_SECONDS": "3600", "FLATOUT_COST": "1.00",
    }  # fmt: skip
    assert not list(tmp_path.rglob("injected*")), "a value was interpreted as shell code"


@pytest.mark.parametrize(
    ("error", "outcome", "code"),
    [
        (Interrupted("SIGTERM: saved."), "interrupted", "75"),
        (DataError("a\nb\0c"), "failed", "3"),
        (ZeroDivisionError("x"), "failed", "70"),
        (KeyboardInterrupt(), "interrupted", "130"),
    ],
)
def test_an_exception_is_reported_to_the_command_and_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, outcome: str, code: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(type(error)), OnDone(WRITE_VARIABLES, Spending()):
        raise error
    found = variables_in(tmp_path)
    assert (found["FLATOUT_OUTCOME"], found["FLATOUT_EXIT_CODE"], found["FLATOUT_RUN"]) == (outcome, code, "")
    assert found["FLATOUT_MESSAGE"] == " ".join(str(error).replace("\0", " ").split())


def test_a_command_that_fails_is_reported_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with OnDone("exit 9", Spending()):
        pass
    assert caplog.messages == ["--on-done ended with exit code 9: exit 9"]
    assert caplog.records[0].levelno == logging.WARNING


def test_of_several_ranks_only_the_first_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "1")
    with OnDone("touch run", Spending()):
        pass
    assert not (tmp_path / "run").exists()
