"""Scan the images and labels of a data set in parallel: read headers and labels, and report problems with either.

    pairs of paths --feed of chunks--> one ScanTable per chunk --join--> ScanTable --image_set--> ImageSet

Dimension key:  N images   T labels of all images   P polygon points of all labels
"""

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
    MAX_LARGE_PIXELS,
    MAX_MISSING,
    NOT_IMAGES,
    NOT_OPENED,
    READABLE,
    Header,
    ImageFacts,
    check_declared_size,
    decode,
    decoder_messages,
    describe_format,
    most_pixels,
    open_regular,
    read_bytes,
    read_facts,
)
from flatout.progress import Advance, progress
from flatout.yolo.data.find import Pair
from flatout.yolo.data.formats.sidecars import SIDECARS
from flatout.yolo.data.image_set import ImageSet, Labels, offsets, ranges
from flatout.yolo.data.label_text import (
    MAX_BYTES,
    MAX_LABELS,
    NO_BOXES,
    NO_POINTS,
    ImageLabels,
    Problem,
    RejectedLabels,
    num_lines,
    parse_labels,
    parse_labels_strictly,
    too_many_labels,
)

# One image and its labels

MIN_SIDE_PX = 10
"""Images with a shorter side are rejected."""
NO_LABELS = ImageLabels(NO_BOXES, [], [])

_SUFFIXES = {
    "jpeg": ("jpg", "jpeg"),
    "mpo": ("mpo", "jpg", "jpeg"),
    "tiff": ("tif", "tiff"),
}


class ScannedImage(NamedTuple):
    """The result of scanning one image."""

    reason: str
    """Why the image is left out, "" if it is used."""
    label_file: str
    """"found", "empty" or "missing"; "" if the image cannot be used, so that its labels were not read."""
    header: Header
    labels: ImageLabels
    problems: list[Problem]
    """Problems of the image; those of the labels are in `labels`."""


class RejectedImage(Exception):
    """The image cannot be used."""

    def __init__(self, reason: str, check: str, text: str) -> None:
        super().__init__(text)
        self.reason, self.problem = reason, Problem(check, 0, text)


def scan_image(
    image: str, label: str, *, strict: bool = False, names: tuple[str, ...] = (), large: bool = False
) -> ScannedImage:
    """Read the header and the labels of an image; `strict` applies all rules of YOLOv7, `large` allows more pixels.

    No content of a file raises an exception.
    """
    header = Header("unknown")
    try:
        facts = read_facts(image, verify=strict)
        if facts.ending == "absent" and facts.header.format == "png":
            raise RejectedImage("unreadable_image", "image-truncated", "the PNG file is truncated")
        header = facts.header
        check_header(header, large=large)
        check_declared_size(header, facts.num_bytes)
        problems = [*_minor_problems(facts, image), *([] if strict else _incomplete(image, facts))]
    except RejectedImage as error:
        reason, problem = error.reason, error.problem
    except OSError as error:
        reason, problem = "unreadable_image", Problem("image-unreadable", 0, error.strerror or str(error))
    except DecodeError as error:
        check = "image-empty" if "empty" in str(error) else "image-corrupt"
        reason, problem = "unreadable_image", Problem(check, 0, str(error))
    else:
        return _with_labels(label, header, problems, strict, names)
    return ScannedImage(reason, "", header, NO_LABELS, [problem])


def check_header(header: Header, *, large: bool = False) -> None:
    """Raise RejectedImage if the header shows that the image cannot be used: format, too small, too many pixels.

    `large` allows more pixels.
    """
    if header.format not in READABLE:
        reason = "unreadable_image" if header.format in NOT_OPENED else "image_format"
        check = "image-format" if header.format in NOT_IMAGES else "image-unsupported"
        raise RejectedImage(reason, check, describe_format(header.format))
    if min(header.width, header.height) < MIN_SIDE_PX:
        size = f"{header.width} x {header.height} px"
        raise RejectedImage("image_too_small", "image-too-small", f"{size}; sides must be at least {MIN_SIDE_PX} px")
    if header.width * header.height > (limit := MAX_LARGE_PIXELS if large else most_pixels(header.bits)):
        size = f"{header.width} x {header.height} px"
        raise RejectedImage("unreadable_image", "image-huge", f"{size}; the limit is {limit:,} pixels")


