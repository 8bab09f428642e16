"""Checks of label files and of the boxes in them, and the list of checks that the scan makes by itself.

Dimension key:  N images   T labels of all images   n labels of one image
"""

import os
from collections.abc import Iterator

import numpy as np

from flatout.errors import counted
from flatout.findings import Severity
from flatout.yolo.data.check.facts import Check, Found, SetFacts, SplitFacts, add_check, set_check, split_check
from flatout.yolo.data.find import label_path
from flatout.yolo.data.formats.sidecars import SIDECARS
from flatout.yolo.data.label_text import drops_a_label
from flatout.yolo.data.scan import REASONS

TINY_PX = 2.0
MIN_BOX_PX = 0.5
WHOLE = 0.98
CROWD = 500
SAME_BOX_IOU = 0.95
MAX_COMPARED = 300
"""Labels per image whose boxes are compared with each other."""
OUTSIDE = 0.02
"""Share of the side of the image; less is rounding."""
LIKELY_CORNERS = 0.5
MIN_BOXES = 20
WARN_DROPPED, STOP_DROPPED = 0.1, 0.5
"""Shares of unusable labels in a split above which there is a warning, and above which training does not start."""
MAX_LINES_LOOKED_UP = 100
"""Findings for which the label file is read again, to find the line."""


# Labels of a split, and label files


@set_check(
    "error",
    "a train split without a single usable label",
    "fix this: without labels there is nothing to learn",
    stops=True,
)
def labels_none(facts: SetFacts) -> Found:
    return _without_labels(facts, "train")


@set_check("warning", "a val split without a single usable label", "label some images: otherwise every score will be 0")
def labels_none_val(facts: SetFacts) -> Found:
    return _without_labels(facts, "val")


@split_check(
    "error",
    "splits in which more than half of the labels are unusable",
    "fix the program that wrote them, or train on the rest with --allow-bad-labels",
    stops=True,
)
def labels_mostly_dropped(split: SplitFacts, facts: SetFacts) -> Found:
    # A train split with nothing left is reported by labels-none.
    if split.dropped_share > STOP_DROPPED and (len(split.images.labels.class_box_T5) or split.name != "train"):
        yield split.name, _dropped_labels(split)


@split_check(
    "warning",
    "splits in which 10 to 50 % of the labels are unusable",
    "fix the program that wrote them; training leaves these labels out",
)
def labels_often_dropped(split: SplitFacts, facts: SetFacts) -> Found:
    if WARN_DROPPED < split.dropped_share <= STOP_DROPPED:
        yield split.name, _dropped_labels(split)


@split_check(
    "warning",
    "images without a label file",
    "if they show no objects, add an empty file; either way they are trained on as background",
)
def label_missing(split: SplitFacts, facts: SetFacts) -> Found:
    for pair in split.label_files("missing"):
        yield pair.image, f"there is no {pair.label}"


@split_check("note", "empty label files", "nothing to do if the images show no objects")
def label_empty(split: SplitFacts, facts: SetFacts) -> Found:
    for pair in split.label_files("empty"):
        yield pair.label_place, "contains no labels"


@set_check(
    "error",
    "label files whose name differs from the expected one only in upper and lower case",
    "rename them: on this system they are not found",
)
def label_case(facts: SetFacts) -> Found:
    folders = {folder: {name.lower(): name for name in names} for folder, names in facts.label_names.items()}
    for split in facts.splits.values():
        for pair in split.label_files("missing"):
            folder, name = os.path.split(pair.label)
            if like := folders.get(folder, {}).get(name.lower()):
                yield pair.label, f"does not exist, but {like} does"


@set_check("warning", "label files without an image", "add the missing images, or remove the label files")
def label_orphan(facts: SetFacts) -> Found:
    own = [pair for split in facts.splits.values() for pair in split.pairs if pair.has_own_label_file]
    wanted = {pair.label for pair in own}
    folded = {label.lower() for label in wanted}
    endings: dict[str, set[str]] = {}
    for label in wanted:
        endings.setdefault(os.path.dirname(label), {".txt", ".xml"}).add(os.path.splitext(label)[1])
    for folder, names in facts.label_names.items():
        for name in names:
            path = os.path.join(folder, name)
            if (
                name.endswith(tuple(endings.get(folder, ())))
                and name != "classes.txt"
                and path not in wanted
                and path.lower() not in folded
            ):
                yield path, "there is no image with this name"


# Classes and boxes


