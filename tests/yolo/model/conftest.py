"""One thread for all tests of this folder: networks are small, or run once on small images."""

import pytest


@pytest.fixture(autouse=True)
def _in_one_thread(one_thread: None) -> None: ...
