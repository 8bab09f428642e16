"""Checks of the YAML, of paths and of names.

Checks of classes, splits and anchors over the whole data set.

Dimension key:  C classes
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import PurePath

import numpy as np

from flatout.errors import counted
from flatout.findings import Finding
from flatout.yolo.data.anchors import fit_of
from flatout.yolo.data.check.facts import SetFacts, found_at, looking_for
from flatout.yolo.data.find import how_to_resize
from flatout.yolo.data.image_set import class_counts

LIKELY_OTHER = {".txt", ".xml", ".json", ".md", ".csv", ".yaml", ".yml", ".cache"}


def _told(facts: SetFacts, check: str) -> Iterator[Finding]:
    for complaint in facts.complaints:
        if complaint.check == check:
            yield found_at(check, str(facts.data.file), complaint.text)


@looking_for(
    "names-count",
    "error",
    "nc and the number of names disagree, or there are no names",
    "make nc equal to the number of names",
    stops=True,
)
def names_count(facts: SetFacts) -> Iterable[Finding]:
    return _told(facts, "names-count")


@looking_for("names-holes", "error", "names given by number that are not 0, 1, 2, ...", "fill the holes", stops=True)
def names_holes(facts: SetFacts) -> Iterable[Finding]:
    return _told(facts, "names-holes")


@looking_for(
    "split-missing", "error", "no train or no val in the YAML", "name a folder, a list, or a list of them", stops=True
)
def split_missing(facts: SetFacts) -> Iterable[Finding]:
    return _told(facts, "split-missing")


@looking_for("names-duplicate", "warning", "two classes of one name", "give every class a name of its own")
def names_duplicate(facts: SetFacts) -> Iterable[Finding]:
    seen: dict[str, int] = {}
    for number, name in enumerate(facts.data.names):
        first = seen.setdefault(name.strip().lower(), number)
        if first != number:
            yield found_at("names-duplicate", str(facts.data.file), f"classes {first} and {number} are called {name!r}")


@looking_for("names-blank", "warning", "class names that are empty or cannot be printed", "name the class")
def names_blank(facts: SetFacts) -> Iterable[Finding]:
    for number, name in enumerate(facts.data.names):
        if not name.strip() or not name.isprintable():
            yield found_at("names-blank", str(facts.data.file), f"class {number} is called {name!r}")


@looking_for(
    "download-refused", "note", "a download command in the YAML", "flatout does not run it; fetch the data yourself"
)
def download_refused(facts: SetFacts) -> Iterable[Finding]:
    if facts.data.written.download:
        yield found_at(
            "download-refused", str(facts.data.file), facts.data.written.download.strip().splitlines()[0][:80]
        )


@looking_for(
    "path-missing",
    "error",
    "folders and lists that do not exist",
    "correct the path; it starts from the working directory, else from the YAML's folder",
    stops=True,
)
def path_missing(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        for entry in split.found.absent:
            advice = f".{command}" if (command := how_to_resize(entry)) else ""
            yield found_at("path-missing", entry, f"{split.name}: does not exist{advice}")


@looking_for(
    "split-unreadable",
    "error",
    "a split that cannot be read at all: a damaged list or COCO file, a folder without permission",
    "see the text of the finding",
    stops=True,
)
def split_unreadable(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        if split.trouble:
            yield found_at("split-unreadable", split.name, split.trouble)


@looking_for("path-empty", "error", "folders and lists without a single picture", "correct the path", stops=True)
def path_empty(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        for entry in split.found.empty:
            yield found_at("path-empty", entry, f"{split.name}: no pictures in this folder or list")


@looking_for("path-backslash", "warning", "paths with backslashes, as Windows writes them", "write / instead")
def path_backslash(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        for path in [*facts.data.entries.get(split.name, ()), *(pair.image for pair in split.pairs)]:  # type: ignore[call-overload]
            if "\\" in path:
                yield found_at("path-backslash", path, "a backslash is part of the name here")


@looking_for("list-duplicate", "warning", "pictures that are named twice in one split", "remove one; it counts twice")
def list_duplicate(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        paths = [os.path.realpath(pair.image) for pair in split.pairs]
        for before, path in zip(sorted(paths), sorted(paths)[1:], strict=False):
            if before == path:
                yield found_at("list-duplicate", path, f"{split.name}: named more than once")


@looking_for(
    "name-odd",
    "warning",
    "file names with control characters, line breaks or bytes that are no UTF-8",
    "rename them; lists and label names will not find them everywhere",
)
def name_odd(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        for pair in split.pairs:
            if not pair.image.isprintable():
                yield found_at("name-odd", pair.image, "has characters that cannot be printed")


@looking_for("name-hidden", "note", "pictures whose name begins with a dot", "rename them if they shall be used")
def name_hidden(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        for path in split.found.hidden:
            yield found_at("name-hidden", path, f"{split.name}: hidden, so not used")


@looking_for(
    "name-other",
    "note",
    "files in picture folders that are no pictures by their name",
    "move them away, or give them the ending of their format",
)
def name_other(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        for path in split.found.other:
            if PurePath(path).suffix.lower() not in LIKELY_OTHER:
                yield found_at("name-other", path, f"{split.name}: not used")


@looking_for("stem-shared", "error", "pictures that share one label file (a.jpg and a.png)", "rename one of them")
def stem_shared(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        owners: dict[str, str] = {}
        for pair in split.pairs:
            owner = owners.setdefault(pair.label, pair.image)
            if owner != pair.image and not pair.label.endswith(".json"):
                yield found_at("stem-shared", pair.image, f"has the same labels as {owner}")


RARE = 10
UNEVEN = 100
SMALL_VAL = 20
BACKGROUND = 0.5
LEAST_RECALL = 0.98
MOST_NAMED = 8


def _counts(facts: SetFacts, split: str) -> np.ndarray:
    if split not in facts.splits:
        return np.zeros(facts.num_classes, np.int64)
    return class_counts(facts.splits[split].images.labels, facts.num_classes)


def _named(facts: SetFacts, classes: np.ndarray) -> str:
    shown = [f"{number} {facts.data.names[number]!r}" for number in classes[:MOST_NAMED].tolist()]
    return ", ".join(shown) + (", ..." if len(classes) > MOST_NAMED else "")


@looking_for("class-unused", "warning", "classes without any label in train", "remove the class or label some objects")
def class_unused(facts: SetFacts) -> Iterable[Finding]:
    unused = np.flatnonzero(_counts(facts, "train") == 0)
    if len(unused) and "train" in facts.splits:
        yield found_at(
            "class-unused", "train", f"{len(unused)} of {counted(facts.num_classes, 'class')}: {_named(facts, unused)}"
        )


@looking_for(
    "class-rare",
    "warning",
    "classes with fewer than 10 labels in train",
    "label more, or draw them more often: --image-weights",
)
def class_rare(facts: SetFacts) -> Iterable[Finding]:
    counts_C = _counts(facts, "train")
    rare = np.flatnonzero((counts_C > 0) & (counts_C < RARE))
    if len(rare):
        yield found_at("class-rare", "train", f"{counted(len(rare), 'class')}: {_named(facts, rare)}")


@looking_for(
    "class-balance", "note", "a class 100 times as frequent as another", "draw rare ones more often: --image-weights"
)
def class_balance(facts: SetFacts) -> Iterable[Finding]:
    counts_C = _counts(facts, "train")
    present = counts_C[counts_C > 0]
    if len(present) > 1 and present.max() > UNEVEN * present.min():
        most, least = int(counts_C.argmax()), int(np.where(counts_C > 0, counts_C, counts_C.max() + 1).argmin())
        text = f"{facts.data.names[most]!r} {counts_C[most]}, {facts.data.names[least]!r} {counts_C[least]}"
        yield found_at("class-balance", "train", text)


@looking_for(
    "class-from-one",
    "warning",
    "class 0 is never used, but one class beyond the names is: numbers that start at 1",
    "subtract 1 from every class",
)
def class_from_one(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        class_T = split.images.labels.class_box_T5[:, 0]
        if len(class_T) and class_T.min() >= 1 and class_T.max() == facts.num_classes:
            yield found_at(
                "class-from-one",
                split.name,
                f"classes {class_T.min():g} to {class_T.max():g}, names 0 to {facts.num_classes - 1}",
            )


@looking_for("class-only-in-val", "warning", "classes in val that train never shows", "divide the pictures anew")
def class_only_in_val(facts: SetFacts) -> Iterable[Finding]:
    if {"train", "val"} <= set(facts.splits):
        only = np.flatnonzero((_counts(facts, "val") > 0) & (_counts(facts, "train") == 0))
        if len(only):
            yield found_at("class-only-in-val", "val", _named(facts, only))


@looking_for("class-not-in-val", "note", "classes of train that val cannot judge", "move a few pictures to val")
def class_not_in_val(facts: SetFacts) -> Iterable[Finding]:
    if {"train", "val"} <= set(facts.splits):
        missing = np.flatnonzero((_counts(facts, "train") > 0) & (_counts(facts, "val") == 0))
        if len(missing):
            yield found_at("class-not-in-val", "val", f"{counted(len(missing), 'class')}: {_named(facts, missing)}")


@looking_for("val-small", "warning", "fewer than 20 pictures in val", "results jump by chance; use more")
def val_small(facts: SetFacts) -> Iterable[Finding]:
    if "val" in facts.splits and 0 < len(facts.splits["val"].images) < SMALL_VAL:
        yield found_at("val-small", "val", counted(len(facts.splits["val"].images), "picture"))


@looking_for(
    "background-share",
    "note",
    "more than half of train without a label",
    "make sure that nothing on them was forgotten",
)
def background_share(facts: SetFacts) -> Iterable[Finding]:
    if "train" in facts.splits:
        counts_N = np.diff(facts.splits["train"].images.labels.first_N)
        share = float((counts_N == 0).mean()) if len(counts_N) else 0.0
        if BACKGROUND < share < 1:
            yield found_at("background-share", "train", f"{share:.0%} of {len(counts_N)} pictures")


@looking_for(
    "anchor-fit",
    "warning",
    "boxes that no anchor suits at the training size (more than 2 %)",
    "let training search for anchors, or train at another size",
)
def anchor_fit(facts: SetFacts) -> Iterable[Finding]:
    if "train" in facts.splits and len(facts.anchor_wh_A2):
        found = fit_of(facts.anchor_wh_A2, facts.splits["train"].box_px(facts.img_size))
        if found.num_boxes and found.best_recall < LEAST_RECALL:
            text = f"{1 - found.best_recall:.1%} of {found.num_boxes} boxes at size {facts.img_size}"
            yield found_at("anchor-fit", "train", text)
