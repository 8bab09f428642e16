"""The detections of one image: arrays, plots, conversions for other tools, and a line for the log.

Dimension key:  n detections   H W image
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from flatout.errors import ConfigError, counted
from flatout.yolo.metrics.coco import image_id_of
from flatout.yolo.predict.files import Origin, Unreadable

if TYPE_CHECKING:
    import pandas
    import supervision


class Boxes(np.ndarray):
    """Boxes as an array, float32 [n, 4]: left, top, right, bottom in pixels; it knows other formats, too.

    What is computed from it is a plain array; rows of it are boxes again.
    """

    size_hw: tuple[int, int]
    """Height and width of the image."""

    def __new__(cls, xyxy_n4: np.ndarray, size_hw: tuple[int, int]) -> Self:
        """A view of the corners."""
        boxes = np.asarray(xyxy_n4).view(cls)
        boxes.size_hw = size_hw
        return boxes

    @property
    def xyxy(self) -> np.ndarray:
        """left, top, right, bottom in pixels."""
        return np.array(self)

    @property
    def xywh(self) -> np.ndarray:
        """Centre x and y, width, height in pixels."""
        corner, far = self.xyxy[..., :2], self.xyxy[..., 2:]
        return np.concatenate(((corner + far) / 2, far - corner), -1)

    @property
    def xyxyn(self) -> np.ndarray:
        """left, top, right, bottom, divided by the size of the image: 0 to 1."""
        return np.asarray(self.xyxy / self._scale)

    @property
    def xywhn(self) -> np.ndarray:
        """Centre x and y, width, height, divided by the size of the image, as in label files."""
        return np.asarray(self.xywh / self._scale)

    @property
    def _scale(self) -> np.ndarray:
        height, width = self.size_hw
        return np.array([width, height, width, height], np.float32)

    def __array_finalize__(self, source: Any) -> None:
        # A view or copy of boxes belongs to the same image.
        self.size_hw = getattr(source, "size_hw", (1, 1))

    def __array_wrap__(self, array: np.ndarray, context: Any = None, return_scalar: bool = False) -> Any:
        return array[()] if return_scalar else np.asarray(array)

    def __getitem__(self, key: Any) -> Any:
        chosen = super().__getitem__(key)
        is_choice_of_rows = self.ndim == 2 and not isinstance(key, tuple) and np.ndim(key) < 2
        return np.asarray(chosen) if isinstance(chosen, Boxes) and not is_choice_of_rows else chosen

    def __reduce__(self) -> tuple[Any, ...]:
        return Boxes, (np.asarray(self), self.size_hw)


NO_ID = -1
"""The id of a detection that belongs to no track, or not yet."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Result:
    """The detections of one image, highest score first. The arrays belong to the caller."""

    boxes: Boxes
    """float32 [n, 4]: left, top, right, bottom in pixels of the image, clipped to it. An array with further formats:
    `boxes.xywh`, `boxes.xyxyn`. Plain arrays are accepted."""
    scores: np.ndarray
    """float32 [n], 0 to 1, descending."""
    classes: np.ndarray
    """int64 [n]."""
    names: tuple[str, ...]
    """Names of all classes; `names[classes[0]]` is the class of the first detection."""
    image: np.ndarray
    """uint8 [H, W, 3], BGR: the image without boxes."""
    origin: Origin
    """The file, stream or array that the image comes from."""
    ms: float = 0.0
    """Time of network and NMS for its batch, divided by the images of the batch."""
    ids: np.ndarray | None = None
    """int64 [n], if objects are tracked: the same number in every frame, from 1; -1 for one that has none (yet)."""

    def __post_init__(self) -> None:
        height, width = self.image.shape[:2]
        object.__setattr__(self, "boxes", Boxes(self.boxes, (height, width)))

    def __len__(self) -> int:
        return len(self.boxes)

    def __repr__(self) -> str:
        """'3 apples, 1 leaf; 12 ms'."""
        return f"{self.summary()}; {self.ms:.0f} ms"

    @property
    def path(self) -> str:
        return self.origin.path

    @property
    def labels(self) -> list[str]:
        """The name of the class of every detection."""
        return [self.names[kind] for kind in self.classes.tolist()]

    @property
    def pixel_boxes(self) -> np.ndarray:
        """int64 [n, 4]: corners rounded to whole pixels, as `detect.py` plots and writes them."""
        return self.boxes.xyxy.round().astype(np.int64)

    @property
    def stem(self) -> str:
        """Name of output files without ending: that of its file, with the number of the frame if there is one."""
        origin = self.origin
        return origin.stem if origin.frame is None else f"{origin.stem}_{origin.frame}"

    def summary(self) -> str:
        """'2 bolts, 1 nut', in the order of the classes; 'nothing' if there are no detections."""
        counts = sorted(Counter(self.classes.tolist()).items())
        return ", ".join(f"{count} {_plural(self.names[kind], count)}" for kind, count in counts) or "nothing"

    # Pictures

    def plot(self) -> np.ndarray:
        """A copy of the image with boxes, names and scores, and ids if there are any: uint8 [H, W, 3], BGR."""
        from flatout.charts import plot_boxes

        plotted = self.image.copy()
        height, width = plotted.shape[:2]
        plot_boxes(
            plotted,
            self.pixel_boxes.astype(np.float64),
            self.classes,
            self.names,
            score_n=self.scores,
            ids=None if self.ids is None else [None if number == NO_ID else number for number in self.ids.tolist()],
            letters_px=max(7.0, LETTERS * (height + width)),
            line_px=max(2, round(LINE * (height + width))),
        )
        return plotted

    draw = plot

    def save(self, path: str | Path = "") -> Path:
        """Write the plot to a file and return its path.

        `path` is a file, or a folder, which gets `<stem>_found.jpg`; by default this folder is the current one.
        ConfigError for a format that cannot be written, ResourceError if there is no room.
        """
        from flatout.yolo.predict.outputs import WRITABLE, write_file

        path = Path(path)
        file = path if path.suffix and not path.is_dir() else path / f"{self.stem}_found.jpg"
        if file.suffix.lower() not in WRITABLE:
            raise ConfigError(
                f"save(): {file}: images are written as {', '.join(sorted(WRITABLE))}. Choose one of these."
            )
        write_file(file, self.plot())
        return file

    def show(self) -> None:
        """Show the plot: in a notebook below the cell, else in a window until a key is pressed.

        ResourceError where neither is possible.
        """
        from flatout.yolo.predict.windows import show_image

        show_image(self.stem, self.plot())

    def crop(self, folder: str | Path | None = None) -> list[np.ndarray]:
        """The pixels of every detection, uint8 [h, w, 3], BGR; of a box thinner than a pixel, an empty array.

        With a `folder`, they are also written to `<class>/<stem>_<number>.jpg` there, as by `--save-crop`.
        """
        if folder is not None:
            from flatout.yolo.predict.outputs import write_crops

            write_crops(self, Path(folder), self.stem)
        corners = self.pixel_boxes.tolist()
        return [self.image[top:bottom, left:right].copy() for left, top, right, bottom in corners]

    # Other formats

    def to_coco(
        self, *, image_id: int | str | None = None, category_ids: Sequence[int] | None = None
    ) -> list[dict[str, Any]]:
        """One {image_id, category_id, bbox, score} per detection, as the COCO API reads it; track_id if it is tracked.

        bbox is x, y, w, h with 3 decimals, score has 5. `image_id` is by default the number in the file's name, else
        the name. `category_ids` maps classes to categories (`flatout.yolo.metrics.coco.COCO_CATEGORY_IDS` for COCO); by
        default a category is the number of its class.
        """
        name: int | str = image_id_of(f"{self.stem}.jpg") if image_id is None else image_id
        corner_n2, far_n2 = self.boxes[:, :2], self.boxes[:, 2:]
        box_n4 = np.concatenate((corner_n2, far_n2 - corner_n2), 1).astype(np.float64).round(3)
        scores = self.scores.astype(np.float64).round(5).tolist()
        kinds = self.classes.tolist()
        records = [
            {
                "image_id": name,
                "category_id": kind if category_ids is None else category_ids[kind],
                "bbox": box,
                "score": score,
            }
            for kind, box, score in zip(kinds, box_n4.tolist(), scores, strict=True)
        ]
        if self.ids is not None:
            for record, number in zip(records, self.ids.tolist(), strict=True):
                record["track_id"] = number
        return records

    def to_json(self) -> str:
        """The image and its detections as one JSON document: path, frame, width, height, ms, detections."""
        height, width = self.image.shape[:2]
        rows = [
            {name: round(value, 5) if name == "score" else value for name, value in row.items() if name not in SIDES}
            | {"box": [round(row[side], 3) for side in SIDES]}
            for row in self._rows()
        ]
        return json.dumps(
            {
                "path": self.path,
                "frame": self.origin.frame,
                "width": width,
                "height": height,
                "ms": round(self.ms, 3),
                "detections": rows,
            }
        )

    def to_df(self) -> "pandas.DataFrame":
        """One row per detection: class, name, score, left, top, right, bottom, and id if tracked; needs pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ConfigError(
                f"to_df() needs pandas ({error}). Install the extra `pandas`: pip install pandas"
            ) from None
        columns = ["class", "name", "score", *SIDES, *(["id"] if self.ids is not None else [])]
        return pandas.DataFrame(self._rows(), columns=columns)

    def to_supervision(self) -> "supervision.Detections":
        """The detections as `supervision.Detections`; ConfigError if that package is not installed."""
        try:
            import supervision
        except ImportError as error:
            # Also if it is installed, but one of its dependencies is missing.
            raise ConfigError(f"to_supervision(): {error}. Install it with: pip install supervision") from None
        ids: dict[str, Any] = {} if self.ids is None else {"tracker_id": self.ids.copy()}
        return supervision.Detections(
            xyxy=self.boxes.xyxy,
            confidence=self.scores.copy(),
            class_id=self.classes.copy(),
            data={"class_name": np.array(self.labels, dtype=str)},
            **ids,
        )

    def _rows(self) -> list[dict[str, Any]]:
        """A flat record per detection."""
        columns = {"class": self.classes, "name": self.labels, "score": self.scores}
        columns |= dict(zip(SIDES, self.boxes.xyxy.T, strict=True))
        columns |= {} if self.ids is None else {"id": self.ids}
        rows = zip(*(np.asarray(column).tolist() for column in columns.values()), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in rows]


SIDES = ("left", "top", "right", "bottom")
IRREGULAR = {
    "calf": "calves", "child": "children", "deer": "deer", "fish": "fish", "foot": "feet", "goose": "geese",
    "knife": "knives", "leaf": "leaves", "loaf": "loaves", "man": "men", "mouse": "mice", "sheep": "sheep",
    "shelf": "shelves", "tooth": "teeth", "wolf": "wolves", "woman": "women",
}  # fmt: skip
"""Last words of class names -> their plurals."""
LETTERS, LINE = 0.006, 0.0013
"""Height of capitals and width of lines, as shares of height + width."""


def _plural(name: str, count: int) -> str:
    """YOLOv7's 's', but as in English: 'boxes', 'berries', 'leaves'; names that look like a plural (skis) are kept."""
    if count == 1 or (name.endswith("s") and not name.endswith(("ss", "us"))):
        return name
    for one, many in IRREGULAR.items():
        if re.search(rf"\b{one}$", name):
            return f"{name.removesuffix(one)}{many}"
    if name.endswith("y") and name[-2:-1] not in (*"aeiou", ""):
        return f"{name[:-1]}ies"
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


def done_line(frames: int, detections: int, seconds: float) -> str:
    """How much was detected, and how fast."""
    rate = frames / max(seconds, 1e-9)
    seen = f"{counted(frames, 'image')}, {counted(detections, 'detection')}"
    speed = f"{rate:.1f}" if rate >= 1 else f"{rate:.2g}"  # large images in tiles take seconds each
    return f"Done. {seen} in {seconds:.1f} s: {speed} img/s, with reading and writing"


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
    place = f"{origin.kind} {origin.number + 1}/{origin.total or '?'}"
    if origin.kind == "video":
        place += f" ({origin.frame}/{origin.num_frames or '?'})"
    elif origin.kind == "stream":
        place += f" ({origin.frame})"
    return f"{place} {shown(origin.path)}"
