"""What a run writes down as it goes: lines at the end of text files, CSV tables and JSON lines.

    results.txt, results.csv, log.jsonl  <--append--  Records  --lengths--> saved state --> cut back on resume

A saved state remembers how long each file was. Continued from it, the files are cut back to that, so that no row is
there twice. A full disk costs rows and never the training: one warning, and a mark where rows are missing.
"""

import csv
import io
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

logger = logging.getLogger(__name__)

NAMES = ("results.txt", "results.csv", "log.jsonl")


class Records:
    """The text files of a run folder, appended to by name; they are made when first written to.

    All names are given beforehand: a file that was begun after the state was saved must be cut back as well.
    """

    def __init__(self, folder: Path, names: Sequence[str] = NAMES) -> None:
        self._files = {name: _AppendedFile(folder / name) for name in names}

    def line(self, name: str, text: str) -> None:
        """One line as it is, such as a row of results.txt."""
        self._files[name].append(f"{text}\n".encode())

    def row(self, name: str, values: Mapping[str, object]) -> None:
        """A row of a CSV table whose first line holds the names."""
        self.rows(name, [values])

    def rows(self, name: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Several at once, all or none of them.

        A table keeps the columns that it was begun with, perhaps by an older version: of a row that has others only
        those are written that the table has, and what a row lacks stays empty.
        """
        if not rows:
            return
        file = self._files[name]
        begun = file.columns()
        columns = begun or list(rows[0])
        text = "".join(_csv_line(row.get(column) for column in columns) for row in rows)
        file.append((text if begun else _csv_line(columns) + text).encode())

    def event(self, name: str, values: Mapping[str, object]) -> None:
        """An object on a line of its own. Numbers that are not finite become null, which every reader understands."""
        self.line(name, json.dumps({key: _finite(value) for key, value in values.items()}))

    def state_dict(self) -> dict[str, Any]:
        """How long each file is, in bytes that are on the disk."""
        for file in self._files.values():
            file.sync()
        return {"bytes": {name: file.length for name, file in self._files.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Cut all files back to what they were."""
        for name, file in self._files.items():
            file.cut_back(state["bytes"].get(name, 0))

    def clear(self) -> None:
        """Begin anew: all files become empty."""
        self.load_state_dict({"bytes": {}})

    def close(self) -> None:
        """May be called twice."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _AppendedFile:
    """A file that only ever holds whole entries; trouble with it is told once and does not spread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._num_missing = 0
        self._has_warned = False
        self.length = path.stat().st_size if path.is_file() else 0

    def append(self, content: bytes) -> None:
        try:
            self._write(gap_mark(self._path.name, self._num_missing) + content)
        except OSError as error:
            self._num_missing += 1
            self._warn(error)
        else:
            self._num_missing = 0

    def columns(self) -> list[str]:
        """Names in the first line, if this is a table that was begun; a mark of missing rows may stand before it."""
        if not self.length:
            return []
        with suppress(OSError), self._path.open(newline="") as file:
            return next(csv.reader(line for line in file if not line.startswith("#")), [])
        return []

    def cut_back(self, length: int) -> None:
        if length == self.length:
            return
        if length > self.length:
            logger.warning("%s is shorter than it was when the state was saved: rows are missing.", self._path)
            return
        try:
            os.ftruncate(self._open(), length)
            self.length = length
        except OSError as error:
            self._warn(error)

    def sync(self) -> None:
        with suppress(OSError):
            if self._fd is not None:
                os.fsync(self._fd)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        if self._fd is None:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        return self._fd

    def _write(self, content: bytes) -> None:
        fd = self._open()
        taken = 0
        try:
            while taken < len(content):
                taken += os.pwrite(fd, content[taken:], self.length + taken)
        except OSError:
            # Half a row is worse than none, and shortening a file needs no room.
            with suppress(OSError):
                os.ftruncate(fd, self.length)
            raise
        self.length += taken

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: cannot be written: %s. Training goes on without it; a mark will show where rows are missing.",
                self._path, error.strerror,
            )  # fmt: skip


def gap_mark(name: str, num_missing: int) -> bytes:
    """What stands in a file where rows are missing: a comment, or an object among JSON lines."""
    if num_missing == 0:
        return b""
    text = json.dumps({"missing": num_missing}) if name.endswith(".jsonl") else f"# {num_missing} missing"
    return f"{text}\n".encode()


def _csv_line(values: Iterable[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def _finite(value: object) -> object:
    """JSON knows no NaN."""
    return None if isinstance(value, float) and value - value != 0 else value
