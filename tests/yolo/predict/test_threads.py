"""Reading ahead and writing behind: order, bounds, errors and the end of all threads."""

import threading
import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from flatout.yolo.predict.files import Frame, Origin, Prepare, Prepared
from flatout.yolo.predict.results import Groups, InOrder
from flatout.yolo.predict.threads import ReadAhead, WriteBehind


def late(number: int, wait_s: float) -> int:
    time.sleep(wait_s)
    return number


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("flatout-")]


@pytest.mark.parametrize("threads", [1, 4])
def test_results_come_in_the_order_of_the_calls(threads):
    calls = [partial(late, number, 0.002 * (7 - number % 8)) for number in range(40)]
    with ReadAhead(calls, threads=threads, depth=8) as ahead:
        assert list(ahead.results()) == list(range(40))
    assert not own_threads()


def test_no_more_calls_are_made_than_there_is_room_for():
    made: list[int] = []

    def calls() -> Iterator[partial[int]]:
        for number in range(100):
            made.append(number)
            yield partial(int, number)

    with ReadAhead(calls(), threads=2, depth=5) as ahead:
        results = ahead.results()
        next(results)
        while len(made) < 6:
            time.sleep(0.001)
        time.sleep(0.05)
        assert len(made) == 1 + 5  # taken and waiting; nothing is asked for that there is no room for
    assert not own_threads()


def test_an_error_of_a_call_or_of_asking_reaches_the_reader():
    def broken() -> Iterator[partial[int]]:
        yield partial(int, "1")
        raise OSError("the source is gone")

    with (
        ReadAhead([partial(int, "x")], threads=1, depth=1) as ahead,
        pytest.raises(ValueError, match="invalid literal"),
    ):
        next(ahead.results())
    with ReadAhead(broken(), threads=1, depth=1) as ahead, pytest.raises(OSError, match="the source is gone"):
        list(ahead.results())


def test_reading_stops_when_asked_even_if_nothing_comes():
    gone = threading.Event()

    def silent() -> Iterator[partial[int]]:
        gone.wait()
        yield partial(int, "1")

    with ReadAhead(silent(), threads=1, depth=1) as ahead:
        begin_s = time.monotonic()
        assert list(ahead.results(lambda: time.monotonic() - begin_s > 0.05)) == []
        gone.set()
    assert not own_threads()


def test_work_is_finished_in_the_order_it_was_handed_over():
    done: list[int] = []
    with WriteBehind(threads=4, depth=8) as behind:
        for number in range(40):
            behind.submit(partial(late, number, 0.002 * (7 - number % 8)), done.append)
    assert done == list(range(40)) and not own_threads()


def test_an_error_behind_is_told_once_and_ends_the_writing():
    done: list[int] = []
    behind = WriteBehind(threads=2, depth=4)
    behind.submit(partial(int, "1"), done.append)
    behind.submit(partial(int, "x"), done.append)
    with pytest.raises(ValueError, match="invalid literal"):  # noqa: PT012 - soon, not at once
        for _ in range(100):
            behind.submit(partial(late, 2, 0.001), done.append)
    with pytest.raises(ValueError, match="invalid literal"):
        behind.close()
    behind.close()
    assert done == [1] and not own_threads()


def test_the_error_of_the_block_is_the_one_that_is_told():
    with pytest.raises(KeyError), WriteBehind(threads=1, depth=1) as behind:  # noqa: PT012
        behind.submit(partial(int, "x"), lambda number: None)
        raise KeyError("first")


def prepared(width: int) -> Prepared:
    frame = Frame(np.zeros((64, width, 3), np.uint8), Origin("a", "array", 0, 1))
    return Prepare(64, 32)(frame)


def test_pictures_of_one_shape_go_together_whatever_lies_between():
    groups = Groups(2, patience=4)
    widths = [64, 32, 64, 32, 64]
    batches = [[each.place for each in groups.add(place, prepared(width))] for place, width in enumerate(widths)]
    assert batches == [[], [], [0, 2], [1, 3], []]
    assert [[each.place for each in batch] for batch in groups.rest()] == [[4]]


def test_nobody_waits_for_others_for_ever():
    groups = Groups(2, patience=2)
    lone = groups.add(0, prepared(32))
    others = [groups.add(place, prepared(64)) for place in range(1, 5)]
    assert not lone and [[each.place for each in batch] for batch in others] == [[], [1, 2], [], [3, 4]]
    # Three places to wait: the fourth that waits lets the oldest go.
    small = Groups(3, patience=1)
    waits = [small.add(place, prepared(width)) for place, width in enumerate([32, 64, 64, 16])]
    assert [[each.place for each in batch] for batch in waits] == [[], [], [], [0, 3]]


def test_results_are_given_in_order_however_they_come():
    in_order, given = InOrder[str](), []
    for place in (2, 0, 3, 1, 4):
        in_order.put(place, str(place))
        given.append(list(in_order.ready()))
    assert given == [[], ["0"], [], ["1", "2", "3"], ["4"]]
