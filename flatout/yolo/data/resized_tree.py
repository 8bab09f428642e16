"""`flatout yolo resize`: a copy of a data set with smaller images, and the same labels, names and ids.

    data YAML --find--> images --compare with OUT--> what is missing --workers--> images and labels
                                                                     --at the end--> annotations, lists, data YAML

    OUT/resize.json                    how the tree was made; written first, and completed last
    OUT/images/..., OUT/labels/...     folders and names as in the source
    OUT/train2017.txt                  lists of the source, with the images of the tree
    OUT/annotations/*.json             COCO annotations, scaled to the new sizes
    OUT/OUT.yaml                       the data YAML, named like the folder; only a complete tree has it

Every file is written atomically and gets the modification time of its source; a file whose time matches is not made
again. The source is only read. torch is never imported, OpenCV only to process pixels.
"""

import contextlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flatout.errors import ConfigError, DataError, Interrupted, ResourceError, counted
from flatout.feed import DecodeError, Feed, FeedConfig, Plan
from flatout.images import MAX_MISSING, Header, check_size, decode, header_of, read_bytes, read_facts
from flatout.progress import progress
from flatout.ranks import Interrupts
from flatout.yolo.data.coco import (
    annotation_file,
    annotation_folder,
    listed,
    load_json,
    resized_annotations,
    size_of,
)
from flatout.yolo.data.data_yaml import SPLITS, DataSet, Split, refuse_missing, require_valid
from flatout.yolo.data.file_records import FileRecords, stat_of
from flatout.yolo.data.find import Pair, find_images, is_image_name, label_path, pair_up
from flatout.yolo.data.formats.annotated import find_listed
from flatout.yolo.data.formats.coco import read_coco
from flatout.yolo.data.formats.registry import annotation_files, open_listed
from flatout.yolo.data.formats.sidecars import SIDECARS
from flatout.yolo.data.letterbox import resized_hw
from flatout.yolo.data.open_data import open_data_set
from flatout.yolo.data.output_folder import OutputFolder, write_atomically, yaml_text
from flatout.yolo.data.scan import MIN_SIDE_PX

logger = logging.getLogger(__name__)

SETTINGS = "resize.json"
MIN_SIZE = 32
MAX_UNREADABLE = 0.01
"""Share of images that may be unreadable; with more, the data set counts as broken, as in training."""
MIN_FOR_WORKERS = 64
"""Fewer images are processed without worker processes."""
NUM_TRIALS = 16
"""Images that are resized in advance, to estimate the disk space of all of them."""
BLOCK_BYTES = 4096
BATCH_BYTES = 8_000_000
"""Bytes of image files per batch, some tenths of a second of work; signals are handled between batches."""
SAME_TIME_NS = 2_000_000_000
"""Some file systems store times in steps of 2 s."""


@dataclass(frozen=True, kw_only=True)
class ResizeConfig:
    """How images are resized and saved."""

    size: int
    """Longer side in pixels."""
    stretch: bool = False
    """Make squares of exactly `size`, without keeping the aspect ratio."""
    enlarge: bool = False
    """Enlarge images that are smaller than `size`."""
    quality: int = 95
    """Quality of JPEG, and of WebP unless it is lossless."""

    def __post_init__(self) -> None:
        if self.size < MIN_SIZE:
            raise ConfigError(f"size={self.size} is too small to train on: use {MIN_SIZE} or more.")
        if not 1 <= self.quality <= 100:
            raise ConfigError(f"quality={self.quality}: use a number from 1 to 100.")


@dataclass(frozen=True)
class ResizedSet:
    """The result of `resize`: where the copy is, and what was done."""

    data: Path
    """The data YAML of the copy."""
    num_resized: int
    num_copied: int
    """Images that were small enough and were copied unchanged."""
    num_kept: int
    """Images that were there from an earlier call."""
    num_bytes: int
    """Bytes of the images that this call wrote."""
    skipped: Mapping[str, str]
    """Path -> reason for the images that cannot be read; they are not in the copy."""

    @property
    def num_images(self) -> int:
        """Number of images in the copy."""
        return self.num_resized + self.num_copied + self.num_kept


