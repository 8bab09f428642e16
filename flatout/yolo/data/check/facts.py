"""What checks work on: facts about a data set, the registry of all checks, and the pass that decodes every image.

    SetFacts --> one SplitFacts per split: the files that were found, their scan, and a DecodeTable
    CHECKS   --> one Check per id; docs/data.md publishes this table

Dimension key:  N images   M decoded images   T labels of all images   A anchors   HWC height, width, channels
"""

import functools
import hashlib
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from flatout.feed import DecodeError, Feed, FeedConfig, Plan
from flatout.findings import LEVEL_OF, Finding, Severity
from flatout.images import DecodedImage, Header, check_png, decode, decoder_messages, read_bytes
from flatout.progress import progress
from flatout.yolo.data.anchors import boxes_at_size
from flatout.yolo.data.data_yaml import DataSet, YamlProblem
from flatout.yolo.data.file_records import FileRecords
from flatout.yolo.data.find import FoundImages, Pair
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.scan import LABEL_FILES, ScanTable, image_set

HASH_SIDE = 16
BAND_ROWS = 64
MAX_PIXELS_COMPARED = 4_000_000
REASON_BYTES = 200
END_BYTES = 4096
"""Bytes at the end of a JPEG in which the scan looks for the end marker."""
DECODE_RECORD = np.dtype(
    [
        ("digest", "V16"),  # of the bytes of the file
        ("hash", f"V{HASH_SIDE * HASH_SIDE // 8}"),  # see `difference_hash`
        ("width", "<i4"),
        ("height", "<i4"),
        ("state", "u1"),
        ("one_colour", "?"),
        ("grey", "?"),
        ("reason", f"S{REASON_BYTES}"),  # why the image cannot be used, or what is damaged; "" if it is sound
    ]
)
DECODED, UNREADABLE, UNDECODABLE, CRASHED = range(4)
"""Values of `state`. CRASHED: decoding ended the process."""

_TIFF_ERROR = "TIFF_Error"


# Facts about a data set


@dataclass(frozen=True)
class DecodeTable:
    """What decoding the images of a split showed."""

    rows: np.ndarray
    """Positions of the decoded images among the pairs of the split, int64 [M]."""
    facts_M: np.ndarray
    """DECODE_RECORD."""


NOT_DECODED = DecodeTable(np.zeros(0, np.int64), np.zeros(0, DECODE_RECORD))


@dataclass(frozen=True)
class SplitFacts:
    """Facts about one split: train, val or test."""

    name: str
    found: FoundImages
    pairs: list[Pair]
    table: ScanTable
    decoded: DecodeTable
    """NOT_DECODED in a quick check."""
    class_names: tuple[str, ...] = ()
    error: str = ""
    """Why the split could not be read at all; "" if it was."""
    single_class: bool = False
    """Whether every class of `images` is 0."""

    @cached_property
    def images(self) -> ImageSet:
        """The images that training would use."""
        paths = [pair.image for pair in self.pairs]
        return image_set(self.table, paths, self.class_names, single_class=self.single_class)

    @cached_property
    def used_rows(self) -> list[int]:
        """Position of each of `images` among the pairs."""
        return np.flatnonzero(self.table.used_N).tolist()

    @property
    def num_dropped(self) -> int:
        """Number of labels that cannot be used."""
        return int(self.table.image_N["num_dropped"].sum())

    @property
    def dropped_share(self) -> float:
        """Share of all labels that cannot be used."""
        return self.num_dropped / max(1, self.num_dropped + len(self.table.class_box_T5))

    def label_place(self, image: int) -> str:
        """Path to report for the labels of one of `images`."""
        return self.pairs[self.used_rows[image]].label_place

    def box_px(self, img_size: int, tiles: int | None = None) -> np.ndarray:
        """Width and height of each label in pixels at a training size, float64 [T, 2]; `tiles`: side of the tiles."""
        size_T2 = self.images.size_wh_N2[self.images.labels.image_T].astype(np.float64)
        box_px_T2 = boxes_at_size(size_T2, self.images.labels.class_box_T5[:, 3:], img_size)
        # Not the whole image, but a tile of it is resized to the training size.
        return box_px_T2 if tiles is None else box_px_T2 * np.maximum(1, size_T2.max(1, keepdims=True) / tiles)

    def label_files(self, state: str) -> Iterator[Pair]:
        """The images whose label file is in this state, one of LABEL_FILES."""
        for row in np.flatnonzero(self.table.image_N["label_file"] == LABEL_FILES.index(state)).tolist():
            yield self.pairs[row]


