"""Checks of decoded pictures: sizes, damage, and pictures that are there more than once."""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from flatout.findings import Finding
from flatout.images import FORMATS
from flatout.yolo.data.check.facts import DEADLY, DECODED, DEEP, SetFacts, SplitFacts, found_at, looking_for

# Pictures that look the same though their files differ: one saved again, shrunk or converted from the other.
#
# A picture's look is one bit per pixel of a thumbnail (decode_check.py). Saved again at quality 60, photographs of COCO
# and of blood cells change up to 12 of 256 bits, at half their size up to 13; two different ones differ in 20 and more.

MOST_APART = 1 / 8
"""Of the rarer kind of bits: 16 of 256 for a photograph, hardly any for something small on an even ground."""
MOST_COMPARED = 1 << 23
"""Pairs at a time, which bounds the memory."""


def look_alikes(looks_MB: np.ndarray, others_KB: np.ndarray) -> np.ndarray:
    """For each look the number of the nearest of the others, -1 where none is near; int64 [M].

    One matrix product finds them: of 118,000 pictures and 5,000 others in the time it takes to decode some thousand.
    """
    nearest_M = np.full(len(looks_MB), -1)
    if not len(others_KB):
        return nearest_M
    others_KS = _signs(others_KB)
    rows = max(1, MOST_COMPARED // len(others_KS))
    for begin in range(0, len(looks_MB), rows):
        looks_RS = _signs(looks_MB[begin : begin + rows])
        agree_RK = looks_RS @ others_KS.T
        num_bits = looks_RS.shape[1]
        apart_R = (num_bits - agree_RK.max(1)) / 2
        rarer_R = (num_bits - np.abs(looks_RS.sum(1))) / 2
        nearest_M[begin : begin + rows] = np.where(apart_R <= MOST_APART * rarer_R, agree_RK.argmax(1), -1)
    return nearest_M


def _signs(looks_MB: np.ndarray) -> np.ndarray:
    """float32 [M, bits], 1 and -1; whole numbers this small are exact in any order of summing."""
    return np.unpackbits(looks_MB, axis=1).astype(np.float32) * 2 - 1


LARGE = 4
"""Times the training size."""
FLAT = 10
"""Long side by short side."""
NUM_LOOK_BYTES = DEEP["look"].itemsize


@looking_for(
    "image-large",
    "note",
    "pictures more than 4 times as large as the training size",
    "shrink them once with `flatout yolo resize`; decoding them takes most of the time",
)
def image_large(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        long_N = split.images.size_wh_N2.max(1, initial=0)
        for row in np.flatnonzero(long_N > LARGE * facts.img_size).tolist():
            width, height = split.images.size_wh_N2[row].tolist()
            yield found_at("image-large", split.images.paths[row], f"{width} x {height} px")


@looking_for(
    "image-aspect",
    "warning",
    "pictures more than 10 times as long as high, or the other way round",
    "cut them into pieces; most of the network's input would be grey bars",
)
def image_aspect(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        size_N2 = split.images.size_wh_N2
        for row in np.flatnonzero(size_N2.max(1, initial=0) > FLAT * size_N2.min(1, initial=1 << 30)).tolist():
            width, height = size_N2[row].tolist()
            yield found_at("image-aspect", split.images.paths[row], f"{width} x {height} px")


@looking_for(
    "image-decode",
    "error",
    "pictures whose header is right but whose pixels do not decode",
    "copy them again, or remove them",
)
def image_decode(facts: SetFacts) -> Iterable[Finding]:
    for split, path, deep in _deep(facts):
        if deep["state"] != DECODED:
            why = (
                "decoding it ended the process"
                if deep["state"] == DEADLY
                else bytes(deep["why"]).decode(errors="replace")
            )
            yield found_at("image-decode", path, f"{split.name}: {why}")


@looking_for(
    "image-damaged",
    "warning",
    "pictures that decode, but not as they were saved: a strict decoder complains",
    "copy them again; training uses them with the pixels that can be saved",
)
def image_damaged(facts: SetFacts) -> Iterable[Finding]:
    for split, path, deep in _deep(facts):
        if deep["state"] == DECODED and deep["why"]:
            yield found_at("image-damaged", path, f"{split.name}: {bytes(deep['why']).decode(errors='replace')}")


@looking_for(
    "image-header-lies",
    "error",
    "pictures that decode to another size than their header says",
    "save them again with another program",
)
def image_header_lies(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        if split.deep is None:
            continue
        said_M = split.table.picture_N[split.deep.rows]
        found_M = split.deep.facts_M
        differs_M = (said_M["width"] != found_M["width"]) | (said_M["height"] != found_M["height"])
        for row in np.flatnonzero(differs_M & (found_M["state"] == DECODED)).tolist():
            said, found = said_M[row], found_M[row]
            text = f"says {said['width']} x {said['height']}, is {found['width']} x {found['height']}"
            yield found_at("image-header-lies", split.pairs[split.deep.rows[row]].image, text)


@looking_for(
    "image-blank", "warning", "pictures of a single colour", "look at them; black pictures come from failed exports"
)
def image_blank(facts: SetFacts) -> Iterable[Finding]:
    for _, path, deep in _deep(facts):
        if deep["state"] == DECODED and deep["one_colour"]:
            yield found_at("image-blank", path, "every pixel has the same colour")


@looking_for("image-grey", "note", "grey pictures among coloured ones", "make sure that both look the same in use")
def image_grey(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        if split.deep is None:
            continue
        grey_M = split.deep.facts_M["grey"] & ~split.deep.facts_M["one_colour"]
        num_grey, num_used = int(grey_M.sum()), int((split.deep.facts_M["state"] == DECODED).sum())
        if 0 < num_grey < num_used:
            first = split.pairs[split.deep.rows[grey_M.argmax()]].image
            yield found_at("image-grey", first, f"{split.name}: {num_grey} of {num_used} pictures are grey")


@looking_for("formats-mixed", "note", "several picture formats in one split", "nothing to do; all are read")
def formats_mixed(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        counts = np.bincount(split.table.picture_N["format"][split.table.used_N], minlength=len(FORMATS))
        present = {FORMATS[code].upper(): int(counts[code]) for code in np.flatnonzero(counts).tolist()}
        if len(present) > 1:
            listed = ", ".join(f"{count} {name}" for name, count in present.items())
            yield found_at("formats-mixed", split.name, listed)


@looking_for("image-copy", "warning", "files with the same content within a split", "remove one; it counts twice")
def image_copy(facts: SetFacts) -> Iterable[Finding]:
    for split in facts.splits.values():
        for paths in _groups([split]).values():
            real = sorted({os.path.realpath(path) for _, path in paths})
            if len(real) > 1:
                yield found_at("image-copy", real[1], f"{split.name}: the same content as {real[0]}")


@looking_for("leak-path", "error", "one file in train and in val or test", "take it out of one of them")
def leak_path(facts: SetFacts) -> Iterable[Finding]:
    owners: dict[str, str] = {}
    for split in facts.splits.values():
        # Compared by what a file really is, told by its name in the data set; once, however often it is named.
        for path, name in {os.path.realpath(pair.image): pair.image for pair in split.pairs}.items():
            owner = owners.setdefault(path, split.name)
            if owner != split.name:
                yield found_at("leak-path", name, f"in {owner} and in {split.name}")


@looking_for(
    "leak-content",
    "error",
    "files with the same content in train and in val or test",
    "take one out: results on what was trained on mean nothing",
)
def leak_content(facts: SetFacts) -> Iterable[Finding]:
    yield from _leaks(facts, "leak-content", "the same content as")


@looking_for(
    "leak-pixels",
    "warning",
    "pictures in train and in val or test that look the same but are other files",
    "look at both; often one is the other saved again",
)
def leak_pixels(facts: SetFacts) -> Iterable[Finding]:
    same_bytes = {finding.where for finding in leak_content(facts)}
    before: list[tuple[str, str]] = []
    looks_KB = np.zeros((0, NUM_LOOK_BYTES), np.uint8)
    for split in facts.splits.values():
        places, looks_MB = _looks(split)
        for (name, path), alike in zip(places, look_alikes(looks_MB, looks_KB).tolist(), strict=True):
            other_name, other = before[alike] if alike >= 0 else (name, path)
            if path not in same_bytes and os.path.realpath(path) != os.path.realpath(other):
                yield found_at("leak-pixels", path, f"{name}: looks the same as {other} ({other_name})")
        before += places
        looks_KB = np.concatenate((looks_KB, looks_MB))


def _looks(split: SplitFacts) -> tuple[list[tuple[str, str]], np.ndarray]:
    """Split and path of its pictures, and how they look, uint8 [M, bytes]; not of those of a single colour."""
    if split.deep is None:
        return [], np.zeros((0, NUM_LOOK_BYTES), np.uint8)
    facts_M = split.deep.facts_M
    good_M = (facts_M["state"] == DECODED) & ~facts_M["one_colour"]
    places = [(split.name, split.pairs[row].image) for row in split.deep.rows[good_M].tolist()]
    return places, np.frombuffer(facts_M["look"][good_M].tobytes(), np.uint8).reshape(-1, NUM_LOOK_BYTES)


def _leaks(facts: SetFacts, check: str, words: str) -> Iterator[Finding]:
    for group in _groups(list(facts.splits.values())).values():
        name, first = group[0]
        for other_name, path in group[1:]:
            if other_name != name and os.path.realpath(path) != os.path.realpath(first):
                yield found_at(check, path, f"{other_name}: {words} {first} ({name})")


def _groups(splits: list[SplitFacts]) -> dict[bytes, list[tuple[str, str]]]:
    """Split and path of pictures by their content."""
    groups: dict[bytes, list[tuple[str, str]]] = defaultdict(list)
    for split in splits:
        if split.deep is None:
            continue
        facts_M = split.deep.facts_M
        for row in np.flatnonzero(facts_M["state"] == DECODED).tolist():
            groups[bytes(facts_M["digest"][row])].append((split.name, split.pairs[split.deep.rows[row]].image))
    return groups


def _deep(facts: SetFacts) -> Iterator[tuple[SplitFacts, str, np.void]]:
    for split in facts.splits.values():
        if split.deep is not None:
            for row, deep in zip(split.deep.rows.tolist(), split.deep.facts_M, strict=True):
                yield split, split.pairs[row].image, deep