@set_check(
    "error",
    "class numbers for which the YAML has no name",
    "correct the class number, or add the name to the YAML",
    stops=True,
)
def class_beyond_names(facts: SetFacts) -> Found:
    beyond = (
        (split, row, label)
        for split in facts.splits.values()
        for row, label in _labels(split, split.images.labels.class_box_T5[:, 0] >= facts.num_classes)
    )
    for index, (split, row, label) in enumerate(beyond):
        number = int(split.images.labels.class_box_T5[label, 0])
        place = split.label_place(row)
        if index < MAX_LINES_LOOKED_UP:
            place = _with_line(place, number)
        names = f"{facts.data.file} names {counted(facts.num_classes, 'class')} (0 to {facts.num_classes - 1})"
        yield place, f"the label has class {number}, but {names}"


@split_check(
    "warning",
    "boxes that reach out of the image by more than 2 % of its side",
    "clip them to the image: the part outside cannot be seen",
)
def box_outside(split: SplitFacts, facts: SetFacts) -> Found:
    box_T4 = split.images.labels.class_box_T5[:, 1:]
    low_T2, high_T2 = box_T4[:, :2] - box_T4[:, 2:] / 2, box_T4[:, :2] + box_T4[:, 2:] / 2
    for row, label in _labels(split, np.maximum(-low_T2, high_T2 - 1).max(1) > OUTSIDE):
        box = " ".join(f"{value:.3g}" for value in box_T4[label])
        yield split.label_place(row), f"cx cy w h = {box}"


@split_check(
    "warning",
    "boxes with a side below 2 px at the training size",
    "train at a larger size, or on tiles of the images (--tiles): such small boxes are never found",
)
def box_tiny(split: SplitFacts, facts: SetFacts) -> Found:
    box_px_T2 = split.box_px(facts.img_size, facts.tiles)
    is_tiny_T = (box_px_T2.min(1, initial=TINY_PX) < TINY_PX) & ~_below_one_pixel(split)
    for row, label in _labels(split, is_tiny_T):
        width, height = box_px_T2[label].tolist()
        yield split.label_place(row), f"{width:.1f} x {height:.1f} px at size {facts.img_size}"


@split_check(
    "warning",
    "boxes with a side below half a pixel of their image",
    "remove them: they contain nothing to see at any size",
)
def box_no_pixel(split: SplitFacts, facts: SetFacts) -> Found:
    for row, label in _labels(split, _below_one_pixel(split)):
        width, height = (split.images.labels.class_box_T5[label, 3:] * split.images.size_wh_N2[row]).tolist()
        yield split.label_place(row), f"{width:.2g} x {height:.2g} px in the image"


@split_check(
    "note", "boxes that cover nearly the whole image", "look at a few of them: some tools write such boxes by mistake"
)
def box_whole(split: SplitFacts, facts: SetFacts) -> Found:
    for row, _ in _labels(split, np.all(split.images.labels.class_box_T5[:, 3:] > WHOLE, axis=1)):
        yield split.label_place(row), "the box covers the whole image"


@split_check("note", "images with more than 500 labels", "nothing to do; training needs more memory and time")
def box_crowd(split: SplitFacts, facts: SetFacts) -> Found:
    counts_N = np.diff(split.images.labels.first_N)
    for row in np.flatnonzero(counts_N > CROWD).tolist():
        yield split.label_place(row), f"{counts_N[row]} labels"


@split_check("warning", "boxes that have two classes", "keep one of the two labels")
def box_two_classes(split: SplitFacts, facts: SetFacts) -> Found:
    for row in np.flatnonzero(np.diff(split.images.labels.first_N) > 1).tolist():
        pair = _same_box(split.images.labels.of(row)[:MAX_COMPARED])
        if pair:
            yield split.label_place(row), f"classes {pair[0]} and {pair[1]} have the same box"


@split_check(
    "warning",
    'boxes that seem to be written as corners: "class x1 y1 x2 y2"',
    'write the centre and the size instead: "class cx cy w h"',
)
def boxes_as_corners(split: SplitFacts, facts: SetFacts) -> Found:
    box_T4 = split.images.labels.class_box_T5[:, 1:]
    if len(box_T4) < MIN_BOXES:
        return
    leaves_T = ((box_T4[:, :2] + box_T4[:, 2:] / 2) > 1 + OUTSIDE).any(1)
    in_order = bool((box_T4[:, 2:] > box_T4[:, :2]).all())
    if in_order and leaves_T.mean() > LIKELY_CORNERS:
        text = f"{leaves_T.mean():.0%} of {len(box_T4)} boxes reach out of the image, and all have w > cx, h > cy"
        yield split.name, text


def _below_one_pixel(split: SplitFacts) -> np.ndarray:
    """Whether a side of each box is below half a pixel of the image, bool [T]."""
    side_px_T2 = split.images.labels.class_box_T5[:, 3:] * split.images.size_wh_N2[split.images.labels.image_T]
    return np.asarray(side_px_T2.min(1, initial=1.0) < MIN_BOX_PX)