def read_labels(
    path: str, *, strict: bool, names: tuple[str, ...] = (), size_wh: tuple[int, int] = (1, 1)
) -> tuple[str, ImageLabels]:
    """State (one of LABEL_FILES) and labels of a label file; raises RejectedLabels only if `strict`."""
    sidecar = SIDECARS.get(os.path.splitext(path)[1])
    most_bytes = MAX_BYTES if sidecar is None else sidecar.max_bytes
    try:
        with open_regular(path) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            content = file.read(min(num_bytes, most_bytes))
    except FileNotFoundError:
        return "missing", NO_LABELS
    except OSError as error:
        return "found", _unreadable(error.strerror or str(error), strict)
    if sidecar is None and num_lines(content) > MAX_LABELS:
        return "found", too_many_labels()
    if num_bytes > most_bytes:
        return "found", _unreadable(f"larger than {most_bytes >> 20} MiB", strict)
    if not content.strip():
        return "empty", NO_LABELS
    if sidecar is not None:
        return "found", sidecar.parse(content, names, size_wh)
    if not strict:
        return "found", parse_labels(content)
    try:
        return "found", parse_labels_strictly(content)
    except RejectedLabels as rejected:
        rejected.num_labels = num_lines(content)
        raise


def _with_labels(
    path: str, header: Header, problems: list[Problem], strict: bool, names: tuple[str, ...]
) -> ScannedImage:
    try:
        state, labels = read_labels(path, strict=strict, names=names, size_wh=header.size_wh)
    except RejectedLabels as rejected:
        return ScannedImage(
            rejected.reason, "found", header, NO_LABELS._replace(num_dropped=rejected.num_labels), problems
        )
    return ScannedImage("", state, header, labels, problems)


def _unreadable(why: str, strict: bool) -> ImageLabels:
    if strict:
        raise RejectedLabels("unreadable_label")
    return NO_LABELS._replace(problems=[Problem("label-unreadable", 0, why)], num_dropped=1)


def _incomplete(image: str, facts: ImageFacts) -> list[Problem]:
    """Decode a JPEG without an end marker, to see whether rows are missing too."""
    if facts.ending != "absent" or facts.header.format != "jpeg":
        return []
    with decoder_messages():
        missing = decode(read_bytes(image)).missing
    if missing > MAX_MISSING:
        text = f"truncated: {missing:.0%} of the rows are missing"
        raise RejectedImage("image_truncated", "image-truncated", text)
    return [Problem("image-no-end", 0, "the end marker is missing; all rows are there")]


def _minor_problems(facts: ImageFacts, image: str) -> list[Problem]:
    """Problems of an image that is used anyway."""
    header, problems = facts.header, []
    suffix = os.path.splitext(image)[1][1:].lower()
    if suffix not in _SUFFIXES.get(header.format, (header.format,)):
        problems.append(Problem("image-extension", 0, f"contains {header.format.upper()} but is named .{suffix}"))
    if facts.ending == "more":
        problems.append(Problem("image-bytes-after-end", 0, "has extra bytes after the end of the image"))
    if header.orientation != 1:
        check = "exif-mirrored" if header.orientation in (2, 4, 5, 7) else "exif-rotated"
        problems.append(Problem(check, 0, f"EXIF orientation {header.orientation}; it is turned upright when read"))
    if header.bits > 8:
        problems.append(Problem("image-16-bit", 0, f"{header.bits} bits per channel; the upper 8 are used"))
    if header.format in ("jpeg", "mpo") and header.channels == 4:
        problems.append(Problem("image-cmyk", 0, "has CMYK colours"))
    elif header.channels in (2, 4):
        problems.append(Problem("image-alpha", 0, "has transparency, which is ignored"))
    if header.pages > 1:
        problems.append(Problem("image-pages", 0, "has several pages or frames; only the first is used"))
    return problems


# The result of a scan: a few flat arrays that can be joined, indexed and stored

IMAGE_RECORD = np.dtype(
    [
        ("width", "<i4"),  # of the upright image
        ("height", "<i4"),
        ("num_labels", "<i4"),
        ("reason", "u1"),  # position in REASONS
        ("label_file", "u1"),  # position in LABEL_FILES
        ("format", "u1"),  # position in FORMATS
        ("orientation", "u1"),
        ("bits", "u1"),
        ("channels", "u1"),
        ("num_dropped", "<u2"),  # unusable labels, at most MAX_DROPPED
    ]
)
MAX_SIDE_PX = 2**31 - 1
"""Longest side that is recorded; a header may contain any number."""
MAX_DROPPED = 2**16 - 1
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
    "image_N": (IMAGE_RECORD, 0),
    "class_box_T5": (np.dtype("<f4"), 5),
    "num_points_T": (np.dtype("<i4"), 0),
    "point_P2": (np.dtype("<f4"), 2),
}
"""Element type and number of columns (0: one-dimensional) of each array, in the order in which they are packed."""
_HEAD = struct.Struct("<I4q")