@dataclass(frozen=True)
class SetFacts:
    """Facts about a whole data set."""

    data: DataSet
    problems: list[YamlProblem]
    """Mistakes in the data YAML."""
    splits: dict[str, SplitFacts]
    img_size: int = 640
    tiles: int | None = None
    """Side of the tiles that are trained on; None: whole images are."""
    anchor_wh_A2: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))
    """Anchors to compare with the boxes, in pixels."""
    label_names: dict[str, list[str]] = field(default_factory=dict)
    """Label folder -> names of the files in it."""

    @property
    def num_classes(self) -> int:
        return len(self.data.names)


# The registry of checks
#
# A check is reported either by the scan, which names its id in a Problem, or by a function over the finished facts,
# which `set_check` or `split_check` adds to the registry. The name of the function is the id, with dashes.

Found = Iterable[tuple[str, str]]
"""Place and text of each finding."""


@dataclass(frozen=True)
class Check:
    """One entry of the published list of checks."""

    id: str
    severity: Severity
    looks_for: str
    advice: str
    find: Callable[[SetFacts], Found] | None = None
    """None: the scan reports it."""
    stops: bool = False
    """Whether training refuses such data; see `open_set.py`."""

    def findings(self, facts: SetFacts) -> Iterator[Finding]:
        """What its function finds; nothing if the scan reports it."""
        for where, text in self.find(facts) if self.find is not None else ():
            yield finding_at(self.id, where, text)


CHECKS: dict[str, Check] = {}


def set_check(
    severity: Severity, looks_for: str, advice: str, *, stops: bool = False
) -> Callable[[Callable[[SetFacts], Found]], Callable[[SetFacts], Found]]:
    """Decorator that adds a check of the whole data set to the registry."""

    def register(find: Callable[[SetFacts], Found]) -> Callable[[SetFacts], Found]:
        add_check(Check(find.__name__.replace("_", "-"), severity, looks_for, advice, find, stops))
        return find

    return register


def split_check(
    severity: Severity, looks_for: str, advice: str, *, stops: bool = False
) -> Callable[[Callable[[SplitFacts, SetFacts], Found]], Callable[[SetFacts], Found]]:
    """Decorator that adds a check of one split, made for each of them, to the registry."""

    def register(find: Callable[[SplitFacts, SetFacts], Found]) -> Callable[[SetFacts], Found]:
        @functools.wraps(find)
        def find_in_all(facts: SetFacts) -> Found:
            return itertools.chain.from_iterable(find(split, facts) for split in facts.splits.values())

        return set_check(severity, looks_for, advice, stops=stops)(find_in_all)

    return register


def add_check(check: Check) -> None:
    """Add a check to the registry; for checks that the scan makes, which have no function of their own."""
    assert check.id not in CHECKS, f"two checks have the id {check.id}"
    CHECKS[check.id] = check


def finding_at(check: str, where: str, text: str) -> Finding:
    """A finding of a check at one place, with the severity and advice of the registry."""
    entry = CHECKS[check]
    return Finding(check, text, LEVEL_OF[entry.severity], entry.advice, where)


# Decoding every image, in worker processes


def check_decoding(paths: Sequence[str], rows: np.ndarray, *, workers: int | str, shown: bool) -> DecodeTable:
    """Decode the images at `rows`; one that crashes its worker process is recorded as CRASHED."""
    if not len(rows):
        return NOT_DECODED
    chosen = [paths[row] for row in rows.tolist()]
    source = FileRecords(chosen, chosen, decode_facts, DECODE_RECORD)
    facts_M = np.zeros(len(source), DECODE_RECORD)
    plan = Plan(num_samples=len(source), batch_size=min(64, len(source)), shuffle=False, last="short")
    with (
        progress("decoding", len(rows), shown=shown) as advance,
        Feed(source, plan, FeedConfig(workers=workers, epochs=1, bad_share=1.0)) as feed,
    ):
        for batch in feed:
            is_own = batch.indices == batch.positions  # else it is another image, in place of one that crashes
            facts_M[batch.positions[is_own]] = batch["record"][is_own]
            facts_M["state"][batch.positions[~is_own]] = CRASHED
            advance(min(int(batch.positions[-1]) + 1, len(rows)), 0)
    return DecodeTable(rows, facts_M[: len(rows)])


