"""A folder with weights, images and a video, made once; every test works in a folder of its own."""

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flatout.yolo.predict import detect
from flatout.yolo.predict.results import load_networks
from tests.yolo.predict.small_sources import weights_file, write_images, write_video


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a.pt and b.pt, images/00.png to 09.png, clip.mp4 of 6 frames."""
    folder = tmp_path_factory.mktemp("predict")
    weights_file(folder / "a.pt", 0)
    weights_file(folder / "b.pt", 1)
    write_images(folder / "images")
    write_video(folder / "clip.mp4")
    return folder


@functools.cache
def loaded_once(weights: tuple[str, ...], device: torch.device, augment: bool = False):
    return load_networks(weights, device, augment=augment)


@pytest.fixture(autouse=True)
def fast_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build the network of a weights file once for all tests: that takes longer than most of them."""
    monkeypatch.setattr(detect, "load_networks", loaded_once)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No file of a test may end up in the checkout. One thread, because small maps gain nothing from a second."""
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
