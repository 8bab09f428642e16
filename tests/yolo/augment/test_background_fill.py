"""Images that are decoded while the training goes on: the batches are those of a store that was filled before."""

import gc
import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatout.errors import DataError
from flatout.feed import DecodeError, Feed, Plan, SampleError
from flatout.feed.background_fill import BackgroundFill
from flatout.yolo.augment.draw import AugmentConfig
from flatout.yolo.augment.gpu.batches import DeviceInput
from flatout.yolo.augment.gpu.input import DeviceInputConfig, images_by_step, training_input
from flatout.yolo.augment.gpu.source import ParameterSource
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.letterbox import rect_batches
from tests.feed.test_device import DEVICES
from tests.yolo.augment.test_device_input import SIZE, plan_of, resized_set

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = DeviceInputConfig(dtype=torch.uint8, channels_last=False, workers=0, decode_workers=0)
PLAIN = AugmentConfig(mixup=0.4, degrees=10, scale=0.6, flipud=0.5, paste_in=0)
SETTINGS = {
    "mosaics": PLAIN,
    "all tiles": replace(PLAIN, perspective=0.001),
    "single images": AugmentConfig(mosaic=0, mixup=0, paste_in=0),
    "pasted": replace(PLAIN, paste_in=0.6),
    "copied": replace(PLAIN, copy_paste=0.5),
}


class SlowImages:
    """Images in memory of which some are damaged; the first ones are only returned when a file exists."""

    def __init__(self, images: list[np.ndarray], damaged: frozenset[int] = frozenset(), gate: str = "") -> None:
        self.images, self.damaged, self.gate = images, damaged, gate

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> np.ndarray:
        while self.gate and not os.path.exists(self.gate):
            time.sleep(0.005)
        if index in self.damaged:
            raise DecodeError("a damaged image")
        return self.images[index]


Kept = list[tuple[int, int, list[int], dict[str, torch.Tensor]]]


def kept(batches: DeviceInput, begin: tuple[int, int] = (0, 0)) -> Kept:
    """The batches from a step to the end of its epoch, and the first of the next one, copied."""
    found: Kept = []
    for epoch, start, most in ((*begin, None), (begin[0] + 1, 0, 2)):
        for batch in islice(batches.epoch(epoch, start), most):
            fields = {name: tensor.clone() for name, tensor in batch.fields.items()}
            found.append((batch.epoch, batch.step, batch.indices.tolist(), fields))
    return found


def assert_equal(mine: Kept, theirs: Kept) -> None:
    assert len(mine) == len(theirs) > 2
    for (*place, fields), (*wanted_place, wanted) in zip(mine, theirs, strict=True):
        assert place == wanted_place
        assert fields.keys() == wanted.keys()
        for name in fields:
            assert torch.equal(fields[name], wanted[name]), (place, name)


def both(
    image_set: ImageSet, images: Any, augment: AugmentConfig, plan: Plan, device: str, **more: Any
) -> tuple[Kept, Kept]:
    """Batches of two epochs, of images that are decoded meanwhile and of images that were decoded before."""
    begin = more.pop("begin", (0, 0))
    config = more.pop("config", CONFIG)
    common: dict[str, Any] = {"size": SIZE, "device": device, "config": config, **more}
    with training_input(image_set, images, augment, plan, fill_from=begin, **common) as batches:
        assert batches._filling is not None
        mine = kept(batches, begin)
    with training_input(image_set, images, augment, plan, **common) as batches:
        theirs = kept(batches, begin)
    return mine, theirs


