"""Checks of the data YAML, of paths and file names, and of classes, splits and anchors over the whole data set.

Dimension key:  N images   C classes
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import PurePath

import numpy as np

from flatout.errors import counted
from flatout.findings import Finding
from flatout.yolo.data.anchors import fit_of
from flatout.yolo.data.check.facts import SetFacts, finding_at, register_check
from flatout.yolo.data.find import resize_hint
from flatout.yolo.data.image_set import class_counts

LIKELY_OTHER = {".txt", ".xml", ".json", ".md", ".csv", ".yaml", ".yml", ".cache"}
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


@register_check(
    "names-count",
    "error",
    "nc differs from the number of names, or there are no names",
    "make nc equal to the number of names, or remove it",
    stops=True,
)
def names_count(facts: SetFacts) -> Iterable[Finding]:
    return _yaml_findings(facts, "names-count")


@register_check(
    "names-holes",
    "error",
    "class numbers in names that are not 0, 1, 2, ... without a gap",
    "name every class from 0 on",
    stops=True,
)
def names_holes(facts: SetFacts) -> Iterable[Finding]:
    return _yaml_findings(facts, "names-holes")


@register_check(
    "split-missing",
    "error",
    "a data YAML without train or without val",
    "add the split: a folder, a .txt list, or several of them in brackets",
    stops=True,
)
def split_missing(facts: SetFacts) -> Iterable[Finding]:
    return _yaml_findings(facts, "split-missing")


@register_check("names-duplicate", "warning", "several classes with the same name", "give every class its own name")
def names_duplicate(facts: SetFacts) -> Iterable[Finding]:
    seen: dict[str, int] = {}
    for number, name in enumerate(facts.data.names):
        first = seen.setdefault(name.strip().lower(), number)
        if first != number:
            yield finding_at(
                "names-duplicate", str(facts.data.file), f"classes {first} and {number} are both named {name!r}"
            )


@register_check(
    "names-blank",
    "warning",
    "class names that are empty or contain unprintable characters",
    "give the class a readable name",
)
def names_blank(facts: SetFacts) -> Iterable[Finding]:
    for number, name in enumerate(facts.data.names):
        if not name.strip() or not name.isprintable():
            yield finding_at("names-blank", str(facts.data.file), f"class {number} is named {name!r}")


@register_check(
    "download-refused",
    "note",
    "a download command in the YAML",
    "flatout never runs it; if files are missing, download them yourself",
)
def download_refused(facts: SetFacts) -> Iterable[Finding]:
    if facts.data.written.download:
        yield finding_at(
            "download-refused", str(facts.data.file), facts.data.written.download.strip().splitlines()[0][:80]
        )


def _yaml_findings(facts: SetFacts, check: str) -> Iterator[Finding]:
    for problem in facts.problems:
        if problem.check == check:
            yield finding_at(check, str(facts.data.file), problem.text)


# Paths and file names


@register_check(
    "path-missing",
    "error",
    "folders, lists and files that do not exist",
    "correct the path; relative paths start from the working directory, or else from the folder of the YAML",
    stops=True,
)
def path_missing(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        for entry in split.found.absent:
            advice = f".{command}" if (command := resize_hint(entry)) else ""
            yield finding_at("path-missing", entry, f"{split.name}: does not exist{advice}")


@register_check(
    "split-unreadable",
    "error",
    "a split that cannot be read at all: a damaged list or COCO file, or a folder without read permission",
    "the finding says what to do",
    stops=True,
)
def split_unreadable(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        if split.error:
            yield finding_at("split-unreadable", split.name, split.error)


@register_check("path-empty", "error", "folders and lists without a single image", "correct the path", stops=True)
def path_empty(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        for entry in split.found.empty:
            yield finding_at("path-empty", entry, f"{split.name}: there are no images in this folder or list")


@register_check("path-backslash", "warning", "paths with backslashes, as Windows writes them", "use / instead")
def path_backslash(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        for path in [*facts.data.entries.get(split.name, ()), *(pair.image for pair in split.pairs)]:  # type: ignore[call-overload]
            if "\\" in path:
                yield finding_at("path-backslash", path, "on this system the backslash is part of the file name")


@register_check(
    "list-duplicate", "warning", "images that are listed more than once in a split", "remove the copy: it counts twice"
)
def list_duplicate(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        paths = [os.path.realpath(pair.image) for pair in split.pairs]
        for before, path in zip(sorted(paths), sorted(paths)[1:], strict=False):
            if before == path:
                yield finding_at("list-duplicate", path, f"{split.name}: listed more than once")


@register_check(
    "name-odd",
    "warning",
    "file names with control characters, line breaks or bytes that are not UTF-8",
    "rename the files: other tools, and .txt lists, may not find them",
)
def name_odd(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        for pair in split.pairs:
            if not pair.image.isprintable():
                yield finding_at("name-odd", pair.image, "the name contains unprintable characters")


@register_check(
    "name-hidden", "note", "images whose name starts with a dot", "rename them if you want to train on them"
)
def name_hidden(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        for path in split.found.hidden:
            yield finding_at("name-hidden", path, f"{split.name}: hidden file, not used")


@register_check(
    "name-other",
    "note",
    "files in image folders that do not have the ending of an image",
    "move them elsewhere; if they are images, give them the ending of their format",
)
def name_other(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        for path in split.found.other:
            if PurePath(path).suffix.lower() not in LIKELY_OTHER:
                yield finding_at("name-other", path, f"{split.name}: not used")


@register_check(
    "stem-shared", "error", "images that share one label file, such as a.jpg and a.png", "rename one of the images"
)
def stem_shared(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        owners: dict[str, str] = {}
        for pair in split.pairs:
            owner = owners.setdefault(pair.label, pair.image)
            if owner != pair.image and not pair.label.endswith(".json"):
                yield finding_at("stem-shared", pair.image, f"has the same label file as {owner}")


# Classes, splits and anchors


@register_check(
    "class-unused", "warning", "classes without a single label in train", "remove the class, or label some objects"
)
def class_unused(facts: SetFacts) -> Iterable[Finding]:
    unused = np.flatnonzero(_counts(facts, "train") == 0)
    if len(unused) and "train" in facts.splits:
        yield finding_at(
            "class-unused", "train", f"{len(unused)} of {counted(facts.num_classes, 'class')}: {_named(facts, unused)}"
        )


@register_check(
    "class-rare",
    "warning",
    "classes with fewer than 10 labels in train",
    "label more objects of these classes, or sample their images more often with --image-weights",
)
def class_rare(facts: SetFacts) -> Iterable[Finding]:
    counts_C = _counts(facts, "train")
    rare = np.flatnonzero((counts_C > 0) & (counts_C < RARE))
    if len(rare):
        yield finding_at("class-rare", "train", f"{counted(len(rare), 'class')}: {_named(facts, rare)}")


@register_check(
    "class-balance",
    "note",
    "a class that is more than 100 times as frequent as another",
    "sample images of rare classes more often with --image-weights",
)
def class_balance(facts: SetFacts) -> Iterable[Finding]:
    counts_C = _counts(facts, "train")
    present = counts_C[counts_C > 0]
    if len(present) > 1 and present.max() > UNEVEN * present.min():
        most, least = int(counts_C.argmax()), int(np.where(counts_C > 0, counts_C, counts_C.max() + 1).argmin())
        text = (
            f"{facts.data.names[most]!r} has {counted(int(counts_C[most]), 'label')}, "
            f"{facts.data.names[least]!r} has {int(counts_C[least])}"
        )
        yield finding_at("class-balance", "train", text)


@register_check(
    "class-from-one",
    "warning",
    "class numbers that seem to start at 1: class 0 is never used, and one class has no name",
    "subtract 1 from every class number",
)
def class_from_one(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        class_T = split.images.labels.class_box_T5[:, 0]
        if len(class_T) and class_T.min() >= 1 and class_T.max() == facts.num_classes:
            yield finding_at(
                "class-from-one",
                split.name,
                f"labels use classes {class_T.min():g} to {class_T.max():g}, "
                f"names are for classes 0 to {facts.num_classes - 1}",
            )


@register_check(
    "class-only-in-val",
    "warning",
    "classes that occur in val but not in train",
    "split the images again, so that train contains every class",
)
def class_only_in_val(facts: SetFacts) -> Iterable[Finding]:
    if {"train", "val"} <= set(facts.splits):
        only = np.flatnonzero((_counts(facts, "val") > 0) & (_counts(facts, "train") == 0))
        if len(only):
            yield finding_at("class-only-in-val", "val", _named(facts, only))


@register_check(
    "class-not-in-val",
    "note",
    "classes of train that do not occur in val, so that their score is unknown",
    "move a few images with these classes to val",
)
def class_not_in_val(facts: SetFacts) -> Iterable[Finding]:
    if {"train", "val"} <= set(facts.splits):
        missing = np.flatnonzero((_counts(facts, "train") > 0) & (_counts(facts, "val") == 0))
        if len(missing):
            yield finding_at("class-not-in-val", "val", f"{counted(len(missing), 'class')}: {_named(facts, missing)}")


@register_check(
    "val-small", "warning", "fewer than 20 images in val", "use more: with so few, scores vary a lot by chance"
)
def val_small(facts: SetFacts) -> Iterable[Finding]:
    if "val" in facts.splits and 0 < len(facts.splits["val"].images) < SMALL_VAL:
        yield finding_at("val-small", "val", counted(len(facts.splits["val"].images), "image"))


@register_check(
    "background-share",
    "note",
    "more than half of the images in train have no label",
    "make sure that no objects were left unlabelled",
)
def background_share(facts: SetFacts) -> Iterable[Finding]:
    if "train" in facts.splits:
        counts_N = np.diff(facts.splits["train"].images.labels.first_N)
        share = float((counts_N == 0).mean()) if len(counts_N) else 0.0
        if BACKGROUND < share < 1:
            yield finding_at("background-share", "train", f"{share:.0%} of {len(counts_N)} images")


@register_check(
    "anchor-fit",
    "warning",
    "more than 2 % of the boxes match no anchor at the training size",
    "let training search for anchors (do not use --noautoanchor), or train at another size",
)
def anchor_fit(facts: SetFacts) -> Iterable[Finding]:
    if "train" in facts.splits and len(facts.anchor_wh_A2):
        fit = fit_of(facts.anchor_wh_A2, facts.splits["train"].box_px(facts.img_size))
        if fit.num_boxes and fit.best_recall < MIN_RECALL:
            text = f"{1 - fit.best_recall:.1%} of {fit.num_boxes} boxes at size {facts.img_size}"
            yield finding_at("anchor-fit", "train", text)


def _counts(facts: SetFacts, split: str) -> np.ndarray:
    if split not in facts.splits:
        return np.zeros(facts.num_classes, np.int64)
    return class_counts(facts.splits[split].images.labels, facts.num_classes)


def _named(facts: SetFacts, classes: np.ndarray) -> str:
    shown = [f"{number} {facts.data.names[number]!r}" for number in classes[:MAX_NAMED].tolist()]
    return ", ".join(shown) + (", ..." if len(classes) > MAX_NAMED else "")
