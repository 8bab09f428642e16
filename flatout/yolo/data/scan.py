"""Look at all pictures and labels of a data set, in parallel: a feed of chunks, each of which becomes a small table."""

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from flatout.feed import DecodeError, Feed, FeedConfig, Plan, Rows, SampleSource
from flatout.images import (
    FORMATS,
    MOST_MISSING,
    NOT_IMAGES,
    NOT_OPENED,
    READABLE,
    Header,
    ImageFacts,
    check_promise,
    decode,
    decoder_messages,
    described,
    most_pixels,
    open_regular,
    read_bytes,
    read_facts,
)
from flatout.progress import Advance, progress
from flatout.yolo.data.find import Pair
from flatout.yolo.data.image_set import ImageSet, Labels
from flatout.yolo.data.label_text import (
    MOST_BYTES,
    MOST_LABELS,
    NO_BOXES,
    NO_POINTS,
    ImageLabels,
    Problem,
    RejectedLabels,
    num_lines,
    read_lines,
    read_strictly,
    read_voc,
    too_many,
)

# One picture and its labels: can it train, how large is it, what is drawn on it, and what is wrong with either?

LEAST_SIDE = 10
"""Pixels; what is smaller is no photograph."""
NOTHING = ImageLabels(NO_BOXES, [], [])

_SUFFIXES = {
    "jpeg": ("jpg", "jpeg"),
    "mpo": ("mpo", "jpg", "jpeg"),
    "tiff": ("tif", "tiff"),
}


class Scanned(NamedTuple):
    """What a scan knows about one picture."""

    reason: str
    """Why it is left out, "" if it is used."""
    label_file: str
    """"found", "empty" or "missing"; "" if the picture is no good, so that nobody looked."""
    header: Header
    labels: ImageLabels
    problems: list[Problem]
    """Of the picture; those of the labels are in `labels`."""


class RejectedImage(Exception):
    """The picture cannot be used."""

    def __init__(self, reason: str, check: str, text: str) -> None:
        super().__init__(text)
        self.reason, self.problem = reason, Problem(check, 0, text)


def scan_picture(image: str, label: str, *, strict: bool = False, names: tuple[str, ...] = ()) -> Scanned:
    """Look at a picture and read its labels; `strict` obeys all rules of YOLOv7. Raises nothing a file can cause."""
    header = Header("unknown")
    try:
        facts = _facts(image, strict)
        header = facts.header
        check_header(header)
        _check_promise(facts)
        problems = [*_remarks(facts, image), *([] if strict else _incomplete(image, facts))]
    except RejectedImage as rejected:
        return Scanned(rejected.reason, "", header, NOTHING, [rejected.problem])
    return _with_labels(label, header, problems, strict, names)


def check_header(header: Header) -> None:
    """Refuse what no training can use, by its header alone."""
    if header.format not in READABLE:
        reason = "unreadable_image" if header.format in NOT_OPENED else "image_format"
        check = "image-format" if header.format in NOT_IMAGES else "image-unsupported"
        raise RejectedImage(reason, check, described(header.format))
    if min(header.width, header.height) < LEAST_SIDE:
        size = f"{header.width} x {header.height} px"
        raise RejectedImage("image_too_small", "image-too-small", f"{size}; {LEAST_SIDE} is the least")
    if header.width * header.height > most_pixels(header):
        size = f"{header.width} x {header.height} px"
        raise RejectedImage("unreadable_image", "image-huge", f"{size}; {most_pixels(header):,} pixels are the most")


def _check_promise(facts: ImageFacts) -> None:
    try:
        check_promise(facts.header, facts.num_bytes)
    except DecodeError as error:
        raise RejectedImage("unreadable_image", "image-corrupt", str(error)) from None


