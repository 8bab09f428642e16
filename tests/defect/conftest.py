"""Runs every test of this folder in one thread, because its networks are small."""

import pytest


@pytest.fixture(autouse=True)
def _in_one_thread(one_thread: None) -> None:
    """Applies `one_thread` to every test of this folder."""
