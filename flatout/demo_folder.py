"""Folders of generated demo data sets, recognized by a note in them, so that no other files are ever touched.

    FOLDER/drawn.json     the settings of the set; written first, and again once it is complete

A folder with other files is refused; a set with other settings, or an incomplete one, is generated again.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flatout.errors import ConfigError, ResourceError
from flatout.safefiles import read_note

NOTE = "drawn.json"


def draw_set(folder: Path, note: Mapping[str, Any], ours: re.Pattern[str], draw: Callable[[], None]) -> None:
    """Call `draw` to fill the folder, unless the set that `note` describes is already there.

    `ours` matches the files of a set, relative to the folder. ConfigError if the folder holds other files,
    ResourceError if it cannot be written.
    """
    complete = json.loads(json.dumps(dict(note) | {"whole": True}))
    try:
        if read_note(folder / NOTE) == complete:
            return
        _clear(folder, ours)
        folder.mkdir(parents=True, exist_ok=True)
        _write_note(folder, complete | {"whole": False})
        draw()
        _write_note(folder, complete)
    except OSError as error:
        raise ResourceError(
            f"{folder}: the demo data set cannot be written: {error.strerror}. Choose another folder, or make this one "
            "writable."
        ) from None


def _write_note(folder: Path, note: Mapping[str, Any]) -> None:
    (folder / NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")


def _clear(folder: Path, ours: re.Pattern[str]) -> None:
    """Remove the files of an earlier set; ConfigError if there are any other files."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file. Choose a folder.")
    files = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
    generated = [file for file in files if file != folder / NOTE]
    foreign = [file for file in generated if not ours.fullmatch(file.relative_to(folder).as_posix())]
    # Without the note, even files with matching names may belong to the user.
    if foreign or (generated and not (folder / NOTE).exists()):
        raise ConfigError(
            f"{folder} holds files that are not part of a demo data set, such as "
            f"{(foreign or generated)[0].relative_to(folder)}. Choose an empty or new folder."
        )
    # The note is kept, marked as incomplete, so that the rest is still recognized if removing is interrupted.
    if generated:
        _write_note(folder, {"whole": False})
    for file in generated:
        file.unlink()
