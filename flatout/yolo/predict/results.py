"""Frames in, results out, in order: threads read and prepare frames while the network runs.

    ReadFrame calls --Prefetcher--> Prepared --ShapeBatcher--> Predictor: network, NMS --ReorderBuffer--> results

Dimension key:  B images of a batch   h w input   D detections of a batch   n detections of one image
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from flatout.feed import plan_workers
from flatout.yolo.boxes import Letterbox, to_native
from flatout.yolo.data.letterbox import ShapeBatcher, round_up_img_size
from flatout.yolo.evaluate.run import InferenceModel, load_inference_model
from flatout.yolo.evaluate.tiles import TileConfig, TileDetector, Watch, WholeImage, tile_config
from flatout.yolo.find_file import weights_files
from flatout.yolo.nms import NmsConfig, non_max_suppression
from flatout.yolo.predict.files import Frame, Prepare, Prepared, ReadFrame, Unreadable
from flatout.yolo.predict.given import Given, frames_of_source
from flatout.yolo.predict.options import PredictOptions, class_numbers
from flatout.yolo.predict.result import Boxes, Result
from flatout.yolo.predict.streams import LiveFrames
from flatout.yolo.predict.threads import Prefetcher
from flatout.yolo.predict.tracks import LOWEST_TRACKED, Tracker, tracked

# The network

AT_ONCE = {"cuda": 16, "cpu": 1}
"""Images per call of the network. On a CPU one image keeps all cores busy, and results come soonest."""


class Predictor:
    """A network on its device, with its NMS thresholds."""

    def __init__(
        self,
        model: InferenceModel,
        *,
        size: int,
        device: torch.device,
        nms: NmsConfig,
        tiles: TileConfig | None = None,
    ) -> None:
        """`size`: longer side of the input, a multiple of the network's stride. `tiles`: cut images, and merge."""
        self._network, self._device, self._nms = model.network, device, nms
        self.tiles = tiles
        parameter = next(model.network.parameters(), None)
        self._dtype = torch.float32 if parameter is None else parameter.dtype
        self.names = model.names
        self.prepare = Prepare(size, model.stride)

    @property
    def default_at_once(self) -> int:
        """Default number of images per batch on this device."""
        return AT_ONCE["cuda" if self._device.type == "cuda" else "cpu"]

    def tile_detector(self, at_once: int | None, watch: Watch | None = None) -> TileDetector:
        """Detects by the tiles of this predictor, `at_once` of them in a batch."""
        assert self.tiles is not None
        return TileDetector(
            self._decoded,
            self.tiles,
            size=self.prepare.size,
            stride=self.prepare.stride,
            device=self._device,
            nms=self._nms,
            at_once=at_once,
            watch=watch,
        )

    def _decoded(self, images_B3hw: torch.Tensor) -> torch.Tensor:
        decoded: torch.Tensor = self._network(images_B3hw.to(self._dtype).div_(255)).decoded
        return decoded

    @torch.no_grad()
    def __call__(self, batch: Sequence[Prepared]) -> list[Result]:
        """Detect in images whose inputs have the same shape; the host waits for the device."""
        begin_s = time.perf_counter()
        images_B3hw = torch.from_numpy(np.stack([prepared.input_3hw for prepared in batch]))
        if self._device.type == "cuda":
            images_B3hw = images_B3hw.pin_memory()
        found = non_max_suppression(self._decoded(images_B3hw.to(self._device, non_blocking=True)), self._nms)
        input_hw = int(images_B3hw.shape[2]), int(images_B3hw.shape[3])
        native_hw = [prepared.frame.image.shape[:2] for prepared in batch]
        letterbox = Letterbox.centred(input_hw, native_hw, str(self._device))
        found.row_D6[:, :4] = to_native(found.box_D4, found.image_D, letterbox)
        rows = found._replace(row_D6=found.row_D6.cpu(), image_D=found.image_D.cpu()).per_image()
        each_ms = 1e3 * (time.perf_counter() - begin_s) / len(batch)
        return [
            self.result(prepared.frame, row_n6.numpy(), each_ms) for prepared, row_n6 in zip(batch, rows, strict=True)
        ]

    def result(self, frame: Frame, row_n6: np.ndarray, each_ms: float) -> Result:
        return Result(
            boxes=Boxes(row_n6[:, :4].copy(), (frame.image.shape[0], frame.image.shape[1])),
            scores=row_n6[:, 4].copy(),
            classes=row_n6[:, 5].astype(np.int64),
            names=self.names,
            image=frame.image,
            origin=frame.origin,
            ms=each_ms,
        )


def load_networks(weights: Sequence[str], device: torch.device, *, augment: bool = False) -> InferenceModel:
    """A model from files or names of weights; several are an ensemble. CheckpointError if one cannot be used."""
    return load_inference_model(weights_files(weights), device, augment=augment)


def predictor_for(model: InferenceModel, device: torch.device, options: PredictOptions) -> Predictor:
    """A predictor with the thresholds of the options; ConfigError for classes that the network does not have."""
    nms = NmsConfig(
        conf_thres=min(options.conf_thres, LOWEST_TRACKED) if options.track else options.conf_thres,
        iou_thres=options.iou_thres,
        classes=None if options.classes is None else class_numbers(options.classes, model.names),
        agnostic=options.agnostic_nms,
    )
    size = round_up_img_size(options.img_size, model.stride)
    return Predictor(model, size=size, device=device, nms=nms, tiles=tile_config(options, model.tiles))