@dataclass(frozen=True)
class ScanTable:
    """The scan of N images in their order; rejected images are included, without labels."""

    image_N: np.ndarray
    class_box_T5: np.ndarray
    num_points_T: np.ndarray
    point_P2: np.ndarray
    problems: Mapping[int, list[Problem]]
    """Image index -> its problems; most images have none."""

    @property
    def used_N(self) -> np.ndarray:
        """Whether each image can be used, bool."""
        return np.asarray(self.image_N["reason"] == 0)

    def counts(self) -> dict[str, int]:
        """Number of label files found (also empty ones), missing and empty, of corrupt images, and of all images."""
        states = np.bincount(self.image_N["label_file"], minlength=len(LABEL_FILES)).tolist()
        return {
            "found": states[2] + states[3],
            "missing": states[1],
            "empty": states[2],
            "corrupt": int((~self.used_N).sum()),
            "total": len(self.image_N),
        }

    def take(self, rows: np.ndarray) -> "ScanTable":
        """The table of the images at these positions."""
        label_T = _rows_of(self.image_N["num_labels"], rows)
        point_P = _rows_of(self.num_points_T, label_T)
        return ScanTable(
            self.image_N[rows],
            self.class_box_T5[label_T],
            self.num_points_T[label_T],
            self.point_P2[point_P],
            {new: self.problems[old] for new, old in enumerate(rows.tolist()) if old in self.problems},
        )

    def pack(self) -> bytes:
        """The table as bytes, which `unpack` reads."""
        text = json.dumps(list(self.problems.items())).encode()
        arrays = [np.ascontiguousarray(getattr(self, name), kind) for name, (kind, _) in _ARRAYS.items()]
        head = _HEAD.pack(len(text), *map(len, arrays))
        return b"".join([head, text, *(array.tobytes() for array in arrays)])


def unpack(content: bytes | memoryview) -> ScanTable:
    """The table that `pack` wrote; ValueError if the bytes are something else."""
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
        raise ValueError("it does not contain a scan table") from error
    return ScanTable(**arrays, problems=problems)


def table_of(scanned: Sequence[ScannedImage]) -> ScanTable:
    """The table of some scanned images."""
    image_N = np.zeros(len(scanned), IMAGE_RECORD)
    for row, one in enumerate(scanned):
        image_N[row] = (
            *(min(side, MAX_SIDE_PX) for side in one.header.size_wh),
            len(one.labels.class_box_n5),
            REASONS.index(one.reason),
            LABEL_FILES.index(one.label_file),
            FORMATS.index(one.header.format),
            one.header.orientation,
            min(one.header.bits, 255),
            min(one.header.channels, 255),
            min(one.labels.num_dropped, MAX_DROPPED),
        )
    problems = [[*one.problems, *one.labels.problems] for one in scanned]
    return _table(image_N, [one.labels for one in scanned], problems)


def with_labels(table: ScanTable, labels: Sequence[ImageLabels]) -> ScanTable:
    """The same images with the given labels; images that cannot be used get none."""
    given = [each if used else NO_LABELS for each, used in zip(labels, table.used_N.tolist(), strict=True)]
    image_N = table.image_N.copy()
    image_N["num_labels"] = [len(each.class_box_n5) for each in given]
    image_N["num_dropped"] = [min(each.num_dropped, MAX_DROPPED) for each in given]
    image_N["label_file"] = np.where(image_N["num_labels"] > 0, LABEL_FILES.index("found"), LABEL_FILES.index("empty"))
    image_N["label_file"][~table.used_N] = 0
    problems = [[*table.problems.get(row, ()), *each.problems] for row, each in enumerate(given)]
    return _table(image_N, given, problems)


def _table(image_N: np.ndarray, labels: Sequence[ImageLabels], problems: Sequence[list[Problem]]) -> ScanTable:
    """Join the labels and problems of each image."""
    num_points = [len(points) for each in labels for points in each.polygons or [NO_POINTS] * len(each.class_box_n5)]
    return ScanTable(
        image_N,
        np.concatenate([NO_BOXES, *(each.class_box_n5 for each in labels)]),
        np.array(num_points, np.int32),
        np.concatenate([NO_POINTS, *(points for each in labels for points in each.polygons)]),
        {row: own for row, own in enumerate(problems) if own},
    )


