"""The background of a run: order, errors, and that no plot is missing at the end."""

import logging
import threading
from functools import partial

import pytest

from flatout.runs import Background


def test_plots_are_made_in_order_and_beside_the_caller():
    made, go_on = list[int](), threading.Event()
    with Background() as background:
        background.submit(go_on.wait)
        for number in range(5):
            background.submit(partial(made.append, number))
        assert made == []
        go_on.set()
        background.wait()
        assert made == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("error", [OSError("no room"), ValueError("bad value"), RuntimeError("a bug")])
def test_an_error_is_a_warning_and_later_plots_are_made(error: Exception, caplog: pytest.LogCaptureFixture):
    def fail() -> None:
        raise error

    made = list[str]()
    with caplog.at_level(logging.WARNING), Background() as background:
        background.submit(fail)
        background.submit(partial(made.append, "later"))
    assert made == ["later"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(error) in caplog.text


def test_no_plot_is_lost_when_the_training_is_interrupted():
    made, go_on = list[int](), threading.Event()
    background = Background()
    background.submit(go_on.wait)
    background.submit(partial(made.append, 1))
    threading.Timer(0.05, go_on.set).start()
    with pytest.raises(KeyboardInterrupt), background:
        raise KeyboardInterrupt
    assert made == [1]


def test_without_plots_there_is_no_thread():
    before = threading.active_count()
    with Background() as background:
        background.wait()
        assert threading.active_count() == before
