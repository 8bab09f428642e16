"""One picture and its labels: can it train, how large is it, what is drawn on it, and what is wrong with either?"""

import os
from typing import NamedTuple

from flatout.feed import DecodeError
from flatout.images import (
    MOST_MISSING,
    NO_PICTURES,
    NOT_OPENED,
    READABLE,
    Facts,
    Header,
    check_promise,
    decode,
    decoder_messages,
    described,
    most_pixels,
    open_regular,
    read_bytes,
    read_facts,
)
from flatout.yolo.data.label_text import (
    MOST_BYTES,
    MOST_LABELS,
    NO_BOXES,
    PictureLabels,
    Problem,
    RejectedLabels,
    num_lines,
    read_lines,
    read_strictly,
    too_many,
)
from flatout.yolo.data.voc_xml import read_voc

LEAST_SIDE = 10
"""Pixels; what is smaller is no photograph."""
NOTHING = PictureLabels(NO_BOXES, [], [])

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
    labels: PictureLabels
    problems: list[Problem]
    """Of the picture; those of the labels are in `labels`."""


class RejectedPicture(Exception):
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
    except RejectedPicture as rejected:
        return Scanned(rejected.reason, "", header, NOTHING, [rejected.problem])
    return _with_labels(label, header, problems, strict, names)


def check_header(header: Header) -> None:
    """Refuse what no training can use, by its header alone."""
    if header.format not in READABLE:
        reason = "unreadable_image" if header.format in NOT_OPENED else "image_format"
        check = "image-format" if header.format in NO_PICTURES else "image-unsupported"
        raise RejectedPicture(reason, check, described(header.format))
    if min(header.width, header.height) < LEAST_SIDE:
        size = f"{header.width} x {header.height} px"
        raise RejectedPicture("image_too_small", "image-too-small", f"{size}; {LEAST_SIDE} is the least")
    if header.width * header.height > most_pixels(header):
        size = f"{header.width} x {header.height} px"
        raise RejectedPicture("unreadable_image", "image-huge", f"{size}; {most_pixels(header):,} pixels are the most")


def _check_promise(facts: Facts) -> None:
    try:
        check_promise(facts.header, facts.num_bytes)
    except DecodeError as error:
        raise RejectedPicture("unreadable_image", "image-corrupt", str(error)) from None


def read_labels(
    path: str, *, strict: bool, names: tuple[str, ...] = (), size_wh: tuple[int, int] = (1, 1)
) -> tuple[str, PictureLabels]:
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


def _facts(image: str, strict: bool) -> Facts:
    try:
        facts = read_facts(image, verify=strict)
    except OSError as error:
        raise RejectedPicture("unreadable_image", "image-unreadable", error.strerror or str(error)) from None
    except DecodeError as error:
        check = "image-empty" if "empty" in str(error) else "image-corrupt"
        raise RejectedPicture("unreadable_image", check, str(error)) from None
    if facts.ending == "absent" and facts.header.format == "png":
        raise RejectedPicture("unreadable_image", "image-truncated", "a PNG that is cut off")
    return facts


def _with_labels(path: str, header: Header, problems: list[Problem], strict: bool, names: tuple[str, ...]) -> Scanned:
    try:
        state, labels = read_labels(path, strict=strict, names=names, size_wh=header.size_wh)
    except RejectedLabels as rejected:
        return Scanned(rejected.reason, "found", header, NOTHING._replace(num_dropped=rejected.num_labels), problems)
    return Scanned("", state, header, labels, problems)


def _unreadable(why: str, strict: bool) -> PictureLabels:
    if strict:
        raise RejectedLabels("unreadable_label")
    return NOTHING._replace(problems=[Problem("label-unreadable", 0, why)], num_dropped=1)


def _incomplete(image: str, facts: Facts) -> list[Problem]:
    """A JPEG without its end marker is decoded, once: does it lack only that, or pixels too?"""
    if facts.ending != "absent" or facts.header.format != "jpeg":
        return []
    try:
        with decoder_messages():
            missing = decode(read_bytes(image)).missing
    except (OSError, DecodeError) as error:
        raise RejectedPicture("unreadable_image", "image-corrupt", str(error)) from None
    if missing > MOST_MISSING:
        text = f"cut off: {missing:.0%} of its rows are missing"
        raise RejectedPicture("image_truncated", "image-truncated", text)
    return [Problem("image-no-end", 0, "lacks its end marker; every row is there")]


def _remarks(facts: Facts, image: str) -> list[Problem]:
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
