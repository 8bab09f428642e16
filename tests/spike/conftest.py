"""One thread for the tests of this folder, because its networks are small; and a tiny simulated data set."""

from pathlib import Path

import pytest

from flatout.spike.demo_data import DemoConfig, write_demo_data


@pytest.fixture(autouse=True, scope="module")
def _in_one_thread(module_in_one_thread: None) -> None:
    """Applies `module_in_one_thread` to every test of this folder."""


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML file of a data set of 2 + 1 sequences of 6 frames of 64 x 32 pixels."""
    folder = tmp_path_factory.mktemp("spike") / "demo"
    return write_demo_data(folder, DemoConfig(train=2, test=1, frames=6, width=64, height=32, spike_frames=80))
