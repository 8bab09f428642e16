"""The data YAML: which pictures train, validate and test, and what their classes are called.

    coco.yaml --load_yaml--> plain values --complaints--> DataYaml, or every mistake at once

Nothing is downloaded here: a `download` command is kept as text and refused by whoever misses the pictures.

Which files are the pictures of a split, and where are their labels?
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from flatout.config import build_config
from flatout.errors import ConfigError, DataError, counted
from flatout.yaml_strict import Yaml, load_yaml
from flatout.yolo.data.find import how_to_resize

VOC_IMAGES, VOC_LABELS, VOC_LISTS = "JPEGImages", "Annotations", "ImageSets"
"""Folders of a Pascal VOC data set."""


Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")


@dataclass(frozen=True)
class DataYaml:
    """What the file says, with paths as written; `entries` resolves them."""

    names: list[str] | dict[int, str]
    train: str | list[str] = field(default_factory=list)
    val: str | list[str] = field(default_factory=list)
    test: str | list[str] = field(default_factory=list)
    nc: int | None = None
    """Number of classes; follows from the names where it is not given."""
    path: str | None = None
    """Folder that relative paths start from. YOLOv7 has no such key; newer data sets do."""
    download: str | None = None
    """Where the data comes from, or the command that fetches it. Never obeyed on its own."""
    annotations: str | dict[Split, str] | None = None
    """COCO's own annotation file of val, or one for each split: COCO's AP is computed with it."""
    roboflow: dict[str, int | float | str] | None = None
    """Where a data set that Roboflow exported comes from; nobody reads it."""
    heads: int | None = None
    grouping: str | None = None
    full_head: bool | None = None
    generated_by: str | None = None
    head_assignments: dict[str, dict[str, int | float | str | list[int]]] | None = None
    """With the keys before it: which head of a network with several answers for which classes. Read by `--head-config`,
    for which a data YAML may serve as well."""


class Complaint(NamedTuple):
    """A mistake in a data YAML that still could be read, and the check that is about it."""

    check: str
    text: str


@dataclass(frozen=True)
class DataSet:
    """A data YAML with its paths resolved and its names as a tuple: what everybody else works with."""

    file: Path
    names: tuple[str, ...]
    entries: dict[Split, tuple[str, ...]]
    """Folders, lists and files of each split, in the order in which they are written."""
    written: DataYaml
    annotations: dict[Split, str] = field(default_factory=dict)
    """COCO annotation files that the YAML names for AP."""


def read_data_yaml(path: str | Path) -> DataSet:
    """The data set a YAML file describes; raises ConfigError with every mistake, one per line."""
    return without_complaints(open_data_yaml(path))


def without_complaints(data: DataSet, splits: Sequence[Split] = ("train", "val")) -> DataSet:
    """The same data set; ConfigError with every mistake in its names and in those splits, one per line."""
    if mistakes := [mistake.text for mistake in complaints(data.written, splits)]:
        raise ConfigError("\n".join(f"{data.file}: {mistake}" for mistake in mistakes))
    return data


def open_data_yaml(path: str | Path) -> DataSet:
    """As `read_data_yaml`, without judging names and splits: for those who want to report every mistake."""
    values = load_yaml(path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a data YAML is a group of keys: train, val, nc, names. Is this the right file?")
    written = build_config(_with_text_names(values), DataYaml, where=str(path))
    resolved = partial(resolve, base=written.path, yaml_folder=Path(path).parent)
    entries: dict[Split, tuple[str, ...]] = {split: tuple(map(resolved, _listed(written, split))) for split in SPLITS}
    named = {"val": written.annotations} if isinstance(written.annotations, str) else written.annotations or {}
    annotations: dict[Split, str] = {split: resolved(named[split]) for split in SPLITS if split in named}
    return DataSet(Path(path), names_of(written), entries, written, annotations)


def complaints(data: DataYaml, splits: Sequence[Split] = ("train", "val")) -> Iterator[Complaint]:
    """What is wrong with the names and with the splits that are needed."""
    for split in splits:
        if not _listed(data, split):
            yield Complaint(
                "split-missing", f"{split}: no pictures are named - add a folder, a .txt list or a list of them"
            )
    if not data.names:
        yield Complaint("names-count", "names: empty - name at least one class")
    if isinstance(data.names, dict) and sorted(data.names) != list(range(len(data.names))):
        yield Complaint(
            "names-holes", f"names: the numbers {sorted(data.names)[:8]} are not 0, 1, 2, ... - fill the holes"
        )
    elif data.nc is not None and data.nc != len(data.names):
        yield Complaint(
            "names-count", f"nc: {counted(data.nc, 'class')}, but {counted(len(data.names), 'name')} - make them agree"
        )


def names_of(data: DataYaml) -> tuple[str, ...]:
    """The names in the order of their class numbers."""
    if isinstance(data.names, dict):
        return tuple(data.names[number] for number in sorted(data.names))
    return tuple(data.names)


def resolve(entry: str, *, base: str | None, yaml_folder: Path) -> str:
    """An entry as a path that can be opened.

    YOLOv7 starts relative paths from the working directory. Where nothing is there, the YAML's own folder is tried,
    so that a data set works from anywhere.
    """
    path = entry if base is None else os.path.join(base, entry)
    # YOLOv7 looks for /images/ with both slashes, and so misses the labels of a folder `images` right here.
    if path.startswith("images/") and os.path.isdir("labels") and os.path.exists(path):
        return f"./{path}"
    if os.path.isabs(path) or os.path.exists(path):
        return path
    beside = os.path.join(yaml_folder, path)
    return os.path.normpath(beside) if os.path.exists(beside) else path


def refuse_missing(data: DataSet, missing: str) -> DataError:
    """The error for an entry that does not exist; says what `download` would do, and does not do it."""
    advice = "Paths start from the working directory, else from the folder of the YAML file."
    if data.written.download:
        shown = data.written.download.strip().splitlines()[0][:120]
        advice += f" The file names a download ({shown!r}), which is not run: fetch the data yourself."
    return DataError(f"{data.file}: {missing} does not exist. {advice}{how_to_resize(missing)}")


def _listed(data: DataYaml, split: Split | str) -> list[str]:
    value = getattr(data, split)
    return [value] if isinstance(value, str) else list(value)


def _with_text_names(values: dict[str | int, Yaml]) -> dict[str | int, Yaml]:
    """Names that YAML reads as numbers or booleans are names all the same: `names: [1, true]`. Splits may be null."""
    plain = {key: value for key, value in values.items() if not (key in SPLITS and value is None)}
    names = plain.get("names")
    if isinstance(names, list):
        plain["names"] = [_as_name(name) for name in names]
    elif isinstance(names, dict):
        plain["names"] = {number: _as_name(name) for number, name in names.items()}
    return plain


def _as_name(name: Yaml) -> Yaml:
    return str(name) if isinstance(name, bool | int | float) else name
