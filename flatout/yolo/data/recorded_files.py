"""train_files.csv of a run folder: the training images in their order, so that a later change can be named.

    file,bytes,modified_ns,width,height,labels      `labels` is a checksum of classes, boxes and polygons

Files are not read, only their size and time of change are asked for; labels and image sizes come from the scan.

Dimension key:  N images
"""

import csv
import hashlib
import io
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from flatout.safefiles import csv_text, write_file
from flatout.yolo.data.file_records import stat_of
from flatout.yolo.data.image_set import ImageSet

FILE_NAME = "train_files.csv"
MAX_NAMED = 5
"""Files named in a message."""
COLUMNS = ("file", "bytes", "modified_ns", "width", "height", "labels")
MISSING = (-1, -1)


class RecordedFile(NamedTuple):
    """A training image as it was when the run began, or as it is now."""

    path: str
    num_bytes: int
    modified_ns: int
    """Time of the last change; both are -1 for a file that does not exist."""
    width: int
    height: int
    labels: str

    @property
    def content(self) -> tuple[object, ...]:
        """What the order, the targets and the geometry of samples depend on."""
        return self.path, self.width, self.height, self.labels


class Changes(NamedTuple):
    """Differences between the training images of a run and those of now."""

    files: dict[str, str]
    """Path -> what changed in the list of images, their sizes or their labels."""
    touched: frozenset[str]
    """Images whose file has another size or time of change, and nothing of the above. Of a data set that was moved or
    copied, only those with another size, if there are any: copies often have another time of change."""

    @property
    def listed(self) -> str:
        """The first of `files` with what changed, and how many more there are."""
        shown = "; ".join(f"{path}: {what}" for path, what in sorted(self.files.items())[:MAX_NAMED])
        return shown + (f"; and {len(self.files) - MAX_NAMED:,} more" if len(self.files) > MAX_NAMED else "")


def describe_files(images: ImageSet) -> list[RecordedFile]:
    """The images of a data set with the state of their files; no file is opened."""
    sizes = images.size_wh_N2.tolist()
    return [
        RecordedFile(path, *_state(path), width, height, _labels_of(images, number))
        for number, (path, (width, height)) in enumerate(zip(images.paths, sizes, strict=True))
    ]


def write_files(folder: Path, images: ImageSet, *, continues: bool) -> str:
    """Write train_files.csv; returns the `digest` of the list. A run that continues keeps the one of its beginning,
    unless that lists other images or labels."""
    found = describe_files(images)
    recorded = read_files(folder) if continues else None
    if recorded is None or digest(recorded) != digest(found):
        write_file(folder / FILE_NAME, csv_text([COLUMNS, *found]).encode(errors="surrogateescape"))
    return digest(found)


def read_files(folder: Path) -> list[RecordedFile] | None:
    """The images that a run was trained on; None if it has not recorded them, or the file is damaged."""
    try:
        text = (folder / FILE_NAME).read_bytes().decode(errors="surrogateescape")
        header, *rows = csv.reader(io.StringIO(text, newline=""))
        if tuple(header) != COLUMNS:
            return None
        return [
            RecordedFile(path, int(num_bytes), int(modified_ns), int(width), int(height), labels)
            for path, num_bytes, modified_ns, width, height, labels in rows
        ]
    except (OSError, ValueError):
        return None


def digest(files: list[RecordedFile]) -> str:
    """A hash of the order, sizes and labels of images."""
    return hashlib.sha256(repr([file.content for file in files]).encode(errors="surrogateescape")).hexdigest()[:16]


def changes_since(recorded: list[RecordedFile], images: ImageSet) -> Changes:
    """What has changed since the files were recorded. A data set that was moved or copied is the same one: if all names
    are equal, and in the same order, folders are not compared."""
    was_moved = not {file.path for file in recorded} & set(images.paths)
    if [Path(file.path).name for file in recorded] == [Path(path).name for path in images.paths]:
        recorded = [file._replace(path=path) for file, path in zip(recorded, images.paths, strict=True)]
    elif was_moved:
        recorded = _moved(recorded, images.paths)
    now = {file.path: file for file in describe_files(images)}
    before = {file.path: file for file in recorded}
    changed = {path: "removed, or no longer usable" for path in before if path not in now}
    changed |= {path: "new" for path in now if path not in before}
    touched, resized = set(), set()
    for path, old in before.items():
        new = now.get(path, old)
        if old.labels != new.labels:
            changed[path] = "other labels"
        elif (old.width, old.height) != (new.width, new.height):
            changed[path] = f"was {old.width} x {old.height}, is {new.width} x {new.height} pixels"
        elif old[1:3] != new[1:3]:
            touched.add(path)
            if old.num_bytes != new.num_bytes:
                resized.add(path)
    if not changed and [file.path for file in recorded] != list(images.paths):
        changed = {"the list of images": "another order"}
    return Changes(changed, frozenset(resized if was_moved and resized else touched))


def _moved(recorded: list[RecordedFile], paths: Sequence[str]) -> list[RecordedFile]:
    """The recorded files as if they were below the folder that all `paths` have in common."""
    try:
        before, now = (
            os.path.commonpath([os.path.dirname(path) or "." for path in each])
            for each in ([file.path for file in recorded], paths)
        )
    except ValueError:  # absolute and relative paths, or none
        return recorded
    return [file._replace(path=os.path.join(now, os.path.relpath(file.path, before))) for file in recorded]


def _state(path: str) -> tuple[int, int]:
    status = stat_of(path)
    return MISSING if status is None else (status.st_size, status.st_mtime_ns)


def _labels_of(images: ImageSet, number: int) -> str:
    labels = images.labels
    first, end = labels.first_N[number], labels.first_N[number + 1]
    points = labels.point_P2[labels.first_point_T[first] : labels.first_point_T[end]]
    counts = labels.first_point_T[first : end + 1] - labels.first_point_T[first]
    checksum = zlib.crc32(labels.class_box_T5[first:end].tobytes())
    return f"{zlib.crc32(counts.tobytes(), zlib.crc32(points.tobytes(), checksum)):08x}"
