"""Frames in, results out, in order: reading and preparing happens in threads while the network works."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from flatout.errors import ConfigError
from flatout.yolo.data.find import is_image_name
from flatout.yolo.predict.files import Streams, find_sources, frames_of, read_frame
from flatout.yolo.predict.frames import Frame, Origin, Prepare, Prepared, ReadFrame, Unreadable, given
from flatout.yolo.predict.predictor import Predictor
from flatout.yolo.predict.result import Result
from flatout.yolo.predict.streams import LiveFrames
from flatout.yolo.predict.threads import ReadAhead

# Pictures of one shape together, and their results in the order in which they came.

T = TypeVar("T")


class Numbered(NamedTuple):
    """A picture and its place in the order."""

    place: int
    prepared: Prepared


class Groups:
    """Collects pictures until enough have the same shape of input, or until the oldest has waited long enough."""

    def __init__(self, at_once: int, *, patience: int = 2) -> None:
        """At most `patience` * `at_once` pictures wait, each in its own size: large photos take room. Which ones share
        a batch depends on their order alone, never on time."""
        self._at_once, self._most_waiting = at_once, patience * at_once
        self._waiting: deque[Numbered] = deque()

    def add(self, place: int, prepared: Prepared) -> list[Numbered]:
        """The batch that is now complete; empty if none is."""
        self._waiting.append(Numbered(place, prepared))
        alike = self._alike(prepared)
        if len(alike) == self._at_once:
            return self._take(alike)
        if len(self._waiting) > self._most_waiting:
            return self._take(self._alike(self._waiting[0].prepared))
        return []

    def rest(self) -> Iterator[list[Numbered]]:
        """Whatever waits, as batches."""
        while self._waiting:
            yield self._take(self._alike(self._waiting[0].prepared))

    def _alike(self, prepared: Prepared) -> list[Numbered]:
        shape = prepared.input_3hw.shape
        return [waiting for waiting in self._waiting if waiting.prepared.input_3hw.shape == shape]

    def _take(self, batch: list[Numbered]) -> list[Numbered]:
        places = {numbered.place for numbered in batch}
        self._waiting = deque(numbered for numbered in self._waiting if numbered.place not in places)
        return batch


class InOrder(Generic[T]):
    """Takes results as they come and gives them in the order of their places, from 0 on."""

    def __init__(self) -> None:
        self._early: dict[int, T] = {}
        self._next = 0

    def put(self, place: int, result: T) -> None:
        self._early[place] = result

    def ready(self) -> Iterator[T]:
        """All that are next in order."""
        while self._next in self._early:
            result = self._early.pop(self._next)
            self._next += 1
            yield result


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


# What a Python caller gives to look at: paths, arrays, or several of them.

Given = str | Path | np.ndarray
"""A path, pattern or URL; or pixels, uint8 [H, W, 3], BGR."""


def frames_of_given(source: Given | Sequence[Given], stack: ExitStack) -> Iterable[ReadFrame]:
    """The frames of one thing or of several, in order; cameras and streams are closed with the stack."""
    if isinstance(source, str | Path):
        found = find_sources(str(source))
        if isinstance(found, Streams):
            return stack.enter_context(LiveFrames(found.addresses))
        return frames_of(found)
    if not isinstance(source, np.ndarray | Iterable):
        raise ConfigError(f"{source!r} is nothing to look at: give a path, an array, or a list of these.")
    return _of_several([source] if isinstance(source, np.ndarray) else list(source))


def _of_several(several: Sequence[Given]) -> Iterator[ReadFrame]:
    for number, each in enumerate(several):
        if isinstance(each, np.ndarray):
            origin = Origin(f"array {number}", "array", number, len(several))
            yield partial(given, Frame(_checked(each, origin.path), origin))
        elif is_image_name(str(each)):
            # Whether it is there shows when it is read, so that all that are missing are told together.
            yield partial(read_frame, Origin(str(each), "image", number, len(several)))
        else:
            found = find_sources(str(each))
            if isinstance(found, Streams):
                raise ConfigError(f"{each}: a camera or stream is looked at alone, not in a list of pictures.")
            yield from frames_of(found)


def _checked(image: np.ndarray, where: str) -> np.ndarray:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        shape = list(image.shape)
        raise ConfigError(
            f"{where}: {image.dtype} {shape} is no picture: uint8 [height, width, 3] in BGR order is, "
            "as cv2.imread gives it."
        )
    return image
