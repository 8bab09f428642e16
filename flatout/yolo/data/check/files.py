"""Checks of the data YAML, of paths and file names, and of classes, splits and anchors over the whole data set.

Dimension key:  N images   C classes
"""

import os
from pathlib import PurePath

import numpy as np

from flatout.errors import counted
from flatout.yolo.data.anchors import fit_of
from flatout.yolo.data.check.facts import Found, SetFacts, SplitFacts, set_check, split_check
from flatout.yolo.data.image_set import class_counts
from flatout.yolo.find_file import resize_hint

LIKELY_OTHER = {".txt", ".xml", ".json", ".jsonl", ".md", ".csv", ".yaml", ".yml", ".cache"}
"""Endings of files that people keep beside images on purpose."""
RARE = 10
"""Labels in train below which a class is rare."""
UNEVEN = 100
"""Ratio between the most and the least frequent class."""
SMALL_VAL = 20
BACKGROUND = 0.5
"""Share of images without a label."""
MIN_RECALL = 0.98
MAX_NAMED = 8
"""Classes that are listed in a text."""


# The data YAML


@set_check(
    "error",
    "nc differs from the number of names, or there are no names",
    "make nc equal to the number of names, or remove it",
    stops=True,
)
def names_count(facts: SetFacts) -> Found:
    return _yaml_findings(facts, "names-count")


@set_check(
    "error", "class numbers in names that are not 0, 1, 2, ... without a gap", "name every class from 0 on", stops=True
)
def names_holes(facts: SetFacts) -> Found:
    return _yaml_findings(facts, "names-holes")


@set_check(
    "error",
    "a data YAML without train or without val",
    "add the split: a folder, a .txt list, or several of them in brackets",
    stops=True,
)
def split_missing(facts: SetFacts) -> Found:
    return _yaml_findings(facts, "split-missing")


@set_check("warning", "several classes with the same name", "give every class its own name")
def names_duplicate(facts: SetFacts) -> Found:
    seen: dict[str, int] = {}
    for number, name in enumerate(facts.data.names):
        first = seen.setdefault(name.strip().lower(), number)
        if first != number:
            yield str(facts.data.file), f"classes {first} and {number} are both named {name!r}"


@set_check("warning", "class names that are empty or contain unprintable characters", "give the class a readable name")
def names_blank(facts: SetFacts) -> Found:
    for number, name in enumerate(facts.data.names):
        if not name.strip() or not name.isprintable():
            yield str(facts.data.file), f"class {number} is named {name!r}"


@set_check(
    "note", "a download command in the YAML", "flatout never runs it; if files are missing, download them yourself"
)
def download_refused(facts: SetFacts) -> Found:
    if facts.data.written.download:
        yield str(facts.data.file), facts.data.written.download.strip().splitlines()[0][:80]


def _yaml_findings(facts: SetFacts, check: str) -> Found:
    return [(str(facts.data.file), problem.text) for problem in facts.problems if problem.check == check]


# Paths and file names


@split_check(
    "error",
    "folders, lists and files that do not exist",
    "correct the path; relative paths start from the working directory, or else from the folder of the YAML",
    stops=True,
)
def path_missing(split: SplitFacts, facts: SetFacts) -> Found:
    for entry in split.found.absent:
        advice = f".{command}" if (command := resize_hint(entry)) else ""
        yield entry, f"{split.name}: does not exist{advice}"


@split_check(
    "error",
    "a split that cannot be read at all: a damaged list or annotation file, or a folder without read permission",
    "the finding says what to do",
    stops=True,
)
def split_unreadable(split: SplitFacts, facts: SetFacts) -> Found:
    if split.error:
        yield split.name, split.error


@split_check("error", "folders and lists without a single image", "correct the path", stops=True)
def path_empty(split: SplitFacts, facts: SetFacts) -> Found:
    for entry in split.found.empty:
        yield entry, f"{split.name}: there are no images in this folder or list"


@split_check("warning", "paths with backslashes, as Windows writes them", "use / instead")
def path_backslash(split: SplitFacts, facts: SetFacts) -> Found:
    for path in [*facts.data.entries.get(split.name, ()), *(pair.image for pair in split.pairs)]:  # type: ignore[call-overload]
        if "\\" in path:
            yield path, "on this system the backslash is part of the file name"


@split_check("warning", "images that are listed more than once in a split", "remove the copy: it counts twice")
def list_duplicate(split: SplitFacts, facts: SetFacts) -> Found:
    paths = [os.path.realpath(pair.image) for pair in split.pairs]
    for before, path in zip(sorted(paths), sorted(paths)[1:], strict=False):
        if before == path:
            yield path, f"{split.name}: listed more than once"


@split_check(
    "warning",
    "file names with control characters, line breaks or bytes that are not UTF-8",
    "rename the files: other tools, and .txt lists, may not find them",
)
def name_odd(split: SplitFacts, facts: SetFacts) -> Found:
    for pair in split.pairs:
        if not pair.image.isprintable():
            yield pair.image, "the name contains unprintable characters"


@split_check("note", "images whose name starts with a dot", "rename them if you want to train on them")
def name_hidden(split: SplitFacts, facts: SetFacts) -> Found:
    for path in split.found.hidden:
        yield path, f"{split.name}: hidden file, not used"


@split_check(
    "note",
    "files in image folders that do not have the ending of an image",
    "move them elsewhere; if they are images, give them the ending of their format",
)
def name_other(split: SplitFacts, facts: SetFacts) -> Found:
    for path in split.found.other:
        if PurePath(path).suffix.lower() not in LIKELY_OTHER:
            yield path, f"{split.name}: not used"


