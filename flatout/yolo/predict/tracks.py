"""Tracking: objects get ids that stay the same from frame to frame, by ByteTrack of the package `trackers`.

    detections above 0.1 --ByteTrack--> those of tracks, and those above the score threshold --> Result with ids

ByteTrack joins boxes by overlap and motion, not by class or looks: detections above the score threshold begin tracks,
weaker ones only continue them.

Dimension key:  n detections of one image
"""

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from flatout.errors import ConfigError
from flatout.yolo.predict.files import Origin, Unreadable
from flatout.yolo.predict.options import PredictOptions
from flatout.yolo.predict.result import NO_ID, Result

LOWEST_TRACKED = 0.1
"""Detections with lower scores do not even continue a track."""
PACKAGE = "trackers>=2.1,<2.2"
"""What pip installs. Later versions require opencv-python, which overwrites opencv-python-headless, and which cannot be
imported on a machine without graphics libraries; they work, too, if they are installed without their requirements."""


class Tracker:
    """Adds ids to results, which must come in order.

    Every video and every stream is a sequence of its own, with ids from 1; images and arrays are one sequence.
    """

    def __init__(self, *, conf_thres: float, buffer: int) -> None:
        """`buffer`: frames for which an object that is not found keeps its id. ConfigError without `trackers`."""
        try:
            from trackers import ByteTrackTracker  # noqa: F401 - a missing package is noticed before the long work
        except ImportError as error:
            raise ConfigError(
                f'Tracking needs the package trackers ({error}). Install the extra `track`: pip install "{PACKAGE}"'
            ) from None
        self._conf_thres, self._buffer = conf_thres, buffer
        self._sequences: dict[Hashable, _Sequence] = {}

    @classmethod
    def from_options(cls, options: PredictOptions) -> "Tracker | None":
        """A tracker, or None if the options do not ask for one."""
        return cls(conf_thres=options.conf_thres, buffer=options.track_buffer) if options.track else None

    def __call__(self, result: Result) -> Result:
        """The next frame of its sequence, with ids; detections in no track below the score threshold are dropped."""
        key = _sequence_of(result.origin)
        is_new = result.origin.kind == "video" and result.origin.frame == 1
        if key not in self._sequences or is_new:
            self._sequences[key] = _Sequence(self._conf_thres, self._buffer)
        id_n = self._sequences[key].ids_of(result)
        kept = (result.scores > self._conf_thres) | (id_n != NO_ID)
        return replace(
            result, boxes=result.boxes[kept], scores=result.scores[kept], classes=result.classes[kept], ids=id_n[kept]
        )


class _Sequence:
    """The tracks of one sequence of frames."""

    def __init__(self, conf_thres: float, buffer: int) -> None:
        from trackers import ByteTrackTracker

        # 30 frames per second make the buffer a number of frames.
        self._tracker: Any = ByteTrackTracker(
            lost_track_buffer=buffer,
            frame_rate=30.0,
            track_activation_threshold=conf_thres,
            high_conf_det_threshold=conf_thres,
            minimum_consecutive_frames=1,
        )
        # The package counts over all trackers of the process; ours count from 1.
        self._own_id: dict[int, int] = {}

    def ids_of(self, result: Result) -> np.ndarray:
        """An id for every detection of the next frame, int64 [n]."""
        import supervision

        detections = supervision.Detections(
            xyxy=np.asarray(result.boxes, dtype=np.float32),
            confidence=result.scores,
            class_id=result.classes,
            # Some detections are left out of the answer, and the others come in any order.
            data={"index": np.arange(len(result))},
        )
        answer = self._tracker.update(detections)
        id_n = np.full(len(result), NO_ID, dtype=np.int64)
        if len(answer):
            for index, found in zip(answer.data["index"].tolist(), answer.tracker_id.tolist(), strict=True):
                if found is not None and found >= 0:
                    id_n[index] = self._own_id.setdefault(int(found), len(self._own_id) + 1)
        return id_n


def tracked(results: Iterator[Result | Unreadable], tracker: Tracker | None) -> Iterator[Result | Unreadable]:
    """The results with ids; unchanged without a tracker."""
    for result in results:
        yield tracker(result) if tracker is not None and isinstance(result, Result) else result


def _sequence_of(origin: Origin) -> Hashable:
    return (origin.path, origin.number) if origin.kind in ("video", "stream") else "images"
