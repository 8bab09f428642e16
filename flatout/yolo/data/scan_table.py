"""What a scan found, as a few flat arrays that can be joined, cut and written down.

Dimension key:  N pictures   T labels of all pictures   P polygon points of all labels
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatout.images import FORMATS
from flatout.yolo.data.image_set import ImageSet, Labels
from flatout.yolo.data.label_text import NO_BOXES, NO_POINTS, PictureLabels, Problem
from flatout.yolo.data.scan_picture import Scanned

PICTURE = np.dtype(
    [
        ("width", "<i4"),  # after the orientation is obeyed
        ("height", "<i4"),
        ("num_labels", "<i4"),
        ("reason", "u1"),  # position in REASONS
        ("label_file", "u1"),  # position in LABEL_FILES
        ("format", "u1"),  # position in FORMATS
        ("orientation", "u1"),
        ("bits", "u1"),
        ("channels", "u1"),
        ("num_dropped", "<u2"),  # labels that cannot be used; 65,535 and more are the same
    ]
)
MOST_PX = 2**31 - 1
"""What a side is recorded as at most; a header may say anything."""
MOST_DROPPED = 2**16 - 1
LABEL_FILES = ("", "missing", "empty", "found")
REASONS = (
    "",
    "unreadable_image",
    "image_format",
    "image_too_small",
    "image_truncated",
    "unreadable_label",
    "ragged_rows",
    "column_count",
    "not_a_number",
    "odd_coordinate_count",
    "negative_or_nan",
    "above_one",
    "duplicate_row",
)
_ARRAYS: dict[str, tuple[np.dtype, int]] = {
    "picture_N": (PICTURE, 0),
    "class_box_T5": (np.dtype("<f4"), 5),
    "num_points_T": (np.dtype("<i4"), 0),
    "point_P2": (np.dtype("<f4"), 2),
}
"""Element type and row width (0: no rows) of each array, in the order in which they are packed."""
_HEAD = struct.Struct("<I4q")


@dataclass(frozen=True)
class ScanTable:
    """A scan of N pictures, in their order; those that are left out are in it too, without labels."""

    picture_N: np.ndarray
    class_box_T5: np.ndarray
    num_points_T: np.ndarray
    point_P2: np.ndarray
    problems: Mapping[int, list[Problem]]
    """Picture -> what is wrong or remarkable; most pictures have none."""

    @property
    def used_N(self) -> np.ndarray:
        """bool: pictures that can be used."""
        used_N: np.ndarray = self.picture_N["reason"] == 0
        return used_N

    def counts(self) -> dict[str, int]:
        """found (with or without labels in it), missing, empty, corrupt, total."""
        states = np.bincount(self.picture_N["label_file"], minlength=len(LABEL_FILES)).tolist()
        return {
            "found": states[2] + states[3],
            "missing": states[1],
            "empty": states[2],
            "corrupt": int((~self.used_N).sum()),
            "total": len(self.picture_N),
        }

    def take(self, rows: np.ndarray) -> "ScanTable":
        """The pictures at these positions."""
        label_T, _ = _rows_of(self.picture_N["num_labels"], rows)
        point_P, _ = _rows_of(self.num_points_T, label_T)
        return ScanTable(
            self.picture_N[rows],
            self.class_box_T5[label_T],
            self.num_points_T[label_T],
            self.point_P2[point_P],
            {new: self.problems[old] for new, old in enumerate(rows.tolist()) if old in self.problems},
        )

    def pack(self) -> bytes:
        """One block of bytes; `unpack` reads it back."""
        text = json.dumps(list(self.problems.items())).encode()
        arrays = [np.ascontiguousarray(getattr(self, name), kind) for name, (kind, _) in _ARRAYS.items()]
        head = _HEAD.pack(len(text), *map(len, arrays))
        return b"".join([head, text, *(array.tobytes() for array in arrays)])


def unpack(content: bytes | memoryview) -> ScanTable:
    """ValueError where the bytes are no table."""
    try:
        text_bytes, *lengths = _HEAD.unpack_from(content)
        offset = _HEAD.size + text_bytes
        problems = {
            row: [Problem(*each) for each in listed] for row, listed in json.loads(bytes(content[_HEAD.size : offset]))
        }
        arrays: dict[str, Any] = {}
        for (name, (kind, width)), length in zip(_ARRAYS.items(), lengths, strict=True):
            flat = np.frombuffer(content, kind, length * (width or 1), offset)
            offset += flat.nbytes
            arrays[name] = flat.reshape(-1, width) if width else flat
    except (struct.error, TypeError) as error:
        raise ValueError("not a table of scanned pictures") from error
    return ScanTable(**arrays, problems=problems)


def table_of(scanned: Sequence[Scanned]) -> ScanTable:
    """The table of a few pictures."""
    picture_N = np.zeros(len(scanned), PICTURE)
    problems: dict[int, list[Problem]] = {}
    boxes, points, num_points = [np.zeros((0, 5), np.float32)], [np.zeros((0, 2), np.float32)], []
    for row, one in enumerate(scanned):
        labels, header = one.labels, one.header
        num_labels = len(labels.class_box_n5)
        picture_N[row] = (
            *(min(side, MOST_PX) for side in header.size_wh),
            num_labels,
            REASONS.index(one.reason),
            LABEL_FILES.index(one.label_file),
            FORMATS.index(header.format),
            header.orientation,
            min(header.bits, 255),
            min(header.channels, 255),
            min(labels.num_dropped, MOST_DROPPED),
        )
        boxes.append(labels.class_box_n5)
        points += labels.polygons
        num_points += [len(each) for each in labels.polygons] or [0] * num_labels
        if told := [*one.problems, *labels.problems]:
            problems[row] = told
    return ScanTable(picture_N, np.concatenate(boxes), np.array(num_points, np.int32), np.concatenate(points), problems)


def with_labels(table: ScanTable, labels: Sequence[PictureLabels]) -> ScanTable:
    """The same pictures with these labels instead of their own; those that cannot be used get none."""
    used = table.used_N.tolist()
    given = [each if used[row] else PictureLabels(NO_BOXES, [], []) for row, each in enumerate(labels)]
    picture_N = table.picture_N.copy()
    picture_N["num_labels"] = [len(each.class_box_n5) for each in given]
    picture_N["num_dropped"] = [min(each.num_dropped, MOST_DROPPED) for each in given]
    picture_N["label_file"] = np.where(
        picture_N["num_labels"] > 0, LABEL_FILES.index("found"), LABEL_FILES.index("empty")
    )
    picture_N["label_file"][~table.used_N] = 0
    num_points = [len(points) for each in given for points in each.polygons or [NO_POINTS] * len(each.class_box_n5)]
    problems = {row: [*table.problems.get(row, ()), *each.problems] for row, each in enumerate(given)}
    return ScanTable(
        picture_N,
        np.concatenate([NO_BOXES, *(each.class_box_n5 for each in given)]),
        np.array(num_points, np.int32),
        np.concatenate([NO_POINTS, *(points for each in given for points in each.polygons)]),
        {row: told for row, told in problems.items() if told},
    )


def join(tables: Iterable[ScanTable]) -> ScanTable:
    """One after the other."""
    listed = [table_of([]), *tables]
    problems, first = {}, 0
    for table in listed:
        problems.update({first + row: told for row, told in table.problems.items()})
        first += len(table.picture_N)
    arrays = {name: np.concatenate([getattr(table, name) for table in listed]) for name in _ARRAYS}
    return ScanTable(**arrays, problems=problems)


def image_set(table: ScanTable, paths: Sequence[str], names: Sequence[str], *, single_class: bool = False) -> ImageSet:
    """The pictures that can be used, with their labels; `single_class` makes every class 0."""
    rows = np.flatnonzero(table.used_N)
    used = table if len(rows) == len(paths) else table.take(rows)
    class_box_T5 = used.class_box_T5
    if single_class:
        class_box_T5 = class_box_T5.copy()
        class_box_T5[:, 0] = 0
    labels = Labels(class_box_T5, _starts(used.picture_N["num_labels"]), used.point_P2, _starts(used.num_points_T))
    size_wh_N2 = np.stack((used.picture_N["width"], used.picture_N["height"]), 1)
    return ImageSet(tuple(paths[row] for row in rows.tolist()), size_wh_N2, labels, tuple(names))


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


def _rows_of(counts: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions of what belongs to `owners`, in their order, and where each one's begin, [owners + 1]."""
    first = _starts(counts)
    taken = _starts(counts[owners])
    within = np.arange(taken[-1]) - np.repeat(taken[:-1], np.diff(taken))
    return np.repeat(first[:-1][owners], np.diff(taken)) + within, taken
