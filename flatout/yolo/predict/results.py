"""Frames in, results out, in order: reading and preparing happens in threads while the network works.

Batches of prepared pictures through the network and NMS, and the boxes back in the pictures' own pixels.

Dimension key:  B pictures   h w input   D detections
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from flatout.errors import ConfigError
from flatout.yolo.boxes import Letterbox, to_native
from flatout.yolo.data.find import is_image_name
from flatout.yolo.data.letterbox import rounded_up
from flatout.yolo.evaluate.run import InferenceModel, load_inference_model
from flatout.yolo.find_file import weights_files
from flatout.yolo.nms import NmsConfig, non_max_suppression
from flatout.yolo.predict.files import (
    Frame,
    Origin,
    Prepare,
    Prepared,
    ReadFrame,
    Streams,
    Unreadable,
    find_sources,
    frames_of,
    given,
    read_frame,
)
from flatout.yolo.predict.options import PredictOptions
from flatout.yolo.predict.result import Result
from flatout.yolo.predict.streams import LiveFrames
from flatout.yolo.predict.threads import ReadAhead

AT_ONCE = {"cuda": 16, "cpu": 1}
"""Pictures per call. One keeps all cores of a CPU busy, and its result comes soonest."""


class Predictor:
    """A network with its thresholds, on a device."""

    def __init__(self, model: InferenceModel, *, size: int, device: torch.device, nms: NmsConfig) -> None:
        """`size`: longer side of the input, a multiple of the network's stride."""
        self._network, self._device, self._nms = model.network, device, nms
        self._dtype = next(model.network.parameters()).dtype
        self.names = model.names
        self.prepare = Prepare(size, model.stride)

    @property
    def usual_at_once(self) -> int:
        """How many pictures a batch should have on this device."""
        return AT_ONCE["cuda" if self._device.type == "cuda" else "cpu"]

    @torch.no_grad()
    def __call__(self, batch: Sequence[Prepared]) -> list[Result]:
        """What is in pictures whose inputs have one shape; the host waits for the device."""
        begin_s = time.perf_counter()
        images_B3hw = torch.from_numpy(np.stack([prepared.input_3hw for prepared in batch]))
        if self._device.type == "cuda":
            images_B3hw = images_B3hw.pin_memory()
        x = images_B3hw.to(self._device, non_blocking=True).to(self._dtype).div_(255)
        found = non_max_suppression(self._network(x).decoded, self._nms)
        input_hw = int(x.shape[2]), int(x.shape[3])
        native_hw = [prepared.frame.image.shape[:2] for prepared in batch]
        letterbox = Letterbox.centred(input_hw, native_hw, str(self._device))
        found.row_D6[:, :4] = to_native(found.box_D4, found.image_D, letterbox)
        rows = found._replace(row_D6=found.row_D6.cpu(), image_D=found.image_D.cpu()).per_image()
        each_ms = 1e3 * (time.perf_counter() - begin_s) / len(batch)
        return [self._result(prepared, row_n6.numpy(), each_ms) for prepared, row_n6 in zip(batch, rows, strict=True)]

    def _result(self, prepared: Prepared, row_n6: np.ndarray, each_ms: float) -> Result:
        return Result(
            boxes=row_n6[:, :4].copy(),
            scores=row_n6[:, 4].copy(),
            classes=row_n6[:, 5].astype(np.int64),
            names=self.names,
            image=prepared.frame.image,
            origin=prepared.frame.origin,
            ms=each_ms,
        )


# A predictor out of files of weights and options.


def load_networks(weights: Sequence[str], device: torch.device, *, augment: bool = False) -> InferenceModel:
    """Networks of files or of names of weights, side by side; CheckpointError if one cannot be used."""
    return load_inference_model(weights_files(weights), device, augment=augment)


def predictor_for(model: InferenceModel, device: torch.device, options: PredictOptions) -> Predictor:
    """The networks with the thresholds of the options; ConfigError for classes that they do not know."""
    if unknown := [kind for kind in options.classes or () if kind >= model.num_classes]:
        raise ConfigError(f"--classes {unknown[0]}: the network knows the classes 0 to {model.num_classes - 1}.")
    nms = NmsConfig(
        conf_thres=options.conf_thres,
        iou_thres=options.iou_thres,
        classes=options.classes,
        agnostic=options.agnostic_nms,
    )
    return Predictor(model, size=rounded_up(options.img_size, model.stride), device=device, nms=nms)


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