def write_resized(
    data_file: str | Path,
    out: str | Path,
    config: ResizeConfig,
    *,
    workers: int | str = "cpu*1.0",
    show_progress: bool = False,
) -> ResizedSet:
    """Write a copy of a data set with resized images, or what is missing of it.

    Raises DataError if more than 1 % of the images cannot be read, after everything else is written; Interrupted after
    a signal, and then the same call continues.
    """
    source = find_source(open_data_set(data_file))
    folder = OutputFolder.of(out, "resize", SETTINGS, by_flag=" with --out")
    folder.check_place(checked_folders(source))
    settings = {"source": os.path.abspath(data_file), "root": source.root, **asdict(config)}
    folder.check_settings(settings)
    with folder.written():
        tree = ResizedTree(source, folder, config)
        folder.write_settings(settings, complete=False)
        outcome = tree.fill(workers, show_progress)
        tree.finish(outcome)
        folder.write_settings(settings, complete=True, pictures=outcome.num_images, skipped=dict(outcome.skipped))
    num_skipped = len(outcome.skipped)
    if num_skipped > MAX_UNREADABLE * (outcome.num_images + num_skipped):
        raise DataError(
            f"{num_skipped} of {counted(outcome.num_images + num_skipped, 'image')} cannot be read, such as "
            f"{_examples(outcome.skipped)}. All others are in {outcome.data}; {folder.record} lists the missing ones. "
            "Repair or remove them, then run the same command again."
        )
    return outcome


# -- one image -----------------------------------------------------------------------------------------------------


