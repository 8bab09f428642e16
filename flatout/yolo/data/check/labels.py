"""Checks of label files as a whole, and of boxes over the whole data set.

Dimension key:  N pictures   T labels of all pictures

Checks that the scan makes on its way through pictures and label lines.
"""

import os
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from flatout.errors import counted
from flatout.findings import Finding
from flatout.yolo.data.check.facts import Check, SetFacts, SplitFacts, add, found_at, looking_for
from flatout.yolo.data.find import label_path
from flatout.yolo.data.label_text import drops_a_label
from flatout.yolo.data.scan import REASONS

TINY_PX = 2.0
LEAST_SIDE_PX = 0.5
WHOLE = 0.98
CROWD = 500
SAME_BOX_IOU = 0.95
MOST_COMPARED = 300
"""Labels per picture whose boxes are compared with each other."""
OUTSIDE = 0.02
"""Of the picture's side; less is rounding."""
LIKELY_CORNERS = 0.5
FEW_BOXES = 20
OFTEN_DROPPED, MOST_DROPPED = 0.1, 0.5
"""Shares of a split's labels that are worth a warning, and that stop a training."""
MOST_LINES_LOOKED_UP = 100
"""Findings for which the label file is opened once more."""


@looking_for(
    "labels-none",
    "error",
    "a train split without any label that can be used",
    "correct this cause; there is nothing to learn from pictures alone",
    stops=True,
)
def labels_none(facts: SetFacts) -> Iterable[Finding]:
    return _without_labels(facts, "train", "labels-none")


@looking_for(
    "labels-none-val",
    "warning",
    "a val split without any label that can be used",
    "label some pictures: every score will be 0",
)
def labels_none_val(facts: SetFacts) -> Iterable[Finding]:
    return _without_labels(facts, "val", "labels-none-val")


