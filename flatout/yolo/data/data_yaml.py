"""The data YAML: which images are used to train, validate and test, and the names of the classes.

    coco.yaml --load_yaml--> plain values --build_config--> DataYaml --resolve--> DataSet
                                                               |
                                                               `--yaml_problems--> every mistake at once

Nothing is downloaded: a `download` command is kept as text, and quoted in the error about missing images.
"""

import glob
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from flatout.config import build_config
from flatout.errors import ConfigError, DataError, counted
from flatout.yaml_strict import Yaml, load_yaml
from flatout.yolo.find_file import resize_hint

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")


@dataclass(frozen=True)
class DataYaml:
    """The content of the file, with paths as written; `DataSet.entries` has them resolved."""

    names: list[str] | dict[int, str]
    train: str | list[str] = field(default_factory=list)
    val: str | list[str] = field(default_factory=list)
    test: str | list[str] = field(default_factory=list)
    nc: int | None = None
    """Number of classes; by default the number of names."""
    path: str | None = None
    """Folder that relative paths start from. YOLOv7 has no such key; newer data sets do."""
    download: str | None = None
    """Where the data comes from, or the command that downloads it. Never run."""
    annotations: str | dict[Split, str] | None = None
    """COCO annotation file of val, or one for each split, used to compute COCO's AP."""
    roboflow: dict[str, int | float | str] | None = None
    """Origin of a data set that was exported by Roboflow; accepted and not used."""
    heads: int | None = None
    grouping: str | None = None
    full_head: bool | None = None
    generated_by: str | None = None
    head_assignments: dict[str, dict[str, int | float | str | list[int]]] | None = None
    """Classes of each head of a multi-head network. With `heads` to `generated_by` it makes a data YAML usable as the
    file of `--head-config`."""


class YamlProblem(NamedTuple):
    """A mistake in a readable data YAML, and the id of the check that reports it."""

    check: str
    text: str


@dataclass(frozen=True)
class DataSet:
    """A data YAML with resolved paths and its names as a tuple; all other modules work with this."""

    file: Path
    names: tuple[str, ...]
    entries: dict[Split, tuple[str, ...]]
    """Folders, lists and files of each split, in the order of the file."""
    written: DataYaml
    annotations: dict[Split, str] = field(default_factory=dict)
    """COCO annotation files that the YAML names for computing AP."""

    @property
    def check_command(self) -> str:
        """The command that reports everything about this data set, ready for a shell."""
        return f"flatout yolo check {shlex.quote(str(self.file))}"


def read_data_yaml(path: str | Path) -> DataSet:
    """Read a data YAML; ConfigError with every mistake in it, one per line."""
    return require_valid(open_data_yaml(path))


def require_valid(data: DataSet, splits: Sequence[Split] = ("train", "val")) -> DataSet:
    """Return the data set if its names and these splits are valid; ConfigError with every mistake, one per line."""
    if mistakes := [mistake.text for mistake in yaml_problems(data.written, splits)]:
        raise ConfigError("\n".join(f"{data.file}: {mistake}" for mistake in mistakes))
    return data


def open_data_yaml(path: str | Path) -> DataSet:
    """Like `read_data_yaml`, but without validating names and splits; for callers that report mistakes themselves."""
    values = load_yaml(path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a data YAML has the keys train, val, nc and names. Is this the right file?")
    written = build_config(_with_text_names(values), DataYaml, where=str(path))
    resolved = partial(resolve, base=written.path, yaml_folder=Path(path).parent)
    entries: dict[Split, tuple[str, ...]] = {split: tuple(map(resolved, _listed(written, split))) for split in SPLITS}
    named = {"val": written.annotations} if isinstance(written.annotations, str) else written.annotations or {}
    annotations: dict[Split, str] = {split: resolved(named[split]) for split in SPLITS if split in named}
    return DataSet(Path(path), names_of(written), entries, written, annotations)


def yaml_problems(data: DataYaml, splits: Sequence[Split] = ("train", "val")) -> Iterator[YamlProblem]:
    """Mistakes in the names, and splits that are needed but missing."""
    for split in splits:
        if not _listed(data, split):
            yield YamlProblem(
                "split-missing", f"{split}: no images given - add a folder, a .txt list, or several of them in brackets"
            )
    if not data.names:
        yield YamlProblem("names-count", "names: empty - name at least one class")
    if isinstance(data.names, dict) and sorted(data.names) != list(range(len(data.names))):
        yield YamlProblem(
            "names-holes",
            f"names: the class numbers {sorted(data.names)[:8]} are not 0, 1, 2, ... - name every class from 0 on",
        )
    elif data.nc is not None and data.nc != len(data.names):
        yield YamlProblem(
            "names-count",
            f"nc: {counted(data.nc, 'class')}, but {counted(len(data.names), 'name')} - make them equal, or remove nc",
        )


def names_of(data: DataYaml) -> tuple[str, ...]:
    """The class names, in the order of the class numbers."""
    if isinstance(data.names, dict):
        return tuple(data.names[number] for number in sorted(data.names))
    return tuple(data.names)


def resolve(entry: str, *, base: str | None, yaml_folder: Path) -> str:
    """Turn an entry of the YAML into a path that can be opened.

    As in YOLOv7, relative paths start from the working directory. If nothing is there, the folder of the YAML is tried,
    so that a data set works from any directory.
    """
    path = entry if base is None else os.path.join(base, entry)
    # Labels are found by replacing /images/ with both slashes, which a path that starts with images/ does not have.
    if path.startswith("images/") and os.path.isdir("labels") and os.path.exists(path):
        return f"./{path}"
    if os.path.isabs(path) or os.path.exists(path):
        return path
    beside = os.path.join(yaml_folder, path)
    if os.path.exists(beside):
        return os.path.normpath(beside)
    # Roboflow writes ../train/images for a folder beside the YAML; parquet files are named by how their names begin.
    within = os.path.join(yaml_folder, path.removeprefix("../"))
    if path.startswith("../") and os.path.exists(within):
        return os.path.normpath(within)
    return beside if glob.glob(f"{glob.escape(beside)}-*.parquet") and not glob.glob(f"{glob.escape(path)}-*") else path


def refuse_missing(data: DataSet, missing: str) -> DataError:
    """The error for an entry that does not exist; it quotes the `download` command, which is never run."""
    advice = "Relative paths start from the working directory, or else from the folder of the YAML."
    if data.written.download:
        shown = data.written.download.strip().splitlines()[0][:120]
        advice += f" The download command of the YAML ({shown!r}) is not run: download the data yourself."
    return DataError(f"{data.file}: {missing} does not exist. {advice}{resize_hint(missing)}")


def _listed(data: DataYaml, split: Split | str) -> list[str]:
    value = getattr(data, split)
    return [value] if isinstance(value, str) else list(value)


def _with_text_names(values: dict[str | int, Yaml]) -> dict[str | int, Yaml]:
    """The values with names as text where YAML reads numbers or booleans (`names: [1, true]`), without null splits."""
    plain = {key: value for key, value in values.items() if not (key in SPLITS and value is None)}
    names = plain.get("names")
    if isinstance(names, list):
        plain["names"] = [_as_name(name) for name in names]
    elif isinstance(names, dict):
        plain["names"] = {number: _as_name(name) for number, name in names.items()}
    return plain


def _as_name(name: Yaml) -> Yaml:
    return str(name) if isinstance(name, bool | int | float) else name