# Batches of one shape, and results in order

T = TypeVar("T")


class IndexedInput(NamedTuple):
    """A prepared frame and its place: its number in the order of the frames, from 0."""

    place: int
    prepared: Prepared


class ReorderBuffer(Generic[T]):
    """Takes results in any order and returns them in the order of their places, from 0 on."""

    def __init__(self) -> None:
        self._early: dict[int, T] = {}
        self._next = 0

    def put(self, placed: Iterable[tuple[int, T]]) -> None:
        self._early.update(placed)

    def ready(self) -> Iterator[T]:
        """All results that are next in order."""
        while self._next in self._early:
            result = self._early.pop(self._next)
            self._next += 1
            yield result


# From frames to results

Stopped = Callable[[], bool]


OnTile = Callable[[int, int], None]
"""Called with the number of tiles of an image that are done, and of all of them."""


def _watch(stopped: Stopped, on_tile: OnTile | None, done: int, total: int) -> bool:
    if on_tile is not None:
        on_tile(done, total)
    return not stopped()


def results_of(
    frames: Iterable[ReadFrame],
    predictor: Predictor,
    *,
    threads: int,
    at_once: int | None = None,
    stopped: Stopped = lambda: False,
    on_tile: OnTile | None = None,
) -> Generator[Result | Unreadable, None, None]:
    """A result for every frame, or why it could not be read, in the order of the frames.

    Frames of files wait for others of the same shape, live frames never do. Once `stopped` returns True, prefetched
    frames are dropped, and with tiles also the current one. `on_tile` is called after every tile of an image. Close the
    iterator to end its threads early; live frames are closed with it.
    """
    live = frames if isinstance(frames, LiveFrames) else None
    predict: _ByBatches | _ByTiles
    calls: Iterable[Callable[[], Any]]
    if predictor.tiles is not None:
        predict = _ByTiles(predictor, predictor.tile_detector(at_once, partial(_watch, stopped, on_tile)))
        # Images are read as far ahead as there are threads.
        calls, depth = frames, 1 if live is not None else threads
    else:
        at_once = at_once or predictor.default_at_once
        predict = _ByBatches(predictor, at_once)
        calls = (partial(_prepared, frame, predictor.prepare) for frame in frames)
        # Live frames are not prefetched beyond a batch: the newest are wanted.
        depth = at_once if live is not None else at_once + threads
    in_order = ReorderBuffer[Result | Unreadable]()
    # Live frames are closed first: the prefetcher's thread would wait for the next one.
    with Prefetcher(calls, threads=threads, depth=depth) as prefetched, live or nullcontext():
        for place, read in enumerate(prefetched.results(stopped)):
            in_order.put([(place, read)] if isinstance(read, Unreadable) else predict.add(place, read))
            if live is not None and prefetched.is_drained:
                in_order.put(predict.rest())
            # An image of a loop variable would stay in memory while the next one is read.
            del read
            yield from in_order.ready()
        in_order.put(predict.rest())
        yield from in_order.ready()


Placed = Iterator[tuple[int, Result]]
"""Results with the places of their frames."""


class _ByBatches:
    """Predicts frames in batches of one input shape."""

    def __init__(self, predictor: Predictor, at_once: int) -> None:
        self._predictor = predictor
        self._groups = ShapeBatcher[IndexedInput](at_once, lambda each: each.prepared.input_3hw.shape)

    def add(self, place: int, prepared: Prepared) -> Placed:
        return self._results(self._groups.add(IndexedInput(place, prepared)))

    def rest(self) -> Placed:
        return chain.from_iterable(map(self._results, self._groups.rest()))

    def _results(self, batch: list[IndexedInput]) -> Placed:
        results = self._predictor([each.prepared for each in batch]) if batch else []
        return zip([each.place for each in batch], results, strict=True)


class _ByTiles:
    """Predicts frames tile by tile."""

    def __init__(self, predictor: Predictor, detector: TileDetector) -> None:
        self._predictor, self._detector = predictor, detector
        self._known: dict[int, Frame] = {}

    def add(self, place: int, frame: Frame) -> Placed:
        self._known[place] = frame
        return self._results(self._detector.add(place, frame.image))

    def rest(self) -> Placed:
        return self._results(self._detector.rest())

    def _results(self, found: Iterator[WholeImage]) -> Placed:
        for place, row_n6, seconds in found:
            yield place, self._predictor.result(self._known.pop(place), row_n6, 1e3 * seconds)


def _prepared(read: ReadFrame, prepare: Prepare) -> Prepared | Unreadable:
    frame = read()
    return frame if isinstance(frame, Unreadable) else prepare(frame)


def results_of_source(
    source: "Given | Iterable[Given]",
    predictor: Predictor,
    options: PredictOptions,
    *,
    tracker: Tracker | None = None,
    one_of_live: bool = False,
) -> Generator[Result | Unreadable, None, None]:
    """The results of whatever is given in Python, in order; close the iterator to end its threads early."""
    threads = min(options.workers, plan_workers("cpu*1.0").total)
    with ExitStack() as stack:
        large = options.tiles is not None
        frames = frames_of_source(source, stack, large=large, allow_urls=options.allow_urls, one_of_live=one_of_live)
        results = results_of(frames, predictor, threads=threads, at_once=options.at_once)
        yield from tracked(stack.enter_context(closing(results)), tracker)
