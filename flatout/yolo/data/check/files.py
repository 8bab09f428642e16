"""Checks of the YAML, of paths and of names."""

import os
from collections.abc import Iterable, Iterator
from pathlib import PurePath

from flatout.findings import Finding
from flatout.yolo.data.check.facts import SetFacts, found_at, looking_for
from flatout.yolo.data.find import how_to_resize

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
