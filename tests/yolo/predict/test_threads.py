"""Prefetcher and write queue: order, limits, errors and the end of all threads."""

import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from flatout.yolo.data.letterbox import ShapeBatcher
from flatout.yolo.predict.results import ReorderBuffer
from flatout.yolo.predict.threads import Prefetcher, WriteQueue


def late(number: int, wait_s: float) -> int:
    time.sleep(wait_s)
    return number


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("flatout-")]


@pytest.mark.parametrize("threads", [1, 4])
def test_results_come_in_the_order_of_the_calls(threads):
    calls = [partial(late, number, 0.002 * (7 - number % 8)) for number in range(40)]
    with Prefetcher(calls, threads=threads, depth=8) as prefetched:
        assert list(prefetched.results()) == list(range(40))
    assert not own_threads()


def test_it_is_drained_only_when_the_results_of_all_submitted_calls_were_taken():
    asked, go_on = threading.Event(), threading.Event()

    def calls() -> Iterator[partial[int]]:
        yield partial(int, 1)
        asked.set()
        go_on.wait(5)
        yield partial(int, 2)

    with Prefetcher(calls(), threads=1, depth=4) as prefetched:
        results = prefetched.results()
        assert asked.wait(5) and not prefetched.is_drained  # submitted, finished or not
        assert next(results) == 1 and prefetched.is_drained
        go_on.set()
        assert list(results) == [2]


def test_no_more_calls_are_made_than_there_is_room_for():
    made: list[int] = []

    def calls() -> Iterator[partial[int]]:
        for number in range(100):
            made.append(number)
            yield partial(int, number)

    with Prefetcher(calls(), threads=2, depth=5) as prefetched:
        results = prefetched.results()
        next(results)
        while len(made) < 6:
            time.sleep(0.001)
        time.sleep(0.05)
        assert len(made) == 1 + 5  # one taken, five waiting
    assert not own_threads()


def test_an_error_of_a_call_or_of_the_iterator_reaches_the_reader():
    def broken() -> Iterator[partial[int]]:
        yield partial(int, "1")
        raise OSError("the source is gone")

    with (
        Prefetcher([partial(int, "x")], threads=1, depth=1) as prefetched,
        pytest.raises(ValueError, match="invalid literal"),
    ):
        next(prefetched.results())
    with Prefetcher(broken(), threads=1, depth=1) as prefetched, pytest.raises(OSError, match="the source is gone"):
        list(prefetched.results())


def test_reading_stops_on_request_even_if_nothing_comes():
    gone = threading.Event()

    def silent() -> Iterator[partial[int]]:
        gone.wait()
        yield partial(int, "1")

    with Prefetcher(silent(), threads=1, depth=1) as prefetched:
        begin_s = time.monotonic()
        assert list(prefetched.results(lambda: time.monotonic() - begin_s > 0.05)) == []
        gone.set()
    assert not own_threads()


def test_work_is_finished_in_the_order_of_submission():
    done: list[int] = []
    with WriteQueue(threads=4, depth=8) as queue:
        for number in range(40):
            queue.submit(partial(late, number, 0.002 * (7 - number % 8)), done.append)
    assert done == list(range(40)) and not own_threads()


def test_an_error_in_the_queue_is_raised_once_and_ends_the_writing():
    done: list[int] = []
    queue = WriteQueue(threads=2, depth=4)
    queue.submit(partial(int, "1"), done.append)
    queue.submit(partial(int, "x"), done.append)
    with pytest.raises(ValueError, match="invalid literal"):  # noqa: PT012 - soon, not at once
        for _ in range(100):
            queue.submit(partial(late, 2, 0.001), done.append)
    with pytest.raises(ValueError, match="invalid literal"):
        queue.close()
    queue.close()
    assert done == [1] and not own_threads()


def test_the_error_of_the_block_is_the_one_that_is_raised():
    with pytest.raises(KeyError), WriteQueue(threads=1, depth=1) as queue:  # noqa: PT012
        queue.submit(partial(int, "x"), lambda number: None)
        raise KeyError("first")


Item = tuple[int, int]
"""A place, and the width that stands for a shape."""


def batcher_of(at_once: int, *, patience: int) -> ShapeBatcher[Item]:
    return ShapeBatcher(at_once, lambda item: item[1], patience=patience)


def test_images_of_one_shape_share_a_batch_whatever_comes_between():
    batcher = batcher_of(2, patience=4)
    batches = [[place for place, _ in batcher.add(item)] for item in enumerate([64, 32, 64, 32, 64])]
    assert batches == [[], [], [0, 2], [1, 3], []]
    assert list(batcher.rest()) == [[(4, 64)]]


def test_no_image_waits_forever_for_others():
    batcher = batcher_of(2, patience=2)
    lone = batcher.add((0, 32))
    others = [batcher.add((place, 64)) for place in range(1, 5)]
    assert not lone and [[place for place, _ in batch] for batch in others] == [[], [1, 2], [], [3, 4]]
    # At most three may wait: a fourth completes the batch of the oldest.
    small = batcher_of(3, patience=1)
    waits = [small.add(item) for item in enumerate([32, 64, 64, 32])]
    assert [[place for place, _ in batch] for batch in waits] == [[], [], [], [0, 3]]


def test_results_are_returned_in_order_however_they_come():
    buffer, returned = ReorderBuffer[str](), []
    for place in (2, 0, 3, 1, 4):
        buffer.put([(place, str(place))])
        returned.append(list(buffer.ready()))
    assert returned == [[], ["0"], [], ["1", "2", "3"], ["4"]]