def _without_labels(facts: SetFacts, name: str) -> Found:
    split = facts.splits.get(name)
    if split is not None and split.pairs and not len(split.images.labels.class_box_T5):
        images = counted(len(split.pairs), "image")
        yield name, f"no usable label for {images}: {_cause_of_no_labels(split)}"


def _cause_of_no_labels(split: SplitFacts) -> str:
    """The probable reason why a split has no labels."""
    if split.num_dropped:
        return _dropped_labels(split)
    first = split.pairs[0]
    if not first.has_own_label_file:
        return f"{first.label} contains no labels for them"
    if any(True for _ in split.label_files("empty")):
        return f"the label files are empty or missing, such as {first.label}"
    folder = os.path.dirname(first.label) or "."
    try:
        num_files = sum(name.endswith((".txt", *SIDECARS)) for name in os.listdir(folder))
    except OSError:
        return f"the folder {folder} does not exist or cannot be read; {_expected(first.image, first.label)}"
    there = f"{counted(num_files, 'label file')} with other names" if num_files else "no label files"
    if first.label.startswith("images/"):  # beside the images, because there is no folder `labels`
        usual = label_path(f"./{first.image}").removeprefix("./")
        return f"there is no folder labels, and {folder} contains {there}; {_expected(first.image, usual)}"
    return f"{folder} contains {there}; {_expected(first.image, first.label)}"


def _expected(image: str, label: str) -> str:
    return f"the labels of {image} are expected in {label}"


def _dropped_labels(split: SplitFacts) -> str:
    """How many labels are unusable, and where the first one is; there must be at least one."""
    total = split.num_dropped + len(split.table.class_box_T5)
    row = int(np.argmax(split.table.image_N["num_dropped"] > 0))
    problem = next(filter(drops_a_label, split.table.problems.get(row, ())), None)
    place = split.pairs[row].label_place
    unusable = f"{split.num_dropped:,} of {counted(total, 'label')} cannot be used"
    if problem is None:  # strict rules drop the whole file
        reason = REASONS[split.table.image_N["reason"][row]].replace("_", " ")
        return f"{unusable}, the first in {place}: {reason}"
    line = f"{split.pairs[row].label}:{problem.line}" if problem.line else place
    return f"{unusable}, the first at {line}: {problem.text}"


def _labels(split: SplitFacts, is_chosen_T: np.ndarray) -> Iterator[tuple[int, int]]:
    """Image and index of each chosen label."""
    for label in np.flatnonzero(is_chosen_T).tolist():
        yield int(split.images.labels.image_T[label]), label


def _with_line(path: str, number: int) -> str:
    """The path with the number of the first line that has this class; labels in memory do not know their line."""
    if not path.endswith(".txt"):
        return path
    try:
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            for line, text in enumerate(file, 1):
                if text.split()[:1] in ([str(number)], [f"{number}.0"]):
                    return f"{path}:{line}"
    except OSError:
        pass
    return path


def _same_box(class_box_n5: np.ndarray) -> tuple[int, int] | None:
    """Classes of the first two nearly identical boxes with different classes; None if there are none."""
    class_n, box_n4 = class_box_n5[:, 0], class_box_n5[:, 1:]
    low_n2, high_n2 = box_n4[:, :2] - box_n4[:, 2:] / 2, box_n4[:, :2] + box_n4[:, 2:] / 2
    overlap_nn2 = np.minimum(high_n2[:, None], high_n2) - np.maximum(low_n2[:, None], low_n2)
    shared_nn = overlap_nn2.clip(0).prod(2)
    area_n = box_n4[:, 2:].prod(1)
    iou_nn = shared_nn / np.maximum(area_n[:, None] + area_n - shared_nn, 1e-12)
    found = np.argwhere((iou_nn > SAME_BOX_IOU) & (class_n[:, None] < class_n))
    return (int(class_n[found[0][0]]), int(class_n[found[0][1]])) if len(found) else None


# Checks that the scan makes while it reads images and label lines