def read_labels(
    path: str, *, strict: bool, names: tuple[str, ...] = (), size_wh: tuple[int, int] = (1, 1)
) -> tuple[str, ImageLabels]:
    """State and labels of a label file; RejectedLabels only where `strict`."""
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return "missing", NOTHING
    except OSError as error:
        return "found", _unreadable(error.strerror or str(error), strict)
    try:
        num_bytes = os.fstat(fd).st_size
        content = os.pread(fd, min(num_bytes, MOST_BYTES), 0)
    except OSError as error:
        return "found", _unreadable(error.strerror or str(error), strict)
    finally:
        os.close(fd)
    if not path.endswith(".xml") and num_lines(content) > MOST_LABELS:
        return "found", too_many()
    if num_bytes > MOST_BYTES:
        return "found", _unreadable(f"larger than {MOST_BYTES >> 20} MiB", strict)
    if not content.strip():
        return "empty", NOTHING
    if path.endswith(".xml"):
        return "found", read_voc(content, names, size_wh)
    if not strict:
        return "found", read_lines(content)
    try:
        return "found", read_strictly(content)
    except RejectedLabels as rejected:
        rejected.num_labels = num_lines(content)
        raise


def _facts(image: str, strict: bool) -> ImageFacts:
    try:
        facts = read_facts(image, verify=strict)
    except OSError as error:
        raise RejectedImage("unreadable_image", "image-unreadable", error.strerror or str(error)) from None
    except DecodeError as error:
        check = "image-empty" if "empty" in str(error) else "image-corrupt"
        raise RejectedImage("unreadable_image", check, str(error)) from None
    if facts.ending == "absent" and facts.header.format == "png":
        raise RejectedImage("unreadable_image", "image-truncated", "a PNG that is cut off")
    return facts


def _with_labels(path: str, header: Header, problems: list[Problem], strict: bool, names: tuple[str, ...]) -> Scanned:
    try:
        state, labels = read_labels(path, strict=strict, names=names, size_wh=header.size_wh)
    except RejectedLabels as rejected:
        return Scanned(rejected.reason, "found", header, NOTHING._replace(num_dropped=rejected.num_labels), problems)
    return Scanned("", state, header, labels, problems)


def _unreadable(why: str, strict: bool) -> ImageLabels:
    if strict:
        raise RejectedLabels("unreadable_label")
    return NOTHING._replace(problems=[Problem("label-unreadable", 0, why)], num_dropped=1)


def _incomplete(image: str, facts: ImageFacts) -> list[Problem]:
    """A JPEG without its end marker is decoded, once: does it lack only that, or pixels too?"""
    if facts.ending != "absent" or facts.header.format != "jpeg":
        return []
    try:
        with decoder_messages():
            missing = decode(read_bytes(image)).missing
    except (OSError, DecodeError) as error:
        raise RejectedImage("unreadable_image", "image-corrupt", str(error)) from None
    if missing > MOST_MISSING:
        text = f"cut off: {missing:.0%} of its rows are missing"
        raise RejectedImage("image_truncated", "image-truncated", text)
    return [Problem("image-no-end", 0, "lacks its end marker; every row is there")]


def _remarks(facts: ImageFacts, image: str) -> list[Problem]:
    """What is worth saying about a picture that is used."""
    header, remarks = facts.header, []
    suffix = os.path.splitext(image)[1][1:].lower()
    if suffix not in _SUFFIXES.get(header.format, (header.format,)):
        remarks.append(Problem("image-extension", 0, f"is {header.format.upper()} but is named .{suffix}"))
    if facts.ending == "more":
        remarks.append(Problem("image-bytes-after-end", 0, "holds more bytes after its end"))
    if header.orientation != 1:
        check = "exif-mirrored" if header.orientation in (2, 4, 5, 7) else "exif-rotated"
        remarks.append(Problem(check, 0, f"EXIF orientation {header.orientation}; it is turned upright"))
    if header.bits > 8:
        remarks.append(Problem("image-16-bit", 0, f"{header.bits} bits per channel; 8 are used"))
    if header.format in ("jpeg", "mpo") and header.channels == 4:
        remarks.append(Problem("image-cmyk", 0, "has CMYK colours"))
    elif header.channels in (2, 4):
        remarks.append(Problem("image-alpha", 0, "has transparency, which is dropped"))
    if header.pages > 1:
        remarks.append(Problem("image-pages", 0, "has several pages or frames; only the first is used"))
    return remarks


# What a scan found, as a few flat arrays that can be joined, cut and written down.
#
# Dimension key:  N pictures   T labels of all pictures   P polygon points of all labels

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


