"""The detections of one image: plain arrays, conversions for other tools, and a line for the log.

Dimension key:  n detections   H W image
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.errors import ConfigError, counted
from flatout.yolo.metrics.coco import image_id_of
from flatout.yolo.predict.files import Origin, Unreadable

if TYPE_CHECKING:
    import supervision


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """The detections of one image, highest score first. The arrays belong to the caller."""

    boxes: np.ndarray
    """float32 [n, 4]: left, top, right, bottom in pixels of the image, clipped to it."""
    scores: np.ndarray
    """float32 [n], 0 to 1, descending."""
    classes: np.ndarray
    """int64 [n]."""
    names: tuple[str, ...]
    """Names of all classes; `names[classes[0]]` is the class of the first detection."""
    image: np.ndarray = field(repr=False)
    """uint8 [H, W, 3], BGR: the image without boxes."""
    origin: Origin
    """The file, stream or array that the image comes from."""
    ms: float = 0.0
    """Time of network and NMS for its batch, divided by the images of the batch."""

    def __len__(self) -> int:
        return len(self.boxes)

    @property
    def path(self) -> str:
        return self.origin.path

    @property
    def pixel_boxes(self) -> np.ndarray:
        """int64 [n, 4]: corners rounded to whole pixels, as `detect.py` plots and writes them."""
        return self.boxes.round().astype(np.int64)

    @property
    def stem(self) -> str:
        """Name of output files without ending: that of its file, with the number of the frame if there is one."""
        origin = self.origin
        return origin.stem if origin.frame is None else f"{origin.stem}_{origin.frame}"

    def summary(self) -> str:
        """'2 bolts, 1 nut', in the order of the classes; 'nothing' if there are no detections."""
        counts = sorted(Counter(self.classes.tolist()).items())
        return ", ".join(f"{count} {_plural(self.names[kind], count)}" for kind, count in counts) or "nothing"

    def to_coco(
        self, *, image_id: int | str | None = None, category_ids: Sequence[int] | None = None
    ) -> list[dict[str, Any]]:
        """One {image_id, category_id, bbox, score} per detection, as the COCO API reads it.

        bbox is x, y, w, h with 3 decimals, score has 5. `image_id` is by default the number in the file's name, else
        the name. `category_ids` maps classes to categories (`flatout.yolo.metrics.coco.COCO_CATEGORY_IDS` for COCO); by
        default a category is the number of its class.
        """
        name: int | str = image_id_of(f"{self.stem}.jpg") if image_id is None else image_id
        corner_n2, far_n2 = self.boxes[:, :2], self.boxes[:, 2:]
        box_n4 = np.concatenate((corner_n2, far_n2 - corner_n2), 1).astype(np.float64).round(3)
        scores = self.scores.astype(np.float64).round(5).tolist()
        kinds = self.classes.tolist()
        return [
            {
                "image_id": name,
                "category_id": kind if category_ids is None else category_ids[kind],
                "bbox": box,
                "score": score,
            }
            for kind, box, score in zip(kinds, box_n4.tolist(), scores, strict=True)
        ]

    def to_supervision(self) -> "supervision.Detections":
        """The detections as `supervision.Detections`; ConfigError if that package is not installed."""
        try:
            import supervision
        except ImportError as error:
            # Also if it is installed, but one of its dependencies is missing.
            raise ConfigError(f"to_supervision(): {error}. Install it with: pip install supervision") from None
        names = np.array([self.names[kind] for kind in self.classes.tolist()], dtype=str)
        return supervision.Detections(
            xyxy=self.boxes.copy(),
            confidence=self.scores.copy(),
            class_id=self.classes.copy(),
            data={"class_name": names},
        )

    def draw(self) -> np.ndarray:
        """A copy of the image with boxes, names and scores: uint8 [H, W, 3], BGR."""
        from flatout.charts import plot_boxes

        plotted = self.image.copy()
        height, width = plotted.shape[:2]
        plot_boxes(
            plotted,
            self.pixel_boxes.astype(np.float64),
            self.classes,
            self.names,
            score_n=self.scores,
            letters_px=max(7.0, LETTERS * (height + width)),
            line_px=max(2, round(LINE * (height + width))),
        )
        return plotted


LETTERS, LINE = 0.006, 0.0013
"""Height of capitals and width of lines, as shares of height + width."""


def _plural(name: str, count: int) -> str:
    """YOLOv7's 's', but as in English: 'boxes', 'buses'; names that look like a plural (skis) are kept."""
    if count == 1 or (name.endswith("s") and not name.endswith(("ss", "us"))):
        return name
    return f"{name}es" if name.endswith(("s", "x", "z", "ch", "sh")) else f"{name}s"


# Lines for the log

MAX_LISTED = 10
"""Unreadable files that are listed by name; the others are counted."""


def result_line(result: Result) -> str:
    """'image 3/12 images/c.jpg: 640x480, 2 bolts, 1 nut, 12.3 ms'."""
    height, width = result.image.shape[:2]
    return f"{_place(result.origin)}: {width}x{height}, {result.summary()}, {result.ms:.1f} ms"


def unreadable_lines(unreadable: Sequence[Unreadable]) -> list[str]:
    """How many sources could not be read, which, and why."""
    if not unreadable:
        return []
    lines = [f"{counted(len(unreadable), 'source')} could not be read, or not to the end:"]
    lines += [f"  {shown(each.path)}: {each.reason}" for each in unreadable[:MAX_LISTED]]
    if len(unreadable) > MAX_LISTED:
        lines.append(f"  ... and {len(unreadable) - MAX_LISTED} more")
    return lines


def closing_lines(
    *,
    frames: int,
    detections: int,
    seconds: float,
    folder: Path,
    wrote: Sequence[str],
    unreadable: Sequence[Unreadable],
) -> list[str]:
    """The last lines of a detection."""
    rate = frames / max(seconds, 1e-9)
    seen = f"{counted(frames, 'image')}, {counted(detections, 'detection')}"
    done = f"Done. {seen} in {seconds:.1f} s: {rate:.1f} img/s, with reading and writing"
    saved = [f"Results saved to {folder}"] if wrote else []
    return [*unreadable_lines(unreadable), done, *wrote, *saved]


def nothing_read_message(source: str, unreadable: Sequence[Unreadable]) -> str:
    """The error if no frame could be read; each file has been logged before."""
    first = unreadable[0]
    reason = f"{shown(first.path)}: {first.reason}"
    if len(unreadable) == 1:
        return f"--source {source}: nothing could be read: {reason}. Repair or replace it."
    return (
        f"--source {source}: none of its {len(unreadable)} files could be read. The first: {reason}. "
        "Repair or replace them."
    )


def shown(path: str) -> str:
    """A path with unprintable characters escaped, so that it fits on one line."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in path)


def _place(origin: Origin) -> str:
    place = f"{origin.kind} {origin.number + 1}/{origin.total}"
    if origin.kind == "video":
        place += f" ({origin.frame}/{origin.num_frames or '?'})"
    elif origin.kind == "stream":
        place += f" ({origin.frame})"
    return f"{place} {shown(origin.path)}"
