"""Exports in tests time a single call: their times are not used."""

import pytest

from flatout.yolo.export import files


@pytest.fixture(autouse=True)
def one_turn(monkeypatch):
    monkeypatch.setattr(files, "MAX_TURNS", 1)


@pytest.fixture(autouse=True)
def single_thread(one_thread):
    """Small maps gain nothing from a second thread."""
