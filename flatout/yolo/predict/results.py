"""Frames in, results out, in order: reading and preparing happens in threads while the network works."""

from collections.abc import Callable, Generator, Iterable
from contextlib import nullcontext
from functools import partial

from flatout.yolo.predict.ahead import ReadAhead
from flatout.yolo.predict.frames import Prepare, Prepared, ReadFrame, Unreadable
from flatout.yolo.predict.grouping import Groups, InOrder, Numbered
from flatout.yolo.predict.live import LiveFrames
from flatout.yolo.predict.predictor import Predictor
from flatout.yolo.predict.result import Result

Stopped = Callable[[], bool]


def never() -> bool:
    return False


def results_of(
    frames: Iterable[ReadFrame],
    predictor: Predictor,
    *,
    threads: int,
    at_once: int | None = None,
    stopped: Stopped = never,
) -> Generator[Result | Unreadable, None, None]:
    """A result for every frame, or why there is none, in the order of the frames.

    Frames of files wait for others of their shape, live ones never do. After `stopped` says so, what was read ahead is
    left. Close the iterator to end its threads early; live frames are closed with it.
    """
    live = frames if isinstance(frames, LiveFrames) else None
    at_once = at_once or predictor.usual_at_once
    groups, in_order = Groups(at_once), InOrder[Result | Unreadable]()
    calls = (partial(_prepared, read, predictor.prepare) for read in frames)
    # Of live frames the newest are wanted, not those that waited.
    depth = at_once if live is not None else at_once + threads
    # Live frames end first: the thread that asks for them would wait for the next one.
    with ReadAhead(calls, threads=threads, depth=depth) as ahead, live or nullcontext():
        for place, prepared in enumerate(ahead.results(stopped)):
            if isinstance(prepared, Unreadable):
                in_order.put(place, prepared)
            else:
                _predict(predictor, groups.add(place, prepared), in_order)
            if live is not None and ahead.is_drained:
                _predict_rest(predictor, groups, in_order)
            yield from in_order.ready()
        _predict_rest(predictor, groups, in_order)
        yield from in_order.ready()


def _prepared(read: ReadFrame, prepare: Prepare) -> Prepared | Unreadable:
    frame = read()
    return frame if isinstance(frame, Unreadable) else prepare(frame)


def _predict(predictor: Predictor, batch: list[Numbered], in_order: InOrder[Result | Unreadable]) -> None:
    if batch:
        results = predictor([numbered.prepared for numbered in batch])
        for numbered, result in zip(batch, results, strict=True):
            in_order.put(numbered.place, result)


def _predict_rest(predictor: Predictor, groups: Groups, in_order: InOrder[Result | Unreadable]) -> None:
    for batch in groups.rest():
        _predict(predictor, batch, in_order)