@pytest.fixture
def as_late_as_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images come only while a step waits for them, one or two at a time, and the order is decided step by step."""
    waiting = threading.Event()
    wait_for, take = BackgroundFill.wait_for, BackgroundFill._take

    def waiting_for(self: BackgroundFill, epoch: float, step: int) -> bool:
        waiting.set()
        try:
            return wait_for(self, epoch, step)
        finally:
            waiting.clear()

    def taking_later(self: BackgroundFill, *args: Any) -> int:
        while not waiting.wait(0.05) and not self._is_closing:
            pass
        return take(self, *args)

    monkeypatch.setattr(BackgroundFill, "wait_for", waiting_for)
    monkeypatch.setattr(BackgroundFill, "_take", taking_later)
    monkeypatch.setattr("flatout.feed.background_fill.SEGMENT_ITEMS", 1)
    monkeypatch.setattr("flatout.feed.background_fill.MAX_PER_BATCH", 2)
    monkeypatch.setattr("flatout.feed.background_fill.FEW_NEW", 0.0)


@pytest.mark.usefixtures("as_late_as_possible")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("augment", SETTINGS.values(), ids=SETTINGS)
def test_batches_are_those_of_images_decoded_before(augment: AugmentConfig, device: str):
    image_set, resized = resized_set(1, augment=True, polygons="some", num=60)
    assert_equal(*both(image_set, resized, augment, plan_of(image_set), device))


@pytest.mark.usefixtures("as_late_as_possible")
@pytest.mark.parametrize("device", DEVICES)
def test_batches_of_images_kept_as_420_are_those_of_images_decoded_before(device: str):
    image_set, resized = resized_set(1, augment=True, num=60)
    config = replace(CONFIG, subsampled=True)
    assert_equal(*both(image_set, resized, PLAIN, plan_of(image_set), device, config=config))


@pytest.mark.usefixtures("as_late_as_possible")
@pytest.mark.parametrize("device", DEVICES)
def test_batches_with_workers_are_those_of_images_decoded_before(device: str):
    image_set, resized = resized_set(1, augment=True, polygons="some", num=60)
    config = replace(CONFIG, workers=1, decode_workers=2)
    plan = plan_of(image_set, batch_size=4)
    assert_equal(*both(image_set, SlowImages(resized), SETTINGS["pasted"], plan, device, config=config))


@pytest.mark.usefixtures("as_late_as_possible")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("begin", [(0, 7), (1, 3)])
def test_a_resumed_training_begins_with_the_images_of_its_place(begin: tuple[int, int], device: str):
    image_set, resized = resized_set(1, augment=True, num=60)
    assert_equal(*both(image_set, resized, PLAIN, plan_of(image_set, batch_size=2), device, begin=begin))


@pytest.mark.usefixtures("as_late_as_possible")
def test_a_training_resumed_at_the_end_of_an_epoch_begins_with_the_images_of_the_next():
    image_set, resized = resized_set(1, augment=True, num=60)
    plan = plan_of(image_set, batch_size=2)
    end = 0, plan.epoch(0).num_steps
    with training_input(
        image_set, resized, PLAIN, plan, size=SIZE, device="cpu", config=CONFIG, fill_from=end
    ) as batches:
        fill = batches._filling
        assert fill is not None
        next(iter(batches.epoch(1)))
        assert fill.num_left > 0


@pytest.mark.usefixtures("as_late_as_possible")
@pytest.mark.parametrize("device", DEVICES)
def test_rectangular_batches_are_those_of_images_decoded_before(device: str):
    image_set, resized = resized_set(5, augment=True, largest=60, num=40)
    rect = rect_batches(image_set.size_wh_N2, batch_size=5, img_size=SIZE)
    plan = plan_of(image_set, order=rect.order_N)
    assert_equal(*both(image_set, resized, SETTINGS["single images"], plan, device, rect=rect))


@pytest.mark.usefixtures("as_late_as_possible")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("damaged", [{0}, {5, 17}, {59}], ids=str)
@pytest.mark.parametrize("augment", SETTINGS.values(), ids=SETTINGS)
def test_damaged_images_are_replaced_as_if_all_were_decoded_before(
    augment: AugmentConfig, damaged: set[int], device: str, monkeypatch: pytest.MonkeyPatch
):
    image_set, resized = resized_set(1, augment=True, polygons="some", num=60)
    images = SlowImages(resized, frozenset(damaged))
    monkeypatch.setattr("flatout.feed.supervisor.Supervisor._note_bad", _note_without_limit)
    assert_equal(*both(image_set, images, augment, plan_of(image_set, batch_size=3), device))


def _note_without_limit(self: Any, causes: dict[int, str]) -> None:
    self.bad |= causes


@pytest.mark.usefixtures("as_late_as_possible")
def test_a_damaged_image_is_reported_once_with_its_file_and_cause(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    image_set, resized = resized_set(1, augment=True, num=60)
    images = SlowImages(resized, frozenset({7}))
    with training_input(
        image_set, images, PLAIN, plan_of(image_set), size=SIZE, device="cpu", config=CONFIG, fill_from=(0, 0)
    ) as batches:
        kept(batches)
        assert batches.feed.bad_samples == {7: "DecodeError: a damaged image"}
    replaced = [text for text in caplog.messages if "is replaced by a substitute" in text]
    assert replaced == ["File image 7 is replaced by a substitute: DecodeError: a damaged image"]


def test_batches_are_ready_ahead_again_after_a_damaged_image():
    image_set, resized = resized_set(1, augment=True, num=60)
    images, config = SlowImages(resized, frozenset({7})), replace(CONFIG, workers=1)
    plan = plan_of(image_set, batch_size=2)
    with training_input(
        image_set, images, PLAIN, plan, size=SIZE, device="cpu", config=config, fill_from=(0, 0)
    ) as batches:
        host_pass = batches._open(0, 0)
        while batches._filling is not None:
            lease = host_pass.take()
            assert lease is not None, "the damaged image is part of no batch"
            host_pass.give_back(lease)
        deadline = time.monotonic() + 20
        while not host_pass.is_ready() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert host_pass.is_ready()


@pytest.mark.usefixtures("as_late_as_possible")
def test_too_many_damaged_images_end_the_training():
    image_set, resized = resized_set(1, augment=True, num=60)
    images = SlowImages(resized, frozenset({7, 8}))
    with (
        training_input(
            image_set, images, PLAIN, plan_of(image_set), size=SIZE, device="cpu", config=CONFIG, fill_from=(0, 0)
        ) as batches,
        pytest.raises(DataError, match="2 of 60 files could not be read, more than the 1 allowed"),
    ):
        kept(batches)


class Broken(SlowImages):
    """Images with a bug in their code."""

    def __getitem__(self, index: int) -> np.ndarray:
        if index == 9:
            raise ZeroDivisionError("a bug")
        return super().__getitem__(index)


@pytest.mark.usefixtures("as_late_as_possible")
def test_an_error_while_decoding_reaches_the_training_with_its_file_and_traceback():
    image_set, resized = resized_set(1, augment=True, num=60)
    with (
        training_input(
            image_set, Broken(resized), PLAIN, plan_of(image_set), size=SIZE, device="cpu", config=CONFIG,
            fill_from=(0, 0),
        ) as batches,
        pytest.raises(SampleError, match=r"Sample 9 \(image 9\) could not be read.*a bug") as caught,
    ):  # fmt: skip
        kept(batches)
    assert 'raise ZeroDivisionError("a bug")' in str(caught.value.__cause__)


def test_an_error_while_the_order_is_decided_reaches_the_training():
    image_set, resized = resized_set(1, augment=True, num=60)

    def uses() -> Iterator[np.ndarray]:
        yield np.arange(3)
        raise ZeroDivisionError("no order")

    fill = BackgroundFill(Sized(resized), image_set.paths, lambda numbers, rows: None, uses(), workers=0)
    fill.start()
    with pytest.raises(ZeroDivisionError, match="no order"):
        fill.wait_for(0, 5)
    fill.close()


class Sized(SlowImages):
    """Images of known shapes."""

    dtype = np.dtype(np.uint8)

    def __init__(self, images: list[np.ndarray]) -> None:
        super().__init__(images)
        self.shapes_ND = np.array([image.shape for image in images])


def test_a_step_waits_for_its_images_alone_and_says_what_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    image_set, resized = resized_set(1, augment=True, num=60)
    put: list[int] = []
    gate = threading.Event()

    def slowly(numbers: np.ndarray, rows: np.ndarray) -> None:
        if len(put) >= 6:
            gate.wait(20)
        put.extend(numbers.tolist())

    uses = iter([np.array([50, 3, 3]), np.array([3, 7]), np.array([7, 50, 20, 21, 22]), np.array([1])])
    fill = BackgroundFill(Sized(resized), image_set.paths, slowly, uses, begin=(2, 4), workers=0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("flatout.feed.background_fill.SEGMENT_ITEMS", 1)
        patched.setattr("flatout.feed.background_fill.MAX_PER_BATCH", 2)
        fill.start()
        assert fill.wait_for(2, 4) and fill.wait_for(2, 5) and fill.wait_for(2, 6)
        assert put == [3, 50, 7, 20, 21, 22]
        assert fill.num_left == 54
        assert not fill.is_ready(2, 7) and not fill.is_ready(2, 3) and not fill.is_ready(3, 0)
        assert fill.seconds_left > 0
        gate.set()
        assert fill.wait_for(3, 0)
    assert sorted(put) == list(range(60)) and put[6] == 1
    assert fill.is_over and fill.num_left == 0 and fill.seconds_left == 0
    assert any(text.startswith("All 60 images are decoded") for text in caplog.messages)


def test_the_log_says_that_training_begins_before_all_images_are_decoded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    image_set, resized = resized_set(1, augment=True, num=60)
    with training_input(
        image_set, resized, PLAIN, plan_of(image_set), size=SIZE, device="cpu", config=CONFIG, fill_from=(0, 0)
    ) as batches:
        fill = batches._filling
        assert fill is not None
        fill.wait_for(9, 0)
        fill._num_done = 23  # as if the others were not decoded yet
        next(iter(batches.epoch(0)))
    expected = "Training begins while 37 of 60 images are still to be decoded: it waits for those that it needs next."
    assert expected in caplog.messages


def test_closing_in_the_middle_leaves_no_thread_and_no_process(tmp_path: Path):
    image_set, resized = resized_set(1, augment=True, num=60)
    images, before = SlowImages(resized, gate=str(tmp_path / "never")), _children()
    config = replace(CONFIG, workers=1, decode_workers=2)
    with training_input(
        image_set, images, PLAIN, plan_of(image_set), size=SIZE, device="cpu", config=config, fill_from=(0, 0)
    ):
        deadline = time.monotonic() + 60
        while len(_children() - before) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(_children() - before) >= 2
        (tmp_path / "never").touch()
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name == "flatout-fill"]
    deadline = time.monotonic() + 10
    while _children() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _children() - before


def _children() -> set[int]:
    """Child processes of this one."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        found |= set(map(int, (task / "children").read_text().split()))
    return found


