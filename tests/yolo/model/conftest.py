"""Networks here are small, or run once on small pictures."""

import pytest


@pytest.fixture(autouse=True)
def _in_one_thread(one_thread: None) -> None:
    """Every test of this folder."""
