"""A run folder at the moment of a save: what is needed to continue it, held so that later saves change nothing.

Large files are held open: one that is replaced under its name keeps its content for whoever has it open. Small ones are
read at once.
"""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.engine.run_folder import read_record

SMALL_SUFFIXES = {".json", ".jsonl", ".yaml", ".txt", ".csv"}
SMALL_BYTES = 64 << 20
BEST = "best.pt"
_CHUNK_BYTES = 4 << 20


class HeldFile:
    """A file that stays what it was; `close` lets it go."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(self._fd)
        self.nbytes = status.st_size
        self.identity = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
        """Equal for two openings of the same content."""

    @property
    def path(self) -> Path:
        """A name under which this content can be read, whatever happens to its first one."""
        return Path(f"/proc/self/fd/{self._fd}")

    def sha256(self) -> str:
        digest, offset = hashlib.sha256(), 0
        while chunk := os.pread(self._fd, _CHUNK_BYTES, offset):
            digest.update(chunk)
            offset += len(chunk)
        return digest.hexdigest()

    def close(self) -> None:
        os.close(self._fd)


class Snapshot:
    """Everything of a run that a fresh machine needs to go on with it."""

    def __init__(self, folder: Path, state: Path) -> None:
        """`state` is the file to continue from. Takes milliseconds: nothing is copied but small files."""
        record = read_record(folder) or {}
        self.config: Mapping[str, Any] = record.get("config", {})
        self.finished = bool(record.get("finished"))
        self.position = read_position(state)
        self.small = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if _is_small(path)}
        self.held = {
            path.relative_to(folder).as_posix(): HeldFile(path)
            for path in (state, state.with_name(BEST))
            if path.is_file()
        }

    def close(self) -> None:
        for file in self.held.values():
            file.close()
        self.held = {}


def position_note(state: Path) -> Path:
    """Where `Generations` notes how far a state is."""
    return state.with_name(f".{state.stem}.position.json")


def read_position(state: Path) -> dict[str, int]:
    """How far a state is, as the note beside it says; empty where there is none."""
    try:
        note = json.loads(position_note(state).read_text())
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in note.items() if isinstance(value, int)} if isinstance(note, dict) else {}


def _is_small(path: Path) -> bool:
    status = path.lstat()
    visible = not path.name.startswith(".") and path.suffix in SMALL_SUFFIXES
    return visible and stat.S_ISREG(status.st_mode) and status.st_size <= SMALL_BYTES
