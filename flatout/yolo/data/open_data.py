"""Open a data set by its YAML, annotation file or folder, and scan the images of a split with their labels.

folders, lists, VOC folders --find_images--> image paths      --scan--> ScanTable
annotation files            --open_listed--> paths and labels --scan--> ScanTable, with the labels put in
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.errors import ConfigError, DataError
from flatout.yolo.data.data_yaml import SPLITS, DataSet, DataYaml, Split, open_data_yaml
from flatout.yolo.data.find import VOC_IMAGES, VOC_LABELS, VOC_LISTS, FoundImages, Pair, find_images, pair_up
from flatout.yolo.data.formats.registry import annotation_files, names_of, open_listed
from flatout.yolo.data.formats.sidecars import SIDECARS
from flatout.yolo.data.label_cache import scan_cached
from flatout.yolo.data.scan import ScanConfig, ScanTable, join, with_labels

LISTS: dict[Split, tuple[str, ...]] = {
    "train": ("train.txt", "trainval.txt"),
    "val": ("val.txt",),
    "test": ("test.txt",),
}
"""Files in ImageSets/Main that define each split; the first one that exists is used."""
SPLIT_FOLDERS: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "val": ("valid", "val", "validation"),
    "test": ("test",),
}
"""Names of folders, and of parquet files, by which tools export each split; the first one that exists is used."""


def open_data_set(path: str | Path) -> DataSet:
    """Open a data YAML, an annotation file, or a folder in one of the layouts of docs/data.md.

    Without a YAML, classes are numbered in the order in which a COCO or CVAT file declares them, or else
    alphabetically.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if annotation_files(str(path)):
        return _standalone(path, {"train": (str(path),)})
    return open_data_yaml(path)


def _open_folder(folder: Path) -> DataSet:
    if (folder / VOC_LABELS).is_dir() and (folder / VOC_IMAGES).is_dir():
        places = {split: [folder / VOC_LISTS / "Main" / file for file in files] for split, files in LISTS.items()}
        splits = _first_of(places, os.path.isfile) or {"train": (str(folder),)}
    elif any(folder.glob("*.yaml")) or any(folder.glob("*.yml")):
        splits = {}
    else:
        # Folders, or what the names of parquet files begin with.
        places = {
            split: [parent / name for name in names for parent in (folder, folder / "data")]
            for split, names in SPLIT_FOLDERS.items()
        }
        splits = _first_of(places, _is_labelled)
        if not splits and _is_labelled(str(folder)):
            splits = {"train": (str(folder),)}
    if not splits:
        raise ConfigError(_not_a_data_set(folder))
    return _standalone(folder, splits)


def _first_of(places: Mapping[Split, Iterable[Path]], is_one: Callable[[str], bool]) -> dict[Split, tuple[str, ...]]:
    """The first place of each split that passes; splits without one are left out."""
    found = {split: next(filter(is_one, map(str, own)), "") for split, own in places.items()}
    return {split: (place,) for split, place in found.items() if place}


def _is_labelled(entry: str) -> bool:
    """Whether an entry has labels that contain class names."""
    if annotation_files(entry):
        return True
    return os.path.isdir(entry) and any(_named_labels(entry))


def _named_labels(entry: str) -> Iterator[str]:
    """The label files of an entry that contain class names."""
    for pair in pair_up(find_images([entry]).paths):
        if os.path.splitext(pair.label)[1] in SIDECARS and os.path.exists(pair.label):
            yield pair.label


def _all_names(splits: Mapping[Split, tuple[str, ...]]) -> tuple[str, ...]:
    """All class names: first those of the first annotation file in its order, then others in alphabetical order."""
    entries = [entry for own in splits.values() for entry in own]
    ordered = [names_of(file) for entry in entries for file in annotation_files(entry)]
    names = {name for own in ordered for name in own}
    if not ordered:
        for label in (label for entry in entries for label in _named_labels(entry)):
            names |= SIDECARS[os.path.splitext(label)[1]].names_in(Path(label).read_bytes())
    if not names:
        raise DataError(f"{entries[0]}: its labels name no object. Is this the right file or folder?")
    first = ordered[0] if ordered else ()
    return (*first, *sorted(names - set(first)))


def _not_a_data_set(folder: Path) -> str:
    """The error text for a folder that is not a data set, with what to give instead."""
    inside = sorted(str(file) for ending in ("*.yaml", "*.yml") for file in folder.glob(ending))
    if inside:
        return f"{folder} is a folder. Give the YAML in it: {' or '.join(inside[:3])}."
    return (
        f"{folder} is a folder without a data YAML, no export that has class names in its labels, and not a "
        f"Pascal VOC folder (with {VOC_IMAGES} and {VOC_LABELS}). Give a YAML with train, val and names, or an "
        "annotation file, such as a COCO .json."
    )


def _standalone(path: Path, splits: Mapping[Split, tuple[str, ...]]) -> DataSet:
    names, entries = _all_names(splits), {split: splits.get(split, ()) for split in SPLITS}
    written = DataYaml(names=list(names), train=list(entries["train"]), val=list(entries["val"]), nc=len(names))
    return DataSet(path, names, entries, written)


def images_of(entries: Sequence[str], names: Sequence[str]) -> FoundImages:
    """The images of some entries in any format; their labels are not kept."""
    files = {entry: annotation_files(entry) for entry in entries}
    found = find_images([entry for entry in entries if not files[entry]])
    for file in (file for own in files.values() for file in own):
        found.paths.extend(open_listed(file, names).paths)
    return found


class ScannedFiles(NamedTuple):
    """The images of some entries and their scan."""

    found: FoundImages
    pairs: list[Pair]
    table: ScanTable
    """One row per pair."""


def scan_entries(entries: Sequence[str], config: ScanConfig, *, cache_folder: Path | None) -> ScannedFiles:
    """Find and scan the images of the given entries; those of annotation files come last."""
    files = {entry: annotation_files(entry) for entry in entries}
    plain = [entry for entry in entries if not files[entry]]
    found = find_images(plain)
    pairs = pair_up(found.paths)
    # Only some formats contain class names. For the others, renaming a class must not invalidate the cache.
    needs_names = any(not pair.label.endswith(".txt") for pair in pairs)
    plain_config = config if needs_names else replace(config, names=())
    table = scan_cached(pairs, plain_config, folder=cache_folder, key=repr(plain))
    for entry in entries:
        for file in files[entry]:
            listed = open_listed(file, config.names)
            # The annotation file replaces label files, so the cached image headers do not depend on it.
            headers = scan_cached(
                [Pair(path, "") for path in listed.paths],
                replace(config, names=()),
                folder=cache_folder,
                key=file.path,
            )
            size_N2 = np.stack((headers.image_N["width"], headers.image_N["height"]), 1)
            pairs += [Pair(path, file.path) for path in listed.paths]
            table = join([table, with_labels(headers, listed.labels(size_N2))])
            found.paths.extend(listed.paths)
            found.absent.extend(listed.absent)
            if not listed.paths and not listed.absent:
                found.empty.append(file.path)
    return ScannedFiles(found, pairs, table)