def join(tables: Iterable[ScanTable]) -> ScanTable:
    """Concatenate tables."""
    listed = [table_of([]), *tables]
    problems, first = {}, 0
    for table in listed:
        problems.update({first + row: own for row, own in table.problems.items()})
        first += len(table.image_N)
    arrays = {name: np.concatenate([getattr(table, name) for table in listed]) for name in _ARRAYS}
    return ScanTable(**arrays, problems=problems)


def image_set(table: ScanTable, paths: Sequence[str], names: Sequence[str], *, single_class: bool = False) -> ImageSet:
    """The images that can be used, with their labels; `single_class` makes every class 0."""
    rows = np.flatnonzero(table.used_N)
    used = table if len(rows) == len(paths) else table.take(rows)
    class_box_T5 = used.class_box_T5
    if single_class:
        class_box_T5 = class_box_T5.copy()
        class_box_T5[:, 0] = 0
    labels = Labels(class_box_T5, offsets(used.image_N["num_labels"]), used.point_P2, offsets(used.num_points_T))
    size_wh_N2 = np.stack((used.image_N["width"], used.image_N["height"]), 1)
    return ImageSet(tuple(paths[row] for row in rows.tolist()), size_wh_N2, labels, tuple(names))


def _rows_of(counts: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Positions of the items that belong to `owners`, in their order."""
    return ranges(offsets(counts)[:-1][owners], counts[owners])[0]


# Scanning in parallel

CHUNK = 128
BYTES_EXPECTED = 1024
"""Expected bytes of a packed table per image. More is fine: the slot grows (see `Rows`)."""
MIN_FOR_WORKERS = 3000
"""Fewer images are scanned in this process, in the few tenths of a second that starting workers would take."""


@dataclass(frozen=True, kw_only=True)
class ScanConfig:
    """How a data set is scanned."""

    strict: bool = False
    """Apply all label rules of YOLOv7: one bad line drops the image."""
    workers: int | str = "cpu*1.0"
    """Worker processes, as for the feed. Small data sets are scanned without any."""
    progress: bool = True
    names: tuple[str, ...] = ()
    """Class names, needed for label files that contain names (Pascal VOC, labelme)."""
    large: bool = False
    """Accept images of more than 100 megapixels: they are cut into tiles (`--tiles`)."""


class ScanChunks(SampleSource):
    """Each sample is the packed table of a chunk of images."""

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
        config = self._config
        table = table_of(
            [scan_image(*pair, strict=config.strict, names=config.names, large=config.large) for pair in pairs]
        )
        return {"table": np.frombuffer(table.pack(), np.uint8)[:, None]}


def scan(pairs: Sequence[Pair], config: ScanConfig) -> ScanTable:
    """Scan all images; the table has them in the given order. No content of a file raises an exception."""
    if not pairs:
        return table_of([])
    workers = config.workers if len(pairs) >= MIN_FOR_WORKERS else 0
    with progress("scanning", len(pairs), shown=config.progress) as advance:
        tables = _scan_chunks(pairs, config, CHUNK, workers, advance)
        for number, table in enumerate(tables):
            if table is None:  # a file in it crashes the process that reads it
                tables[number] = _one_by_one(pairs[number * CHUNK : (number + 1) * CHUNK], config)
    return join(table for table in tables if table is not None)


def _one_by_one(pairs: Sequence[Pair], config: ScanConfig) -> ScanTable:
    """Scan a chunk again, one image at a time: a file in it crashed the worker, and is reported as unreadable."""
    crashed = ScannedImage(
        "unreadable_image",
        "",
        Header("unknown"),
        NO_LABELS,
        [Problem("image-corrupt", 0, "reading it crashes the process")],
    )
    tables = _scan_chunks(pairs, config, 1, 1, lambda done, nbytes: None)
    return join(table_of([crashed]) if table is None else table for table in tables)


def _scan_chunks(
    pairs: Sequence[Pair], config: ScanConfig, chunk: int, workers: int | str, advance: Advance
) -> list[ScanTable | None]:
    """The table of each chunk; None for one that crashes its workers."""
    source = ScanChunks(pairs, config, chunk)
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