@split_check("error", "images that share one label file, such as a.jpg and a.png", "rename one of the images")
def stem_shared(split: SplitFacts, facts: SetFacts) -> Found:
    owners: dict[str, str] = {}
    for pair in split.pairs:
        owner = owners.setdefault(pair.label, pair.image)
        if owner != pair.image and pair.has_own_label_file:
            yield pair.image, f"has the same label file as {owner}"


# Classes, splits and anchors


@set_check("warning", "classes without a single label in train", "remove the class, or label some objects")
def class_unused(facts: SetFacts) -> Found:
    unused = np.flatnonzero(_counts(facts, "train") == 0)
    if len(unused) and _have_images(facts, "train"):
        yield "train", f"{len(unused)} of {counted(facts.num_classes, 'class')}: {_named(facts, unused)}"


@set_check(
    "warning",
    "classes with fewer than 10 labels in train",
    "label more objects of these classes, or sample their images more often with --image-weights",
)
def class_rare(facts: SetFacts) -> Found:
    counts_C = _counts(facts, "train")
    rare = np.flatnonzero((counts_C > 0) & (counts_C < RARE))
    if len(rare):
        yield "train", f"{counted(len(rare), 'class')}: {_named(facts, rare)}"


@set_check(
    "note",
    "a class that is more than 100 times as frequent as another",
    "sample images of rare classes more often with --image-weights",
)
def class_balance(facts: SetFacts) -> Found:
    counts_C = _counts(facts, "train")
    present = counts_C[counts_C > 0]
    if len(present) > 1 and present.max() > UNEVEN * present.min():
        most, least = int(counts_C.argmax()), int(np.where(counts_C > 0, counts_C, counts_C.max() + 1).argmin())
        text = (
            f"{facts.data.names[most]!r} has {counted(int(counts_C[most]), 'label')}, "
            f"{facts.data.names[least]!r} has {int(counts_C[least])}"
        )
        yield "train", text


@split_check(
    "warning",
    "class numbers that seem to start at 1: class 0 is never used, and one class has no name",
    "subtract 1 from every class number",
)
def class_from_one(split: SplitFacts, facts: SetFacts) -> Found:
    class_T = split.images.labels.class_box_T5[:, 0]
    if len(class_T) and class_T.min() >= 1 and class_T.max() == facts.num_classes:
        yield (
            split.name,
            f"labels use classes {class_T.min():g} to {class_T.max():g}, "
            f"names are for classes 0 to {facts.num_classes - 1}",
        )


@set_check(
    "warning",
    "classes that occur in val but not in train",
    "split the images again, so that train contains every class",
)
def class_only_in_val(facts: SetFacts) -> Found:
    only = _classes_of_one(facts, "val", "train")
    if len(only):
        yield "val", _named(facts, only)


@set_check(
    "note",
    "classes of train that do not occur in val, so that their score is unknown",
    "move a few images with these classes to val",
)
def class_not_in_val(facts: SetFacts) -> Found:
    missing = _classes_of_one(facts, "train", "val")
    if len(missing):
        yield "val", f"{counted(len(missing), 'class')}: {_named(facts, missing)}"


@set_check("warning", "fewer than 20 images in val", "use more: with so few, scores vary a lot by chance")
def val_small(facts: SetFacts) -> Found:
    if "val" in facts.splits and 0 < len(facts.splits["val"].images) < SMALL_VAL:
        yield "val", counted(len(facts.splits["val"].images), "image")


@set_check(
    "note", "more than half of the images in train have no label", "make sure that no objects were left unlabelled"
)
def background_share(facts: SetFacts) -> Found:
    if "train" in facts.splits:
        counts_N = np.diff(facts.splits["train"].images.labels.first_N)
        share = float((counts_N == 0).mean()) if len(counts_N) else 0.0
        if BACKGROUND < share < 1:
            yield "train", f"{share:.0%} of {len(counts_N)} images"


@set_check(
    "warning",
    "more than 2 % of the boxes match no anchor at the training size",
    "let training search for anchors (do not use --noautoanchor), or train at another size",
)
def anchor_fit(facts: SetFacts) -> Found:
    if "train" in facts.splits and len(facts.anchor_wh_A2):
        fit = fit_of(facts.anchor_wh_A2, facts.splits["train"].box_px(facts.img_size, facts.tiles))
        if fit.num_boxes and fit.best_recall < MIN_RECALL:
            text = f"{1 - fit.best_recall:.1%} of {fit.num_boxes} boxes at size {facts.img_size}"
            yield "train", text


def _have_images(facts: SetFacts, *splits: str) -> bool:
    """Whether something can be said about the classes of these splits; a missing folder is a finding by itself."""
    return all(split in facts.splits and len(facts.splits[split].images) for split in splits)


def _counts(facts: SetFacts, split: str) -> np.ndarray:
    if split not in facts.splits:
        return np.zeros(facts.num_classes, np.int64)
    return class_counts(facts.splits[split].images.labels, facts.num_classes)


def _classes_of_one(facts: SetFacts, split: str, other: str) -> np.ndarray:
    """Classes with labels in a split and none in the other one; none unless both have images."""
    if not _have_images(facts, split, other):
        return np.zeros(0, np.int64)
    return np.flatnonzero((_counts(facts, split) > 0) & (_counts(facts, other) == 0))


def _named(facts: SetFacts, classes: np.ndarray) -> str:
    shown = [f"{number} {facts.data.names[number]!r}" for number in classes[:MAX_NAMED].tolist()]
    return ", ".join(shown) + (", ..." if len(classes) > MAX_NAMED else "")
