"""Files with a confusion matrix: the one that `test.py` writes, and other formats that are read.

    confusion_matrix.csv     predicted,cat,dog,background
                             cat,41,3,2
                             ...                               row = predicted, column = true, both named

Also read are tables without names (.csv, .txt), arrays (.npz) and lists of lists (.json).

Dimension key:  C classes   R rows, with or without one for the background
"""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flatout.errors import ConfigError, DataError
from flatout.safefiles import csv_text, write_file

BACKGROUND = "background"
MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class Confusion:
    """A confusion matrix: how often objects of each class were detected as each class."""

    count_CC: np.ndarray
    """float64: row = predicted, column = true."""
    missed_C: np.ndarray
    """float64: objects that were not found; zeros if the file has no background."""
    names: tuple[str, ...] | None

    @property
    def num_objects_C(self) -> np.ndarray:
        """True objects of each class, float64 [C]."""
        return np.asarray(self.count_CC.sum(0) + self.missed_C)

    @property
    def fraction_CC(self) -> np.ndarray:
        """Each count divided by the number of true objects of its column, float64 [C, C]; 0 where there are none."""
        return np.asarray(self.count_CC / np.maximum(self.num_objects_C, 1e-12))


def write_confusion(shown_RR: np.ndarray, names: Sequence[str], path: Path) -> Path:
    """Write counts with the background last, row = predicted, column = true, as in the chart; returns the path."""
    labels = [*names[: len(shown_RR) - 1], BACKGROUND]
    rows = ([label, *row] for label, row in zip(labels, shown_RR.tolist(), strict=True))
    write_file(path, csv_text([["predicted", *labels], *rows]))
    return path


def read_confusion(path: Path, *, num_classes: int | None = None) -> Confusion:
    """A confusion matrix in one of the formats above; DataError for wrong content, ConfigError for another extension.

    The last row and column are the background if they are named so, or if there is one more than `num_classes`.
    """
    if path.suffix.lower() not in _READERS:
        raise ConfigError(f"{path}: not a confusion matrix. Its file must end in {', '.join(_READERS)}.")
    table, names = _READERS[path.suffix.lower()](path)
    return _checked(table, names, num_classes, path)


def confusion_in(content: Any, *, where: Path) -> Confusion:
    """A confusion matrix inside JSON: a list of lists, or an object with `matrix` and optionally `names`."""
    return _checked(*_from_json(content), None, where)


def _checked(table: Any, names: Sequence[str] | None, num_classes: int | None, path: Path) -> Confusion:
    try:
        count_RR = np.array(table, np.float64)
    except (TypeError, ValueError):
        count_RR = np.empty(0)
    side = len(count_RR)
    if count_RR.shape != (side, side) or side < 2 or not np.isfinite(count_RR).all() or count_RR.min() < 0:
        raise DataError(
            f"{path}: not a confusion matrix. It must be a square table of counts, none of them negative, row = "
            "predicted, column = true."
        )
    if names is not None and len(names) != side:
        raise DataError(f"{path}: {side} rows of counts, but {len(names)} names. There must be one name per row.")
    named = names is not None and names[-1].strip().lower() == BACKGROUND
    if named or side - 1 == num_classes:
        return Confusion(count_RR[:-1, :-1], count_RR[-1, :-1], None if names is None else tuple(names[:-1]))
    return Confusion(count_RR, np.zeros(side), None if names is None else tuple(names))


def _read_text(path: Path) -> tuple[Any, list[str] | None]:
    lines = [line for line in _bytes(path).decode("utf-8-sig", "replace").splitlines() if line.strip()]
    first = lines[0] if lines else ""
    split = next((mark for mark in (",", ";", "\t") if mark in first), None)
    rows = [line.split() for line in lines] if split is None else list(csv.reader(lines, delimiter=split))
    if not rows or all(map(_is_number, rows[0])):
        return rows, None
    return [row[1:] for row in rows[1:]], rows[0][1:]


def _read_arrays(path: Path) -> tuple[Any, list[str] | None]:
    _bytes(path, most=0)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            tables = [name for name in arrays.files if arrays[name].ndim == 2]
            if len(tables) != 1 and "matrix" not in tables:
                raise DataError(f"{path}: has {len(tables)} tables. Name the confusion matrix `matrix`.")
            names = [str(name) for name in arrays["names"]] if "names" in arrays.files else None
            return arrays["matrix" if "matrix" in tables else tables[0]], names
    except DataError:
        raise
    except Exception:  # damage raises errors of zip, zlib, NumPy, and of the tokenizer by which NumPy reads headers
        raise DataError(
            f"{path}: not a readable .npz file with a confusion matrix. Write it again with "
            "numpy.savez(path, matrix=...)."
        ) from None


def _read_json(path: Path) -> tuple[Any, list[str] | None]:
    try:
        return _from_json(json.loads(_bytes(path)))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: this confusion matrix is not valid JSON: {str(error)[:100]}. Correct it, or give a .csv, "
            ".txt or .npz file."
        ) from None


def _from_json(content: Any) -> tuple[Any, list[str] | None]:
    if not isinstance(content, dict):
        return content, None
    names = content.get("names")
    return content.get("matrix"), [str(name) for name in names] if isinstance(names, list) else None


def _bytes(path: Path, most: int | None = None) -> bytes:
    """The content, at most `most` bytes of it; DataError if it cannot be read or is too large."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DataError(f"{path}: larger than {MAX_BYTES >> 20} MiB. Is this the right file?")
        with path.open("rb") as file:
            return file.read() if most is None else file.read(most)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}. Check its path and permissions.") from None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_READERS = {".csv": _read_text, ".txt": _read_text, ".npz": _read_arrays, ".json": _read_json}