SCAN_CHECKS: dict[Severity, dict[str, tuple[str, str]]] = {
    "error": {
        "image-unreadable": (
            "images that cannot be opened: missing permissions, broken links, folders or pipes named like images",
            "correct the permissions, or remove them from the data set",
        ),
        "image-empty": ("image files of 0 bytes", "copy them again from the original"),
        "image-format": (
            "files named like images that contain something else",
            "remove them; a web page saved as .jpg, for example, comes from a failed download",
        ),
        "image-unsupported": ("images of an unsupported format (GIF, AVIF, HEIC, ...)", "convert them to JPEG or PNG"),
        "image-corrupt": (
            "damaged images: a broken header, wrong checksums, pixels that cannot be decoded",
            "copy them again from the original, or remove them; training leaves them out",
        ),
        "image-truncated": (
            "truncated images: more than 1 % of the rows are missing",
            "copy them again from the original; training leaves them out",
        ),
        "image-too-small": ("images with a side below 10 px", "remove them; training leaves them out"),
        "image-huge": (
            "images of more than 100 million pixels",
            "train, test and detect on tiles of them (--tiles, also here): whole, they take gigabytes of memory",
        ),
        "label-unreadable": (
            "label files that cannot be read",
            "correct the permissions; until then the image counts as background",
        ),
        "label-too-many": (
            "images with more than 10,000 labels",
            "cut the image into tiles, or remove it; none of its labels are read",
        ),
        "label-encoding": (
            "label files that are not UTF-8 text, or not valid XML or JSON",
            "save them as UTF-8, or export them again",
        ),
        "label-columns": (
            "lines with the wrong number of columns",
            'write "class cx cy w h", or "class x1 y1 x2 y2 x3 y3 ..." for a polygon',
        ),
        "label-not-a-number": (
            "lines with text in place of a number",
            "write numbers only, and classes by their number instead of their name",
        ),
        "label-separator": (
            "lines with commas or semicolons",
            "separate the columns with spaces, and write decimals with a point",
        ),
        "label-nan": ("lines with nan or inf", "fix the program that wrote them"),
        "label-negative": ("coordinates below 0", "clip boxes to the image before you write them"),
        "label-above-one": ("coordinates above 1", "divide by the width and height of the image, then clip"),
        "label-in-pixels": (
            "coordinates far above 1, probably in pixels",
            "divide x and w by the width of the image, y and h by its height",
        ),
        "label-class-negative": ("class numbers below 0", "number the classes from 0"),
        "label-class-fraction": ("class numbers that are not whole numbers, or far too large", "write 1, not 1.5"),
        "label-polygon-odd": ("polygons with an odd number of coordinates", "write both x and y for every point"),
        "label-polygon-outside": (
            "polygons that reach out of the image by more than 1 %",
            "clip them to the image before you write them",
        ),
    },
    "warning": {
        "image-extension": (
            "files whose ending does not match their content, such as a PNG named .jpg",
            "rename them: flatout reads them, but other tools may not",
        ),
        "exif-mirrored": (
            "images that EXIF mirrors, which cameras never do",
            "look at them: the labels often belong to the image before mirroring",
        ),
        "image-cmyk": ("JPEG files with CMYK colours", "convert them to RGB: programs disagree on how to show CMYK"),
        "label-image-size": (
            "labels in pixels for an image of another shape",
            "look at the boxes: the image was probably rotated, cropped or replaced after it was labelled",
        ),
        "label-rotated": (
            "rotated boxes (CVAT, labelme)",
            "nothing to do if the upright boxes around them, which are used, fit well enough",
        ),
        "label-shape": (
            "shapes that are neither boxes nor polygons, such as points, lines and skeletons (CVAT, labelme)",
            "draw a box or a polygon; these shapes are left out",
        ),
        "label-zero-area": ("boxes and polygons without area", "remove them: they cannot be learned"),
        "label-duplicate": ("the same label twice in one image", "remove one of them; only one is used"),
    },
    "note": {
        "image-no-end": ("JPEG files without an end marker that have all their rows", "nothing to do: they are used"),
        "image-bytes-after-end": (
            "files with extra bytes after the end of the image",
            "nothing to do: often it is a second image from a phone camera",
        ),
        "exif-rotated": (
            "images that EXIF rotates by 90, 180 or 270 degrees",
            "make sure that the labels were drawn on the rotated, upright image",
        ),
        "image-16-bit": (
            "images with more than 8 bits per channel",
            "nothing to do if their values use the whole range: the upper 8 bits are used. 12 bits stored in 16 become "
            "nearly black: scale such images first",
        ),
        "image-alpha": (
            "images with transparency",
            "look at them: transparency is ignored, so transparent areas show the colour stored beneath",
        ),
        "image-pages": (
            "files with several pages or frames",
            "only the first is used: split the file if the others matter",
        ),
        "label-bom": ("label files that begin with a byte order mark", "save them as UTF-8 without a BOM"),
        "label-blank-line": ("blank lines between labels", "remove them if YOLOv7 has to read the file too"),
        "label-mixed": (
            "files with both boxes and polygons",
            "nothing to do; YOLOv7 would read the boxes as polygons of two points",
        ),
    },
}
"""Severity -> id -> what it looks for, and advice."""
SCAN_STOPS = frozenset({"label-too-many"})

for _severity, _checks in SCAN_CHECKS.items():
    for _id, _texts in _checks.items():
        add_check(Check(_id, _severity, *_texts, stops=_id in SCAN_STOPS))
