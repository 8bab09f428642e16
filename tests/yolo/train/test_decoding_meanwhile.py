"""Trainings that begin while their images are decoded end with the same bits as those that decode all images first."""

import logging
import os
import signal
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.engine import IntervalStats
from flatout.engine.callbacks import Callback
from flatout.errors import Interrupted
from flatout.feed.background_fill import BackgroundFill
from flatout.ranks.world import World
from flatout.yolo.data.open_data import open_data_set
from flatout.yolo.data.open_set import SplitConfig, open_split
from flatout.yolo.options import TrainOptions
from flatout.yolo.train import input as input_module
from flatout.yolo.train import train
from flatout.yolo.train.choose_input import InputSettings
from flatout.yolo.train.input import InputConfig
from tests.yolo.train.small_training import tiny_hyp
from tests.yolo.train.test_train import assert_same_end, trained

pytestmark = pytest.mark.usefixtures("one_thread")

BEGINS = "images are still to be decoded: it waits for those that it needs next."


@pytest.fixture(autouse=True)
def few_images_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets of any size are decoded meanwhile, two images at a time."""
    monkeypatch.setattr(input_module, "MIN_IMAGES", 1)
    monkeypatch.setattr("flatout.feed.background_fill.SEGMENT_ITEMS", 1)
    monkeypatch.setattr("flatout.feed.background_fill.MAX_PER_BATCH", 2)


@pytest.mark.parametrize(
    "switches", [{}, {"rect": True}, {"image_weights": True}, {"store_420": True, "workers": 1}], ids=str
)
def test_a_training_ends_with_the_same_bits(options: TrainOptions, switches: dict[str, Any]):
    options = replace(options, device_augment=True, notest=True, **switches)
    first = trained(replace(options, name="first", decode_first=True))
    meanwhile = trained(replace(options, name="meanwhile"))
    assert_same_end(first.folder, meanwhile.folder)


def test_a_training_that_is_continued_ends_with_the_same_bits(
    options: TrainOptions, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    caplog.set_level(logging.INFO)
    options = replace(options, device_augment=True, notest=True, save_every_steps=2, batch_size=10)
    first = trained(replace(options, name="first", decode_first=True))
    begins, real = [], BackgroundFill.__init__

    def noting(self: BackgroundFill, *args: Any, **more: Any) -> None:
        begins.append(more["begin"])
        real(self, *args, **more)

    monkeypatch.setattr(BackgroundFill, "__init__", noting)
    for stop_after in (6, 6, None):
        result = trained(replace(options, name="continued", stop_after=stop_after))
    assert begins == [(0, 0), (1, 0), (1, 6)], "at the beginning, after an epoch, and within one"
    assert_same_end(first.folder, result.folder)


def test_a_signal_while_images_are_decoded_ends_everything_and_the_run_continues(options: TrainOptions):
    options = replace(options, device_augment=True, notest=True, batch_size=10)
    first = trained(replace(options, name="first", decode_first=True))

    class Stops(Callback):
        def log(self, stats: IntervalStats) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        train(replace(options, name="stopped"), [Stops()])
    assert not [thread for thread in threading.enumerate() if thread.name == "flatout-fill"]
    assert_same_end(first.folder, trained(replace(options, name="stopped")).folder)


def test_a_waiting_training_ends_at_a_signal(options: TrainOptions, monkeypatch: pytest.MonkeyPatch):
    """One that waits for images which do not come: nothing is left behind, and nobody waits for them."""
    held, signalled = threading.Event(), threading.Event()
    take = BackgroundFill._take

    def hangs(self: BackgroundFill, *args: Any) -> int:
        if self._num_done >= 20:
            held.set()
            while not self._is_closing:
                signalled.wait(0.01)
        return take(self, *args)

    monkeypatch.setattr(BackgroundFill, "_take", hangs)

    def stop() -> None:
        held.wait(60)
        signalled.wait(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Interrupted):
        train(replace(options, device_augment=True, notest=True, batch_size=10))
    thread.join()
    assert not [thread for thread in threading.enumerate() if thread.name == "flatout-fill"]


# Where all images are decoded first, and why


def opener(options: TrainOptions, **changes: Any) -> input_module._Opener:
    images = open_split(open_data_set(options.data), "train", SplitConfig(cache_folder=None)).images
    config = InputConfig(
        augment=tiny_hyp().augment(),
        size=64,
        batch_size=8,
        seed=0,
        grid=32,
        epochs=3,
        device=torch.device("cpu"),
        dtype=torch.float32,
        world=World(),
    )
    return input_module._Opener(images, replace(config, **changes))


SETTINGS = InputSettings(keep="device", workers=0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"decode_first": "--decode-first"}, "--decode-first"),
        ({"verify": True}, "--verify-cache compares them with their files"),
        ({"world": World(0, 2)}, "several ranks share them"),
    ],
    ids=["flag", "verify", "ranks"],
)
def test_the_log_says_why_all_images_are_decoded_first(
    options: TrainOptions, changes: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    with ExitStack() as stack:
        batches = opener(options, **changes).open(SETTINGS, stack)
        assert batches is not None and batches.fill_left_s == 0
        batches.feed.close()
    assert f"All images are decoded before the training begins: {why}." in caplog.messages
    assert not [text for text in caplog.messages if text.endswith(BEGINS)]


def test_images_that_do_not_fit_into_the_device_are_decoded_first(
    options: TrainOptions, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    caplog.set_level(logging.INFO)
    opened = opener(options)
    monkeypatch.setattr(input_module, "device_budget", lambda device: 500_000)
    assert opened._budget_to_decode_meanwhile(SETTINGS) is None
    assert caplog.messages[-1].endswith("of 70 fit into the device's memory.")


def test_small_sets_are_decoded_first_without_a_word(
    options: TrainOptions, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(input_module, "MIN_IMAGES", 71)
    opened = opener(options)
    caplog.clear()
    assert opened._budget_to_decode_meanwhile(SETTINGS) is None
    assert caplog.messages == []


def test_the_fill_ends_with_the_input(options: TrainOptions, tmp_path: Path):
    with ExitStack() as stack:
        opener(options).open(SETTINGS, stack)
        assert [thread for thread in threading.enumerate() if thread.name == "flatout-fill"]
    assert not [thread for thread in threading.enumerate() if thread.name == "flatout-fill"]
