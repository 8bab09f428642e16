"""Toy trainings for the tests of faults and guarantees."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs.toy_runs import REPEATS, Toys


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toys]:
    with Toys(tmp_path_factory.mktemp("toys")) as started:
        yield started


@pytest.fixture(scope="session")
def undisturbed(toys: Toys, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed training."""
    run = toys.run(project := tmp_path_factory.mktemp("undisturbed"))
    assert run.code == 0, run.output
    return project / "toy"


@pytest.fixture(scope="session")
def repeats() -> int:
    return REPEATS
