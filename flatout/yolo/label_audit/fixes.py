"""The fix list: what a person agreed to, and corrected copies of the label files.

    fix-list.json --checked against the label files--> FOLDER/labels/train/0139.txt, one file per changed label file

Label files are never changed in place, and no file is ever overwritten.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

from flatout.errors import ConfigError, DataError, ResourceError, counted
from flatout.safefiles import write_file
from flatout.yolo.data.label_text import decode_text, parse_labels

Action = Literal["delete", "replace", "add"]
ACTIONS = ("delete", "replace", "add")
AGAIN = "Make a new list: run flatout yolo audit again."


@dataclass(frozen=True, kw_only=True)
class Fix:
    """One change of a label file."""

    action: Action
    file: str
    """The label file."""
    line: int
    """Line number from 1; to add a line at the end, the number of lines that the file had."""
    was: str
    """The text of that line when it was audited; a file that has changed since is refused. Empty to add a line."""
    text: str
    """The new text of the line; "" to delete it."""


def label_text(class_number: int, box_xyxy: Iterable[float]) -> str:
    """A line of a label file from corners relative to the image, clipped to it."""
    x1, y1, x2, y2 = (min(1.0, max(0.0, float(value))) for value in box_xyxy)
    numbers = ((x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1)
    return f"{class_number} " + " ".join(f"{number:.6f}" for number in numbers)


def read_fix_list(path: Path) -> list[Fix]:
    """The fixes of a file that the page saved; ConfigError if it is something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--fix-list {path}: cannot be read: {error.strerror}. Check the path.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--fix-list {path}: is not JSON ({error}). Save it with the button of audit.html.") from None
    entries = content.get("fixes") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ConfigError(f'--fix-list {path}: has no list "fixes". Save it with the button of audit.html.')
    if not entries:
        raise ConfigError(f"--fix-list {path}: has no fixes. Tick findings in audit.html, and save the list again.")
    return [_parsed(path, number, entry) for number, entry in enumerate(entries)]


def _parsed(path: Path, number: int, entry: Any) -> Fix:
    where = f"--fix-list {path}: fixes[{number}]"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is not an object with the keys action, file, line, was, text.")
    types: Mapping[str, type] = {"action": str, "file": str, "line": int, "was": str, "text": str}
    for key, kind in types.items():
        if type(entry.get(key)) is not kind:
            raise ConfigError(f"{where}: {key} must be {'a whole number' if kind is int else 'text'}.")
    if entry["action"] not in ACTIONS:
        raise ConfigError(f"{where}: action {entry['action']!r} must be one of {', '.join(ACTIONS)}.")
    if len(entry["text"].splitlines()) > 1 or entry["text"] != entry["text"].rstrip("\r\n"):
        raise ConfigError(f"{where}: text must be a single line.")
    if entry["action"] != "delete":
        found = parse_labels(entry["text"].encode(errors="surrogateescape"))
        if len(found.class_box_n5) != 1 or found.num_dropped:
            raise ConfigError(
                f"{where}: text {entry['text']!r} is not a label: a class, and a box or polygon relative to the image."
            )
    return Fix(**{key: entry[key] for key in types})


def write_fixed(fixes: Sequence[Fix], out: Path) -> list[Path]:
    """Write corrected copies of the label files that `fixes` name, below the folder `out`; returns their paths.

    Nothing is written if any file has changed since the audit (DataError), or if a copy exists already (ConfigError).
    """
    by_file: dict[str, list[Fix]] = {}
    for fix in fixes:
        by_file.setdefault(fix.file, []).append(fix)
    places = places_below(list(by_file))
    targets: dict[Path, str] = {}
    contents: list[tuple[Path, str]] = []
    for file, own in by_file.items():
        target = out / places[file]
        if target in targets:
            raise ConfigError(
                f"{file} and {targets[target]} would both become {target}. Split the fix list, one folder each."
            )
        if target.exists():
            raise ConfigError(f"{target} already exists, and nothing is overwritten. Choose another folder with --out.")
        if target.resolve() == Path(file).resolve():
            raise ConfigError(
                f"{file}: --out {out} would put the corrected copy in its place, and a data set is never changed. "
                "Choose another folder."
            )
        targets[target] = file
        contents.append((target, fixed_text(file, own)))
    for target, text in contents:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResourceError(
                f"--out {out}: {target.parent} cannot be created: {error.strerror}. Choose another folder."
            ) from None
        write_file(target, text)
    return [target for target, _ in contents]


def places_below(files: Sequence[str]) -> dict[str, PurePath]:
    """The paths of copies in their folder: from the first folder `labels` on, as data sets are laid out, else the name.

    If two would be the same, because several folders have files of this name: from the folder on that all files have
    in common. ConfigError if a path would lead out of the folder of the copies.
    """
    places = {file: _from_labels(PurePath(file)) for file in files}
    if len(set(places.values())) < len(places) and all(map(os.path.isabs, files)):
        common = os.path.commonpath(files)
        places = {file: PurePath(file).relative_to(common) for file in files}
    for file, place in places.items():
        if not place.parts or ".." in place.parts:
            raise ConfigError(f"--fix-list: {file!r} is not the path of a label file. {AGAIN}")
    return places


def _from_labels(file: PurePath) -> PurePath:
    parts = file.parts
    return PurePath(*(parts[parts.index("labels") :] if "labels" in parts[:-1] else parts[-1:]))


def fixed_text(file: str, fixes: Sequence[Fix]) -> str:
    """The text of a label file with its fixes applied, with its line ends; DataError if a line is not what it was."""
    text = _text_of(file, may_be_missing=all(fix.action == "add" and not fix.line for fix in fixes))
    lines, line_end = text.splitlines(), "\r\n" if "\r\n" in text else "\n"
    changed: dict[int, str | None] = {}
    added = []
    for fix in fixes:
        if fix.action == "add":
            if fix.line != len(lines):
                raise DataError(
                    f"{file}: this file has changed since the audit: it had {counted(fix.line, 'line')} and has "
                    f"{len(lines)}. {AGAIN}"
                )
            added.append(fix.text)
            continue
        if not 1 <= fix.line <= len(lines) or lines[fix.line - 1].strip() != fix.was.strip():
            raise DataError(f"{file}:{fix.line}: this line has changed since the audit: it was {fix.was!r}. {AGAIN}")
        new = None if fix.action == "delete" else fix.text
        if changed.get(fix.line, new) != new:
            raise ConfigError(f"{file}:{fix.line}: the fix list changes this line twice. Keep one of the changes.")
        changed[fix.line] = new
    kept = [changed.get(number, line) for number, line in enumerate(lines, 1)]
    return "".join(f"{line}{line_end}" for line in [*kept, *added] if line is not None)


def _text_of(file: str, *, may_be_missing: bool) -> str:
    try:
        return decode_text(Path(file).read_bytes())
    except FileNotFoundError:
        if may_be_missing:  # an image without labels gets its first one
            return ""
        raise DataError(f"{file}: this label file does not exist any more. {AGAIN}") from None
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}. Check its permissions.") from None
    except ValueError as error:
        raise DataError(f"{file}: is not UTF-8 text: {error}. {AGAIN}") from None