def target_hw(native_hw: tuple[int, int], config: ResizeConfig) -> tuple[int, int]:
    """Size of an image in the tree: the one that training at this size would resize it to.

    The longer side is exact. A long, thin image keeps the 10 px below which training would reject it.
    """
    if config.stretch:
        return config.size, config.size
    longer, shorter = max(native_hw), min(native_hw)
    if longer <= config.size and not config.enlarge:
        return native_hw
    size = config.size
    if size < longer and shorter * size < MIN_SIDE_PX * longer:
        size = min(longer, -(-MIN_SIDE_PX * longer // shorter))
    height, width = (
        size if side == longer else max(kept, min(MIN_SIDE_PX, side))
        for side, kept in zip(native_hw, resized_hw(native_hw, size), strict=True)
    )
    return height, width


def resized_file(content: bytes, config: ResizeConfig) -> bytes:
    """The bytes of an image file at its new size, in the same format; the given object itself if the size stays.

    Pixels are those that training reads: 8 bits, upright, without transparency, the first of several pages.
    Raises DecodeError where training could not use the file either.
    """
    import cv2

    if not content:
        raise DecodeError("the file is empty")
    header = header_of(content)
    check_size(header, len(content))
    width, height = header.size_wh
    if target_hw((height, width), config) == (height, width):
        return content
    decoded = decode(content)
    if decoded.missing > MAX_MISSING:
        raise DecodeError(f"truncated: {decoded.missing:.0%} of the rows are missing")
    native_hw = decoded.image.shape[0], decoded.image.shape[1]
    new_hw = target_hw(native_hw, config)
    shrinks = new_hw[0] <= native_hw[0] and new_hw[1] <= native_hw[1]
    how = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    return _encoded(cv2.resize(decoded.image, new_hw[::-1], interpolation=how), header, content, config.quality)


def _encoded(image_HWC: np.ndarray, header: Header, content: bytes, quality: int) -> bytes:
    import cv2

    kind, options = {
        "jpeg": (".jpg", [cv2.IMWRITE_JPEG_QUALITY, quality]),
        "mpo": (".jpg", [cv2.IMWRITE_JPEG_QUALITY, quality]),
        # Above 100 means lossless.
        "webp": (".webp", [cv2.IMWRITE_WEBP_QUALITY, 101 if b"VP8L" in content[:64] else quality]),
        "png": (".png", []),
        "bmp": (".bmp", []),
        "tiff": (".tiff", []),
        "dng": (".tiff", []),  # OpenCV cannot write DNG, which is a kind of TIFF
    }[header.format]
    is_grey = header.channels == 1 and header.format in ("jpeg", "mpo", "png")
    done, encoded = cv2.imencode(kind, np.ascontiguousarray(image_HWC[..., 0]) if is_grey else image_HWC, options)
    if not done:
        raise DecodeError(f"OpenCV cannot write this {header.format.upper()} image")
    return encoded.tobytes()


# -- the source ----------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A folder, list or file of a split, with its images."""

    path: str
    images: list[str]

    @property
    def is_coco(self) -> bool:
        """Whether the entry is a COCO file, which has the labels of all its images."""
        return self.path.lower().endswith(".json")

    @property
    def is_list(self) -> bool:
        return not (self.is_coco or os.path.isdir(self.path) or is_image_name(self.path))

    def pairs(self) -> list[Pair]:
        """Each image with its label file; "" for the images of a COCO file."""
        return [Pair(image, "") for image in self.images] if self.is_coco else pair_up(self.images)


class SourceDataSet(NamedTuple):
    """All images of the data set to copy."""

    data: DataSet
    splits: dict[Split, list[Entry]]
    root: str
    """The folder that corresponds to the top of the tree."""

    @property
    def entries(self) -> list[Entry]:
        return [entry for entries in self.splits.values() for entry in entries]


class Task(NamedTuple):
    """An image and its label file, and where they go; label paths are "" for the images of a COCO file."""

    image: str
    label: str
    image_out: str
    label_out: str


def find_source(data: DataSet) -> SourceDataSet:
    """Find the images of every split. A missing `test` split is left out, because training does not need it."""
    require_valid(data, splits=())
    splits: dict[Split, list[Entry]] = {}
    for split in SPLITS:
        try:
            entries = [_entry(data, split, entry) for entry in data.entries[split]]
            images = [image for entry in entries for image in entry.images]
            if images and not any(map(os.path.exists, images)):
                raise DataError(
                    f"{data.file}: {split}: none of {counted(len(images), 'listed image')} exists, such as "
                    f"{images[0]}. Correct the list, or copy the images there."
                )
        except DataError as error:
            if split != "test":
                raise
            logger.warning("The split `test` is left out: %s", error)
        else:
            splits[split] = entries
    if not any(splits.values()):
        raise DataError(f"{data.file}: no split names a folder or list of images. Add train and val.")
    return SourceDataSet(data, splits, _root([entry for entries in splits.values() for entry in entries]))


def _entry(data: DataSet, split: Split, path: str) -> Entry:
    for file in annotation_files(path):
        if file.format.read is not read_coco or file.folder:
            raise _unscaled(data, f"{file.path}: {file.format.title} labels are not scaled by this command")
        coco = open_listed(file, data.names)
        return Entry(path, sorted(coco.paths + coco.absent))
    found = find_images([path])
    if found.absent:
        raise refuse_missing(data, path)
    if not found.paths:
        raise DataError(f"{data.file}: {split}: there are no images in {path}. Is it the right folder?")
    return Entry(path, found.paths)


def _unscaled(data: DataSet, reason: str) -> ConfigError:
    """The error for labels that would not fit resized images."""
    return ConfigError(
        f"{data.file}: {reason}. Convert the data set first: flatout yolo convert-data {data.file} FOLDER --to yolo"
    )


def _root(entries: Sequence[Entry]) -> str:
    """The folder that contains everything; never inside a folder `images`, which is needed to find labels."""
    folders = {os.path.dirname(os.path.abspath(image)) for entry in entries for image in entry.images}
    named = [os.path.abspath(entry.path) for entry in entries if not entry.is_list]
    beside = {path if os.path.isdir(path) else os.path.dirname(path) for path in named}
    root = os.path.commonpath([*folders, *beside])
    # The top of the tree has other files, so images need a folder of their own.
    root = os.path.dirname(root) if root in folders else root
    above, images, _ = f"{root}/".partition("/images/")
    return (above or os.sep) if images else root


def checked_folders(source: SourceDataSet) -> list[str]:
    """The folders that have files of the source; ConfigError if its labels would not fit resized images."""
    pairs = [pair for entry in source.entries for pair in entry.pairs()]
    if other := next((pair.label for pair in pairs if pair.label and not pair.label.endswith(".txt")), ""):
        title = SIDECARS[os.path.splitext(other)[1]].title
        raise _unscaled(source.data, f"{title} labels are in pixels and would not fit resized images")
    folders = {os.path.dirname(path) for pair in pairs for path in pair if path}
    return sorted(folders | {entry.path for entry in source.entries if os.path.isdir(entry.path)})


# -- the tree ------------------------------------------------------------------------------------------------------


class ResizedTree:
    """The output folder: maps each source file to its place, makes missing files, and writes the data YAML last."""

    def __init__(self, source: SourceDataSet, folder: OutputFolder, config: ResizeConfig) -> None:
        self._source = source
        self._folder = folder
        self._out = out = folder.path
        self._config = config
        # Not named like the source: `--data coco.yaml` is also searched for below the working directory.
        self._data = out / f"{out.name}.yaml"
        self._tasks = self._all_tasks()

    def fill(self, workers: int | str, show_progress: bool) -> ResizedSet:
        """Resize or copy the images that are missing or have changed; Interrupted after a signal."""
        missing = [task for task in self._tasks if not is_done(task)]
        num_kept = len(self._tasks) - len(missing)
        if num_kept:
            logger.info(
                "%s: %d of %s already there, %d to go.",
                self._out, num_kept, counted(len(self._tasks), "image"), len(missing),
            )  # fmt: skip
        if missing:
            self._data.unlink(missing_ok=True)
        for folder in {os.path.dirname(path) for task in missing for path in (task.image_out, task.label_out) if path}:
            _make_folder(folder)
        self._folder.check_room(
            bytes_needed(missing, self._config),
            f"about {{needed}} are needed for {counted(len(missing), 'image')}, but only {{free}} are free. Free some "
            "space, or choose another disk with --out.",
        )
        results, num_bytes = process_all(missing, self._config, workers, show_progress)
        states = [result.state for result in results]
        skipped = {
            task.image: result.reason for task, result in zip(missing, results, strict=True) if result.state == SKIPPED
        }
        for path, reason in list(skipped.items())[:5]:
            logger.warning("%s: left out: %s", path, reason)
        if len(skipped) > 5:
            logger.warning("... and %d more; %s lists them.", len(skipped) - 5, self._folder.record)
        return ResizedSet(self._data, states.count(RESIZED), states.count(COPIED), num_kept, num_bytes, skipped)

    def finish(self, outcome: ResizedSet) -> None:
        """Write annotations and lists without the skipped images, then the data YAML."""
        is_new = bool(outcome.num_resized or outcome.num_copied)
        self._write_annotations(is_new)
        splits = {
            split: [self._entry_out(split, entry, outcome.skipped) for entry in entries]
            for split, entries in self._source.splits.items()
        }
        write_atomically(str(self._data), self._yaml_text(splits).encode())
        self._warn_of_leftovers()

    def _warn_of_leftovers(self) -> None:
        """Warn about images from an earlier call that the source no longer has, because training would use them."""
        folders = [self.place(entry.path) for entry in self._source.entries if os.path.isdir(entry.path)]
        known = {task.image_out for task in self._tasks}
        if leftovers := [path for path in find_images(folders).paths if path not in known]:
            logger.warning(
                "The copy still has %s that the source no longer has, such as %s. Delete what is left over, or "
                "training will use it.", counted(len(leftovers), "image"), leftovers[0],
            )  # fmt: skip

    def place(self, path: str) -> str:
        """The path in the tree of a file or folder of the source."""
        below = os.path.abspath(path).removeprefix(self._source.root.rstrip(os.sep)).lstrip(os.sep)
        return os.path.join(self._out, below) if below else str(self._out)

    def _all_tasks(self) -> list[Task]:
        tasks: dict[str, Task] = {}
        for entry in self._source.entries:
            for image, label in entry.pairs():
                image_out = self.place(image)
                if label or image_out not in tasks:
                    tasks[image_out] = Task(image, label, image_out, label_path(image_out) if label else "")
        return list(tasks.values())

    def _entry_out(self, split: Split, entry: Entry, skipped: Mapping[str, str]) -> str:
        """An entry of the new data YAML; if it is a list, this also writes the list."""
        place = self._entry_place(split, entry)
        if entry.is_list:
            below = (os.path.relpath(self.place(image), self._out) for image in entry.images if image not in skipped)
            text = "".join(f"./{path}\n" for path in below)
            write_atomically(str(place), text.encode(errors="surrogateescape"))
        return self._from_yaml(place)

    def _from_yaml(self, place: Path) -> str:
        """A path in the tree as it is written in the new data YAML."""
        # It includes the name of the tree's folder: relative paths start from the working directory first, where
        # `images/train` may be a folder of the source.
        return os.path.normpath(os.path.join("..", self._out.name, os.path.relpath(place, self._out)))

    def _entry_place(self, split: Split, entry: Entry) -> Path:
        """The path of an entry in the tree.

        Lists are at its top, under their own names; lists with the same name get their split and a number as a prefix.
        """
        if not entry.is_list:
            return Path(self.place(entry.path))
        lists = [
            (other_split, other.path)
            for other_split, entries in self._source.splits.items()
            for other in entries
            if os.path.basename(other.path) == os.path.basename(entry.path)
        ]
        number = lists.index((split, entry.path))
        prefix = f"{split}_{number}_" if len({os.path.abspath(path) for _, path in lists}) > 1 else ""
        return self._out / f"{prefix}{os.path.basename(entry.path)}"

    def _yaml_text(self, splits: Mapping[Split, Sequence[str]]) -> str:
        """The new data YAML."""
        written = self._source.data.written
        named = {
            split: self._from_yaml(found[1])
            for split in self._source.data.annotations
            if (found := self._annotations_of(split)) is not None
        }
        names = list(self._source.data.names)
        kept = asdict(replace(written, names=names, path=None, download=None, annotations=named or None))
        values: dict[str, object] = {
            split: entries[0] if len(entries) == 1 else list(entries) for split, entries in splits.items() if entries
        }
        values |= {key: value for key, value in kept.items() if key not in SPLITS and value is not None}
        name = json.dumps(self._source.data.file.name)
        return yaml_text(f"Images of {name}, resized by `flatout yolo resize`; {SETTINGS} has the settings.", values)

    def _write_annotations(self, is_new: bool) -> None:
        """Scale and write the COCO files that contain labels or are used to compute AP."""
        done: set[Path] = set()
        # The annotation file of val may be found for several splits, and must then be written with the images of val.
        order: tuple[Split, ...] = ("val", "test", "train")
        for split in order:
            entries = self._source.splits.get(split, [])
            found = [(entry.path, self._entry_place(split, entry)) for entry in entries if entry.is_coco]
            if (beside := self._annotations_of(split)) is not None:
                found.append(beside)
            for path, place in found:
                if not place.is_relative_to(self._out):
                    logger.warning("%s: not copied, because it would be outside %s.", path, self._out)
                elif place not in done and (is_new or not _is_current(stat_of(str(place)), os.stat(path))):
                    self._write_json(path, str(place), entries)
                done.add(place)

    def _annotations_of(self, split: Split) -> tuple[str, Path] | None:
        """The annotation file used to compute the AP of a split, and its path in the tree; None if there is none."""
        entries = self._source.splits.get(split, [])
        file = annotation_file(self._source.data, split)
        if not entries or entries[0].is_coco or file is None:
            return None
        return str(file), annotation_folder(self._entry_place(split, entries[0])) / file.name

    def _write_json(self, path: str, place: str, entries: Sequence[Entry]) -> None:
        """Scale an annotation file and write it to `place`; `entries` are those of its split."""
        content = load_json(path)
        records = listed(content, "images", path)
        names = [str(each.get("file_name")) for each in records]
        if any(entry.path == path for entry in entries):
            known = dict(zip(names, map(self.place, find_listed(path, names)), strict=True))
        else:
            places = {os.path.basename(image): self.place(image) for entry in entries for image in entry.images}
            known = {name: places[base] for name in names if (base := os.path.basename(name)) in places}
        if not known:
            return  # the file belongs to another data set

        def new_size(image: dict[str, Any]) -> tuple[int, int] | None:
            name = str(image.get("file_name"))
            if name in known:
                return _size_of_file(known[name])
            width, height = size_of(image, path)  # not in the split: the size that it would have
            return target_hw((max(1, int(height)), max(1, int(width))), self._config)[::-1]

        resized = resized_annotations(content, new_size, path=path)
        _make_folder(os.path.dirname(place))
        write_atomically(place, json.dumps(resized).encode(), time_ns=os.stat(path).st_mtime_ns)


def _make_folder(folder: str) -> None:
    """Create a folder of the tree if necessary, and remove partial files that a killed process left in it."""
    os.makedirs(folder, exist_ok=True)
    for entry in os.scandir(folder):
        if entry.name.startswith(".") and entry.name.endswith(".part"):
            os.unlink(entry.path)


def _size_of_file(path: str) -> tuple[int, int] | None:
    """Width and height of an image in the tree; None if it is not there."""
    try:
        return read_facts(path).header.size_wh
    except (OSError, DecodeError):
        return None


# -- the work ------------------------------------------------------------------------------------------------------

RESIZED, COPIED, SKIPPED, UNWRITABLE = range(4)
RESULT = np.dtype([("state", "u1"), ("num_bytes", "<i8"), ("reason", "S160")])


class TaskResult(NamedTuple):
    """The outcome for one image."""

    state: int
    reason: str = ""


def process_all(
    tasks: Sequence[Task], config: ResizeConfig, workers: int | str, show_progress: bool
) -> tuple[list[TaskResult], int]:
    """Process all tasks; returns the result of each, and the number of bytes written.

    Raises Interrupted after a signal, ResourceError if a file cannot be written.
    """
    if not tasks:
        return [], 0
    source = FileRecords([task.image for task in tasks], tasks, partial(process_one, config=config), RESULT)
    plan = Plan(num_samples=len(source), batch_size=_batch_size(tasks), shuffle=False, last="short")
    feed_config = FeedConfig(workers=workers if len(tasks) >= MIN_FOR_WORKERS else 0, epochs=1, bad_share=1.0)
    results: list[TaskResult] = []
    num_bytes = 0
    with (
        Interrupts() as interrupts,
        progress("resizing", len(tasks), shown=show_progress) as advance,
        Feed(source, plan, feed_config) as feed,
    ):
        for batch in feed:
            for position, index, result in zip(batch.positions, batch.indices, batch["record"], strict=True):
                reason = bytes(result["reason"]).decode(errors="replace")
                if result["state"] == UNWRITABLE:
                    raise ResourceError(
                        f"{tasks[position].image_out}: cannot be written: {reason}. Fix this, then run the same "
                        "command again; it continues where it stopped."
                    )
                crashed = TaskResult(SKIPPED, "reading it crashes the process")
                results.append(TaskResult(int(result["state"]), reason) if index == position else crashed)
                num_bytes += int(result["num_bytes"])
            advance(min(len(results), len(tasks)), num_bytes)
            if interrupts.requested:
                raise Interrupted.by(interrupts.requested)
    return results[: len(tasks)], num_bytes


def _batch_size(tasks: Sequence[Task]) -> int:
    """Images per batch, between which progress and signals are handled: many small ones, or few large ones."""
    most = int(BATCH_BYTES * len(tasks) / max(1, _source_bytes(tasks)))
    return min(max(4, min(most, 32)), len(tasks))


def process_one(task: Task, config: ResizeConfig) -> tuple[int, int, bytes]:
    """Resize or copy one image; returns a RESULT. Labels are written first, so an image in the tree has its labels."""
    try:
        time_ns = os.stat(task.image).st_mtime_ns
        content = read_bytes(task.image)
        made = resized_file(content, config)
        label = _read_label(task.label)
    except (OSError, DecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return SKIPPED, 0, reason.encode(errors="replace")[:160]
    try:
        if label is not None:
            write_atomically(task.label_out, label[0], time_ns=label[1])
        elif task.label_out:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(task.label_out)  # from an earlier call, when the image still had labels
        write_atomically(task.image_out, made, time_ns=time_ns)
    except OSError as error:
        return UNWRITABLE, 0, (error.strerror or str(error)).encode(errors="replace")[:160]
    return (COPIED if made is content else RESIZED), len(made), b""


def _read_label(path: str) -> tuple[bytes, int] | None:
    """Content and time of the label file; None if there is none, which is fine for an image without objects."""
    try:
        time_ns = os.stat(path).st_mtime_ns
        return read_bytes(path), time_ns
    except FileNotFoundError:
        return None
    except (OSError, DecodeError) as error:
        raise DecodeError(f"its label file {path} cannot be read: {error}") from None


def is_done(task: Task) -> bool:
    """Whether the image and its labels are in the tree and up to date.

    The copy of a source file that no longer exists counts as up to date.
    """
    image, label, image_out, label_out = map(stat_of, task)
    if image is None:
        return image_out is not None and image_out.st_size > 0
    if not _is_current(image_out, image):
        return False
    if label is None or label_out is None:
        return label is label_out
    return label.st_size == label_out.st_size and _have_same_time(label, label_out)


def _is_current(made: os.stat_result | None, source: os.stat_result) -> bool:
    """Whether a file has the time of its source, and is not empty as some file systems leave it after a power cut."""
    return made is not None and made.st_size > 0 and _have_same_time(made, source)


def _have_same_time(made: os.stat_result, source: os.stat_result) -> bool:
    return abs(made.st_mtime_ns - source.st_mtime_ns) < SAME_TIME_NS


def bytes_needed(tasks: Sequence[Task], config: ResizeConfig) -> int:
    """Estimated disk space for the files of some tasks; a few images are resized to see how much smaller they get."""
    before = after = 0
    for row in np.linspace(0, len(tasks) - 1, min(NUM_TRIALS, len(tasks))).astype(int).tolist():
        with contextlib.suppress(OSError, DecodeError):
            content = read_bytes(tasks[row].image)
            before += len(content)
            after += len(resized_file(content, config))
    # A file takes half a block more than its size on average, small ones a whole one; there are two files per task.
    return round(_source_bytes(tasks) * (after / before if before else 1)) + len(tasks) * 2 * BLOCK_BYTES


def _source_bytes(tasks: Sequence[Task]) -> int:
    return sum(state.st_size if (state := stat_of(task.image)) else 0 for task in tasks)


def _examples(skipped: Mapping[str, str]) -> str:
    return ", ".join(f"{path} ({reason})" for path, reason in list(skipped.items())[:3])
