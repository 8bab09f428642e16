"""What a mirrored generation consists of: a list of files with their digests, written last.

A generation is there if and only if its manifest is. What a manifest says is not believed: names must stay inside the
run folder, keys are digests, and content must have the digest that its key is.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

from flatout.engine.mirror.place import Place, PlaceError

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
    """One generation."""

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
    """Of the generations that are there, rising."""
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
