"""Progress is told on terminals and in logs, and no clock that is set can confuse it (F11)."""

import io
import logging
import time

import pytest

from flatout.engine.progress import Pace, StepProgress, eta_text


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_off_a_terminal_lines_are_aligned_and_seldom(caplog):
    caplog.set_level(logging.INFO)
    clock = Clock()
    with StepProgress(1000, stream=io.StringIO(), every_s=10, clock=clock) as progress:
        for done in range(1, 101):
            clock.now_s += 0.5
            progress.advance(done, {"loss": f"{1 / done:.4f}"})
    assert len(caplog.messages) == 5
    assert caplog.messages[0] == "train     1/1000    0 %  loss 1.0000  8:20 left"
    assert caplog.messages[2] == "train    41/1000    4 %  loss 0.0244  8:00 left"


def test_the_last_step_is_always_told(caplog):
    caplog.set_level(logging.INFO)
    with StepProgress(3, stream=io.StringIO(), every_s=1e9) as progress:
        for done in (1, 2, 3):
            progress.advance(done)
    assert [message.split()[1] for message in caplog.messages] == ["1/3", "3/3"]


def test_steps_of_an_earlier_process_do_not_count_as_speed(caplog):
    caplog.set_level(logging.INFO)
    clock = Clock()
    with StepProgress(1000, start=900, stream=io.StringIO(), clock=clock) as progress:
        clock.now_s += 2
        progress.advance(901)
    assert caplog.messages == ["train   901/1000   90 %  3:18 left"]


def test_on_a_terminal_a_bar_is_drawn_and_removed(caplog):
    terminal = Terminal()
    with StepProgress(10, stream=terminal) as progress:
        for done in range(1, 11):
            progress.advance(done, {"loss": "0.1"})
    assert "10/10" in terminal.getvalue()
    assert "loss 0.1" in terminal.getvalue()
    assert not caplog.messages


def test_a_line_goes_above_the_bar_on_a_terminal_and_else_to_the_log(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    with StepProgress(10, stream=terminal) as progress:
        progress.say("image 1/2 [bold]a.jpg: 3 bolts")
    assert "image 1/2 [bold]a.jpg: 3 bolts" in terminal.getvalue() and not caplog.messages
    monkeypatch.setattr("sys.stdout", io.StringIO())  # somebody keeps the lines in a file
    with StepProgress(10, stream=terminal) as progress:
        progress.say("image 2/2 b.jpg: nothing")
    assert caplog.messages == ["image 2/2 b.jpg: nothing"]


@pytest.mark.parametrize("jump_s", [86_400, -86_400, 3600, -3600])
def test_a_wall_clock_that_jumps_changes_no_line(jump_s: float, caplog, monkeypatch):
    """F11: an ETA from time.time would be a day off, or negative."""
    caplog.set_level(logging.INFO)
    wall = time.time
    with StepProgress(10_000, stream=io.StringIO(), every_s=0) as progress:
        progress.advance(1)
        monkeypatch.setattr(time, "time", lambda: wall() + jump_s)
        progress.advance(2)
    assert caplog.messages[-1].endswith("0:00 left") or int(caplog.messages[-1].split()[-2].split(":")[0]) < 60


def test_the_pace_follows_a_change_of_speed():
    pace = Pace(0, 0.0)
    pace.update(100, 100.0)
    assert pace.seconds_for(10) == 10
    for second in range(1, 301):
        pace.update(100 + 10 * second, 100.0 + second)
    assert pace.seconds_for(10) == pytest.approx(1, rel=0.01)


def test_a_clock_that_stands_still_or_no_new_step_is_harmless():
    pace = Pace(5, 1.0)
    assert pace.seconds_for(3) is None
    pace.update(5, 2.0)
    assert pace.seconds_for(3) is None
    pace.update(6, 1.0)
    assert pace.seconds_for(3) == 0


def test_times_left_are_short():
    assert [eta_text(s) for s in (None, 0, 61, 3723)] == ["just begun", "0:00 left", "1:01 left", "1:02:03 left"]
