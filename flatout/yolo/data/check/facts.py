"""What checks look at: the data set, and for each split the files, the scan and the decoded pictures.

Dimension key:  N pictures   T labels of all pictures

Every picture read and decoded, in worker processes: does it decode, to what size, and is it the same as another?
"""

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from flatout.feed import DecodeError, Feed, FeedConfig, Field, Plan, SampleSource
from flatout.findings import LEVEL_OF, Finding, Severity
from flatout.images import DecodedImage, Header, check_png, decode, decoder_messages, read_bytes
from flatout.progress import progress
from flatout.yolo.data.anchors import boxes_at_size
from flatout.yolo.data.data_yaml import Complaint, DataSet
from flatout.yolo.data.find import Found, Pair
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.scan import LABEL_FILES, ScanTable, image_set

THUMB = 16
BAND = 64
ENOUGH_PIXELS = 4_000_000
WHY_BYTES = 200
END_BYTES = 4096
"""At the end of a JPEG, in which the scan looks for its end marker."""
DEEP = np.dtype(
    [
        ("digest", "V16"),  # of the file's bytes
        ("look", f"V{THUMB * THUMB // 8}"),  # brighter than the pixel to the left or not, of a thumbnail
        ("width", "<i4"),
        ("height", "<i4"),
        ("state", "u1"),
        ("one_colour", "?"),
        ("grey", "?"),
        ("why", f"S{WHY_BYTES}"),  # it cannot be used, or is used though damaged; "" for neither
    ]
)
DECODED, UNREADABLE, UNDECODABLE, DEADLY = range(4)

_TIFF_ERROR = "TIFF_Error"


@dataclass(frozen=True)
class DeepTable:
    """What decoding told about pictures; `rows` are their positions among the pairs of the split."""

    rows: np.ndarray
    facts_M: np.ndarray
    """DEEP."""


class Pictures(SampleSource):
    """Each picture as its facts; then one more sample, which is none.

    The feed puts another sample in the place of one that ends its process: there must be one that does not.
    """

    fields = {"facts": Field((), DEEP)}

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths) + 1

    def where(self, index: int) -> str:
        return self._paths[index] if index < len(self._paths) else "no picture"

    def sample(self, index: int, rng: np.random.Generator) -> Mapping[str, ArrayLike]:
        return {"facts": facts_of(self._paths[index]) if index < len(self._paths) else np.zeros((), DEEP)}


def facts_of(path: str) -> np.ndarray:
    """DEEP []; whatever the file is."""
    facts = np.zeros((), DEEP)
    messages: list[str] = []
    try:
        content = read_bytes(path)
        facts["digest"] = np.void(hashlib.blake2b(content, digest_size=16).digest())
        with _opencv_speaking(), decoder_messages() as messages:
            picture = decode(content)
    except (OSError, DecodeError) as error:
        facts["state"] = UNREADABLE if isinstance(error, OSError) else UNDECODABLE
        facts["why"] = _text("; ".join([str(error), *messages[:1]]))
        return facts
    image = picture.image
    facts["height"], facts["width"] = image.shape[:2]
    facts["one_colour"] = everywhere(image, lambda rows: rows == image[0, 0])
    facts["grey"] = everywhere(image, lambda rows: rows[..., 1:] == rows[..., :1])
    facts["look"] = np.void(look_of(image))
    facts["why"] = _text(damage_of(content, picture, messages))
    return facts


@contextmanager
def _opencv_speaking() -> Iterator[None]:
    """Let OpenCV report errors also where OPENCV_LOG_LEVEL says otherwise: libtiff's come by no other way."""
    from cv2.utils import logging

    before = logging.setLogLevel(logging.LOG_LEVEL_ERROR)
    try:
        yield
    finally:
        logging.setLogLevel(before)


def damage_of(content: bytes, picture: DecodedImage, messages: Sequence[str]) -> str:
    """What is wrong with a picture that was decoded; "" if nothing is.

    That is what a strict decoder says: libjpeg's warnings, libtiff's errors, wrong checksums of a PNG, and a WebP or
    BMP of another length than it says. A missing end marker of a JPEG is the scan's to tell. Formats without checksums
    hide damage that leaves them decodable.
    """
    kind = picture.header.format
    if kind in ("jpeg", "mpo"):
        # CMYK is decoded by OpenCV, for which libjpeg prints its warnings.
        complaint = picture.complaint or next(iter(messages), "")
        lacks_end = complaint.startswith("Premature end") and b"\xff\xd9" not in content[-END_BYTES:]
        return "" if lacks_end else complaint
    if kind == "png":
        try:
            check_png(lambda offset, count: content[offset : offset + count], len(content))
        except DecodeError as error:
            return str(error)
    if kind in ("tiff", "dng"):
        return next((line.removeprefix(_TIFF_ERROR).strip() for line in messages if _TIFF_ERROR in line), "")
    said = _said_bytes(content, picture.header)
    return f"its header says {said} bytes, the file has {len(content)}" if said not in (None, len(content)) else ""


def _said_bytes(content: bytes, header: Header) -> int | None:
    """Length of a WebP or BMP by its own header; None where that is not to be relied on."""
    if header.format == "webp":
        (rest,) = struct.unpack_from("<I", content, 4)
        return int(8 + rest + rest % 2)
    if header.format == "bmp":
        said, pixels_at = struct.unpack_from("<I4xI", content, 2)
        # Many programs write something else there.
        is_right = said == pixels_at + header.least_bytes * header.height // max(header.height - 1, 1)
        return int(said) if is_right else None
    return None


def _text(text: str) -> bytes:
    return text.encode(errors="replace")[:WHY_BYTES]