@looking_for(
    "labels-mostly-dropped",
    "error",
    "splits in which more than half of the labels cannot be used",
    "correct the program that wrote them; to use the rest all the same: --allow-bad-labels",
    stops=True,
)
def labels_mostly_dropped(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        # What says that nothing is left in train says this too.
        if split.dropped_share > MOST_DROPPED and (len(split.images.labels.class_box_T5) or split.name != "train"):
            yield found_at("labels-mostly-dropped", split.name, _about_dropped(split))


@looking_for(
    "labels-often-dropped",
    "warning",
    "splits in which 10 to 50 % of the labels cannot be used",
    "correct the program that wrote them; training goes on without these labels",
)
def labels_often_dropped(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        if OFTEN_DROPPED < split.dropped_share <= MOST_DROPPED:
            yield found_at("labels-often-dropped", split.name, _about_dropped(split))


@looking_for(
    "label-missing",
    "warning",
    "pictures without a label file",
    "write an empty file for pictures that show nothing; they train as background",
)
def label_missing(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        for pair in split.label_files("missing"):
            yield found_at("label-missing", pair.image, f"no {pair.label}")


@looking_for("label-empty", "note", "empty label files", "nothing to do if the pictures show no object")
def label_empty(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        for pair in split.label_files("empty"):
            yield found_at("label-empty", pair.label_place, "no label in it")


@looking_for(
    "label-case",
    "error",
    "label files whose name differs from the picture's only in case",
    "rename them; on this system they are not found",
)
def label_case(facts: SetFacts) -> Iterable[Finding]:
    folders = {folder: {name.lower(): name for name in names} for folder, names in facts.label_names.items()}
    for split in facts.splits.values():
        for pair in split.label_files("missing"):
            folder, name = os.path.split(pair.label)
            if like := folders.get(folder, {}).get(name.lower()):
                yield found_at("label-case", pair.label, f"does not exist, but {like} does")


@looking_for("label-orphan", "warning", "label files without a picture", "find the pictures, or remove the labels")
def label_orphan(facts: SetFacts) -> Iterable[Finding]:
    wanted = {pair.label for split in facts.splits.values() for pair in split.pairs}
    folded = {label.lower() for label in wanted}
    for folder, names in facts.label_names.items():
        for name in names:
            path = os.path.join(folder, name)
            if (
                name.endswith((".txt", ".xml"))
                and name != "classes.txt"
                and path not in wanted
                and path.lower() not in folded
            ):
                yield found_at("label-orphan", path, "no picture of this name")


@looking_for(
    "class-beyond-names",
    "error",
    "classes for which the YAML has no name",
    "correct the number or add the name; training would not start",
    stops=True,
)
def class_beyond_names(facts: SetFacts) -> Iterable[Finding]:
    beyond = _labels(facts, lambda split: split.images.labels.class_box_T5[:, 0] >= facts.num_classes)
    for told, (split, row, label) in enumerate(beyond):
        number = int(split.images.labels.class_box_T5[label, 0])
        place = split.label_place(row)
        if told < MOST_LINES_LOOKED_UP:
            place = _with_line(place, number)
        names = f"{facts.data.file} names {counted(facts.num_classes, 'class')} (0 to {facts.num_classes - 1})"
        yield found_at("class-beyond-names", place, f"a label of class {number}, but {names}")


@looking_for(
    "box-outside",
    "warning",
    "boxes that leave the picture by more than 2 % of its side",
    "clip them; what is outside cannot be seen",
)
def box_outside(facts: SetFacts) -> Iterable[Finding]:
    def outside(split: SplitFacts) -> np.ndarray:
        box_T4 = split.images.labels.class_box_T5[:, 1:]
        low_T2, high_T2 = box_T4[:, :2] - box_T4[:, 2:] / 2, box_T4[:, :2] + box_T4[:, 2:] / 2
        farthest_T: np.ndarray = np.maximum(-low_T2, high_T2 - 1).max(1)
        outside_T: np.ndarray = farthest_T > OUTSIDE
        return outside_T

    for split, row, label in _labels(facts, outside):
        box = " ".join(f"{value:.3g}" for value in split.images.labels.class_box_T5[label, 1:])
        yield found_at("box-outside", split.label_place(row), f"box {box}")


@looking_for(
    "box-tiny",
    "warning",
    "boxes below 2 px at the training size",
    "train larger, or cut the pictures into tiles; such boxes are never found",
)
def box_tiny(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        box_px_T2 = split.box_px(facts.img_size)
        is_tiny_T = (box_px_T2.min(1, initial=TINY_PX) < TINY_PX) & ~_holds_no_pixel(split)
        for label in np.flatnonzero(is_tiny_T).tolist():
            width, height = box_px_T2[label].tolist()
            place = split.label_place(int(split.picture_T[label]))
            yield found_at("box-tiny", place, f"{width:.1f} x {height:.1f} px at size {facts.img_size}")


@looking_for(
    "box-no-pixel",
    "warning",
    "boxes narrower than half a pixel of their picture",
    "remove them; there is nothing to see in them at any size",
)
def box_no_pixel(facts: SetFacts) -> Iterable[Finding]:
    for split, row, label in _labels(facts, _holds_no_pixel):
        width, height = (split.images.labels.class_box_T5[label, 3:] * split.images.size_wh_N2[row]).tolist()
        yield found_at("box-no-pixel", split.label_place(row), f"{width:.2g} x {height:.2g} px of the picture")


@looking_for(
    "box-whole", "note", "boxes over nearly the whole picture", "look at a few; some tools write them by mistake"
)
def box_whole(facts: SetFacts) -> Iterable[Finding]:
    for split, row, _ in _labels(facts, lambda split: np.all(split.images.labels.class_box_T5[:, 3:] > WHOLE, axis=1)):
        yield found_at("box-whole", split.label_place(row), "a box over the whole picture")


@looking_for("box-crowd", "note", "pictures with more than 500 labels", "nothing to do; they need more memory and time")
def box_crowd(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        counts_N = np.diff(split.images.labels.first_N)
        for row in np.flatnonzero(counts_N > CROWD).tolist():
            yield found_at("box-crowd", split.label_place(row), f"{counts_N[row]} labels")


@looking_for("box-two-classes", "warning", "two classes on one box", "decide for one class")
def box_two_classes(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        for row in np.flatnonzero(np.diff(split.images.labels.first_N) > 1).tolist():
            pair = _same_box(split.images.labels.of(row)[:MOST_COMPARED])
            if pair:
                yield found_at(
                    "box-two-classes", split.label_place(row), f"classes {pair[0]} and {pair[1]} share a box"
                )


@looking_for(
    "boxes-as-corners",
    "warning",
    "boxes that make sense only as corners x1 y1 x2 y2",
    'write centre and size: "class cx cy w h"',
)
def boxes_as_corners(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        box_T4 = split.images.labels.class_box_T5[:, 1:]
        if len(box_T4) < FEW_BOXES:
            continue
        leaves_T = ((box_T4[:, :2] + box_T4[:, 2:] / 2) > 1 + OUTSIDE).any(1)
        in_order = bool((box_T4[:, 2:] > box_T4[:, :2]).all())
        if in_order and leaves_T.mean() > LIKELY_CORNERS:
            text = f"{leaves_T.mean():.0%} of {len(box_T4)} boxes leave the picture, and w > cx, h > cy everywhere"
            yield found_at("boxes-as-corners", split.name, text)


def _holds_no_pixel(split: SplitFacts) -> np.ndarray:
    """bool [T]: boxes with a side below half a pixel of the picture."""
    side_px_T2 = split.images.labels.class_box_T5[:, 3:] * split.images.size_wh_N2[split.picture_T]
    narrow_T: np.ndarray = side_px_T2.min(1, initial=1.0) < LEAST_SIDE_PX
    return narrow_T


def _without_labels(facts: SetFacts, name: str, check: str) -> Iterator[Finding]:
    split = facts.splits.get(name)
    if split is not None and split.pairs and not len(split.images.labels.class_box_T5):
        yield found_at(check, name, f"no label in {counted(len(split.pairs), 'picture')}: {_why_none(split)}")


def _why_none(split: SplitFacts) -> str:
    """The probable cause of a split without labels."""
    if split.num_dropped:
        return _about_dropped(split)
    first = split.pairs[0]
    if first.label.endswith(".json"):
        return f"{first.label} has none for them"
    if any(True for _ in split.label_files("empty")):
        return f"label files are empty or missing, such as {first.label}"
    folder = os.path.dirname(first.label) or "."
    try:
        num_files = sum(name.endswith((".txt", ".xml")) for name in os.listdir(folder))
    except OSError:
        return f"the folder {folder} does not exist or cannot be read; labels of {first.image} would be {first.label}"
    there = f"{counted(num_files, 'label file')} of other names" if num_files else "no label file"
    if first.label.startswith("images/"):  # beside the pictures, because there is no folder `labels`
        usual = label_path(f"./{first.image}").removeprefix("./")
        return f"there is no folder labels, and {folder} holds {there}; labels of {first.image} would be {usual}"
    return f"{folder} holds {there}; labels of {first.image} would be {first.label}"


def _about_dropped(split: SplitFacts) -> str:
    """How many labels are dropped, and the first of them."""
    total = split.num_dropped + len(split.table.class_box_T5)
    row = int(np.argmax(split.table.picture_N["num_dropped"] > 0))
    problem = next(filter(drops_a_label, split.table.problems.get(row, ())), None)
    place = split.pairs[row].label_place
    if problem is None:  # read strictly: the whole file is dropped
        why = REASONS[split.table.picture_N["reason"][row]].replace("_", " ")
        return f"{split.num_dropped:,} of {counted(total, 'label')} cannot be used, the first in {place}: {why}"
    line = f"{place}:{problem.line}" if problem.line else place
    return f"{split.num_dropped:,} of {counted(total, 'label')} cannot be used, the first at {line}: {problem.text}"


def _labels(facts: SetFacts, chosen: Callable[[SplitFacts], np.ndarray]) -> Iterator[tuple[SplitFacts, int, int]]:
    """Split, picture and number of each label that `chosen(split) -> bool [T]` chooses."""
    for split in facts.splits.values():
        for label in np.flatnonzero(chosen(split)).tolist():
            yield split, int(split.picture_T[label]), label


def _with_line(path: str, number: int) -> str:
    """The first line of that class; labels in memory have lost their line."""
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
    """Classes of the first two boxes that are nearly the same but of different classes."""
    class_n, box_n4 = class_box_n5[:, 0], class_box_n5[:, 1:]
    low_n2, high_n2 = box_n4[:, :2] - box_n4[:, 2:] / 2, box_n4[:, :2] + box_n4[:, 2:] / 2
    overlap_nn2 = np.minimum(high_n2[:, None], high_n2) - np.maximum(low_n2[:, None], low_n2)
    shared_nn = overlap_nn2.clip(0).prod(2)
    area_n = box_n4[:, 2:].prod(1)
    iou_nn = shared_nn / np.maximum(area_n[:, None] + area_n - shared_nn, 1e-12)
    found = np.argwhere((iou_nn > SAME_BOX_IOU) & (class_n[:, None] < class_n))
    return (int(class_n[found[0][0]]), int(class_n[found[0][1]])) if len(found) else None


for _check in (
    Check(
        "image-unreadable",
        "error",
        "pictures that cannot be opened: permissions, links to nowhere, folders or pipes named like pictures",
        "correct the permissions or take them out of the data set",
    ),
    Check("image-empty", "error", "files of 0 bytes", "copy them again from where they came"),
    Check(
        "image-format",
        "error",
        "files whose content is no picture, whatever their name says",
        "remove them; a web page saved as .jpg is a failed download",
    ),
    Check(
        "image-unsupported",
        "error",
        "pictures of a format that is not trained on (GIF, AVIF, HEIC, ...)",
        "convert them to JPEG or PNG",
    ),
    Check(
        "image-corrupt",
        "error",
        "damaged pictures: a broken header, wrong checksums, pixels that do not decode",
        "copy them again, or remove them; training leaves them out",
    ),
    Check(
        "image-truncated",
        "error",
        "pictures that are cut off: more than 1 % of the rows are missing",
        "copy them again; training leaves them out",
    ),
    Check(
        "image-no-end", "note", "JPEG files without their end marker, all rows present", "nothing to do; they are used"
    ),
    Check("image-too-small", "error", "pictures with a side below 10 px", "remove them; training leaves them out"),
    Check(
        "image-huge",
        "error",
        "pictures of more than 100 million pixels",
        "cut them into tiles; a picture this size takes gigabytes to decode",
    ),
    Check(
        "image-extension",
        "warning",
        "files whose ending does not fit their content (a PNG named .jpg)",
        "rename them; flatout reads them, other tools may not",
    ),
    Check(
        "image-bytes-after-end",
        "note",
        "files with more bytes after the end of the picture",
        "nothing to do; often a second picture of a phone",
    ),
    Check(
        "exif-rotated",
        "note",
        "pictures that EXIF turns by 90, 180 or 270 degrees",
        "make sure that the labels were drawn on the upright picture",
    ),
    Check(
        "exif-mirrored",
        "warning",
        "pictures that EXIF mirrors, which cameras never do",
        "look at them; labels often belong to the picture before mirroring",
    ),
    Check("image-16-bit", "note", "pictures of more than 8 bits per channel", "nothing to do; 8 bits are used"),
    Check(
        "image-cmyk",
        "warning",
        "JPEG files in CMYK colours",
        "convert them to RGB; colours differ from program to program",
    ),
    Check(
        "image-alpha", "note", "pictures with transparency", "look at them; what is transparent gets its hidden colour"
    ),
    Check("image-pages", "note", "files of several pages or frames", "split them if the others matter"),
    Check(
        "label-unreadable",
        "error",
        "label files that cannot be read",
        "correct the permissions; the picture counts as background",
    ),
    Check(
        "label-too-many",
        "error",
        "more than 10,000 labels in one picture",
        "cut the picture into tiles, or take it out; none of its labels is read",
        stops=True,
    ),
    Check(
        "label-encoding",
        "error",
        "label files that are no UTF-8 text, or no valid XML",
        "save them as UTF-8, or export them again",
    ),
    Check("label-bom", "note", "label files that begin with a byte order mark", "save them as UTF-8 without BOM"),
    Check(
        "label-columns",
        "error",
        "lines with a wrong number of columns",
        'write "class cx cy w h", or "class x1 y1 x2 y2 x3 y3 ..." for a polygon',
    ),
    Check("label-not-a-number", "error", "lines with text where a number should be", "write class numbers, not names"),
    Check("label-separator", "error", "lines separated by commas or semicolons", "separate by spaces"),
    Check("label-nan", "error", "nan or inf", "correct the program that wrote them"),
    Check("label-negative", "error", "coordinates below 0", "clip boxes to the picture before writing them"),
    Check(
        "label-above-one", "error", "coordinates above 1", "divide by the width and height of the picture, then clip"
    ),
    Check(
        "label-in-pixels", "error", "coordinates far above 1: pixels", "divide by the width and height of the picture"
    ),
    Check("label-class-negative", "error", "classes below 0", "classes count from 0"),
    Check("label-class-fraction", "error", "classes that are no whole numbers", "write 1, not 1.5"),
    Check(
        "label-zero-area", "warning", "boxes and polygons without area", "remove them; nothing can be learned from them"
    ),
    Check("label-duplicate", "warning", "the same label twice in one picture", "remove one; it would count twice"),
    Check("label-blank-line", "note", "blank lines between labels", "remove them if YOLOv7 shall read them too"),
    Check("label-polygon-odd", "error", "polygons with an odd number of coordinates", "write x and y of every point"),
    Check(
        "label-polygon-outside",
        "error",
        "polygons that leave the picture by more than 1 %",
        "clip them to the picture before writing them",
    ),
    Check(
        "label-mixed",
        "note",
        "boxes and polygons in one file",
        "nothing to do; YOLOv7 itself would read the boxes as polygons of two points",
    ),
):
    add(_check)
