"""Networks here are small."""

import pytest


@pytest.fixture(autouse=True)
def _in_one_thread(one_thread: None) -> None:
    """Every test of this folder."""
