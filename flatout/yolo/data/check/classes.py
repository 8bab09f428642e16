"""Checks of classes, splits and anchors over the whole data set.

Dimension key:  C classes
"""

from collections.abc import Iterable

import numpy as np

from flatout.errors import counted
from flatout.findings import Finding
from flatout.yolo.data.anchors import fit_of
from flatout.yolo.data.check.facts import SetFacts, found_at, looking_for
from flatout.yolo.data.image_weights import class_counts

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
