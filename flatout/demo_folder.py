"""A folder with a data set that we drew ourselves, known by a note in it: nobody else's files are ever touched.

    FOLDER/drawn.json     what was drawn; written first, and again once the set is whole

A folder that holds anything else is refused; a set of other numbers, or one that was cut off, is drawn anew.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flatout.errors import ConfigError, ResourceError

NOTE = "drawn.json"


def draw_set(folder: Path, note: Mapping[str, Any], ours: re.Pattern[str], draw: Callable[[], None]) -> None:
    """Call `draw` to fill the folder, unless the set that `note` describes is there already.

    `ours` matches the files that a set consists of, relative to the folder.
    """
    wanted = json.loads(json.dumps(dict(note) | {"whole": True}))
    try:
        if _note_in(folder) == wanted:
            return
        _clear(folder, ours)
        folder.mkdir(parents=True, exist_ok=True)
        _write_note(folder, wanted | {"whole": False})
        draw()
        _write_note(folder, wanted)
    except OSError as error:
        raise ResourceError(f"{folder}: the demo set cannot be written: {error.strerror}.") from None


def _write_note(folder: Path, note: Mapping[str, Any]) -> None:
    (folder / NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")


def _note_in(folder: Path) -> Any:
    try:
        return json.loads((folder / NOTE).read_text())
    except (OSError, ValueError):
        return None


def _clear(folder: Path, ours: re.Pattern[str]) -> None:
    """Remove what an earlier call drew; ConfigError if anything else is there."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is a file. Name a folder.")
    files = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
    drawn = [file for file in files if file != folder / NOTE]
    foreign = [file for file in drawn if not ours.fullmatch(file.relative_to(folder).as_posix())]
    # Without the note even files that are named like ours may be somebody's own.
    if foreign or (drawn and not (folder / NOTE).exists()):
        raise ConfigError(
            f"{folder}: holds files that are not of a demo set, such as {(foreign or drawn)[0].relative_to(folder)}. "
            "They are left alone: choose an empty or new folder."
        )
    # The note first: what is left of a set that is being removed is no set. It stays, to know the rest by.
    if drawn:
        _write_note(folder, {"whole": False})
    for file in drawn:
        file.unlink()
