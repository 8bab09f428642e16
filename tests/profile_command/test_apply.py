"""`--apply` keeps a remedy that helps, reverts one that does not, and reports the error of the prediction."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from flatout.profile_command.apply import apply_best
from flatout.profile_command.table import ledger_table
from flatout.profiler.measurement import make_ledger
from flatout.profiler.verdict import diagnose
from tests.profiler.situations import SITUATIONS, measured, network


def profile_of(measurement):
    return SimpleNamespace(ledger=make_ledger(measurement), verdict=diagnose(measurement))


class Training:
    """A training with the measurement `then` under any switch."""

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
def test_a_remedy_without_a_flag_is_not_applied(name):
    training = Training(STARVED)
    applied = apply_best(training, profile_of(SITUATIONS[name].measurement))
    assert training.switched is None
    assert "Nothing to apply" in applied.text()


@pytest.mark.parametrize("width", [40, 80, 160])
def test_no_number_of_the_table_is_cut_however_narrow_the_terminal(width):
    ledger = make_ledger(SITUATIONS["RTX 5090: the assigner"].measurement)
    console = Console(width=width, file=io.StringIO())
    console.print(ledger_table(ledger, width))
    output = console.file.getvalue()
    assert "…" not in output
    assert all(f"{row.us_per_image:,.1f}" in output and f"{row.ms:,.2f}" in output for row in ledger.rows)
