"""Runs every test of this folder in one thread, because its networks are small."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _in_one_thread(module_in_one_thread: None) -> None:
    """Applies `module_in_one_thread` to every test of this folder."""
