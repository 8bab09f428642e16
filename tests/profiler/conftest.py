"""A fixture of the tests that watch loops."""

import pytest

from flatout.clock.machine import OtherLoad


@pytest.fixture
def alone(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own threads would compete with the workers of tiny loops; tests beside this one do not count."""
    monkeypatch.setattr(OtherLoad, "cores", lambda self, own_cpu_s: 0.0)
