"""Snapshots of a run folder at a save, and the manifests of mirrored checkpoints.

A snapshot holds what is needed to continue the run, unaffected by later saves: large files are kept open, and so keep
their content when they are replaced; small ones are read immediately.
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
from flatout.runs.mirror.remote_folder import RemoteError, RemoteFolder
from flatout.safefiles import read_note

SMALL_SUFFIXES = {".json", ".jsonl", ".yaml", ".txt", ".csv"}
SMALL_BYTES = 64 << 20
SMALL_BYTES_BELOW = 1 << 20
"""The limit in subfolders of the run folder, such as spike's metrics/."""
BEST = "best.pt"


# Snapshots


class HeldFile:
    """An open file whose content stays available after it is replaced, until `close`."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(self._fd)
        self.nbytes = status.st_size
        self.identity = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
        """Equal if the same content is opened twice."""

    @property
    def path(self) -> Path:
        """A path to this content, even after its file name belongs to another file."""
        return Path(f"/proc/self/fd/{self._fd}")

    def sha256(self) -> str:
        with self.path.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()

    def close(self) -> None:
        os.close(self._fd)


class Snapshot:
    """Everything that another machine needs to continue a run."""

    def __init__(self, folder: Path, state: Path) -> None:
        """`state` is the checkpoint to continue from. Takes milliseconds: only small files are copied."""
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
    """The file in which `CheckpointStore` keeps the position of a checkpoint."""
    return state.with_name(f".{state.stem}.position.json")


def read_position(state: Path) -> dict[str, int]:
    """The position of a checkpoint from the file beside it; empty if there is none."""
    return {key: value for key, value in read_note(position_note(state)).items() if isinstance(value, int)}


def _is_small(path: Path, most_bytes: int) -> bool:
    status = path.lstat()
    visible = not path.name.startswith(".") and path.suffix in SMALL_SUFFIXES
    return visible and stat.S_ISREG(status.st_mode) and status.st_size <= most_bytes


# Manifests
#
# A manifest lists the files of a checkpoint with their digests. It is written last: a checkpoint exists if and only if
# its manifest does. Manifests are not trusted: names must stay inside the run folder, and content must match its
# digest, which is also its key.

SCHEMA = 1
FOLDER = "manifests"
OBJECTS = "objects"
_NAME = re.compile(r"(\d{6})\.json")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class InvalidManifest(RemoteError):
    """A manifest that cannot be parsed."""


@dataclass(frozen=True)
class MirroredFile:
    """The content of a file of the run folder, stored under its digest."""

    sha256: str
    nbytes: int

    @property
    def key(self) -> str:
        return f"{OBJECTS}/{self.sha256}"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files and the position of one mirrored checkpoint."""

    number: int
    writer: str
    """The process that wrote it; no other may write to the same mirror."""
    config: Mapping[str, Any]
    position: Mapping[str, int]
    """Epoch, step and steps per epoch; empty if unknown."""
    finished: bool
    files: Mapping[str, MirroredFile]
    """By path in the run folder."""

    @property
    def steps(self) -> int:
        return steps_of(self.position)

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files.values())

    def where(self) -> str:
        """The position as text: 'epoch 3, step 40'."""
        return f"epoch {self.position.get('epoch', '?')}, step {self.position.get('step', '?')}"


def steps_of(position: Mapping[str, int]) -> int:
    """Steps since the start of the training; -1 if the position is unknown."""
    if not {"epoch", "step", "steps_per_epoch"} <= position.keys():
        return -1
    return position["epoch"] * position["steps_per_epoch"] + position["step"]


def numbers(remote: RemoteFolder) -> list[int]:
    """Numbers of the existing checkpoints, ascending."""
    matches = map(_NAME.fullmatch, remote.keys(FOLDER))
    return [int(match[1]) for match in matches if match]


def key_of(number: int) -> str:
    return f"{FOLDER}/{number:06}.json"


def write(remote: RemoteFolder, manifest: Manifest) -> None:
    content = json.dumps({"schema": SCHEMA, **asdict(manifest)}, indent=1).encode()
    remote.write(content, key_of(manifest.number))


def read(remote: RemoteFolder, number: int) -> Manifest:
    """The manifest of a checkpoint; RemoteError if it cannot be read, InvalidManifest if it cannot be parsed."""
    try:
        return parse(json.loads(remote.read(key_of(number))))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidManifest(f"{remote.url}/{key_of(number)} is not a valid manifest: {error}") from error


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
        raise ValueError(f"{name!r} is not a file of a run folder")
    if not _SHA256.fullmatch(file.sha256) or file.nbytes < 0:
        raise ValueError(f"{name!r} has no valid digest")
