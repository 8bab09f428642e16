"""Progress on terminals and in logs, unaffected by changes of the wall clock (F11)."""

import io
import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from flatout.engine.meter import Meter
from flatout.progress import Pace, StepProgress, eta_text


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_lines_are_aligned_and_rare(caplog):
    caplog.set_level(logging.INFO)
    clock = Clock()
    with StepProgress(1000, stream=io.StringIO(), every_s=10, clock=clock) as progress:
        for done in range(1, 101):
            clock.now_s += 0.5
            progress.advance(done, {"loss": f"{1 / done:.4f}"})
    assert len(caplog.messages) == 5
    assert caplog.messages[0] == "train     1/1000    0 %  loss 1.0000  at most 8:20 left"
    assert caplog.messages[2] == "train    41/1000    4 %  loss 0.0244  8:00 left"


def test_the_last_step_is_always_logged(caplog):
    caplog.set_level(logging.INFO)
    with StepProgress(3, stream=io.StringIO(), every_s=1e9) as progress:
        for done in (1, 2, 3):
            progress.advance(done)
    assert [message.split()[1] for message in caplog.messages] == ["1/3", "3/3"]


def test_steps_of_an_earlier_process_do_not_count_as_speed(caplog):
    caplog.set_level(logging.INFO)
    clock = Clock()
    with StepProgress(1000, stream=io.StringIO(), clock=clock) as progress:
        progress.start_at(900)
        clock.now_s += 2
        progress.advance(901)
    assert caplog.messages == ["train   901/1000   90 %  at most 3:18 left"]


def test_on_a_terminal_a_bar_is_shown_and_removed(caplog):
    terminal = Terminal()
    with StepProgress(10, stream=terminal) as progress:
        for done in range(1, 11):
            progress.advance(done, {"loss": "0.1"})
    assert "10/10" in terminal.getvalue()
    assert "loss 0.1" in terminal.getvalue()
    assert not caplog.messages