def decode_facts(path: str) -> np.ndarray:
    """Decode a file and describe the result, DECODE_RECORD []; no content of a file raises an exception."""
    facts = np.zeros((), DECODE_RECORD)
    messages: list[str] = []
    try:
        content = read_bytes(path)
        facts["digest"] = np.void(hashlib.blake2b(content, digest_size=16).digest())
        with _opencv_errors_reported(), decoder_messages() as messages:
            decoded = decode(content)
    except (OSError, DecodeError) as error:
        facts["state"] = UNREADABLE if isinstance(error, OSError) else UNDECODABLE
        facts["reason"] = _shortened("; ".join([str(error), *messages[:1]]))
        return facts
    image = decoded.image
    facts["height"], facts["width"] = image.shape[:2]
    facts["one_colour"] = holds_for_all_pixels(image, lambda rows: rows == image[0, 0])
    facts["grey"] = holds_for_all_pixels(image, lambda rows: rows[..., 1:] == rows[..., :1])
    facts["hash"] = np.void(difference_hash(image))
    facts["reason"] = _shortened(find_damage(content, decoded, messages))
    return facts


@contextmanager
def _opencv_errors_reported() -> Iterator[None]:
    """Let OpenCV print errors even if OPENCV_LOG_LEVEL forbids it: libtiff reports its errors in no other way."""
    from cv2.utils import logging

    before = logging.setLogLevel(logging.LOG_LEVEL_ERROR)
    try:
        yield
    finally:
        logging.setLogLevel(before)


def find_damage(content: bytes, decoded: DecodedImage, messages: Sequence[str]) -> str:
    """The damage that a strict decoder reports in an image that was decoded; "" if there is none.

    These are warnings of libjpeg, errors of libtiff, wrong checksums in a PNG, and a WebP or BMP whose length differs
    from the one in its header. The scan reports a JPEG that only lacks its end marker. In formats without checksums,
    damage that leaves the file decodable cannot be seen.
    """
    kind = decoded.header.format
    if kind in ("jpeg", "mpo"):
        # OpenCV decodes CMYK, and there libjpeg prints its warnings.
        warning = decoded.complaint or next(iter(messages), "")
        lacks_end = warning.startswith("Premature end") and b"\xff\xd9" not in content[-END_BYTES:]
        return "" if lacks_end else warning
    if kind == "png":
        try:
            check_png(lambda offset, count: content[offset : offset + count], len(content))
        except DecodeError as error:
            return str(error)
    if kind in ("tiff", "dng"):
        return next((line.removeprefix(_TIFF_ERROR).strip() for line in messages if _TIFF_ERROR in line), "")
    declared = _declared_bytes(content, decoded.header)
    if declared in (None, len(content)):
        return ""
    return f"its header declares {declared} bytes, but the file has {len(content)}"


def _declared_bytes(content: bytes, header: Header) -> int | None:
    """Length of a WebP or BMP according to its header; None where that number is not reliable."""
    if header.format == "webp":
        (rest,) = struct.unpack_from("<I", content, 4)
        return int(8 + rest + rest % 2)
    if header.format == "bmp":
        declared, pixels_at = struct.unpack_from("<I4xI", content, 2)
        # Many programs write something else into this field.
        is_right = declared == pixels_at + header.least_bytes * header.height // max(header.height - 1, 1)
        return int(declared) if is_right else None
    return None


def _shortened(text: str) -> bytes:
    return text.encode(errors="replace")[:REASON_BYTES]


def holds_for_all_pixels(image_HWC: np.ndarray, condition: Callable[[np.ndarray], np.ndarray]) -> bool:
    """Whether a condition holds for every pixel.

    Works on bands of rows, so that the first band decides most images. Of a very large image only every n-th row is
    tested.
    """
    height, width, _ = image_HWC.shape
    rows_HWC = image_HWC[:: max(1, height * width // MAX_PIXELS_COMPARED)]
    bands = (rows_HWC[top : top + BAND_ROWS] for top in range(0, len(rows_HWC), BAND_ROWS))
    return all(bool(condition(band).all()) for band in bands)


def difference_hash(image_HWC: np.ndarray) -> bytes:
    """Perceptual hash: for each pixel of a thumbnail, whether it is brighter than the one to its left.

    Images that look the same have nearly the same bits, however they are compressed; images.py compares them.
    """
    import cv2

    small = cv2.resize(image_HWC, (HASH_SIDE + 1, HASH_SIDE), interpolation=cv2.INTER_AREA).astype(np.int32).sum(2)
    return np.packbits(small[:, 1:] > small[:, :-1]).tobytes()
