"""`flatout yolo convert-data`: a data set in another label format, with its images copied, linked or left out.

    source --scan--> images and labels --layout of the format--> images, label files --at the end--> data YAML

    OUT/convert.json     how the folder was made; written first, and completed last
    OUT/data.yaml        splits and class names; only a complete folder has it

Every file is written atomically. What is already there and up to date is not made again, so the same command continues
after an interruption. The source is only read. torch is never imported.

Dimension key:  n labels of one image
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from flatout.errors import ConfigError, DataError, Interrupted, counted
from flatout.progress import progress
from flatout.ranks import Interrupts
from flatout.yolo.data.data_yaml import SPLITS, DataSet, Split, refuse_missing, require_valid
from flatout.yolo.data.find import is_image_name
from flatout.yolo.data.formats.annotated import ImageToWrite
from flatout.yolo.data.formats.registry import Layout, layout_of
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.label_cache import default_folder
from flatout.yolo.data.open_data import open_data_set, scan_entries
from flatout.yolo.data.output_folder import OutputFolder, temporary_for, write_atomically, yaml_text
from flatout.yolo.data.scan import ScanConfig, image_set

logger = logging.getLogger(__name__)

SETTINGS, DATA_YAML, CLASSES = "convert.json", "data.yaml", "classes.txt"
THREADS = 8
"""Files that are copied at the same time: it hides the latency of network disks, and costs nothing on local ones."""
CHUNK = 256
"""Images between two looks at the signals."""

Images = Literal["copy", "link", "none"]


@dataclass(frozen=True)
class ConvertedSet:
    """The result of `convert_data`: where the new data set is, and what is in it."""

    folder: Path
    data: Path | None
    """Its data YAML; None if only labels were written."""
    num_images: int
    num_labels: int
    num_kept: int
    """Images that were there from an earlier call."""
    num_left_out: int
    """Images of the source that cannot be read."""
    num_dropped: int
    """Labels of the source that cannot be used."""


class _Converted(NamedTuple):
    """An image of the source, and what is written about it."""

    source: str
    split: Split
    written: ImageToWrite


def convert_data(
    source: str | Path, out: str | Path, *, to: str, images: Images = "copy", show_progress: bool = False
) -> ConvertedSet:
    """Write a data set in the label format `to`, or what is missing of it.

    Raises ConfigError for a folder with other files, DataError for a source that cannot be read, ResourceError if the
    disk is too small, Interrupted after a signal; then the same call continues.
    """
    layout = layout_of(to)
    if images not in ("copy", "link", "none"):
        raise ConfigError(f"images={images!r}: use copy, link or none.")
    data = open_data_set(source)
    folder = OutputFolder.of(out, "convert-data", SETTINGS)
    folder.check_place(entry for listed in data.entries.values() for entry in listed if os.path.isdir(entry))
    settings = {"source": os.path.abspath(source), "to": to, "images": images}
    folder.check_settings(settings)
    found = _read_source(data, show_progress)
    converted = _planned(found.splits, across_splits="{split}" not in layout.images)
    with folder.written(), Interrupts() as interrupts:
        folder.write_settings(settings, complete=False)
        num_kept = _Writer(folder, layout, data, images, interrupts).write(converted, show_progress)
        folder.write_settings(settings, complete=True)
    return ConvertedSet(
        folder.path,
        None if images == "none" else folder.path / DATA_YAML,
        len(converted),
        sum(len(each.written.class_n) for each in converted),
        num_kept,
        found.num_left_out,
        found.num_dropped,
    )


# The source


class _Source(NamedTuple):
    splits: dict[Split, ImageSet]
    num_left_out: int
    num_dropped: int


def _read_source(data: DataSet, show_progress: bool) -> _Source:
    """Scan all splits. A `test` split that is missing is left out."""
    require_valid(data, splits=())
    splits: dict[Split, ImageSet] = {}
    num_left_out = num_dropped = 0
    config = ScanConfig(progress=show_progress, names=data.names)
    for split in SPLITS:
        if not data.entries[split]:
            continue
        scanned = scan_entries(data.entries[split], config, cache_folder=default_folder())
        if split == "test" and not scanned.pairs:
            logger.warning("The split `test` is left out: it has no images.")
            continue
        if not scanned.pairs:
            raise refuse_missing(data, data.entries[split][0])
        splits[split] = image_set(scanned.table, [pair.image for pair in scanned.pairs], data.names)
        num_left_out += int((~scanned.table.used_N).sum()) + len(scanned.found.absent)
        num_dropped += int(scanned.table.image_N["num_dropped"].sum())
        class_T = splits[split].labels.class_box_T5[:, 0]
        if len(class_T) and class_T.max() >= len(data.names):
            raise DataError(
                f"{data.file}: {split} has labels of class {class_T.max():.0f}, which has no name. To find them, run: "
                f"{data.check_command}"
            )
    if not splits:
        raise DataError(f"{data.file}: there are no images. Add train and val.")
    if num_left_out or num_dropped:
        logger.warning(
            "%s and %s of the source cannot be used and are left out. To list them, run: %s",
            counted(num_left_out, "image"), counted(num_dropped, "label"), data.check_command,
        )  # fmt: skip
    return _Source(splits, num_left_out, num_dropped)


def _planned(splits: Mapping[Split, ImageSet], *, across_splits: bool) -> list[_Converted]:
    """All images with their new names."""
    taken: set[str] = set()
    planned = []
    for split, images in splits.items():
        taken = taken if across_splits else set()
        for row, path in enumerate(images.paths):
            name = free_name(os.path.basename(path), taken)
            taken.add(_stem(name))
            planned.append(_Converted(path, split, _to_write(images, row, name)))
    return planned


def free_name(name: str, taken: set[str]) -> str:
    """The name of an image, with a number if its stem is taken: label files are named by the stem, in lower case for
    file systems that ignore case."""
    stem, ending = os.path.splitext(name)
    number, free = 1, name
    while _stem(free) in taken:
        number += 1
        free = f"{stem}_{number}{ending}"
    return free


def _stem(name: str) -> str:
    return os.path.splitext(name)[0].lower()


def _to_write(images: ImageSet, row: int, name: str) -> ImageToWrite:
    label_n5 = images.labels.of(row).astype(np.float64)
    half_n2 = label_n5[:, 3:] / 2
    box_n4 = np.concatenate((label_n5[:, 1:3] - half_n2, label_n5[:, 1:3] + half_n2), 1)
    polygons = images.labels.polygons_of(row)
    width, height = images.size_wh_N2[row].tolist()
    return ImageToWrite(name, (width, height), label_n5[:, 0].astype(int).tolist(), box_n4, polygons)


# The folder


class _Writer:
    """Writes images, label files and the data YAML of one data set."""

    def __init__(
        self, folder: OutputFolder, layout: Layout, data: DataSet, images: Images, interrupts: Interrupts
    ) -> None:
        self._folder = folder
        self._out = folder.path
        self._layout = layout
        self._names = data.names
        self._images = images
        self._interrupts = interrupts

    def write(self, converted: Sequence[_Converted], show_progress: bool) -> int:
        """Write everything that is missing; returns the number of images that were there."""
        self._warn_of_polygons(converted)
        (self._out / DATA_YAML).unlink(missing_ok=True)
        wanted = converted if self._images != "none" else []
        places = [*map(self._image_out, wanted), *map(self._label_out, converted)]
        for folder in {place.parent for place in places}:
            folder.mkdir(parents=True, exist_ok=True)
        missing = [each for each in wanted if not self._is_there(each)]
        if self._images == "copy":
            self._folder.check_room(
                sum(os.path.getsize(each.source) for each in missing),
                f"{counted(len(missing), 'image')} need {{needed}}, but only {{free}} are free. Use --images link, or "
                "choose another disk.",
            )
        todo = {id(each) for each in missing}
        with (
            progress("converting", len(converted), shown=show_progress) as advance,
            ThreadPoolExecutor(THREADS) as pool,
        ):
            for start in range(0, len(converted), CHUNK):
                chunk = converted[start : start + CHUNK]
                jobs = [pool.submit(self._write_one, each, id(each) in todo) for each in chunk]
                for job in as_completed(jobs):
                    job.result()
                advance(start + len(chunk), 0)
                if self._interrupts.requested:
                    raise Interrupted.by(self._interrupts.requested)
        self._finish(converted)
        return len(wanted) - len(missing)

    def _write_one(self, each: _Converted, is_missing: bool) -> None:
        """Labels come before the image, so that an image in the folder has its labels."""
        if self._layout.write_image is not None:
            _write_changed(self._label_out(each), self._layout.write_image(each.written, self._names))
        if is_missing:
            _copy(each.source, self._image_out(each), link=self._images == "link")

    def _finish(self, converted: Sequence[_Converted]) -> None:
        """Write what describes a whole split, then the data YAML."""
        by_split = {split: [each for each in converted if each.split == split] for split in SPLITS}
        by_split = {split: own for split, own in by_split.items() if own}
        for split, own in by_split.items():
            if self._layout.write_set is not None:
                pieces = self._layout.write_set([each.written for each in own], self._names)
                _write_pieces(self._label_out(own[0]), pieces)
            if self._layout.write_list:
                stems = "".join(f"{os.path.splitext(each.written.name)[0]}\n" for each in own)
                _write_changed(self._out / self._layout.write_list.format(split=split), _encoded(stems))
        if self._layout.write_names is not None:
            name, content = self._layout.write_names
            _write_changed(self._out / name, content(self._names))
        if self._images == "none":
            _write_changed(self._out / CLASSES, _encoded("".join(f"{name}\n" for name in self._names)))
        else:
            _write_changed(self._out / DATA_YAML, _encoded(self._yaml_text(by_split)))
            self._warn_of_leftovers(converted)

    def _warn_of_leftovers(self, converted: Sequence[_Converted]) -> None:
        """Warn about images from an earlier call that the source no longer has, because training may use them."""
        known = {self._image_out(each) for each in converted}
        present = (path for folder in {path.parent for path in known} for path in folder.iterdir())
        if leftovers := sorted(path for path in present if is_image_name(path.name) and path not in known):
            logger.warning(
                "%s that the source no longer has are still there, such as %s. Delete them, or training may use them.",
                counted(len(leftovers), "image"), leftovers[0],
            )  # fmt: skip

    def _yaml_text(self, splits: Iterable[Split]) -> str:
        """The data YAML."""
        # Paths include the name of the folder: they start from the working directory first, where `train` may exist.
        entries: dict[str, object] = {
            split: f"../{self._out.name}/{self._layout.entry.format(split=split)}" for split in splits
        }
        values = {**entries, "nc": len(self._names), "names": list(self._names)}
        return yaml_text(f"{self._layout.title} labels, written by `flatout yolo convert-data`.", values)

    def _image_out(self, each: _Converted) -> Path:
        return self._out / self._layout.images.format(split=each.split) / each.written.name

    def _label_out(self, each: _Converted) -> Path:
        stem = os.path.splitext(each.written.name)[0]
        # Not by `format`: the stem may contain braces.
        return self._out / self._layout.labels.replace("{split}", each.split).replace("{stem}", stem)

    def _is_there(self, each: _Converted) -> bool:
        """Whether the image is a link to its source, or a copy of the same size and time."""
        place = self._image_out(each)
        if self._images == "link":
            return place.is_symlink() and os.readlink(place) == os.path.abspath(each.source)
        try:
            source, copied = os.stat(each.source), os.stat(place, follow_symlinks=False)
        except OSError:
            return False
        return (source.st_size, source.st_mtime_ns) == (copied.st_size, copied.st_mtime_ns)

    def _warn_of_polygons(self, converted: Sequence[_Converted]) -> None:
        count = sum(len(points) > 0 for each in converted for points in each.written.polygons)
        if count and not self._layout.keeps_polygons:
            logger.warning("%s become boxes: %s has none.", counted(count, "polygon"), self._layout.title)


def _copy(source: str, place: Path, *, link: bool) -> None:
    """Copy a file with its time, or link to it, atomically."""
    with temporary_for(place) as part:
        if link:
            os.symlink(os.path.abspath(source), part)
        else:
            shutil.copy2(source, part)


def _write_changed(path: Path, content: bytes) -> None:
    """Write a file unless it has this content already."""
    with contextlib.suppress(OSError):
        if path.stat().st_size == len(content) and path.read_bytes() == content:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)


def _write_pieces(path: Path, pieces: Iterable[str]) -> None:
    """Write a file piece by piece, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        temporary_for(path) as part,
        open(part, "w", encoding="utf-8", errors="surrogateescape", newline="\n") as file,
    ):
        file.writelines(pieces)


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
