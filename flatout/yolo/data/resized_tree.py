"""A copy of a data set with smaller pictures, for `flatout yolo resize`: labels, names and ids as they were.

    data YAML --find--> pictures --compare with OUT--> what is missing --workers--> pictures and labels
                                                                       --at the end--> annotations, lists, data YAML

    OUT/resize.json                    how the tree was made; written first, and completed last
    OUT/images/..., OUT/labels/...     folders and names as in the source
    OUT/train2017.txt                  lists of the source, with the pictures of the tree
    OUT/annotations/*.json             COCO annotations, scaled to the new sizes
    OUT/OUT.yaml                       the data YAML, named like the folder; only a complete tree has it

Every file appears complete, under its name, with the time of its source: what has the same time is not done again.
The source is only read. No torch, and OpenCV only where pixels are worked on.
"""

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from flatout import __version__
from flatout.errors import ConfigError, DataError, FlatoutError, Interrupted, ResourceError
from flatout.feed import DecodeError, Feed, FeedConfig, Field, Plan, SampleSource
from flatout.images import MOST_MISSING, Header, check_size, decode, header_of, read_bytes, read_facts
from flatout.progress import progress
from flatout.ranks import Interrupts
from flatout.runs import Locked, RunLock
from flatout.yolo.data.coco import (
    annotation_file,
    annotation_folder,
    listed,
    load_json,
    picture_folder,
    read_coco,
    resized_annotations,
)
from flatout.yolo.data.data_yaml import SPLITS, DataSet, Split, complaints, refuse_missing
from flatout.yolo.data.find import Pair, find_images, is_image_name, label_path, pair_up
from flatout.yolo.data.letterbox import kept_size_hw
from flatout.yolo.data.open_data import open_data_set
from flatout.yolo.data.scan import LEAST_SIDE

logger = logging.getLogger(__name__)

SETTINGS = "resize.json"
LEAST_SIZE = 32
BAD_SHARE = 0.01
"""Share of pictures that may be unreadable; more is a broken data set, as in training."""
WORTH_WORKERS = 64
"""Pictures for which starting worker processes pays."""
SAMPLED = 16
"""Pictures that are resized beforehand, to learn how much room all of them take."""
BLOCK_BYTES = 4096
BATCH_BYTES = 8_000_000
"""Bytes of picture files between two looks at signals: some tenths of a second of work."""
SAME_TIME_NS = 2_000_000_000
"""Some file systems keep times to 2 s."""
_COMPARED = ("source", "root", "size", "stretch", "enlarge", "quality")
"""Settings that a tree cannot change."""


@dataclass(frozen=True, kw_only=True)
class ResizeConfig:
    """What becomes of each picture."""

    size: int
    """Longer side, in pixels."""
    stretch: bool = False
    """Exact squares, whatever the picture's shape."""
    enlarge: bool = False
    """Small pictures too."""
    quality: int = 95
    """Quality of JPEG, and of WebP that is not lossless."""

    def __post_init__(self) -> None:
        if self.size < LEAST_SIZE:
            raise ConfigError(f"size={self.size} is too small to train on: use {LEAST_SIZE} or more.")
        if not 1 <= self.quality <= 100:
            raise ConfigError(f"quality={self.quality} must lie in 1..100.")


@dataclass(frozen=True)
class ResizedSet:
    """The tree that was made."""

    data: Path
    """Its data YAML."""
    num_resized: int
    num_copied: int
    """Small enough as they were."""
    num_kept: int
    """From an earlier call."""
    num_bytes: int
    """Size of the pictures that were written by this call."""
    skipped: Mapping[str, str]
    """Pictures that cannot be read, and why; they are not in the tree."""

    @property
    def num_images(self) -> int:
        """In the tree."""
        return self.num_resized + self.num_copied + self.num_kept


