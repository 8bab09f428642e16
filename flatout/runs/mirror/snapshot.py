"""A run folder at the moment of a save: what is needed to continue it, held so that later saves change nothing.

Large files are held open: one that is replaced under its name keeps its content for whoever has it open. Small ones are
read at once.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from flatout.runs.folder import read_record
from flatout.runs.mirror.place import Place, PlaceError

SMALL_SUFFIXES = {".json", ".jsonl", ".yaml", ".txt", ".csv"}
SMALL_BYTES = 64 << 20
SMALL_BYTES_BELOW = 1 << 20
"""In folders of the run folder, such as spike's metrics/."""
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
        own, below = sorted(folder.iterdir()), sorted(folder.glob("[!.]*/*"))
        small = [path for path in own if _is_small(path, SMALL_BYTES)]
        small += [path for path in below if _is_small(path, SMALL_BYTES_BELOW)]
        self.small = {path.relative_to(folder).as_posix(): path.read_bytes() for path in small}
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
    """Where `CheckpointStore` notes how far a state is."""
    return state.with_name(f".{state.stem}.position.json")


def read_position(state: Path) -> dict[str, int]:
    """How far a state is, as the note beside it says; empty where there is none."""
    try:
        note = json.loads(position_note(state).read_text())
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in note.items() if isinstance(value, int)} if isinstance(note, dict) else {}


def _is_small(path: Path, most_bytes: int) -> bool:
    status = path.lstat()
    visible = not path.name.startswith(".") and path.suffix in SMALL_SUFFIXES
    return visible and stat.S_ISREG(status.st_mode) and status.st_size <= most_bytes


# What a mirrored checkpoint consists of: a list of files with their digests, written last.
#
# A checkpoint is there if and only if its manifest is. What a manifest says is not believed: names must stay inside
# the run folder, keys are digests, and content must have the digest that its key is.

SCHEMA = 1
FOLDER = "manifests"
OBJECTS = "objects"
_NAME = re.compile(r"(\d{6})\.json")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Senseless(PlaceError):
    """What was read is no manifest."""


@dataclass(frozen=True)
class MirroredFile:
    """Content of a file of the run folder, found under its digest."""

    sha256: str
    nbytes: int

    @property
    def key(self) -> str:
        return f"{OBJECTS}/{self.sha256}"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One checkpoint."""

    number: int
    writer: str
    """Names the process that wrote it: two must not write to one place."""
    config: Mapping[str, Any]
    position: Mapping[str, int]
    """Epoch, step and steps per epoch of the state; empty if it has none."""
    finished: bool
    files: Mapping[str, MirroredFile]
    """By name in the run folder."""

    @property
    def steps(self) -> int:
        return steps_of(self.position)

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files.values())

    def where(self) -> str:
        """'epoch 3, step 40'."""
        return f"epoch {self.position.get('epoch', '?')}, step {self.position.get('step', '?')}"


def steps_of(position: Mapping[str, int]) -> int:
    """Steps since the beginning; -1 if the position is unknown."""
    if not {"epoch", "step", "steps_per_epoch"} <= position.keys():
        return -1
    return position["epoch"] * position["steps_per_epoch"] + position["step"]


def numbers(place: Place) -> list[int]:
    """Of the checkpoints that are there, rising."""
    matches = map(_NAME.fullmatch, place.keys(FOLDER))
    return [int(match[1]) for match in matches if match]


def key_of(number: int) -> str:
    return f"{FOLDER}/{number:06}.json"


def write(place: Place, manifest: Manifest) -> None:
    content = json.dumps({"schema": SCHEMA, **asdict(manifest)}, indent=1).encode()
    place.write(content, key_of(manifest.number))


def read(place: Place, number: int) -> Manifest:
    """PlaceError if it cannot be read, Senseless if it makes no sense."""
    try:
        return parse(json.loads(place.read(key_of(number))))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Senseless(f"{place.url}/{key_of(number)}: makes no sense: {error}") from error


def parse(content: Mapping[str, Any]) -> Manifest:
    if content["schema"] != SCHEMA:
        raise ValueError(f"schema {content['schema']} is not {SCHEMA}; another version of flatout wrote it")
    files = {
        str(name): MirroredFile(str(file["sha256"]), int(file["nbytes"])) for name, file in content["files"].items()
    }
    for name, file in files.items():
        _check(name, file)
    position = {str(key): int(value) for key, value in content["position"].items()}
    return Manifest(
        number=int(content["number"]),
        writer=str(content["writer"]),
        config=dict(content["config"]),
        position=position,
        finished=bool(content["finished"]),
        files=files,
    )


def _check(name: str, file: MirroredFile) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.name or len(path.parts) > 2 or "\0" in name:
        raise ValueError(f"{name!r} is no file of a run folder")
    if not _SHA256.fullmatch(file.sha256) or file.nbytes < 0:
        raise ValueError(f"{name!r} has no digest")
