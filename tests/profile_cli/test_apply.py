"""Apply-and-verify keeps what helps, reverts what does not, and says how good the prediction was."""

from types import SimpleNamespace

import pytest

from flatout.profile_cli.apply import apply_best
from flatout.profiler.ledger import make_ledger
from flatout.profiler.verdict import judge
from tests.profiler.situations import SITUATIONS, measured, network


def profile_of(measurement):
    return SimpleNamespace(ledger=make_ledger(measurement), verdict=judge(measurement))


class Training:
    """A training that takes `then` with any switch on."""

    def __init__(self, then):
        self.then = then
        self.switched = None

    def with_switch(self, switch):
        self.switched = dict(switch)
        return self

    def speed(self):
        return make_ledger(self.then).images_per_s


STARVED = SITUATIONS["few workers, cores free"].measurement


def test_a_remedy_that_helps_is_kept():
    training = Training(measured(105, network()))
    applied = apply_best(training, profile_of(STARVED))
    assert training.switched == {"workers": 9}
    assert applied.is_kept
    assert applied.prediction_error == pytest.approx(0.05, abs=0.05)
    assert "Kept." in applied.text() and "--workers 9" in applied.text()


def test_a_remedy_that_does_not_help_is_reverted():
    applied = apply_best(Training(STARVED), profile_of(STARVED))
    assert not applied.is_kept
    assert "Reverted" in applied.text() and "Train with" not in applied.text()


@pytest.mark.parametrize("name", ["a healthy step", "a Python loop with .item()"])
def test_what_no_flag_can_switch_is_left_to_people(name):
    training = Training(STARVED)
    applied = apply_best(training, profile_of(SITUATIONS[name].measurement))
    assert training.switched is None
    assert "Nothing to apply" in applied.text()