def with_labels(table: ScanTable, labels: Sequence[ImageLabels]) -> ScanTable:
    """The same pictures with these labels instead of their own; those that cannot be used get none."""
    used = table.used_N.tolist()
    given = [each if used[row] else ImageLabels(NO_BOXES, [], []) for row, each in enumerate(labels)]
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


CHUNK = 128
BYTES_EXPECTED = 1024
"""Per picture, of its part of a table; more is never lost, see Rows."""
WORTH_WORKERS = 3000
"""Pictures that one process looks at while the workers would start, some tenths of a second."""


@dataclass(frozen=True, kw_only=True)
class ScanConfig:
    """How a scan runs and judges."""

    strict: bool = False
    """All label rules of YOLOv7: one bad line drops the picture."""
    workers: int | str = "cpu*1.0"
    """Processes, as for the feed. Few pictures are looked at without any."""
    progress: bool = True
    names: tuple[str, ...] = ()
    """Of the classes, for label files that name them (Pascal VOC)."""


class Chunks(SampleSource):
    """Some pictures at a time, as the bytes of their table."""

    def __init__(self, pairs: Sequence[Pair], config: ScanConfig, chunk: int) -> None:
        self.fields = {"table": Rows(1, np.uint8, expected=BYTES_EXPECTED * chunk)}
        self._pairs = pairs
        self._config = config
        self._chunk = chunk

    def __len__(self) -> int:
        return -(-len(self._pairs) // self._chunk)

    def where(self, index: int) -> str:
        return self._pairs[index * self._chunk].image

    def sample(self, index: int, rng: np.random.Generator) -> Mapping[str, ArrayLike]:
        pairs = self._pairs[index * self._chunk : (index + 1) * self._chunk]
        table = table_of([scan_picture(*pair, strict=self._config.strict, names=self._config.names) for pair in pairs])
        return {"table": np.frombuffer(table.pack(), np.uint8)[:, None]}


def scan(pairs: Sequence[Pair], config: ScanConfig) -> ScanTable:
    """The table of all pictures, in their order, whatever is in the files."""
    if not pairs:
        return table_of([])
    workers = config.workers if len(pairs) >= WORTH_WORKERS else 0
    with progress("scanning", len(pairs), shown=config.progress) as advance:
        tables = _scan_chunks(pairs, config, CHUNK, workers, advance)
        for number, table in enumerate(tables):
            if table is None:  # a file in it ends whoever reads it
                tables[number] = _one_by_one(pairs[number * CHUNK : (number + 1) * CHUNK], config)
    return join(table for table in tables if table is not None)


def _one_by_one(pairs: Sequence[Pair], config: ScanConfig) -> ScanTable:
    """Of pictures among which one kills its worker."""
    killer = Scanned(
        "unreadable_image",
        "",
        Header("unknown"),
        NOTHING,
        [Problem("image-corrupt", 0, "looking at it ended the process")],
    )
    tables = _scan_chunks(pairs, config, 1, 1, lambda done, nbytes: None)
    return join(table_of([killer]) if table is None else table for table in tables)


def _scan_chunks(
    pairs: Sequence[Pair], config: ScanConfig, chunk: int, workers: int | str, advance: Advance
) -> list[ScanTable | None]:
    """A table per chunk; None for one that nobody survives."""
    source = Chunks(pairs, config, chunk)
    plan = Plan(num_samples=len(source), batch_size=min(8, len(source)), shuffle=False, last="short")
    tables: list[ScanTable | None] = [None] * len(source)
    nbytes = 0
    with Feed(source, plan, FeedConfig(workers=workers, epochs=1, bad_share=1.0)) as feed:
        for batch in feed:
            ends = np.cumsum(batch.counts["table"]).tolist()
            pieces = np.split(batch["table"].reshape(-1), ends[:-1])
            for row, (index, piece) in enumerate(zip(batch.positions.tolist(), pieces, strict=True)):
                if batch.indices[row] == index:
                    tables[index] = unpack(piece.tobytes())
                    nbytes += len(piece)
            advance(min((int(batch.positions[-1]) + 1) * chunk, len(pairs)), nbytes)
    return tables
