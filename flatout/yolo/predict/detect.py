"""`detect.py`: weights and a source in; images, videos, labels, crops and JSON in a run folder out."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from flatout.errors import DataError
from flatout.feed import plan_workers
from flatout.ranks import Interrupts, choose_device, make_current
from flatout.runs import StepProgress, new_run_folder, read_record
from flatout.yolo.convert import only_network
from flatout.yolo.find_file import weights_files
from flatout.yolo.predict.files import (
    Files,
    ReadFrame,
    Streams,
    Unreadable,
    count_frames,
    find_sources,
    frames_of,
    without_password,
)
from flatout.yolo.predict.options import DetectOptions
from flatout.yolo.predict.outputs import Outputs
from flatout.yolo.predict.result import Result, done_line, nothing_read_message, result_line, shown, unreadable_lines
from flatout.yolo.predict.results import Predictor, load_networks, predictor_for, results_of
from flatout.yolo.predict.streams import LiveFrames
from flatout.yolo.predict.tracks import Tracker, tracked
from flatout.yolo.predict.windows import open_windows
from flatout.yolo.weights import read_weights, save_weights

logger = logging.getLogger(__name__)

# `--update`: strip weights


def strip_weights(paths: Sequence[str]) -> list[str]:
    """Remove the training state from flatout's weights files, atomically and in place; returns a line about each file.

    Files of other programs, and weights of unfinished runs, are not changed.
    """
    lines = []
    for path in weights_files(paths):
        weights = read_weights(path)
        if weights.format != "flatout":
            lines.append(f"--update: {path} is not changed: not in the format of flatout. See: flatout yolo convert")
        elif _is_in_use(path):
            lines.append(f"--update: {path} is not changed: its training is not finished and continues from this file")
        elif weights.kind == "full":
            save_weights(path, only_network(weights, None, path))
            lines.append(f"--update: removed the training state from {path}")
        else:
            lines.append(f"--update: {path} is not changed: it contains only the network already")
    return lines


def _is_in_use(path: str) -> bool:
    record = read_record(Path(path).absolute().parent.parent)
    return record is not None and not record.get("finished")


# The command

UPDATE_S = 0.5
"""The time that is left is estimated so often within an image of several tiles."""


@dataclass(frozen=True, kw_only=True)
class DetectResult:
    """The result of a detection; its text is what the command prints."""

    text: str
    folder: Path
    frames: int
    """Images and video frames that were processed."""
    detections: int
    unreadable: tuple[Unreadable, ...]
    interrupted: str | None
    """The signal that ended it early; None if everything was processed. Always None for cameras and streams, which only
    end that way."""

    def __str__(self) -> str:
        return self.text


def detect(options: DetectOptions, *, each: Callable[[Result], None] | None = None) -> DetectResult:
    """Detect in every frame of a source; `each` is called with every result, in order.

    Raises ConfigError, DataError or CheckpointError if that is not possible, DataError also if nothing could be read.
    A signal ends it between two frames, after all results so far are written.
    """
    sources = find_sources(options.source, allow_urls=options.allow_urls)
    if isinstance(sources, Streams):
        # YOLOv7 writes no images for a .txt list, which it always takes for a list of streams.
        nosave, at_once = options.nosave or sources.listed, options.at_once or len(sources.addresses)
        options = replace(options, nosave=nosave, at_once=at_once)
    tracker = Tracker.from_options(options)  # before the network is loaded: it may lack its package
    predictor = _predictor(options)
    with ExitStack() as stack:
        frames, total = _frames(sources, stack, large=options.tiles is not None)
        folder = new_run_folder(Path(options.project), options.name, options.exist_ok)
        detection = _DetectionPass(options, folder, total, each, tracker)
        detection.run(frames, predictor)
    if not detection.frames and detection.unreadable:
        raise DataError(nothing_read_message(without_password(options.source), detection.unreadable))
    return detection.result(strip_weights(options.weights) if options.update else [])


class _DetectionPass:
    """One pass over a source, with its counts."""

    def __init__(
        self,
        options: DetectOptions,
        folder: Path,
        total: int | None,
        each: Callable[[Result], None] | None,
        tracker: Tracker | None,
    ) -> None:
        """`total`: the approximate number of frames; None for streams, which have no end."""
        self._options, self._folder, self._total, self._each, self._tracker = options, folder, total, each, tracker
        self.frames = self._detections = 0
        self.unreadable: list[Unreadable] = []
        self._wrote: list[str] = []
        self._seconds = 0.0
        self._signal: str | None = None
        self._updated_s = 0.0

    def run(self, frames: Iterable[ReadFrame], predictor: Predictor) -> None:
        """Process all frames, or until a signal comes; all results are on the disk afterwards."""
        begin_s = time.perf_counter()
        threads = min(self._options.workers, plan_workers("cpu*1.0").total)
        with (
            (open_windows() if self._options.view_img else None) or nullcontext() as windows,
            Interrupts() as interrupts,
            self._progress() as progress,
            Outputs(
                self._folder, self._options, threads=threads, show=None if windows is None else windows.put
            ) as outputs,
            closing(
                results_of(
                    frames,
                    predictor,
                    threads=threads,
                    at_once=self._options.at_once,
                    stopped=lambda: interrupts.requested is not None or (windows is not None and windows.stopped),
                    on_tile=partial(self._show_tile, progress),
                )
            ) as results,
        ):
            for result in tracked(results, self._tracker):
                self._record(result, outputs, progress)
                if windows is not None:
                    windows.show()
        self._wrote, self._signal = list(outputs.wrote()), interrupts.requested
        self._seconds = time.perf_counter() - begin_s

    def result(self, more: list[str]) -> DetectResult:
        wrote = [*self._wrote, *more]
        lines = [f"{self._signal}: stopped early; all results so far are saved."] if self._signal else []
        lines += [*unreadable_lines(self.unreadable), done_line(self.frames, self._detections, self._seconds), *wrote]
        lines += [f"Results saved to {self._folder}"] if wrote else []
        return DetectResult(
            text="\n".join(lines),
            folder=self._folder,
            frames=self.frames,
            detections=self._detections,
            unreadable=tuple(self.unreadable),
            interrupted=None if self._total is None else self._signal,
        )

    def _progress(self) -> AbstractContextManager[StepProgress | None]:
        return nullcontext() if self._total is None else StepProgress(self._total, title="detect")

    @property
    def _num_done(self) -> int:
        """Frames for the progress bar. Video headers may announce fewer than there are."""
        return min(self.frames + len(self.unreadable), self._total or 0)

    def _show_tile(self, progress: StepProgress | None, done: int, total: int) -> None:
        """A large image takes minutes: show how much of it is done. Images of one tile need no such number."""
        if progress is None or total == 1:
            return
        num_images, now_s = self._num_done, time.perf_counter()
        if done and now_s - self._updated_s >= UPDATE_S and num_images < (self._total or 0):
            self._updated_s = now_s
            progress.update(num_images + done / total)
        progress.show(num_images, {"tiles": f"{done}/{total}"})

    def _record(self, result: Result | Unreadable, outputs: Outputs, progress: StepProgress | None) -> None:
        log = partial(logger.info, "%s") if progress is None else progress.say
        if isinstance(result, Unreadable):
            self.unreadable.append(result)
            log(f"{shown(result.path)}: {result.reason if result.partly else f'skipped: {result.reason}'}")
        else:
            outputs.add(result)
            self.frames += 1
            self._detections += len(result)
            log(result_line(result))
            if self._each is not None:
                self._each(result)
        if progress is not None:
            progress.advance(self._num_done)


def _predictor(options: DetectOptions) -> Predictor:
    device = choose_device(options.device)
    make_current(device)
    return predictor_for(load_networks(options.weights, device, augment=options.augment), device, options)


def _frames(sources: Files | Streams, stack: ExitStack, *, large: bool) -> tuple[Iterable[ReadFrame], int | None]:
    """Calls that read the frames, and the approximate number of frames; None for streams."""
    if isinstance(sources, Streams):
        return stack.enter_context(LiveFrames(sources.addresses)), None
    return frames_of(sources, large=large), count_frames(sources)