@pytest.mark.parametrize("paste_in", [0.0, 0.9])
def test_the_images_of_a_step_include_all_that_its_batch_is_made_of(paste_in: float):
    image_set, _ = resized_set(1, augment=True, polygons="some", num=60)
    source = ParameterSource(image_set, replace(PLAIN, paste_in=paste_in), size=SIZE)
    plan = plan_of(image_set, batch_size=6)
    used = list(images_by_step(source, plan, (1, 2)))
    assert len(used) == plan.epoch(1).num_steps - 2
    num_pasted = 0
    with Feed(source, plan) as feed:
        for batch, images in zip(feed.epoch(1, 2), used, strict=True):
            shown = batch["items"][batch["tiles"][..., 2] > 0]
            assert set(shown.tolist()) <= set(images.tolist())
            if paste_in:
                num_pasted += len(batch["pasted"])
                assert set(batch["pasted"][:, 4].tolist()) <= set(images.tolist())
    assert (num_pasted > 0) == (paste_in > 0)


def test_the_rounds_of_objects_to_paste_include_those_that_are_searched(monkeypatch: pytest.MonkeyPatch):
    image_set, _ = resized_set(2, augment=True, polygons="some", num=60)
    source = ParameterSource(image_set, replace(PLAIN, paste_in=0.9), size=SIZE)
    planner = source._paste
    assert planner is not None
    draws = source.draw(1, 0, np.arange(60), np.arange(60))
    chosen = np.flatnonzero(draws["paste"])
    searched = np.zeros((60, draws["paste_tiles"].shape[1]), bool)
    real = type(planner)._round

    def counting(self: Any, draws: Any, samples: np.ndarray, number: int) -> Any:
        searched[samples, number] = True
        return real(self, draws, samples, number)

    monkeypatch.setattr(type(planner), "_round", counting)
    planner._collect(draws, chosen)
    found = planner.rounds_read(draws, chosen)
    assert searched.any() and (found >= searched[chosen]).all()
    assert found.mean() < 0.9, "this is no bound if it counts all rounds"
