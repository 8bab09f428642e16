"""A data set by its YAML, COCO file or VOC folder, and all pictures of a split with their labels."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from flatout.errors import ConfigError, DataError
from flatout.yolo.data.coco import coco_names, read_coco
from flatout.yolo.data.data_yaml import (
    SPLITS,
    VOC_IMAGES,
    VOC_LABELS,
    VOC_LISTS,
    DataSet,
    DataYaml,
    Split,
    open_data_yaml,
)
from flatout.yolo.data.find import Found, Pair, find_images, pair_up
from flatout.yolo.data.label_cache import scan_cached
from flatout.yolo.data.label_text import names_in
from flatout.yolo.data.scan import ScanConfig, ScanTable, join, with_labels

LISTS: dict[Split, tuple[str, ...]] = {
    "train": ("train.txt", "trainval.txt"),
    "val": ("val.txt",),
    "test": ("test.txt",),
}
"""Files of ImageSets/Main; the first that is there counts."""


def open_data_set(path: str | Path) -> DataSet:
    """The data set at a path; COCO's classes are numbered by their ids, VOC's by the alphabet."""
    path = Path(path)
    if path.suffix.lower() == ".json":
        return _alone(path, coco_names(str(path)), {"train": (str(path),)})
    if (path / VOC_LABELS).is_dir() and (path / VOC_IMAGES).is_dir():
        return _alone(path, _voc_names(path / VOC_LABELS), _voc_splits(path))
    if path.is_dir():
        raise ConfigError(_no_data_set(path))
    return open_data_yaml(path)


def _no_data_set(folder: Path) -> str:
    """What to name instead of a folder that is no data set by itself."""
    inside = sorted(str(file) for ending in ("*.yaml", "*.yml") for file in folder.glob(ending))
    if inside:
        return f"{folder}: a folder. Give the YAML in it: {' or '.join(inside[:3])}."
    return (
        f"{folder}: a folder without a data YAML, and no Pascal VOC folder (with {VOC_IMAGES} and {VOC_LABELS}). "
        "Give a YAML with train, val and names, or a COCO .json file."
    )


def _alone(path: Path, names: tuple[str, ...], splits: dict[Split, tuple[str, ...]]) -> DataSet:
    entries = {split: splits.get(split, ()) for split in SPLITS}
    written = DataYaml(names=list(names), train=list(entries["train"]), val=list(entries["val"]), nc=len(names))
    return DataSet(path, names, entries, written)


def _voc_splits(path: Path) -> dict[Split, tuple[str, ...]]:
    """The lists of ImageSets/Main; without them all pictures are for training."""
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
        raise DataError(f"{folder}: no object with a name in any .xml file. Is this the right folder?")
    return tuple(sorted(names))


# All pictures of a split with their labels, whatever form they are kept in: the one way to a scanned table.
#
# folders, lists, VOC folders --find--> pictures --scan--> table
# COCO files                  --read--> pictures and labels --scan--> table, with the labels put in


class Gathered(NamedTuple):
    """What was found, picture by picture."""

    found: Found
    pairs: list[Pair]
    table: ScanTable


def gather(entries: Sequence[str], config: ScanConfig, *, cache_folder: Path | None) -> Gathered:
    """Find and scan the pictures of some entries; COCO files come last."""
    plain = [entry for entry in entries if not entry.lower().endswith(".json")]
    found = find_images(plain)
    pairs = pair_up(found.paths)
    # Other labels say numbers: giving a class another name must not cost a scan.
    needs_names = any(pair.label.endswith(".xml") for pair in pairs)
    plain_config = config if needs_names else replace(config, names=())
    table = scan_cached(pairs, plain_config, folder=cache_folder, family=repr(plain))
    for entry in entries:
        if entry not in plain:
            coco = read_coco(entry, config.names)
            # The file itself takes the place of the label files: the cached headers do not depend on it.
            headers = scan_cached(
                [Pair(path, "") for path in coco.paths], replace(config, names=()), folder=cache_folder, family=entry
            )
            pairs += [Pair(path, entry) for path in coco.paths]
            table = join([table, with_labels(headers, coco.labels)])
            found.paths.extend(coco.paths)
            found.absent.extend(coco.absent)
    return Gathered(found, pairs, table)