def test_a_line_goes_above_the_bar_on_a_terminal_and_otherwise_to_the_log(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    with StepProgress(10, stream=terminal) as progress:
        progress.say("image 1/2 [bold]a.jpg: 3 bolts")
    assert "image 1/2 [bold]a.jpg: 3 bolts" in terminal.getvalue() and not caplog.messages
    monkeypatch.setattr("sys.stdout", io.StringIO())  # stdout is redirected to a file
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
    for second in range(1, 301):
        pace.update(3100 + 2 * second, 400.0 + second)
    assert pace.seconds_for(10) == pytest.approx(5, rel=0.02)


def test_the_start_of_a_process_is_not_extrapolated():
    """A run of COCO's size showed "9:10:25 left" and ended within minutes: its first hundred steps took 23 s."""
    pace = Pace(0, 0.0)
    pace.update(100, 23.0)
    assert pace.is_bound
    pace.update(150, 23.55)
    assert not pace.is_bound
    assert pace.seconds_for(50_000) == pytest.approx(550, rel=0.01)


def test_the_first_line_knows_how_long_steps_take_once_the_start_is_over():
    """292 images, 100 epochs: the first 19 steps took 2.5 s, the other 1881 took 20 s with their validations."""
    pace = Pace(0, 0.0)
    pace.update(19, 2.5, steady_step_s=0.0055)
    assert not pace.is_bound
    assert 10 <= pace.seconds_for(1881) <= 40
    pace.update(38, 2.7, steady_step_s=0.0055)
    assert 10 <= pace.seconds_for(1862) <= 40


def test_a_step_at_the_end_of_the_first_interval_is_no_longer_than_the_mean():
    pace = Pace(0, 0.0)
    pace.update(10, 1.0, steady_step_s=0.5)
    assert pace.seconds_for(10) == 1.0


def test_a_single_pause_is_not_extrapolated_and_a_recurring_one_is():
    pace, done, now_s = Pace(0, 0.0), 0, 0.0
    for interval in range(1, 41):
        done, now_s = done + 50, now_s + 0.55 + (77.0 if interval == 12 else 0.0)
        pace.update(done, now_s)
    assert pace.seconds_for(1000) == pytest.approx(11, rel=0.01)
    for _ in range(8):  # epochs of 500 steps, with 2 s of validation after each
        for interval in range(10):
            done, now_s = done + 50, now_s + 0.55 + (2.0 if interval == 9 else 0.0)
            pace.update(done, now_s)
    assert 11 < pace.seconds_for(1000) < 2 * 15
    assert pace.seconds_for(1000) == pytest.approx(1000 * (0.011 + 8 * 2.0 / (done - 50)), rel=0.01)


@pytest.mark.parametrize("validation_s", [0.0, 1.0, 6.0])
def test_the_time_left_is_never_off_by_a_factor_of_two_after_the_first_epochs(validation_s):
    """Epochs of 19 steps of 50 ms, one interval each, on a machine whose start takes 20 s."""
    epoch_s = 19 * 0.05 + validation_s
    pace, done, now_s = Pace(0, 0.0), 0, 20.0
    for epoch in range(100):
        done, now_s = done + 19, now_s + epoch_s
        pace.update(done, now_s)
        left_s = (99 - epoch) * epoch_s
        if epoch > 0:
            assert left_s / 2 <= pace.seconds_for(1900 - done) <= max(2 * left_s, 0.01)


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A training whose steps take given times."""

    epochs: int
    steps: int
    step_s: float
    start_s: tuple[float, ...] = (3.0, 1.0, 1.0, 1.0)
    """Times of the first steps of the process, in which kernels are chosen, compiled and captured."""
    odd_s: tuple[float, ...] = ()
    """Times of the short last batch of each epoch, the last number for all others; empty: it is a full batch."""
    validation_s: tuple[float, ...] = (0.0,)
    log_every: int = 50
    fill: tuple[float, float] = (0.0, 0.0)
    """Seconds in which all images are decoded, and images of the set that a step is made of, as a share."""

    def lines(self, clock: Clock, *, ahead: int) -> Iterator[tuple[int, float]]:
        """Train, and show progress as a run does; gives the steps done and the time of every line. The host is up to
        `ahead` steps ahead of the device, and waits for it at the end of an epoch."""
        progress = StepProgress(
            self.epochs * self.steps, steps_per_epoch=self.steps, stream=io.StringIO(), every_s=0, clock=clock
        )
        meter, done, device = Meter(("loss",)), 0, deque([clock.now_s], maxlen=ahead + 1)
        progress.start_at(0)
        fill_s, used_share = self.fill
        began_s, waited_s = clock.now_s, 0.0
        for epoch in range(self.epochs):
            meter.begin_epoch()
            meter.begin_interval()
            for step in range(1, self.steps + 1):
                is_odd = bool(self.odd_s) and step == self.steps
                # Images are decoded in the order of first use: a step needs a share of all, most of which came before.
                needed_at_s = began_s + fill_s * (1 - (1 - used_share) ** (done + 1))
                if (wait_s := needed_at_s - clock.now_s) > 0:
                    clock.now_s += wait_s
                    waited_s += wait_s
                    meter.waited(wait_s, once=wait_s)
                device.append(max(device[-1], clock.now_s) + self._seconds(done, epoch, is_odd=is_odd))
                clock.now_s = max(clock.now_s, device[0] if len(device) == ahead + 1 else 0.0)
                meter.count(15 if is_odd else 384)
                done += 1
                if step == self.steps:
                    clock.now_s = max(clock.now_s, device[-1])
                if step % min(self.log_every, self.steps) == 0 or step == self.steps:
                    stats = meter.end_interval(epoch, step, steps_done=done, steps_left=0)
                    progress.update(
                        done,
                        steady_step_s=stats.steady_ms / 1e3,
                        mean_step_s=(stats.step_ms - stats.fill_wait_ms) / 1e3,
                        waited_once_s=waited_s,
                        once_left_s=max(0.0, began_s + fill_s - clock.now_s),
                    )
                    progress.show(done)
                    yield done, clock.now_s
            clock.now_s += self.validation_s[min(epoch, len(self.validation_s) - 1)]

    def _seconds(self, done: int, epoch: int, *, is_odd: bool) -> float:
        if done < len(self.start_s):
            return self.start_s[done]
        return self.odd_s[min(epoch, len(self.odd_s) - 1)] if is_odd else self.step_s


SIMULATED = {
    "COCO's size": Simulated(epochs=3, steps=309, step_s=0.039, odd_s=(14.0, 0.02), validation_s=(3.0, 1.5)),
    "its last interval is 9 steps": Simulated(
        epochs=3, steps=309, step_s=0.039, odd_s=(14.0, 0.02), validation_s=(3.0, 1.5), log_every=300
    ),
    "an odd batch that is slow four times": Simulated(
        epochs=100, steps=19, step_s=0.0053, odd_s=(1.5, 1.5, 1.5, 1.5, 0.006), validation_s=(1.0, 0.15)
    ),
    "two intervals, the second short": Simulated(
        epochs=30, steps=120, step_s=0.01, odd_s=(1.5, 1.5, 1.5, 0.01), validation_s=(2.0, 0.5), log_every=100
    ),
    "few long epochs": Simulated(epochs=2, steps=1000, step_s=0.1, validation_s=(20.0,)),
    "a CPU": Simulated(epochs=6, steps=24, step_s=0.3, start_s=(1.0,), validation_s=(2.0, 1.5), log_every=10),
    "no validation, a slow start": Simulated(epochs=50, steps=60, step_s=0.02, start_s=(20.0, 5.0, 5.0, 5.0)),
    "validations longer than epochs": Simulated(epochs=50, steps=60, step_s=0.02, validation_s=(8.0, 6.0)),
    "images are decoded meanwhile": Simulated(
        epochs=3, steps=309, step_s=0.039, validation_s=(3.0, 1.5), log_every=20, fill=(25.0, 4.5 / 309)
    ),
    "images are decoded slowly meanwhile": Simulated(
        epochs=10, steps=309, step_s=0.039, validation_s=(3.0, 1.5), log_every=20, fill=(120.0, 4.5 / 309)
    ),
    "images are decoded fast meanwhile": Simulated(
        epochs=10, steps=309, step_s=0.3, validation_s=(3.0, 1.5), log_every=20, fill=(30.0, 1 / 309)
    ),
    "epochs of five steps": Simulated(
        epochs=200, steps=5, step_s=0.02, odd_s=(1.5, 1.5, 1.5, 1.0, 0.02), validation_s=(3.0, 0.2)
    ),
}


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("case", SIMULATED)
def test_after_twenty_steps_the_time_left_is_never_off_by_more_than_a_factor_of_two(case, ahead, caplog, monkeypatch):
    """Bounds, 'at least' and 'at most', are true; a second of rounding is allowed."""
    caplog.set_level(logging.INFO)
    clock = Clock()
    monkeypatch.setattr("flatout.engine.meter.time", SimpleNamespace(perf_counter=clock))
    lines = list(SIMULATED[case].lines(clock, ahead=ahead))
    assert len(caplog.messages) == len(lines) > 5
    estimates = 0
    for (done, at_s), line in zip(lines, caplog.messages, strict=True):
        words = line.split()
        bound, shown_s = " ".join(words[-4:-2]), seconds_of(words[-2])
        left_s = clock.now_s - at_s
        if done >= 20:
            assert bound == "at most" or shown_s <= (1 if bound == "at least" else 2) * left_s + 1, (line, left_s)
            assert bound == "at least" or shown_s >= (1 if bound == "at most" else 0.5) * left_s - 1, (line, left_s)
            estimates += bound not in ("at least", "at most")
    assert estimates > len(lines) / 3, "a bound that is always stated says nothing"


def seconds_of(text: str) -> float:
    """'1:02:03' in seconds."""
    return sum(float(part) * 60**place for place, part in enumerate(reversed(text.split(":"))))


def test_a_clock_that_stands_still_or_no_new_step_is_harmless():
    pace = Pace(5, 1.0)
    assert pace.seconds_for(3) is None
    pace.update(5, 2.0)
    assert pace.seconds_for(3) is None
    pace.update(6, 1.0)
    assert pace.seconds_for(3) == 0


def test_times_left_are_short():
    assert [eta_text(s) for s in (None, 0, 61, 3723)] == ["just started", "0:00 left", "1:01 left", "1:02:03 left"]
    assert [eta_text(s, "at most") for s in (0, 61)] == ["0:00 left", "at most 1:01 left"]
