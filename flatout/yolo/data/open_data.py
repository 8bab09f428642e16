"""Open a data set by its YAML, COCO file or Pascal VOC folder, and scan the images of a split with their labels.

folders, lists, VOC folders --find_images--> image paths      --scan--> ScanTable
COCO files                  --read_coco-->   paths and labels --scan--> ScanTable, with the labels put in
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from flatout.errors import ConfigError, DataError
from flatout.yolo.data.coco import coco_names, read_coco
from flatout.yolo.data.data_yaml import SPLITS, DataSet, DataYaml, Split, open_data_yaml
from flatout.yolo.data.find import VOC_IMAGES, VOC_LABELS, VOC_LISTS, FoundImages, Pair, find_images, pair_up
from flatout.yolo.data.label_cache import scan_cached
from flatout.yolo.data.label_text import names_in
from flatout.yolo.data.scan import ScanConfig, ScanTable, join, with_labels

LISTS: dict[Split, tuple[str, ...]] = {
    "train": ("train.txt", "trainval.txt"),
    "val": ("val.txt",),
    "test": ("test.txt",),
}
"""Files in ImageSets/Main that define each split; the first one that exists is used."""


def open_data_set(path: str | Path) -> DataSet:
    """Open a data YAML, a COCO .json file or a VOC folder.

    Without a YAML, COCO classes are numbered in the order of their ids, VOC classes in alphabetical order.
    """
    path = Path(path)
    if path.suffix.lower() == ".json":
        return _standalone(path, coco_names(str(path)), {"train": (str(path),)})
    if (path / VOC_LABELS).is_dir() and (path / VOC_IMAGES).is_dir():
        return _standalone(path, _voc_names(path / VOC_LABELS), _voc_splits(path))
    if path.is_dir():
        raise ConfigError(_not_a_data_set(path))
    return open_data_yaml(path)


def _not_a_data_set(folder: Path) -> str:
    """The error text for a folder that is not a data set, with what to give instead."""
    inside = sorted(str(file) for ending in ("*.yaml", "*.yml") for file in folder.glob(ending))
    if inside:
        return f"{folder} is a folder. Give the YAML in it: {' or '.join(inside[:3])}."
    return (
        f"{folder} is a folder without a data YAML, and not a Pascal VOC folder (with {VOC_IMAGES} and {VOC_LABELS}). "
        "Give a YAML with train, val and names, or a COCO .json file."
    )


def _standalone(path: Path, names: tuple[str, ...], splits: dict[Split, tuple[str, ...]]) -> DataSet:
    entries = {split: splits.get(split, ()) for split in SPLITS}
    written = DataYaml(names=list(names), train=list(entries["train"]), val=list(entries["val"]), nc=len(names))
    return DataSet(path, names, entries, written)


def _voc_splits(path: Path) -> dict[Split, tuple[str, ...]]:
    """The lists in ImageSets/Main; without them all images are in train."""
    main = path / VOC_LISTS / "Main"
    found: dict[Split, tuple[str, ...]] = {}
    for split, files in LISTS.items():
        present = [str(main / file) for file in files if (main / file).is_file()]
        if present:
            found[split] = (present[0],)
    return found or {"train": (str(path),)}


def _voc_names(folder: Path) -> tuple[str, ...]:
    names: set[str] = set()
    for entry in os.scandir(folder):
        if entry.name.endswith(".xml") and entry.is_file():
            names |= names_in(Path(entry.path).read_bytes())
    if not names:
        raise DataError(f"{folder}: no .xml file in it names an object. Is this the right folder?")
    return tuple(sorted(names))


class ScannedFiles(NamedTuple):
    """The images of some entries and their scan."""

    found: FoundImages
    pairs: list[Pair]
    table: ScanTable
    """One row per pair."""


def scan_entries(entries: Sequence[str], config: ScanConfig, *, cache_folder: Path | None) -> ScannedFiles:
    """Find and scan the images of the given entries; those of COCO files come last."""
    plain = [entry for entry in entries if not entry.lower().endswith(".json")]
    found = find_images(plain)
    pairs = pair_up(found.paths)
    # Only VOC labels contain class names. For the others, renaming a class must not invalidate the cache.
    needs_names = any(pair.label.endswith(".xml") for pair in pairs)
    plain_config = config if needs_names else replace(config, names=())
    table = scan_cached(pairs, plain_config, folder=cache_folder, key=repr(plain))
    for entry in entries:
        if entry not in plain:
            coco = read_coco(entry, config.names)
            # The COCO file replaces the label files, so the cached image headers do not depend on it.
            headers = scan_cached(
                [Pair(path, "") for path in coco.paths], replace(config, names=()), folder=cache_folder, key=entry
            )
            pairs += [Pair(path, entry) for path in coco.paths]
            table = join([table, with_labels(headers, coco.labels)])
            found.paths.extend(coco.paths)
            found.absent.extend(coco.absent)
    return ScannedFiles(found, pairs, table)
