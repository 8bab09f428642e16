"""Golden cases: stored inputs with their expected numbers, one pytest case per record found on disk.

A test module says which file it checks and gets one parameter per record:

    @pytest.mark.parametrize("case", golden_cases("spike/workers.json"))
    def test_plans_match_the_golden_table(case): ...

Files are looked up under $FLATOUT_GOLDEN (by default in the folder `golden` beside this file), so that the same tests
run on other cases of the same format. Missing files are skipped with a reason. Conversely, a file in the default folder
that no module uses fails `test_golden_inventory.py`.
"""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

SHIPPED = Path(__file__).parent / "golden"

Split = Callable[[Path], Iterable[tuple[str, Any]]]
"""Opens a golden file and yields its cases, each with a short name that is unique in the file."""


class Claim(NamedTuple):
    """Registers that a module tests the files of a glob pattern, and also reads the files in `also`."""

    pattern: str
    split: Split
    also: tuple[str, ...]


CLAIMS: list[Claim] = []


def golden_root() -> Path:
    """The folder with the case files."""
    root = Path(os.environ.get("FLATOUT_GOLDEN") or SHIPPED)
    # Skipping everything because of a typo would look like success.
    if not root.is_dir():
        raise FileNotFoundError(f"FLATOUT_GOLDEN={root} is not a folder; unset it to use the shipped cases.")
    return root


def json_records(path: Path) -> Iterable[tuple[str, Any]]:
    """The records of a JSON list, named by their position."""
    return [(str(position), record) for position, record in enumerate(json.loads(path.read_text()))]


def golden_cases(pattern: str, split: Split = json_records, *, also: tuple[str, ...] = ()) -> list[Any]:
    """Parameters for every case in the files that match `pattern` ("group/name.json", wildcards allowed).

    Each carries the mark `golden` and an id that starts with its group: `spike/workers.json[12]`. Name the other
    golden files that the test opens in `also`.
    """
    CLAIMS.append(Claim(pattern, split, also))
    root = golden_root()
    found = [
        pytest.param(case, id=f"{path.relative_to(root).as_posix()}[{name}]", marks=pytest.mark.golden)
        for path in sorted(root.glob(pattern))
        for name, case in split(path)
    ]
    absent = pytest.mark.skip(reason=f"no case of {pattern} in the golden folder")
    return found or [pytest.param(None, id=pattern, marks=[pytest.mark.golden, absent])]


def count_claimed(root: Path, claims: Iterable[Claim]) -> dict[str, int]:
    """For every file under `root`, the number of cases that the claims find in it; 0: it is not tested."""
    counts = {path.relative_to(root).as_posix(): 0 for path in sorted(root.rglob("*")) if path.is_file()}
    for pattern, split, also in claims:
        for path in root.glob(pattern):
            num_cases = len(list(split(path)))
            for file in {path.relative_to(root).as_posix(), *also} & counts.keys():
                counts[file] += num_cases
    return counts
