"""Hyper-parameters for tests: a shipped hyp file with some values changed."""

from dataclasses import replace
from typing import Any

from flatout.yolo.find_file import shipped_folder
from flatout.yolo.hyp import Hyp, load_hyp


def recipe(file: str = "hyp.scratch.tiny.yaml", **changed: Any) -> Hyp:
    """The shipped hyp file of that name, with `changed` values."""
    return replace(load_hyp(shipped_folder("data") / file), **changed)