def write_resized(
    data_file: str | Path,
    out: str | Path,
    config: ResizeConfig,
    *,
    workers: int | str = "cpu*1.0",
    show_progress: bool = False,
) -> ResizedSet:
    """Make the tree, or what is missing of it.

    DataError, once everything else is written, if more than 1 % of the pictures cannot be read; Interrupted after a
    signal, and the same call continues.
    """
    source = find_source(open_data_set(data_file))
    # The data YAML names the folder it lies in, which a link would hide.
    out = Path(os.path.realpath(out) if os.path.islink(out) else os.path.abspath(out))
    check_place(out, source)
    settings = {"source": os.path.abspath(data_file), "root": source.root, **asdict(config)}
    check_settings(out, settings)
    try:
        with _locked(out):
            tree = Tree(source, out, config)
            tree.write_settings(settings, complete=False)
            outcome = tree.fill(workers, show_progress)
            tree.finish(outcome)
            tree.write_settings(settings, complete=True, outcome=outcome)
    except KeyboardInterrupt:
        raise Interrupted.by("SIGINT") from None
    except FlatoutError:
        raise
    except OSError as error:
        raise ResourceError(
            f"{out}: cannot be written: {error.strerror or error}. Fix that, and run the same command again."
        ) from None
    if len(outcome.skipped) > BAD_SHARE * (outcome.num_images + len(outcome.skipped)):
        raise DataError(
            f"{len(outcome.skipped)} of {outcome.num_images + len(outcome.skipped)} pictures cannot be read, such as "
            f"{_examples(outcome.skipped)}. The others are in {outcome.data}; {out / SETTINGS} lists what is missing."
        )
    return outcome


# -- one picture ---------------------------------------------------------------------------------------------------


