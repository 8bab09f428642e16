"""Checks of decoded images: their size, damage, and copies within and between splits.

Dimension key:  N images   M, K decoded images   R rows of a block of M   B bytes and S bits of a perceptual hash
"""

import os
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from flatout.images import FORMATS
from flatout.yolo.data.check.facts import (
    CRASHED,
    DECODE_RECORD,
    DECODED,
    Found,
    SetFacts,
    SplitFacts,
    set_check,
    split_check,
)

LARGE = 4
"""Multiple of the training size."""
FLAT = 10
"""Ratio of the long side to the short side."""

# Perceptual hashes find images that look the same though their files differ, because one was saved again, shrunk or
# converted from the other. A hash has one bit per pixel of a thumbnail (`difference_hash` in facts.py). Photographs of
# COCO and of blood cells that are saved again at quality 60 change up to 12 of the 256 bits, at half their size up to
# 13; two different photographs differ in 20 or more.

HASH_BYTES = DECODE_RECORD["hash"].itemsize
MAX_DIFFERENT = 1 / 8
"""Share of the rarer bit value that may differ: 16 of 256 bits for a photograph, hardly any for a small object on a
uniform background."""
MAX_COMPARED = 1 << 23
"""Pairs that are compared at a time, which bounds the memory."""


def nearest_hashes(hash_MB: np.ndarray, other_KB: np.ndarray) -> np.ndarray:
    """Index of the nearest of the other hashes for each hash, -1 where none is near enough; int64 [M].

    Comparing by matrix product is fast: 118,000 images with 5,000 others take as long as decoding a few thousand.
    """
    nearest_M = np.full(len(hash_MB), -1)
    if not len(other_KB):
        return nearest_M
    other_KS = _signs(other_KB)
    rows = max(1, MAX_COMPARED // len(other_KS))
    for begin in range(0, len(hash_MB), rows):
        hash_RS = _signs(hash_MB[begin : begin + rows])
        agree_RK = hash_RS @ other_KS.T
        num_bits = hash_RS.shape[1]
        apart_R = (num_bits - agree_RK.max(1)) / 2
        rarer_R = (num_bits - np.abs(hash_RS.sum(1))) / 2
        nearest_M[begin : begin + rows] = np.where(apart_R <= MAX_DIFFERENT * rarer_R, agree_RK.argmax(1), -1)
    return nearest_M


def _signs(hash_MB: np.ndarray) -> np.ndarray:
    """The bits as 1 and -1, float32 [M, S]; sums of so few whole numbers are exact in any order."""
    return np.unpackbits(hash_MB, axis=1).astype(np.float32) * 2 - 1


# The checks


@split_check(
    "note",
    "images more than 4 times as large as the training size",
    "if objects are small, use --tiles; else shrink them once with `flatout yolo resize`, to save decoding time",
)
def image_large(split: SplitFacts, facts: SetFacts) -> Found:
    if facts.tiles is not None:
        return
    long_N = split.images.size_wh_N2.max(1, initial=0)
    for row in np.flatnonzero(long_N > LARGE * facts.img_size).tolist():
        width, height = split.images.size_wh_N2[row].tolist()
        yield split.images.paths[row], f"{width} x {height} px"


@split_check(
    "warning",
    "images whose long side is more than 10 times the short side",
    "use --tiles, or cut them into pieces: most of the network's input would be padding",
)
def image_aspect(split: SplitFacts, facts: SetFacts) -> Found:
    if facts.tiles is not None:
        return
    size_N2 = split.images.size_wh_N2
    for row in np.flatnonzero(size_N2.max(1, initial=0) > FLAT * size_N2.min(1, initial=1 << 30)).tolist():
        width, height = size_N2[row].tolist()
        yield split.images.paths[row], f"{width} x {height} px"


@set_check(
    "error",
    "images with a valid header whose pixels cannot be decoded",
    "copy them again from the original, or remove them",
)
def image_decode(facts: SetFacts) -> Found:
    for split, path, decoded in _decoded(facts):
        if decoded["state"] != DECODED:
            reason = "decoding it crashes the process" if decoded["state"] == CRASHED else _reason(decoded)
            yield path, f"{split.name}: {reason}"


@set_check(
    "warning",
    "images that decode although a strict decoder reports damage",
    "copy them again from the original; training uses the pixels that can be decoded",
)
def image_damaged(facts: SetFacts) -> Found:
    for split, path, decoded in _decoded(facts):
        if decoded["state"] == DECODED and decoded["reason"]:
            yield path, f"{split.name}: {_reason(decoded)}"


@split_check(
    "error", "images that decode to a different size than their header says", "save them again with another program"
)
def image_header_lies(split: SplitFacts, facts: SetFacts) -> Found:
    header_M = split.table.image_N[split.decoded.rows]
    found_M = split.decoded.facts_M
    differs_M = (header_M["width"] != found_M["width"]) | (header_M["height"] != found_M["height"])
    for row in np.flatnonzero(differs_M & (found_M["state"] == DECODED)).tolist():
        header, found = header_M[row], found_M[row]
        text = (
            f"the header says {header['width']} x {header['height']} px, "
            f"the image has {found['width']} x {found['height']}"
        )
        yield split.pairs[split.decoded.rows[row]].image, text


@set_check("warning", "images of a single colour", "look at them: black images often come from a failed export")
def image_blank(facts: SetFacts) -> Found:
    for _, path, decoded in _decoded(facts):
        if decoded["state"] == DECODED and decoded["one_colour"]:
            yield path, "every pixel has the same colour"


@split_check(
    "note",
    "splits that mix grey and colour images",
    "make sure that the images you will run the network on are mixed in the same way",
)
def image_grey(split: SplitFacts, facts: SetFacts) -> Found:
    grey_M = split.decoded.facts_M["grey"] & ~split.decoded.facts_M["one_colour"]
    num_grey, num_used = int(grey_M.sum()), int((split.decoded.facts_M["state"] == DECODED).sum())
    if 0 < num_grey < num_used:
        first = split.pairs[split.decoded.rows[grey_M.argmax()]].image
        yield first, f"{split.name}: {num_grey} of {num_used} images are grey"


@split_check("note", "splits with several image formats", "nothing to do: all of them are read")
def formats_mixed(split: SplitFacts, facts: SetFacts) -> Found:
    counts = np.bincount(split.table.image_N["format"][split.table.used_N], minlength=len(FORMATS))
    present = {FORMATS[code].upper(): int(counts[code]) for code in np.flatnonzero(counts).tolist()}
    if len(present) > 1:
        listed = ", ".join(f"{count} {name}" for name, count in present.items())
        yield split.name, listed


@split_check("warning", "files with the same content within a split", "remove the copy: it counts twice")
def image_copy(split: SplitFacts, facts: SetFacts) -> Found:
    for paths in _by_content([split]).values():
        real = sorted({os.path.realpath(path) for _, path in paths})
        if len(real) > 1:
            yield real[1], f"{split.name}: has the same content as {real[0]}"


@set_check(
    "error",
    "files that are in train and also in val or test",
    "remove them from one of the splits: scores on images that were trained on mean nothing",
)
def leak_path(facts: SetFacts) -> Found:
    owners: dict[str, str] = {}
    for split in facts.splits.values():
        # Compared by real path and reported by the path in the data set, once even if the file is listed several times.
        for path, name in {os.path.realpath(pair.image): pair.image for pair in split.pairs}.items():
            owner = owners.setdefault(path, split.name)
            if owner != split.name:
                yield name, f"in {owner} and in {split.name}"


@set_check(
    "error",
    "files with the same content in train and in val or test",
    "remove one of them: scores on images that were trained on mean nothing",
)
def leak_content(facts: SetFacts) -> Found:
    for group in _by_content(list(facts.splits.values())).values():
        name, first = group[0]
        for other_name, path in group[1:]:
            if other_name != name and os.path.realpath(path) != os.path.realpath(first):
                yield path, f"{other_name}: has the same content as {first} ({name})"


@set_check(
    "warning",
    "different files in train and in val or test that look the same",
    "look at both: often one is the other, saved again",
)
def leak_pixels(facts: SetFacts) -> Found:
    same_bytes = {path for path, _ in leak_content(facts)}
    before: list[tuple[str, str]] = []
    hash_KB = np.zeros((0, HASH_BYTES), np.uint8)
    for split in facts.splits.values():
        places, hash_MB = _hashes(split)
        for (name, path), nearest in zip(places, nearest_hashes(hash_MB, hash_KB).tolist(), strict=True):
            other_name, other = before[nearest] if nearest >= 0 else (name, path)
            if path not in same_bytes and os.path.realpath(path) != os.path.realpath(other):
                yield path, f"{name}: looks the same as {other} ({other_name})"
        before += places
        hash_KB = np.concatenate((hash_KB, hash_MB))


def _hashes(split: SplitFacts) -> tuple[list[tuple[str, str]], np.ndarray]:
    """Split name and path of the decoded images, and their hashes, uint8 [M, B]; without images of a single colour."""
    facts_M = split.decoded.facts_M
    good_M = (facts_M["state"] == DECODED) & ~facts_M["one_colour"]
    places = [(split.name, split.pairs[row].image) for row in split.decoded.rows[good_M].tolist()]
    return places, np.frombuffer(facts_M["hash"][good_M].tobytes(), np.uint8).reshape(-1, HASH_BYTES)


def _by_content(splits: list[SplitFacts]) -> dict[bytes, list[tuple[str, str]]]:
    """Digest of the content -> split name and path of the images that have it."""
    groups: dict[bytes, list[tuple[str, str]]] = defaultdict(list)
    for split in splits:
        facts_M = split.decoded.facts_M
        for row in np.flatnonzero(facts_M["state"] == DECODED).tolist():
            groups[bytes(facts_M["digest"][row])].append((split.name, split.pairs[split.decoded.rows[row]].image))
    return groups


def _reason(decoded: np.void) -> str:
    return bytes(decoded["reason"]).decode(errors="replace")


def _decoded(facts: SetFacts) -> Iterator[tuple[SplitFacts, str, np.void]]:
    """Split, path and DECODE_RECORD of every decoded image."""
    for split in facts.splits.values():
        for row, decoded in zip(split.decoded.rows.tolist(), split.decoded.facts_M, strict=True):
            yield split, split.pairs[row].image, decoded