def everywhere(image_HWC: np.ndarray, holds: Callable[[np.ndarray], np.ndarray]) -> bool:
    """Whether something holds for every pixel; by bands of rows, so that most pictures are decided by the first.

    Of a very large picture only every so many rows are looked at.
    """
    height, width, _ = image_HWC.shape
    rows_HWC = image_HWC[:: max(1, height * width // ENOUGH_PIXELS)]
    bands = (rows_HWC[top : top + BAND] for top in range(0, len(rows_HWC), BAND))
    return all(bool(holds(band).all()) for band in bands)


def look_of(image_HWC: np.ndarray) -> bytes:
    """Nearly the same bits for pictures that look the same, however they are compressed (images.py compares)."""
    import cv2

    small = cv2.resize(image_HWC, (THUMB + 1, THUMB), interpolation=cv2.INTER_AREA).astype(np.int32).sum(2)
    return np.packbits(small[:, 1:] > small[:, :-1]).tobytes()


def look_deeply(paths: Sequence[str], rows: np.ndarray, *, workers: int | str, shown: bool) -> DeepTable:
    """Decode the pictures at `rows`; one that ends its process is noted like any other."""
    if not len(rows):
        return DeepTable(rows, np.zeros(0, DEEP))
    source = Pictures([paths[row] for row in rows.tolist()])
    facts_M = np.zeros(len(source), DEEP)
    plan = Plan(num_samples=len(source), batch_size=min(64, len(source)), shuffle=False, last="short")
    with (
        progress("decoding", len(rows), shown=shown) as advance,
        Feed(source, plan, FeedConfig(workers=workers, epochs=1, bad_share=1.0)) as feed,
    ):
        for batch in feed:
            facts_M[batch.positions] = batch["facts"]
            deadly = batch.positions[batch.indices != batch.positions]
            facts_M["state"][deadly] = DEADLY
            advance(min(int(batch.positions[-1]) + 1, len(rows)), 0)
    return DeepTable(rows, facts_M[: len(rows)])


@dataclass(frozen=True)
class SplitFacts:
    """One split: train, val or test."""

    name: str
    found: Found
    pairs: list[Pair]
    table: ScanTable
    deep: DeepTable | None
    """Of the pictures that are decoded; None for a quick check."""
    class_names: tuple[str, ...] = ()
    trouble: str = ""
    """Why nothing could be read at all."""

    @cached_property
    def images(self) -> ImageSet:
        """The pictures that training would use."""
        return image_set(self.table, [pair.image for pair in self.pairs], self.class_names)

    @cached_property
    def picture_T(self) -> np.ndarray:
        """Number of each label's picture among `images`."""
        return np.repeat(np.arange(len(self.images)), np.diff(self.images.labels.first_N))

    @cached_property
    def used_rows(self) -> list[int]:
        """Position of each of `images` among the pairs."""
        return np.flatnonzero(self.table.used_N).tolist()

    @property
    def num_dropped(self) -> int:
        """Labels that cannot be used."""
        return int(self.table.picture_N["num_dropped"].sum())

    @property
    def dropped_share(self) -> float:
        """Share of all labels that cannot be used."""
        return self.num_dropped / max(1, self.num_dropped + len(self.table.class_box_T5))

    def label_place(self, picture: int) -> str:
        """The label file of one of `images`."""
        return self.pairs[self.used_rows[picture]].label_place

    def box_px(self, img_size: int) -> np.ndarray:
        """Width and height of each label at a training size, float64 [T, 2]."""
        size_T2 = self.images.size_wh_N2[self.picture_T].astype(np.float64)
        return boxes_at_size(size_T2, self.images.labels.class_box_T5[:, 3:], img_size)

    def label_files(self, state: str) -> Iterator[Pair]:
        """The pictures whose label file is in this state."""
        for row in np.flatnonzero(self.table.picture_N["label_file"] == LABEL_FILES.index(state)).tolist():
            yield self.pairs[row]


@dataclass(frozen=True)
class SetFacts:
    """A whole data set."""

    data: DataSet
    complaints: list[Complaint]
    splits: dict[str, SplitFacts]
    img_size: int = 640
    anchor_wh_A2: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))
    """Anchors to judge, in pixels."""
    label_names: dict[str, list[str]] = field(default_factory=dict)
    """Folder of labels -> names of the files in it."""

    @property
    def num_classes(self) -> int:
        return len(self.data.names)


# Every check there is: what it looks for, how serious it is, and what to do about it.
#
# A check is found either while files are scanned (the scan names it in a Problem) or by a function over the finished
# scan, which `looking_for` puts here. docs/data.md publishes this table.

Look = Callable[["SetFacts"], Iterable[Finding]]


@dataclass(frozen=True)
class Check:
    """One entry of the published list."""

    id: str
    severity: Severity
    looks_for: str
    advice: str
    look: Look | None = None
    """None: the scan finds it on its way."""
    stops: bool = False
    """Whether a training on such data does not start; see `open_set.py`."""


CHECKS: dict[str, Check] = {}


def looking_for(
    id: str, severity: Severity, looks_for: str, advice: str, *, stops: bool = False
) -> Callable[[Look], Look]:
    """Register a function as a check."""

    def register(look: Look) -> Look:
        add(Check(id, severity, looks_for, advice, look, stops))
        return look

    return register


def add(check: Check) -> None:
    assert check.id not in CHECKS, f"two checks are called {check.id}"
    CHECKS[check.id] = check


def found_at(check: str, where: str, text: str) -> Finding:
    """One place where a check found what it looks for."""
    entry = CHECKS[check]
    return Finding(check, text, LEVEL_OF[entry.severity], entry.advice, where)