def target_hw(native_hw: tuple[int, int], config: ResizeConfig) -> tuple[int, int]:
    """Size of a picture in the tree; as training would resize it at that size, so that it has nothing left to do.

    The longer side is exact. A long thin picture keeps the 10 px without which training would leave it out.
    """
    if config.stretch:
        return config.size, config.size
    longer, shorter = max(native_hw), min(native_hw)
    if longer <= config.size and not config.enlarge:
        return native_hw
    size = config.size
    if size < longer and shorter * size < LEAST_SIDE * longer:
        size = min(longer, -(-LEAST_SIDE * longer // shorter))
    height, width = (
        size if side == longer else max(kept, min(LEAST_SIDE, side))
        for side, kept in zip(native_hw, kept_size_hw(native_hw, size), strict=True)
    )
    return height, width


def resized_file(content: bytes, config: ResizeConfig) -> bytes:
    """The bytes of a picture file at its new size, in the same format; the given ones where nothing is to be done.

    Pixels are those that training reads: 8 bits, upright, without transparency, the first of several pages.
    DecodeError where training could not use the file either.
    """
    import cv2

    if not content:
        raise DecodeError("an empty file")
    header = header_of(content)
    check_size(header, len(content))
    width, height = header.size_wh
    if target_hw((height, width), config) == (height, width):
        return content
    picture = decode(content)
    if picture.missing > MOST_MISSING:
        raise DecodeError(f"cut off: {picture.missing:.0%} of its rows are missing")
    native_hw = picture.image.shape[0], picture.image.shape[1]
    new_hw = target_hw(native_hw, config)
    shrinks = new_hw[0] <= native_hw[0] and new_hw[1] <= native_hw[1]
    how = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    return _encoded(cv2.resize(picture.image, new_hw[::-1], interpolation=how), header, content, config.quality)


def _encoded(image_HWC: np.ndarray, header: Header, content: bytes, quality: int) -> bytes:
    import cv2

    kind, options = {
        "jpeg": (".jpg", [cv2.IMWRITE_JPEG_QUALITY, quality]),
        "mpo": (".jpg", [cv2.IMWRITE_JPEG_QUALITY, quality]),
        # Beyond 100 means lossless.
        "webp": (".webp", [cv2.IMWRITE_WEBP_QUALITY, 101 if b"VP8L" in content[:64] else quality]),
        "png": (".png", []),
        "bmp": (".bmp", []),
        "tiff": (".tiff", []),
        "dng": (".tiff", []),  # OpenCV writes no DNG, which is a kind of TIFF
    }[header.format]
    is_grey = header.channels == 1 and header.format in ("jpeg", "mpo", "png")
    done, encoded = cv2.imencode(kind, np.ascontiguousarray(image_HWC[..., 0]) if is_grey else image_HWC, options)
    if not done:
        raise DecodeError(f"OpenCV cannot write this {header.format.upper()}")
    return encoded.tobytes()


# -- the source ----------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A folder, list or file of a split, with its pictures."""

    path: str
    images: list[str]

    @property
    def is_coco(self) -> bool:
        """A file with the labels of all its pictures."""
        return self.path.lower().endswith(".json")

    @property
    def is_list(self) -> bool:
        return not (self.is_coco or os.path.isdir(self.path) or is_image_name(self.path))

    def pairs(self) -> list[Pair]:
        """Each picture with its label file, "" where it has none of its own."""
        return [Pair(image, "") for image in self.images] if self.is_coco else pair_up(self.images)


class Source(NamedTuple):
    """All pictures of a data set, and the folder that the tree begins with."""

    data: DataSet
    splits: dict[Split, list[Entry]]
    root: str


class Task(NamedTuple):
    """A picture and its label file, and where they go; label paths are "" where one file has the labels of all."""

    image: str
    label: str
    image_out: str
    label_out: str


def find_source(data: DataSet) -> Source:
    """The pictures of every split. A `test` split that is not there is left out, as training does not need it."""
    if mistakes := [mistake.text for mistake in complaints(data.written) if mistake.check != "split-missing"]:
        raise ConfigError("\n".join(f"{data.file}: {mistake}" for mistake in mistakes))
    splits: dict[Split, list[Entry]] = {}
    for split in SPLITS:
        try:
            entries = [_entry(data, split, entry) for entry in data.entries[split]]
            images = [image for entry in entries for image in entry.images]
            if images and not any(map(os.path.exists, images)):
                raise DataError(f"{data.file}: {split}: none of {len(images)} pictures exists, such as {images[0]}.")
        except DataError as error:
            if split != "test":
                raise
            logger.warning("The split `test` is left out: %s", error)
        else:
            splits[split] = entries
    if not any(splits.values()):
        raise DataError(f"{data.file}: names no pictures. Add train and val.")
    return Source(data, splits, _root(splits))


def _entry(data: DataSet, split: Split, path: str) -> Entry:
    if path.lower().endswith(".json"):
        coco = read_coco(path, data.names)
        return Entry(path, sorted(coco.paths + coco.absent))
    found = find_images([path])
    if found.absent:
        raise refuse_missing(data, path)
    if not found.paths:
        raise DataError(f"{data.file}: {split}: no pictures in {path}. Is it the right folder?")
    return Entry(path, found.paths)


def _root(splits: Mapping[Split, Sequence[Entry]]) -> str:
    """The folder below which everything lies; never below `images`, without which no labels are found."""
    folders = {os.path.dirname(os.path.abspath(image)) for image in _images(splits)}
    named = [os.path.abspath(entry.path) for entries in splits.values() for entry in entries if not entry.is_list]
    beside = {path if os.path.isdir(path) else os.path.dirname(path) for path in named}
    root = os.path.commonpath([*folders, *beside])
    # The top of the tree has files of its own; pictures get a folder.
    root = os.path.dirname(root) if root in folders else root
    above, images, _ = f"{root}/".partition("/images/")
    return (above or os.sep) if images else root


def _images(splits: Mapping[Split, Sequence[Entry]]) -> Iterable[str]:
    return (image for entries in splits.values() for entry in entries for image in entry.images)


def check_place(out: Path, source: Source) -> None:
    """ConfigError for a place where the tree would harm the source, or would not be found by its own labels."""
    if "/images/" in f"{out}/":
        raise ConfigError(
            f"{out}: below a folder `images`, so labels would be looked for in "
            f"{f'{out}/'.replace('/images/', '/labels/', 1)}. Choose another folder with --out."
        )
    all_entries = [entry for entries in source.splits.values() for entry in entries]
    pairs = [pair for entry in all_entries for pair in entry.pairs()]
    if any(pair.label.endswith(".xml") for pair in pairs):
        raise ConfigError(
            f"{source.data.file}: labels of Pascal VOC are in pixels, which would no longer fit. Convert them to YOLO "
            "or COCO labels first."
        )
    folders = {os.path.dirname(path) for pair in pairs for path in pair if path}
    folders |= {entry.path for entry in all_entries if os.path.isdir(entry.path)}
    place = os.path.realpath(out)
    for folder in sorted(folders):
        if f"{place}{os.sep}".startswith(os.path.realpath(folder) + os.sep):
            raise ConfigError(f"{out}: inside {folder}, which belongs to the source. Choose a folder outside of it.")


# -- settings ------------------------------------------------------------------------------------------------------


def check_settings(out: Path, settings: Mapping[str, Any]) -> None:
    """ConfigError for a folder with other files, or with a tree of other settings."""
    if not out.exists():
        return
    if not out.is_dir():
        raise ConfigError(f"{out}: is a file. Name a folder with --out.")
    try:
        noted = json.loads((out / SETTINGS).read_text())
        if not isinstance(noted, dict) or "size" not in noted:
            raise ValueError
    except FileNotFoundError:
        if foreign := [path.name for path in out.iterdir() if path.name != ".lock"]:
            raise ConfigError(
                f"{out}: holds files that are not of a resized data set, such as {sorted(foreign)[0]}. They are left "
                "alone: choose an empty or new folder with --out."
            ) from None
        return
    except (OSError, ValueError):
        raise ConfigError(f"{out / SETTINGS}: cannot be read. Choose another folder with --out.") from None
    changed = [
        f"{key} was {noted.get(key)}, is {settings[key]}" for key in _COMPARED if noted.get(key) != settings[key]
    ]
    if changed:
        raise ConfigError(
            f"{out}: was made in another way: {'; '.join(changed)}. Choose another folder with --out, or delete it."
        )


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """The folder, made if need be, and for one process at a time."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        # Every file appears whole, whoever writes it: a lock that another host has left need not be respected.
        lock = RunLock(out, break_lock=True)
    except Locked:
        raise ConfigError(
            f"{out}: another `flatout yolo resize` is at work in it. Wait for it, or choose another folder with --out."
        ) from None
    except ResourceError:
        raise ResourceError(f"{out}: cannot be written to. Choose another folder with --out.") from None
    with lock:
        yield


# -- the tree ------------------------------------------------------------------------------------------------------


class Tree:
    """The output folder: knows where each file goes, fills in what is missing, and finishes with the data YAML."""

    def __init__(self, source: Source, out: Path, config: ResizeConfig) -> None:
        self._source = source
        self._out = out
        self._config = config
        # Not under the source's name: `--data coco.yaml` is looked for below the working directory too.
        self._data = out / f"{out.name}.yaml"
        self._tasks = self._all_tasks()

    def write_settings(self, settings: Mapping[str, Any], *, complete: bool, outcome: ResizedSet | None = None) -> None:
        """Write down how the tree is made, and at the end what is in it."""
        note = {"made_by": "flatout yolo resize", "flatout": __version__, **settings, "complete": complete}
        if outcome is not None:
            note |= {"pictures": outcome.num_images, "skipped": dict(outcome.skipped)}
        write_whole(str(self._out / SETTINGS), (json.dumps(note, indent=2) + "\n").encode())

    def fill(self, workers: int | str, show_progress: bool) -> ResizedSet:
        """Resize or copy the pictures that are not there, or have changed since; Interrupted after a signal."""
        missing = [task for task in self._tasks if not is_done(task)]
        num_kept = len(self._tasks) - len(missing)
        if num_kept:
            logger.info(
                "%s: %d of %d pictures are there, %d to go.", self._out, num_kept, len(self._tasks), len(missing)
            )
        if missing:
            self._data.unlink(missing_ok=True)
        self._make_folders(missing)
        self._check_room(missing)
        results, num_bytes = process_all(missing, self._config, workers, show_progress)
        states = [result.state for result in results]
        skipped = {
            task.image: result.why for task, result in zip(missing, results, strict=True) if result.state == SKIPPED
        }
        for path, why in list(skipped.items())[:5]:
            logger.warning("%s: left out: %s", path, why)
        if len(skipped) > 5:
            logger.warning("... and %d more; %s lists them.", len(skipped) - 5, self._out / SETTINGS)
        return ResizedSet(self._data, states.count(RESIZED), states.count(COPIED), num_kept, num_bytes, skipped)

    def finish(self, outcome: ResizedSet) -> None:
        """Annotations and lists without the pictures that were left out; then the data YAML."""
        is_new = bool(outcome.num_resized or outcome.num_copied)
        self._write_annotations(is_new)
        splits = {
            split: [self._entry_out(split, entry, outcome.skipped) for entry in entries]
            for split, entries in self._source.splits.items()
        }
        write_whole(str(self._data), self._yaml_text(splits).encode())
        self._warn_of_leftovers()

    def _warn_of_leftovers(self) -> None:
        """Warn of pictures of an earlier call that the source no longer has: training would use them."""
        folders = [
            self.place(entry.path)
            for entries in self._source.splits.values()
            for entry in entries
            if os.path.isdir(entry.path)
        ]
        known = {task.image_out for task in self._tasks}
        if leftovers := [path for path in find_images(folders).paths if path not in known]:
            logger.warning(
                "%d pictures of the tree are not in the source any more, such as %s: training would use them. "
                "Delete them.", len(leftovers), leftovers[0],
            )  # fmt: skip

    def place(self, path: str) -> str:
        """Where a file or folder of the source is in the tree."""
        below = os.path.abspath(path).removeprefix(self._source.root.rstrip(os.sep)).lstrip(os.sep)
        return os.path.join(self._out, below) if below else str(self._out)

    def _all_tasks(self) -> list[Task]:
        tasks: dict[str, Task] = {}
        for entry in (entry for entries in self._source.splits.values() for entry in entries):
            for image, label in entry.pairs():
                image_out = self.place(image)
                if label or image_out not in tasks:
                    tasks[image_out] = Task(image, label, image_out, label_path(image_out) if label else "")
        return list(tasks.values())

    def _make_folders(self, tasks: Sequence[Task]) -> None:
        folders = {os.path.dirname(path) for task in tasks for path in (task.image_out, task.label_out) if path}
        for folder in folders:
            _make_folder(folder)

    def _check_room(self, tasks: Sequence[Task]) -> None:
        needed = bytes_needed(tasks, self._config)
        free = shutil.disk_usage(self._out).free
        if needed > free:
            raise ResourceError(
                f"{self._out}: {free / 1e9:.2f} GB are free; {len(tasks)} pictures take about {needed / 1e9:.2f} GB. "
                "Free some space, or choose another disk with --out."
            )

    def _entry_out(self, split: Split, entry: Entry, skipped: Mapping[str, str]) -> str:
        """An entry of the new data YAML; a list is written on the way."""
        place = self._entry_place(split, entry)
        if entry.is_list:
            below = (os.path.relpath(self.place(image), self._out) for image in entry.images if image not in skipped)
            text = "".join(f"./{path}\n" for path in below)
            write_whole(str(place), text.encode(errors="surrogateescape"))
        return self._from_yaml(place)

    def _from_yaml(self, place: Path) -> str:
        """A place in the tree as the new data YAML names it."""
        # By the name of the tree's own folder: relative paths are looked for in the working directory first, where
        # `images/train` may well be that of the source.
        return os.path.normpath(os.path.join("..", self._out.name, os.path.relpath(place, self._out)))

    def _entry_place(self, split: Split, entry: Entry) -> Path:
        """Where an entry is in the tree.

        Lists are at its top, under their own names; two of one name are told apart by their splits and numbers.
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
        """Every value as JSON, which is YAML too: no name can be mistaken for a number or a boolean."""
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
        lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items()]
        return (
            f"# Pictures of {json.dumps(self._source.data.file.name)}, resized by `flatout yolo resize`; "
            f"{SETTINGS} says how.\n# Paths start from the working directory, else from this folder. "
            "If you rename it, rename it here too.\n\n" + "".join(lines)
        )

    def _write_annotations(self, is_new: bool) -> None:
        """COCO files that hold labels, or by which AP is computed, with everything in pixels scaled."""
        done: set[Path] = set()
        # COCO's own validation file stands in where a split has none: its pictures come first.
        order: tuple[Split, ...] = ("val", "test", "train")
        for split in order:
            entries = self._source.splits.get(split, [])
            found = [(entry.path, self._entry_place(split, entry)) for entry in entries if entry.is_coco]
            if (beside := self._annotations_of(split)) is not None:
                found.append(beside)
            for path, place in found:
                if not place.is_relative_to(self._out):
                    logger.warning("%s: not copied, as it would lie outside of %s.", path, self._out)
                elif place not in done and (is_new or not _is_of(str(place), os.stat(path).st_mtime_ns)):
                    self._write_json(path, str(place), entries)
                done.add(place)

    def _annotations_of(self, split: Split) -> tuple[str, Path] | None:
        """The annotation file by which AP of a split is computed, and its place in the tree; None if there is none."""
        entries = self._source.splits.get(split, [])
        file = annotation_file(self._source.data, split)
        if not entries or entries[0].is_coco or file is None:
            return None
        return str(file), annotation_folder(self._entry_place(split, entries[0])) / file.name

    def _write_json(self, path: str, place: str, entries: Sequence[Entry]) -> None:
        """`entries` are those of the split that the file is about."""
        content = load_json(path)
        records = listed(content, "images")
        if any(entry.path == path for entry in entries):
            folder = picture_folder(path, records)
            known = {
                str(each.get("file_name")): self.place(os.path.join(folder, str(each.get("file_name"))))
                for each in records
            }
        else:
            places = {os.path.basename(image): self.place(image) for entry in entries for image in entry.images}
            names = [str(each.get("file_name")) for each in records]
            known = {name: places[base] for name in names if (base := os.path.basename(name)) in places}
        if not known:
            return  # of another data set

        def size_of(image: dict[str, Any]) -> tuple[int, int] | None:
            name = str(image.get("file_name"))
            return _size_of_file(known[name]) if name in known else self._size_by_rule(image)

        resized = resized_annotations(content, size_of, path=path)
        _make_folder(os.path.dirname(place))
        write_whole(place, json.dumps(resized).encode(), time_ns=os.stat(path).st_mtime_ns)

    def _size_by_rule(self, image: dict[str, Any]) -> tuple[int, int]:
        """Size of a picture that the annotation file knows and the split does not."""
        try:
            height, width = target_hw((int(image["height"]), int(image["width"])), self._config)
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            raise DataError(f"COCO file: picture {image.get('file_name')!r} has no width and height.") from None
        return width, height


def _make_folder(folder: str) -> None:
    """Make a folder of the tree; in one that is there, remove what a process that was killed has left."""
    os.makedirs(folder, exist_ok=True)
    for entry in os.scandir(folder):
        if entry.name.startswith(".") and entry.name.endswith(".part"):
            os.unlink(entry.path)


def _size_of_file(path: str) -> tuple[int, int] | None:
    """Width and height of a picture of the tree; None if it was left out."""
    try:
        return read_facts(path).header.size_wh
    except (OSError, DecodeError):
        return None


# -- the work ------------------------------------------------------------------------------------------------------

RESIZED, COPIED, SKIPPED, UNWRITABLE = range(4)
RESULT = np.dtype([("state", "u1"), ("num_bytes", "<i8"), ("why", "S160")])


class Result(NamedTuple):
    """What became of a picture."""

    state: int
    why: str = ""


class Pictures(SampleSource):
    """Each picture read, resized and written by a worker; then one more sample, which is none.

    The feed puts another sample in the place of one that ends its process: there must be one that does not.
    """

    fields = {"result": Field((), RESULT)}

    def __init__(self, tasks: Sequence[Task], config: ResizeConfig) -> None:
        self._tasks = tasks
        self._config = config

    def __len__(self) -> int:
        return len(self._tasks) + 1

    def where(self, index: int) -> str:
        return self._tasks[index].image if index < len(self._tasks) else "no picture"

    def sample(self, index: int, rng: np.random.Generator) -> Mapping[str, ArrayLike]:
        result = np.zeros((), RESULT)
        if index < len(self._tasks):
            result[()] = process_one(self._tasks[index], self._config)
        return {"result": result}


def process_all(
    tasks: Sequence[Task], config: ResizeConfig, workers: int | str, show_progress: bool
) -> tuple[list[Result], int]:
    """The result of each task, and the bytes written. Interrupted after a signal, ResourceError where no file fits."""
    if not tasks:
        return [], 0
    pictures = Pictures(tasks, config)
    plan = Plan(num_samples=len(pictures), batch_size=_num_at_once(tasks), shuffle=False, last="short")
    feed_config = FeedConfig(workers=workers if len(tasks) >= WORTH_WORKERS else 0, epochs=1, bad_share=1.0)
    results: list[Result] = []
    num_bytes = 0
    with (
        Interrupts() as interrupts,
        progress("resizing", len(tasks), shown=show_progress) as advance,
        Feed(pictures, plan, feed_config) as feed,
    ):
        for batch in feed:
            for position, index, result in zip(batch.positions, batch.indices, batch["result"], strict=True):
                why = bytes(result["why"]).decode(errors="replace")
                if result["state"] == UNWRITABLE:
                    raise ResourceError(
                        f"{tasks[position].image_out}: cannot be written: {why}. Fix that, and run the same command "
                        "again: what is there is kept."
                    )
                is_lost = index != position
                results.append(
                    Result(SKIPPED, "reading it ended the process") if is_lost else Result(int(result["state"]), why)
                )
                num_bytes += int(result["num_bytes"])
            advance(min(len(results), len(tasks)), num_bytes)
            if interrupts.requested:
                raise Interrupted.by(interrupts.requested)
    return results[: len(tasks)], num_bytes


def _num_at_once(tasks: Sequence[Task]) -> int:
    """Pictures between two looks at the clock and at signals: many small ones, or few large ones."""
    most = int(BATCH_BYTES * len(tasks) / max(1, _source_bytes(tasks)))
    return min(max(4, min(most, 32)), len(tasks))


def process_one(task: Task, config: ResizeConfig) -> tuple[int, int, bytes]:
    """Resize or copy one picture, its labels first: a picture that is there has them. Returns a RESULT."""
    try:
        time_ns = os.stat(task.image).st_mtime_ns
        content = read_bytes(task.image)
        made = resized_file(content, config)
        label = _read_label(task.label)
    except (OSError, DecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return SKIPPED, 0, why.encode(errors="replace")[:160]
    try:
        if label is not None:
            write_whole(task.label_out, label.content, time_ns=label.time_ns)
        elif task.label_out:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(task.label_out)  # of a picture that had labels when it was resized before
        write_whole(task.image_out, made, time_ns=time_ns)
    except OSError as error:
        return UNWRITABLE, 0, (error.strerror or str(error)).encode(errors="replace")[:160]
    return (COPIED if made is content else RESIZED), len(made), b""


class _Label(NamedTuple):
    content: bytes
    time_ns: int


def _read_label(path: str) -> _Label | None:
    """None where a picture has none, as a picture without objects may."""
    try:
        time_ns = os.stat(path).st_mtime_ns
        return _Label(read_bytes(path), time_ns)
    except FileNotFoundError:
        return None
    except (OSError, DecodeError) as error:
        raise DecodeError(f"its labels {path} cannot be read: {error}") from None


def is_done(task: Task) -> bool:
    """Whether the picture and its labels are in the tree, made from the files that are there now.

    What was made of a file that is gone is kept.
    """
    source, label = _state(task.image), _state(task.label) if task.label else None
    if source is None:
        return (made := _state(task.image_out)) is not None and made.st_size > 0
    if not _is_of(task.image_out, source.st_mtime_ns):
        return False
    if label is None:
        return not task.label_out or not os.path.exists(task.label_out)
    copied = _state(task.label_out)
    return copied is not None and copied.st_size == label.st_size and _is_of(task.label_out, label.st_mtime_ns, least=0)


def _is_of(path: str, time_ns: int, *, least: int = 1) -> bool:
    """Whether a file was made from a source of that time. After a power cut some file systems have empty files."""
    state = _state(path)
    return state is not None and state.st_size >= least and abs(state.st_mtime_ns - time_ns) < SAME_TIME_NS


def _state(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (OSError, ValueError):
        return None


def write_whole(path: str, content: bytes, *, time_ns: int | None = None) -> None:
    """Write a file so that it appears complete, with the time of its source; the last of several writers wins."""
    part = os.path.join(os.path.dirname(path), f".{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            file.write(content)
        if time_ns is not None:
            os.utime(part, ns=(time_ns, time_ns))
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def bytes_needed(tasks: Sequence[Task], config: ResizeConfig) -> int:
    """Room for the files of some tasks: a few are resized to see how much smaller they become."""
    before = after = 0
    for row in np.linspace(0, len(tasks) - 1, min(SAMPLED, len(tasks))).astype(int).tolist():
        with contextlib.suppress(OSError, DecodeError):
            content = read_bytes(tasks[row].image)
            before += len(content)
            after += len(resized_file(content, config))
    # A picture and a label file fill half a block more than they hold, on average; small files a whole one.
    return round(_source_bytes(tasks) * (after / before if before else 1)) + len(tasks) * 2 * BLOCK_BYTES


def _source_bytes(tasks: Sequence[Task]) -> int:
    return sum(state.st_size if (state := _state(task.image)) else 0 for task in tasks)


def _examples(skipped: Mapping[str, str]) -> str:
    return ", ".join(f"{path} ({why})" for path, why in list(skipped.items())[:3])
