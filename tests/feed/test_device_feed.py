"""Batches rendered on the device equal those cropped by NumPy, with resident or staged items, resumed or not."""

import threading
from typing import Any

import numpy as np
import pytest
import torch

from examples.gpu_crops import Crops, generate_images, render_crops
from flatout.engine.graphs import GraphedStep, Inputs
from flatout.errors import ConfigError, DataError, ResourceError
from flatout.feed import Feed, FeedConfig, Plan
from flatout.feed.device import DeviceFeed
from flatout.feed.device_store import CHUNK_BYTES, DeviceStore, settle
from tests.feed.test_device import DEVICES, needs_gpu
from tests.reference.plain_feed import plain_batches

SIZE = 12
OUTPUTS = {"image": ((3, SIZE, SIZE), torch.float32)}
IMAGES = generate_images(45, size=16)
HEIGHTS, WIDTHS = (np.array([image.shape[axis] for image in IMAGES]) for axis in (0, 1))
SOURCE = Crops(HEIGHTS, WIDTHS, SIZE)
ALL_BYTES = sum(-(-image.nbytes // CHUNK_BYTES) * CHUNK_BYTES for image in IMAGES)


def plan(**changes: Any) -> Plan:
    usual: dict[str, Any] = {"num_samples": 45, "batch_size": 8, "seed": 3, "last": "short"}
    return Plan(**usual | changes)


def new_store(device: str, share: float = 2.0) -> DeviceStore:
    return DeviceStore(IMAGES, device, budget_bytes=int(share * ALL_BYTES), batch_items=8)


def plain_crops(epoch: int, start: int = 0) -> list[np.ndarray]:
    """The reference: one NumPy slice per sample."""
    batches = []
    for batch in plain_batches(SOURCE, plan(), epoch, start):
        images = []
        for item, (y, x, flip) in zip(batch["items"], batch["crop"], strict=True):
            image = IMAGES[item][y : y + SIZE, x : x + SIZE][:, :: -1 if flip else 1].transpose(2, 0, 1)
            images.append(image.astype(np.float32) * np.float32(2 / 255) - 1)
        batches.append(np.stack(images))
    return batches


def assert_equal(batches, expected: list[np.ndarray]) -> None:
    rendered = [batch["image"].cpu().numpy().copy() for batch in batches]
    assert len(rendered) == len(expected)
    for got, want in zip(rendered, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", [2.0, 0.7, 0.35], ids=["resident", "mostly resident", "mostly staged"])
def test_rendered_batches_equal_numpy_crops(device, share):
    store = new_store(device, share)
    assert (store.residence.num_resident == 45) == (share == 2.0)
    # With workers only once: they import the example's module, and with it torch, which takes seconds.
    with Feed(SOURCE, plan(), FeedConfig(workers=int(share == 0.7))) as feed:
        batches = DeviceFeed(feed, store, render_crops, OUTPUTS)
        for epoch in range(2):
            assert_equal(batches, plain_crops(epoch))


@pytest.mark.parametrize("device", DEVICES)
def test_a_rendered_stream_resumes_at_any_step(device):
    for stop in (1, 4):
        with Feed(SOURCE, plan(), FeedConfig(workers=0)) as feed:
            batches = DeviceFeed(feed, new_store(device), render_crops, OUTPUTS)
            for batch in batches:
                if batch.step == stop:
                    break
            state = batches.state_dict()
        with Feed(SOURCE, plan(), FeedConfig(workers=2, backend="thread")) as feed:
            batches = DeviceFeed(feed, new_store(device, 0.5), render_crops, OUTPUTS)
            batches.load_state_dict(state)
            assert_equal(batches, plain_crops(0, start=stop + 1))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("share", [2.0, 0.3])
def test_nothing_is_overwritten_while_a_slow_step_runs_and_the_host_never_waits(share):
    store = new_store("cuda", share)
    many = plan(order=np.arange(45).repeat(4), last="drop")
    with Feed(SOURCE, many, FeedConfig(workers=2, backend="thread")) as feed:
        batches = iter(DeviceFeed(feed, store, render_crops, OUTPUTS))
        sums = [next(batches)["image"].double().sum() for _ in range(3)]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for batch in batches:
                torch.cuda._sleep(3_000_000)
                sums.append(batch["image"].double().sum())
                if batch.step == 18:
                    break
        finally:
            torch.cuda.set_sync_debug_mode("default")
    with Feed(SOURCE, many, FeedConfig(workers=0)) as feed:
        expected = [
            batch["image"].double().sum() for batch in DeviceFeed(feed, new_store("cpu"), render_crops, OUTPUTS)
        ]
    assert torch.allclose(torch.stack(sums).cpu(), torch.stack(expected)[: len(sums)], atol=1e-3)


def test_the_device_keeps_the_first_items_and_reserves_room_for_a_batch_of_the_largest():
    chunks = np.array([3, 1, 4, 1, 5, 9, 2, 6])
    all_there, staging = settle(chunks, budget=31, batch_items=2)
    assert (all_there.num_resident, all_there.host_chunks, staging) == (8, 0, 0)
    some, staging = settle(chunks, budget=24, batch_items=2)
    assert staging == 15
    assert (some.num_resident, some.device_chunks, some.host_chunks) == (4, 9, 22)
    assert some.begin_N.tolist() == [0, 3, 4, 8, 0, 5, 14, 16]


def test_items_that_fit_neither_the_device_nor_pinned_memory_are_streamed():
    chunks = np.array([3, 1, 4, 1, 5, 9, 2, 6])
    some, _ = settle(chunks, budget=24, batch_items=2, pinned_budget=15)
    assert (some.num_resident, some.num_pinned, some.host_chunks, some.num_kept) == (4, 2, 14, 6)
    none, _ = settle(chunks, budget=15, batch_items=2, pinned_budget=0)
    assert (none.num_resident, none.num_pinned, none.host_chunks, none.num_kept) == (0, 0, 0, 0)


def test_a_source_that_does_not_stream_its_items_is_refused():
    store = DeviceStore(IMAGES, "cpu", budget_bytes=ALL_BYTES // 2, batch_items=8, pinned_bytes=0)
    assert "streamed with the batches" in str(store)
    with Feed(SOURCE, plan(), FeedConfig(workers=0)) as feed, pytest.raises(ResourceError, match="not stream them"):
        DeviceFeed(feed, store, render_crops, OUTPUTS)
    with pytest.raises(ConfigError, match="Item 44 is kept neither"):
        store.sources_of(np.array([44]))


def test_the_text_of_a_store_says_where_its_items_are():
    assert "45 of 45 items on cpu" in str(new_store("cpu"))
    assert "staged from pinned memory" in str(new_store("cpu", 0.5))


@pytest.mark.parametrize(
    ("items", "arguments", "error", "words"),
    [
        ([], {}, DataError, "no items"),
        ([np.zeros((2, 2)), np.zeros(3)], {}, DataError, "same dtype and number of dimensions"),
        (IMAGES, {"budget_bytes": ALL_BYTES // 2}, ConfigError, "batch_items"),
        (IMAGES, {"budget_bytes": 2048, "batch_items": 8}, ResourceError, "smaller batch"),
    ],
)
def test_items_that_cannot_be_kept_are_refused(items, arguments, error, words):
    with pytest.raises(error, match=words):
        DeviceStore(items, "cpu", **arguments)


def test_a_batch_with_more_items_than_reserved_room_is_refused():
    store = DeviceStore(IMAGES, "cpu", budget_bytes=ALL_BYTES // 2, batch_items=2)
    with pytest.raises(ConfigError, match="larger batch_items"):
        store.sources_of(np.arange(30, 40))


def test_wrong_names_are_refused():
    with Feed(SOURCE, plan(), FeedConfig(workers=0)) as feed:
        with pytest.raises(ConfigError, match="no field 'images'"):
            DeviceFeed(feed, new_store("cpu"), render_crops, OUTPUTS, items="images")
        with pytest.raises(ConfigError, match="'crop' has the same name as a field"):
            DeviceFeed(feed, new_store("cpu"), render_crops, {"crop": ((1,), torch.float32)})


class Noise:
    """Items of known shapes."""

    dtype = np.dtype(np.uint8)

    def __init__(self, num: int) -> None:
        self._items = np.random.default_rng(0).integers(0, 256, (num, 40, 30, 3)).astype(np.uint8)
        self.shapes_ND = np.tile(np.array([[40, 30, 3]]), (num, 1))

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> np.ndarray:
        return self._items[index]

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """Items at the beginning of wider rows."""
        return np.pad(self._items[numbers].reshape(len(numbers), -1), ((0, 0), (0, 77)))


def gathered(store: DeviceStore, number: int) -> np.ndarray:
    sources = store.sources_of(np.array([number]))
    begin, shape = int(sources.offsets[0]), sources.shapes[0].tolist()
    return sources.data[begin : begin + int(np.prod(shape))].view(shape).cpu().numpy()


@pytest.mark.parametrize("device", DEVICES)
def test_items_that_are_written_later_are_those_of_a_store_that_was_filled(device):
    items = Noise(9)
    later, filled = DeviceStore(items, device, filled=False), DeviceStore(items, device)
    for numbers in ([4, 0, 8], [2], [1, 3, 5, 6, 7]):
        later.put(np.array(numbers), items.rows(np.array(numbers)))
    for number in range(9):
        np.testing.assert_array_equal(gathered(later, number), items[number])
        np.testing.assert_array_equal(gathered(filled, number), items[number])


def test_items_can_only_be_written_later_if_all_of_them_fit():
    with pytest.raises(ConfigError, match="only be written later if all of them fit"):
        DeviceStore(Noise(9), "cpu", filled=False, budget_bytes=8 * 4096, batch_items=1)


@pytest.mark.gpu
@needs_gpu
def test_steps_are_captured_while_another_thread_writes_items():
    """In CUDA's usual mode, whatever another thread does meanwhile can make a capture fail."""
    items = Noise(200)
    store, numbers, over, errors = DeviceStore(items, "cuda", filled=False), np.arange(200), threading.Event(), []

    def write() -> None:
        try:
            rows = torch.from_numpy(items.rows(numbers)).pin_memory().numpy()
            while not over.is_set():
                store.put(numbers, rows)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.randn(64, 64, device="cuda", requires_grad=True)

            def step(inputs: Inputs) -> torch.Tensor:
                x.grad = None
                (x @ inputs["y"]).sin().sum().backward()
                assert x.grad is not None
                return x.grad

            for number in range(30):
                given = {"y": torch.randn(64, 64 + number % 3, device="cuda")}
                expected = step(given).clone()
                assert torch.equal(GraphedStep(step, given, {})(given), expected)
    finally:
        over.set()
        thread.join()
    assert not errors
    for number in range(200):
        np.testing.assert_array_equal(gathered(store, number), items[number])
