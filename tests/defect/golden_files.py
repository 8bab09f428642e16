"""Golden files of the defect job: a JSON list and an archive of arrays beside it."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np


def records(key: str):
    """A function that splits a JSON file into the records of its list `key`, each with the arrays beside the file."""

    def split(path: Path) -> Iterable[tuple[str, tuple[dict[str, Any], dict[str, np.ndarray]]]]:
        arrays = arrays_of(path.with_suffix(".npz"))
        for position, record in enumerate(json.loads(path.read_text()).get(key, [])):
            yield str(record.get("name", position)), (record, arrays)

    return split


def entries(path: Path) -> Iterable[tuple[str, Any]]:
    """The entries of a JSON object by name."""
    return [(name, (name, entry)) for name, entry in json.loads(path.read_text()).items()]


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    if not path.exists():
        return {}
    with np.load(path) as archive:
        return dict(archive)


def arrays_split(path: Path) -> Iterable[tuple[str, tuple[str, dict[str, np.ndarray]]]]:
    """The arrays of an archive by name, each together with all of them."""
    arrays = arrays_of(path)
    return [(name, (name, arrays)) for name in arrays]
