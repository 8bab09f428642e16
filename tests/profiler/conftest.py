"""A fixture for the tests that watch loops."""

import pytest

from flatout.clock.machine import OtherLoad


@pytest.fixture
def alone(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread for torch, whose threads would compete with the workers of tiny loops; other load counts as none."""
    monkeypatch.setattr(OtherLoad, "cores", lambda self, own_cpu_s: 0.0)
