"""Bitwise comparison of two trainings: tensors, optimizer, average, random states, rows of results."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatout.safefiles.container import read_container

NOT_COMPARED = ("run.", "training.meter.seconds", "training.meter.waited_s", "training.job.records.bytes.log.jsonl")
"""Values that depend on the machine and the duration."""
TIMES = {"seconds", "images_per_s", "step_ms", "wait_ms"}


def state_of(folder: Path, name: str = "last.pt") -> dict[str, Any]:
    """Every value of the newest checkpoint of a run folder by its path, such as 'training.position.step'."""
    return dict(_leaves(read_container(folder / "weights" / name), ""))


def differences_between(left: Path, right: Path) -> list[str]:
    """Names of everything that differs between two run folders; empty if nothing does."""
    mine, theirs = state_of(left), state_of(right)
    keys = [key for key in sorted(mine.keys() | theirs.keys()) if not key.startswith(NOT_COMPARED)]
    assert len(keys) > 50
    differing = [key for key in keys if not _same(mine.get(key), theirs.get(key))]
    return differing + [name for name, rows in ROWS.items() if rows(left / name) != rows(right / name)]


def rows_of(log: Path) -> list[dict[str, Any]]:
    """The rows of log.jsonl, without times."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


ROWS = {"results.csv": Path.read_bytes, "log.jsonl": rows_of}


def _same(left: object, right: object) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and left == right


def _leaves(tree: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list | tuple):
        yield path, len(tree)
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{path}[{index}]")
    else:
        yield path, tree
